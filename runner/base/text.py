"""Format exceptions, lists and sizes as text that is safe to print, short, and picklable."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from runner.base.secret import redact


@dataclass(frozen=True)
class SourceLine:
    """A line of a traceback."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class ExceptionInfo:
    """A picklable description of an exception.

    kind     class name
    bases    names of its base classes
    message  its message; a placeholder in parentheses if its __str__ raises
    frames   stack frames, from the outermost to the line that raised
    cause    its cause or context
    is_from  whether it was raised with `raise ... from cause`
    parts    exceptions of an exception group
    """

    kind: str
    bases: tuple[str, ...]
    message: str
    frames: tuple[SourceLine, ...] = ()
    cause: ExceptionInfo | None = None
    is_from: bool = False
    parts: tuple[ExceptionInfo, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}".removesuffix(": ")


class RemoteError(Exception):
    """An exception of another process, described as text: its class may not exist here."""

    def __init__(self, info: ExceptionInfo) -> None:
        super().__init__(str(info))
        self.info = info

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteError, (self.info,)


def describe_exception(error: BaseException, depth: int = 8) -> ExceptionInfo:
    """Describe an exception, with at most `depth` causes."""
    if isinstance(error, RemoteError):
        return error.info
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return ExceptionInfo(
        type(error).__name__,
        tuple(kind.__name__ for kind in type(error).__mro__),
        error_message(error),
        tuple(
            SourceLine(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
            for frame in traceback.extract_tb(error.__traceback__)
        ),
        describe_exception(before, depth - 1) if before is not None and depth else None,
        error.__cause__ is not None,
        tuple(describe_exception(part, depth - 1) for part in parts) if depth else (),
    )


def error_message(error: BaseException) -> str:
    """Return the exception's message, printable and at most a screen long, even if its __str__ raises."""
    try:
        text = str(error)
    except Exception as second:
        return f"(its __str__ raises {type(second).__name__})"
    return truncate(redact(text))  # redact before shortening: part of a secret would not be recognized


def error_line(error: BaseException) -> str:
    """Return the class of the exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error_message(error))}".removesuffix(": ")


def first_line(text: str) -> str:
    """Return the first non-empty line, or an empty string."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def truncate(text: str) -> str:
    """Return the text without control characters, in at most 12 lines of at most 400 characters."""
    plain = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\t", "    ")
    # Escape everything that is not printable, not only terminal escapes, because some characters hide others.
    visible = "".join(char if char == "\n" or char.isprintable() else _escape(char) for char in plain)
    lines = visible.strip("\n").split("\n")
    cut = [
        line if len(line) <= _MAX_COLUMNS else f"{line[:_MAX_COLUMNS]} ... ({len(line) - _MAX_COLUMNS} more characters)"
        for line in lines
    ]
    more = [f"... ({len(lines) - _MAX_LINES} more lines)"] if len(lines) > _MAX_LINES else []
    return "\n".join(cut[:_MAX_LINES] + more).rstrip()


def format_table(
    rows: Sequence[Sequence[str]],
    sides: str = "<",
    droppable: Sequence[str] = (),
    columns: int = 0,
    *,
    indent: str = "",
    widest: Mapping[int, int] | None = None,
) -> list[str]:
    """Format rows of cells, header first, as the lines of a table. All tables on the terminal use this function.

    A row with a single cell among longer rows is a title and is printed unchanged.

    sides      alignment of each column: < or >; the last character applies to all further columns
    droppable  names of columns in the order in which they are dropped on a narrow screen
    columns    screen width; 0: unlimited
    indent     precedes each line
    widest     index of a column -> its maximum width; longer cells shift the rest of their row to the right
    """
    if not rows:
        return []
    full_rows = [row for row in rows if len(row) == len(rows[0])]
    widths = {at: max(len(row[at]) for row in full_rows) for at in range(len(rows[0]))}
    widths = {at: min(width, (widest or {}).get(at, width)) for at, width in widths.items()}
    dropped: list[str] = []
    for name in droppable:
        if not columns or sum(widths.values()) + 2 * (len(widths) - 1) <= columns:
            break
        del widths[list(rows[0]).index(name)]
        dropped.append(name)
    sides = sides.ljust(len(rows[0]), sides[-1])
    lines = []
    for row in rows:
        is_title = len(row) < len(rows[0])
        cells = [row[0]] if is_title else [f"{row[at]:{sides[at]}{width}}" for at, width in widths.items()]
        lines.append(f"{indent}{'  '.join(cells)}".rstrip())
    return [*lines, f"(not shown, the terminal is too narrow: {', '.join(dropped)})"] if dropped else lines


def terminal_width(stream: IO[str] | None = None) -> int:
    """Return the width of the stream, by default standard output; 0 if it is not a terminal."""
    stream = sys.stdout if stream is None else stream
    try:
        # no stream: the parent process closed it
        return os.get_terminal_size(stream.fileno()).columns if stream is not None and stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def wrap_for_terminal(text: str, stream: IO[str] | None = None) -> str:
    """Wrap the lines of the text at word boundaries if the stream is a terminal too narrow for them.

    stream  default: standard output
    """
    columns = terminal_width(stream)
    return wrap(text, columns) if columns else text


def wrap_help(text: str) -> str:
    """Wrap a help text for the width of the terminal, or for $COLUMNS if standard output is not a terminal."""
    columns_variable = os.environ.get("COLUMNS", "")
    columns = terminal_width() or (int(columns_variable) if columns_variable.isdecimal() else 0)
    return reflow(text, columns) if columns else text


def reflow(text: str, columns: int) -> str:
    """Rewrap the lines of each paragraph and table cell to this width.

    A paragraph consists of consecutive lines at the left margin. The last cell of a row is wrapped within its column,
    or, if the column starts in the right half of the line, moved to the lines below the row.
    """
    joined: list[str] = []
    cell = 0  # column of the last cell of the row
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        before = joined[-1] if joined else ""
        is_prose = bool(before) and before[0] != " " and line[:1] not in ("", " ") and not before.startswith("usage:")
        if line.strip() and ((is_prose and not before.endswith(":")) or (cell and indent == cell and before)):
            joined[-1] = f"{before} {line.strip()}"
            continue
        joined.append(line)
        cell = max((match.end() for match in re.finditer(r"\S {2,}(?=\S)", line)), default=0)
    num_usage_lines = joined.index("") if joined[0].startswith("usage:") and "" in joined else 0
    return "\n".join(
        part
        for number, line in enumerate(joined)
        for part in _wrap_help_line(line, columns, is_usage=number < num_usage_lines)
    )


def _wrap_help_line(line: str, columns: int, *, is_usage: bool = False) -> list[str]:
    if len(line) <= columns:
        return [line]
    text = line.lstrip()
    indent = len(line) - len(text)
    cells = list(re.finditer(r"\S( {2,})(?=\S)", line))
    if indent and cells and cells[-1].end() > columns // 2:
        description = " " * (indent + 4) + line[cells[-1].end() :]
        return [line[: cells[-1].start(1)], *_wrap_line(description, columns, 0)]
    if indent > columns // 2:  # continues the description in the line above
        return _wrap_line(" " * 6 + text, columns, 0)
    if is_usage:  # may be broken, because it is not a command to paste
        return _wrap_line(line, columns, 2 if indent else len("usage: ") + 2, kept=_USAGE_PART)
    return _wrap_line(line, columns, 2 if indent else 0)


def wrap(text: str, columns: int) -> str:
    """Wrap the text to lines of this width, without breaking words or commands.

    Continuation lines are aligned with the last cell of a table, if that leaves half of the line for them, else
    indented by two. If a label has several entries, one per line, their continuation lines are indented by two more
    than the entries. Commands are never broken, so that they can be pasted: a line that the terminal itself wraps is
    still copied as one line.
    """
    lines = text.split("\n")
    indents = [len(line) - len(line.lstrip()) for line in [*lines[1:], ""]]
    return "\n".join(
        part for line, below in zip(lines, indents, strict=True) for part in _wrap_line(line, columns, below=below)
    )


def _wrap_line(
    line: str, columns: int, hanging: int = 2, below: int = 0, *, kept: re.Pattern[str] | None = None
) -> list[str]:
    """Wrap a line.

    hanging  indentation of continuation lines, relative to the first
    below    indentation of the next line; if it equals the column of the last cell, that line is another entry
    kept     pattern of text that is not broken; default: commands
    """
    if len(line) <= columns:
        return [line]
    cells = [match.end() for match in re.finditer(r"\S {2,}(?=\S)", line) if match.end() <= columns // 2]
    text = line.lstrip()
    lead = len(line) - len(text)
    parts = textwrap.wrap(
        (kept or _COMMAND).sub(lambda match: match[0].replace(" ", "\0"), text), columns, initial_indent=" " * lead,
        subsequent_indent=" " * ((cells[-1] + hanging * (cells[-1] == below)) if cells else lead + hanging),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [part.replace("\0", " ") for part in parts] or [""]


def abbreviate(items: Sequence[object], shown: int = 4, separator: str = ", ") -> str:
    """Return the first items, and the number of the others."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return separator.join(map(str, items[:shown])) + more


def format_metric(value: float | None, digits: int = 4) -> str:
    """Format the value of a metric for display, without an exponent below a billion: 12,440 rather than 1.244e+04.

    None and NaN mean that the metric had no items. Files store NaN and infinite values as null, which is read as None.
    """
    if value is None or math.isnan(value):
        return NOT_MEASURED
    return f"{value:,.0f}" if 10**digits - 0.5 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def format_rate(items_per_s: float) -> str:
    """Format items per second without an exponent, with at least three digits."""
    return f"{items_per_s:,.0f}" if items_per_s >= 100 else f"{items_per_s:.3g}"


def format_duration(seconds: float) -> str:
    """Format seconds as `12.3 s`, `4 min 5 s` or `2 h 10 min`; `-` if it is invalid."""
    if not 0 <= seconds < 1e10:
        return "-"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"


def format_bytes(size: float) -> str:
    """Format bytes with at least three digits, in the largest unit in which the size is at least 0.1 (TiB: at least 1).

    All displayed sizes use this function, so that equal sizes look equal: 64 KiB, never 6.4e-05 GiB.
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        value = size / scale
        if value >= (1 if unit == "TiB" else 0.1):  # the memory of large GPUs is given in GiB
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{size:.0f} B" if size else "0"


def format_gib(gib: float) -> str:
    """Format an amount of GiB in a suitable unit."""
    return format_bytes(gib * 2**30)


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")  # ECMA-48
_COMMAND = re.compile(r"(?:(?<=  )|(?<=: )|^(?:\S+ {2,})?)accel-run \S+(?: (?:[-+./'\"]\S*|\S*=\S*))*")
_USAGE_PART = re.compile(r"accel-run \S+|\[[^\[\]]*\]")
NOT_MEASURED = "not measured"
_MAX_LINES, _MAX_COLUMNS = 12, 400
