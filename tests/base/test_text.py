"""Terminal output: wrapping, tables, help texts and sizes."""

from __future__ import annotations

import io
import os
import pty
import termios
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.errors import ConfigError, Problem
from runner.base.text import format_bytes, format_gib, format_metric, format_table, reflow, wrap, wrap_for_terminal
from runner.cli import overview, print_problems
from runner.commands import COMMANDS
from runner.console.progress_display import Bar
from runner.records.events import Console

TABLE = """\
GPU or CPU?        here    rule of thumb                                   says
samples            4,096   at least 1,000 samples, else the GPU waits      a GPU

  fine       kernel launches 12 an update, expected fewer than a hundred of them
  command     accel-run train --task /home/a-name/a-folder/with/a/long/name/that/goes/on/and/on/my_task.py updates=2"""
COMMAND = TABLE.splitlines()[-1]


@pytest.mark.parametrize("columns", [40, 60, 80, 90])
def test_lines_are_broken_only_between_words(columns: int) -> None:
    lines = wrap(TABLE, columns).split("\n")
    assert " ".join(lines).split() == TABLE.split()
    assert all(len(line) <= columns or line == COMMAND for line in lines)
    assert COMMAND in lines


def test_continuation_lines_of_list_entries_are_indented() -> None:
    text = "note   one two three four\n       five six seven eight\nnext   nine ten eleven"
    assert wrap(text, 18).split("\n") == [
        "note   one two",
        "         three",
        "         four",
        "       five six",
        "         seven",
        "         eight",
        "next   nine ten",
        "       eleven",
    ]


def test_only_the_description_of_a_command_is_wrapped() -> None:
    """A command to paste stays on one line."""
    command, meaning = (
        "accel-run train --task ./my_task.py optimizer.lr=0.1",
        "a task of your own, made by accel-run new",
    )
    first, *more = wrap(f"  {command}   {meaning}", 40).split("\n")
    assert first == f"  {command}"
    assert " ".join(" ".join(more).split()) == meaning
    command, meaning = "accel-run COMMAND --help", "tells more of it"
    assert wrap(f"{command} {meaning}", 20).endswith(f"--help\n  {meaning}")


def test_columns_that_do_not_fit_are_dropped_and_listed() -> None:
    rows = [("run", "task", "size"), ("first", "gpt", "9 MiB"), ("second", "nmt", "10 MiB")]
    assert format_table(rows, "<<>") == ["run     task    size", "first   gpt    9 MiB", "second  nmt   10 MiB"]
    assert format_table(rows, "<<>", ("size", "task"), 20) == format_table(rows, "<<>")
    *narrow, note = format_table(rows, "<<>", ("size", "task"), 19)
    assert narrow == ["run     task", "first   gpt", "second  nmt"]
    assert "size" in note
    assert format_table(rows, "<<>", ("size", "task"), 8)[0] == "run"


def test_titles_and_long_cells_do_not_widen_a_table() -> None:
    """Titles are between rows."""
    rows = [("", "lowest", "mean"), ("graphics-card",), ("cpu", "9", "10")]
    assert format_table(rows, "<>", indent="  ") == [
        "       lowest  mean",
        "  graphics-card",
        "  cpu       9    10",
    ]
    assert format_table([("a", "b", "c"), ("d", "eeee", "f")], widest={1: 2}) == ["a  b   c", "d  eeee  f"]
    assert format_table([]) == []


def test_only_terminal_output_is_wrapped() -> None:
    """This includes output above a progress bar, output without a progress bar, and errors."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    text = "device      cpu: CPU (AMD EPYC, 1 core), for there is no GPU here"
    what, fix = "is a key that nobody knows", "did you mean seed=1?"
    with os.fdopen(theirs, "w") as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
        broken = ["device      cpu: CPU (AMD EPYC, 1 core),", "            for there is no GPU here"]
        assert wrap_for_terminal(text, terminal).split("\n") == broken
        assert wrap_for_terminal(text, io.StringIO()) == text
        Bar(terminal).note(text)
        Console().info(text)
        Console().error(text)
        print_problems(ConfigError(Problem(what, "sed=1", fix)))
    messages = b""
    with suppress(OSError):  # EIO means that the terminal is closed
        while part := os.read(ours, 4096):
            messages += part
    os.close(ours)
    lines = messages.decode().replace("\r", "").splitlines()
    assert lines[:4] == broken * 2
    assert " ".join(" ".join(lines[-3:]).split()) == f"accel-run: sed=1: {what} {fix}"
    assert lines[-1] == f"{11 * ' '}{fix}"
    assert max(map(len, lines)) <= 40


HELPS = [overview(), *(import_module(f"runner.commands.{module}").HELP for module, _ in COMMANDS.values())]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 100, 120, 160, 220])
@pytest.mark.parametrize("text", HELPS, ids=lambda text: " ".join(text.split()[1:4]))
def test_help_is_wrapped_at_the_width_of_the_terminal(text: str, columns: int) -> None:
    shown = reflow(text, columns)
    assert shown.split() == text.split()
    lines = shown.split("\n")
    if lines[0].startswith("usage:"):
        assert max(map(len, lines[: lines.index("")])) <= columns, (
            "usage lines must be wrapped, because they are no commands to paste"
        )
    for line in lines:
        assert len(line) <= columns or "accel-run " in line or max(map(len, line.split())) > columns // 2
    for line, below in pairwise(lines):  # lines of a paragraph at the left margin are filled
        if line[:1].isupper() and below[:1].strip() and not line.startswith("usage") and not line.endswith(":"):
            assert len(line) + 1 + len(below.split()[0]) > columns or "accel-run" in line + below


def test_a_narrow_terminal_moves_descriptions_below_terms() -> None:
    command = "  accel-run plan precision=bf16"
    row = f"{command}    show what would run, and why, without training"
    assert reflow(row, 120) == row
    term, *below = reflow(row, 50).split("\n")
    assert term == command
    assert len(below) > 1
    assert all(line.startswith(" " * 6) and line[6] != " " and len(line) <= 50 for line in below)


def test_continuation_lines_of_a_paragraph_are_not_indented() -> None:
    paragraph = "first_contact compares predictions with measurements"
    assert reflow(paragraph, 30).split("\n")[1][0] != " "


@given(st.integers(0, 2**50))
def test_sizes_are_shown_with_three_digits_without_exponent(size: int) -> None:
    shown = format_bytes(size)
    if size == 0:
        assert shown == "0"
        return
    number, unit = shown.split()
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    assert "e" not in number
    assert float(number.replace(",", "")) * units[unit] == pytest.approx(size, rel=0.006, abs=0.5)
    assert format_gib(size / 2**30) == shown


def test_small_amounts_are_shown_in_small_units() -> None:
    assert [format_gib(gib) for gib in (6.4e-05, 0.0005, 0.25, 2.0)] == ["67.1 KiB", "0.512 MiB", "0.25 GiB", "2 GiB"]


@given(st.floats(min_value=1.0, max_value=9e8))
def test_metrics_are_shown_with_four_digits_without_exponent(value: float) -> None:
    for number in (value, -value):
        text = format_metric(number)
        assert "e" not in text
        assert float(text.replace(",", "")) == pytest.approx(number, rel=10**-3 / 2)
