"""Exceptions, lists and sizes in words: safe to print, short enough for a screen, and able to leave their process."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from runner.base.secret import redacted


@dataclass(frozen=True)
class Frame:
    """A line of code that was on the way."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class Raised:
    """An exception as it can be told in another process.

    kind     name of its class
    bases    names of the classes it is of
    message  what it says; a word in brackets where it cannot say anything
    frames   from the outermost to the line that raised
    cause    what it was raised from, or while
    is_from  it was raised from its cause, which is what the program meant to tell
    parts    of an exception group
    """

    kind: str
    bases: tuple[str, ...]
    message: str
    frames: tuple[Frame, ...] = ()
    cause: Raised | None = None
    is_from: bool = False
    parts: tuple[Raised, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}".removesuffix(": ")


class RaisedElsewhere(Exception):
    """An exception of another process, handed over as words: its class may not be known here."""

    def __init__(self, raised: Raised) -> None:
        super().__init__(str(raised))
        self.raised = raised

    def __reduce__(self) -> tuple[Any, ...]:
        return RaisedElsewhere, (self.raised,)


def raised(error: BaseException, depth: int = 8) -> Raised:
    """Return the exception in words, with at most `depth` causes."""
    if isinstance(error, RaisedElsewhere):
        return error.raised
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return Raised(
        type(error).__name__,
        tuple(kind.__name__ for kind in type(error).__mro__),
        message_of(error),
        tuple(
            Frame(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
            for frame in traceback.extract_tb(error.__traceback__)
        ),
        raised(before, depth - 1) if before is not None and depth else None,
        error.__cause__ is not None,
        tuple(raised(part, depth - 1) for part in parts) if depth else (),
    )


def message_of(error: BaseException) -> str:
    """Return what the exception says, printable and at most a screen long, also where its __str__ raises."""
    try:
        text = str(error)
    except Exception as second:
        return f"(its __str__ raises {type(second).__name__})"
    return on_a_screen(redacted(text))  # before it is cut: a part of a secret would not be known as one


def words_of(error: BaseException) -> str:
    """Return the kind of the exception and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(message_of(error))}".removesuffix(": ")


def first_line(text: str) -> str:
    """Return the first line that is not empty, or an empty text."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def on_a_screen(text: str) -> str:
    """Return the text without control characters, in at most 12 lines of at most 400 characters."""
    lines = printable(text).strip("\n").split("\n")
    cut = [
        line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ... ({len(line) - _WIDTH} more characters)" for line in lines
    ]
    more = [f"... ({len(lines) - _LINES} more lines)"] if len(lines) > _LINES else []
    return "\n".join(cut[:_LINES] + more).rstrip()


def printable(text: str) -> str:
    """Return the text without what would move the cursor, color the terminal or hide what comes after it."""
    plain = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\t", "    ")
    return "".join(char if char == "\n" or char.isprintable() else _escaped(char) for char in plain)


def aligned(
    rows: Sequence[Sequence[str]], sides: str = "", gives_way: Sequence[str] = (), columns: int = 0
) -> list[str]:
    """Return rows of cells, the head first, as the lines of a table.

    sides      of each column: < or >; all < where none are named
    gives_way  columns by their names, that which is left out first where there are not enough columns on the screen
    columns    of the screen; 0: as many as it takes
    """
    widths = {at: max(len(row[at]) for row in rows) for at in range(len(rows[0]))}
    left_out: list[str] = []
    for name in gives_way:
        if not columns or sum(widths.values()) + 2 * (len(widths) - 1) <= columns:
            break
        del widths[list(rows[0]).index(name)]
        left_out.append(name)
    sides = sides or "<" * len(rows[0])
    lines = ["  ".join(f"{row[at]:{sides[at]}{width}}" for at, width in widths.items()).rstrip() for row in rows]
    return [*lines, f"(no room for {', '.join(left_out)})"] if left_out else lines


def columns_of(stream: IO[str] | None = None) -> int:
    """Return the columns of the stream, standard output where none is named; 0 where it is no terminal."""
    stream = sys.stdout if stream is None else stream
    try:
        # no stream at all: it was closed by who started us
        return os.get_terminal_size(stream.fileno()).columns if stream is not None and stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def for_terminal(text: str, stream: IO[str] | None = None) -> str:
    """Return the text with its lines broken between words where the stream is a terminal too narrow for them.

    stream  standard output where none is named
    """
    columns = columns_of(stream)
    return wrapped(text, columns) if columns else text


def help_page(text: str, stream: IO[str] | None = None) -> str:
    """Return a help text broken for the width of the terminal, or for $COLUMNS where the stream is none.

    stream  standard output where none is named
    """
    wanted = os.environ.get("COLUMNS", "")
    columns = columns_of(stream) or (int(wanted) if wanted.isdecimal() else 0)
    return reflowed(text, columns) if columns else text


def reflowed(text: str, columns: int) -> str:
    """Return the text with the lines of a paragraph, or of a table's cell, joined and broken again at so many columns.

    A paragraph is what stands at the left edge, line below line; the last cell of a row goes on below where it begins.
    """
    joined: list[str] = []
    cell = 0  # column at which the last cell of the row begins
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        before = joined[-1] if joined else ""
        is_prose = bool(before) and before[0] != " " and line[:1] not in ("", " ") and not before.startswith("usage:")
        if line.strip() and ((is_prose and not before.endswith(":")) or (cell and indent == cell and before)):
            joined[-1] = f"{before} {line.strip()}"
            continue
        joined.append(line)
        cell = max((found.end() for found in re.finditer(r"\S {2,}(?=\S)", line)), default=0)
    return "\n".join(part for line in joined for part in _parts(line, columns, 0 if line[:1].isupper() else 2))


def wrapped(text: str, columns: int) -> str:
    """Return the text in lines of at most so many columns; only a word or a command that is longer stays whole.

    What goes on stands below the last cell of a table, where that leaves it half of the line, else indented by two.
    A command is to be pasted: a terminal copies what it breaks itself as one line.
    """
    return "\n".join(part for line in text.split("\n") for part in _parts(line, columns))


def _parts(line: str, columns: int, hanging: int = 2) -> list[str]:
    if len(line) <= columns:
        return [line]
    cells = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line) if found.end() <= columns // 2]
    text = line.lstrip()
    lead = len(line) - len(text)
    parts = textwrap.wrap(
        _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), text), columns, initial_indent=" " * lead,
        subsequent_indent=" " * (cells[-1] if cells else lead + hanging),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [part.replace("\0", " ") for part in parts] or [""]


def shortened(items: Sequence[object], shown: int = 4, separator: str = ", ") -> str:
    """Return the first of the items, and how many more there are."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return separator.join(map(str, items[:shown])) + more


def is_number(value: object) -> bool:
    """Tell whether what was read can be shown as a number; an integer of 400 digits cannot, and True is none."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def rate(items_per_s: float) -> str:
    """Return items per second without an exponent, with three digits or more."""
    return f"{items_per_s:,.0f}" if items_per_s >= 100 else f"{items_per_s:.3g}"


def sized(size: float) -> str:
    """Return bytes with three digits or more, in the largest unit of which they are at least a tenth.

    Every size that is shown is made here, so that the same memory reads the same everywhere: 64 KiB, never 6.4e-05 GiB.
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        value = size / scale
        if value >= 0.1:
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{size:.0f} B" if size else "0"


def sized_gib(gib: float) -> str:
    """Return an amount of GiB with the unit that suits it."""
    return sized(gib * 2**30)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")  # ECMA-48
_COMMAND = re.compile(r"(?:(?<=  )|(?<=: )|^(?:\S+ {2,})?)accel-run \S+(?: (?:[-+./'\"]\S*|\S*=\S*))*")
_LINES, _WIDTH = 12, 400
