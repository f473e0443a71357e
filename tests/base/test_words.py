"""Lines that are broken for a terminal lose no word, break none, and stay within its columns."""

from __future__ import annotations

import pytest

from runner.base.words import wrapped

TABLE = """\
GPU or CPU?        here    rule of thumb                                   says
samples            4,096   at least 1,000 samples, else the GPU waits      a GPU

  fine       kernel launches 12 an update, expected fewer than a hundred of them
  command     accel-run train --task /home/a-name/a-folder/with/a/long/name/that/goes/on/and/on/my_task.py updates=2"""


@pytest.mark.parametrize("columns", [40, 60, 80, 90])
def test_a_line_is_broken_between_words_only(columns: int) -> None:
    lines = wrapped(TABLE, columns).split("\n")
    assert " ".join(lines).split() == TABLE.split()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)


def test_what_goes_on_stands_below_the_last_cell() -> None:
    assert wrapped("  note   one two three four", 20).split("\n") == ["  note   one two", "         three four"]
    assert wrapped("one two three four five", 20).split("\n") == ["one two three four", "  five"]
    assert wrapped("short", 20) == "short"
