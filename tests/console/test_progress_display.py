"""Progress is shown as lines on a pipe and as a bar on a terminal. Updates that display nothing cost almost nothing."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from runner.console.progress_display import Bar, ProgressDisplay, ProgressLines, make_progress

MONITOR = "GPU: 8.2/16.0GB (51%) | Util: 85% | CPU: 45.3% | RAM: 67.2%"
VALUES = {
    "train/loss": 2.345,
    "lr": 3e-4,
    "train/grad_norm": 1.25,
    "memory_gib": 8.21,
    "data_wait": 0.031,
    "items_per_s": 43457.1,
}


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def terminal(columns: int = 140) -> Iterator[tuple[io.TextIOWrapper, Callable[[], str]]]:
    """Yield a terminal stream with this number of columns, and a function that returns its output."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(ours, False)
    shown: list[bytes] = []

    def seen() -> str:
        while True:
            try:
                shown.append(os.read(ours, 65536))
            except BlockingIOError:
                return b"".join(shown).decode()

    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        yield stream, seen
    os.close(ours)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def run_lines(total: int, done: int = 0, seconds_each: float = 2.0) -> str:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, clock)
    lines.start(total, done)
    for update in range(done + 1, total + 1):
        clock.now += seconds_each
        lines.update(update, {"train/loss": 1.5, "lr": 1e-3, "gpu0/util": None})
    lines.finish()
    return stream.getvalue()


def test_a_pipe_shows_lines_at_the_documented_updates(
    screen: Callable[..., None],
) -> None:
    """Lines are shown at updates 1 and 10, every 30 seconds, and at the last update."""
    screen(run_lines(40))


def test_a_resumed_run_counts_lines_from_the_resume() -> None:
    """The first lines are shown 1 and 10 updates later."""
    assert re.findall(r"^update=(\d+)", run_lines(1020, done=1000, seconds_each=0.1), re.M) == ["1001", "1010", "1020"]


def test_the_remaining_time_ignores_the_slow_start() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, clock)
    lines.start(110, 100)
    for update, seconds in ((101, 60.0), (110, 9.0)):
        clock.now += seconds
        lines.update(update, {"data_wait": 0.1465})
    first, second = (dict(word.split("=") for word in line.split()) for line in stream.getvalue().splitlines())
    assert first == {"update": "101", "total": "110", "data_wait": "15%"}
    assert second == first | {"update": "110", "it_per_s": "1", "eta_s": "0"}


def test_a_line_shows_nan_and_omits_unknown_values() -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, Clock())
    lines.start(1)
    lines.update(1, {"train/loss": float("nan"), "lr": None}, MONITOR)
    assert dict(re.findall(r'(\S+?)=("[^"]*"|\S+)', stream.getvalue())) == {
        "update": "1", "total": "1", "train/loss": "nan", "monitor": f'"{MONITOR}"'
    }  # fmt: skip


def test_pipes_and_dumb_terminals_show_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(make_progress(io.StringIO())) is ProgressLines
    with terminal() as (stream, _):
        assert type(make_progress(stream)) is Bar
        monkeypatch.setenv("TERM", "dumb")
        assert type(make_progress(stream)) is ProgressLines


def test_lines_are_flushed_immediately() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as stream, os.fdopen(ours, "rb", buffering=0) as reader:
        lines = make_progress(stream)
        lines.start(1)
        lines.update(1, {})
        assert reader.read(100) == b"update=1 total=1\n"


def test_the_bar_shows_figures_above_the_machine(screen: Callable[..., None]) -> None:
    clock = Clock()
    with terminal() as (stream, seen):
        bar = Bar(stream, clock, item="token")
        bar.start(1000)
        clock.now += 10
        bar.update(340, VALUES, MONITOR)
        screen("\n".join(plain(seen()).splitlines()[-2:]))
        bar.finish()


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_the_bar_keeps_its_columns_for_any_values(columns: int) -> None:
    clock, dice = Clock(), random.Random(1)
    with terminal(columns) as (stream, seen):
        bar = Bar(stream, clock)
        bar.start(1000)
        clock.now += 1
        wide = {"train/loss": 0.00012345, "lr": 1e-4, "grad_norm": 0.0123, "memory_gib": 10.5, "data_wait": 1.0}
        bar.update(1, wide)
        clock.now += 90
        bar.update(2, wide)  # the widest values, which are those of slow updates and a long remaining time
        seen()
        lengths, places = set(), set()
        for update in [*range(3, 1000, 31), 1000]:
            clock.now += 0.5 + dice.random()
            shrunk = {name: value if dice.random() < 0.5 else round(value, 1) for name, value in wide.items()}
            bar.update(update, shrunk)
            frame = plain(seen()).splitlines()[-1]
            lengths.add(sum(frame.count(block) for block in "█░"))
            places.add(frame.find("/1000"))
        assert len(lengths) == 1, lengths
        assert len(places) == 1, places
        bar.finish()


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_new_figures_do_not_change_the_width_of_the_bar(columns: int) -> None:
    clock = Clock()
    with terminal(columns) as (stream, seen):
        bar = Bar(stream, clock)
        bar.start(1000)
        widths = set()
        for update, values in enumerate(({}, {"train/loss": 2.5}, {"train/loss": 2.5, "lr": 1e-4}, VALUES, VALUES), 1):
            clock.now += 1
            seen()
            bar.update(update, values)
            widths.add(sum(plain(seen()).splitlines()[-1].count(block) for block in "█░"))
        assert len(widths) == 1, widths
        bar.finish()


