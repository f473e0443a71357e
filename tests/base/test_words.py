"""Lines that are broken for a terminal lose no word, break none, and stay within its columns."""

from __future__ import annotations

import io
import os
import pty
import termios
from contextlib import redirect_stderr, redirect_stdout, suppress

import pytest

from runner.base.errors import ConfigError, Problem
from runner.base.words import aligned, for_terminal, wrapped
from runner.cli import print_problems
from runner.observe.events import Console
from runner.observe.progress import Bar

TABLE = """\
GPU or CPU?        here    rule of thumb                                   says
samples            4,096   at least 1,000 samples, else the GPU waits      a GPU

  fine       kernel launches 12 an update, expected fewer than a hundred of them
  command     accel-run train --task /home/a-name/a-folder/with/a/long/name/that/goes/on/and/on/my_task.py updates=2"""
COMMAND = TABLE.splitlines()[-1]


@pytest.mark.parametrize("columns", [40, 60, 80, 90])
def test_a_line_is_broken_between_words_only(columns: int) -> None:
    lines = wrapped(TABLE, columns).split("\n")
    assert " ".join(lines).split() == TABLE.split()
    assert all(len(line) <= columns or line == COMMAND for line in lines)
    assert COMMAND in lines


def test_a_command_to_be_pasted_stays_whole_and_what_is_said_of_it_does_not() -> None:
    line = "  accel-run train --task ./my_task.py optimizer.lr=0.1   a task of your own, made by accel-run new"
    first, *more = wrapped(line, 40).split("\n")
    assert first == "  accel-run train --task ./my_task.py optimizer.lr=0.1"
    assert " ".join(" ".join(more).split()) == "a task of your own, made by accel-run new"
    assert wrapped("accel-run COMMAND --help tells more of it", 20).endswith("--help\n  tells more of it")


def test_columns_of_a_table_give_way_in_their_order_and_are_named() -> None:
    rows = [("run", "task", "size"), ("first", "gpt", "9 MiB"), ("second", "nmt", "10 MiB")]
    assert aligned(rows, "<<>") == ["run     task    size", "first   gpt    9 MiB", "second  nmt   10 MiB"]
    assert aligned(rows, "<<>", ("size", "task"), 20) == aligned(rows, "<<>")
    assert aligned(rows, "<<>", ("size", "task"), 19) == [
        "run     task",
        "first   gpt",
        "second  nmt",
        "(no room for size)",
    ]
    assert aligned(rows, "<<>", ("size", "task"), 8)[0] == "run"


def test_what_a_terminal_is_told_fits_it_and_a_pipe_gets_it_whole() -> None:
    """So is every word of a run, above the bar and without it, and every error."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    text = "device      cpu: CPU (AMD EPYC, 1 core), for there is no GPU here"
    with os.fdopen(theirs, "w") as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
        broken = ["device      cpu: CPU (AMD EPYC, 1 core),", "            for there is no GPU here"]
        assert for_terminal(text, terminal).split("\n") == broken
        assert for_terminal(text, io.StringIO()) == text
        Bar(terminal).note(text)
        Console().info(text)
        Console().error(text)
        print_problems(ConfigError(Problem("is a key that nobody knows", "sed=1", "did you mean seed=1?")))
    told = b""
    with suppress(OSError):  # the terminal is gone
        while part := os.read(ours, 4096):
            told += part
    os.close(ours)
    lines = told.decode().replace("\r", "").splitlines()
    assert lines[:4] == broken * 2
    assert lines[-3:] == ["accel-run: sed=1: is a key that nobody", "  knows", "           did you mean seed=1?"]
    assert max(map(len, lines)) <= 40