@pytest.mark.parametrize("columns", [1, 2, 10, 20, 40, 80, 200])
def test_a_narrow_terminal_drops_values_not_lines(columns: int) -> None:
    clock = Clock()
    with terminal(columns) as (stream, seen):
        bar = Bar(stream, clock)
        bar.start(1000)
        before = len(seen())
        for update in range(1, 6):
            clock.now += 1
            bar.update(update, VALUES, MONITOR)
        drawn = seen()[before:]
        frames = [plain(frame) for frame in re.split(r"\r\x1b\[2K\x1b\[1A\x1b\[2K", drawn)]
        assert len(frames) == 5  # each frame must erase exactly the two lines of the previous one
        assert all(len(line) <= columns for frame in frames for line in frame.splitlines())
        if columns >= 40:
            assert "5/1000" in frames[-1]
        if columns >= 80:  # less important values must be dropped to keep the bar
            assert "░░░░" in frames[-1]
            assert "items/s" in frames[-1]
        bar.finish()


def test_the_bar_is_drawn_at_most_four_times_a_second() -> None:
    """The bar is also drawn at the end."""
    clock = Clock()
    with terminal() as (stream, seen):
        bar = Bar(stream, clock)
        bar.start(10_000)
        due = []
        for update in range(1, 10_001):
            clock.now += 0.001
            due.append(bar.due(update))
            bar.update(update, {})
        assert 39 <= sum(due) <= 42  # number of frames in ten seconds
        assert due[-1]
        assert "100%" in plain(seen())
        bar.finish()


def test_a_note_appears_above_the_bar_once() -> None:
    with terminal() as (stream, seen):
        bar = make_progress(stream)
        bar.start(3)
        bar.update(1, {})
        bar.note("[saved] checkpoint update-0000000001")
        bar.update(3, {})
        bar.finish()
        text = plain(seen())
    assert text.count("[saved] checkpoint update-0000000001") == 1
    assert text.index("[saved]") < text.rindex("100%")


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal() as (stream, seen):
        bar = make_progress(stream)
        bar.start(2)
        bar.update(2, VALUES, MONITOR)
        bar.finish()
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen())


def test_the_cursor_is_never_hidden() -> None:
    with terminal() as (stream, seen):
        bar = make_progress(stream)
        bar.start(2)
        bar.update(1, VALUES)
        assert "\x1b[?25l" not in seen()
        bar.finish()


def test_the_bar_is_ascii_without_block_characters() -> None:
    """The terminal lacks these characters."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="ascii") as stream:
        bar = make_progress(stream)
        bar.start(2)
        bar.update(2, {}, "GPU: 51 °C")
        bar.finish()
    text = plain(os.read(ours, 65536).decode("ascii"))
    os.close(ours)
    assert "100% #######  2/2" in text
    assert "GPU: 51 ? C" in text or "GPU: 51 ?C" in text


def test_a_lost_terminal_does_not_end_the_run() -> None:
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    bar = make_progress(stream)
    bar.start(10)
    os.close(ours)
    for update in range(1, 11):
        bar.update(update, VALUES, MONITOR)
        bar.note("still here")
    bar.finish()
    lines = ProgressLines(stream)
    lines.start(1)
    lines.update(1, {})
    with pytest.raises(OSError):
        stream.close()


def test_standard_output_is_restored_after_the_bar() -> None:
    out, err = sys.stdout, sys.stderr
    with terminal() as (stream, _):
        for _phase in range(2):
            bar = make_progress(stream)
            bar.start(1)
            bar.update(1, {})
            bar.finish()
    assert (sys.stdout, sys.stderr) == (out, err)


def test_silent_ranks_have_a_progress_object_with_equal_methods() -> None:
    silent = make_progress(None)
    silent.start(3)
    assert not silent.due(3)
    silent.update(3, {"loss": 1.0})
    silent.note("nobody hears")
    silent.finish()


@pytest.mark.parametrize("kind", ["bar", "lines"])
def test_an_update_that_displays_nothing_costs_three_calls(kind: str) -> None:
    """The calls are those of `update`, `due` and the clock; `scripts/measure/monitor.py` prints their cost."""
    calls = 0

    def count(frame: FrameType, event: str, value: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    clock = Clock()
    with terminal() as (stream, _):
        progress: ProgressDisplay = Bar(stream, clock) if kind == "bar" else ProgressLines(stream, clock)
        progress.start(1_000_000)
        progress.update(1, VALUES)
        sys.setprofile(count)
        try:
            for update in range(101, 1_101):
                progress.update(update, VALUES)
        finally:
            sys.setprofile(None)
        assert calls <= 3 * 1000 + 1  # includes the call of setprofile
        progress.finish()
