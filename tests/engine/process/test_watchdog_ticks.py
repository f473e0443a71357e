"""The watchdog, tick by tick: the thread runs inside the test, and a scripted step precedes each check."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import Exit, Hang, SystemLimit
from runner.config.configuration import compose
from runner.config.request import Request
from runner.distributed.world import World
from runner.engine.process import watchdog
from runner.engine.process.watchdog import (
    CHECKPOINT,
    DATA,
    END,
    EVALUATION,
    MIN_TIMEOUT_S,
    START,
    SUMMARY,
    TICK_S,
    UPDATE,
    WATCHDOGS,
    WORKER,
    HangTraces,
    ProgressMark,
    WatchdogLimits,
    format_hang,
    hang_error,
    run_watchdog,
)
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.host.stacks import StackFrame
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from tests.distributed.ranks import CPU

LIMITS = ("first_update_s=100", "update_s=3", "data_s=5", "checkpoint_s=7")
Step = Callable[[ProgressMark], object]


def keep(mark: ProgressMark) -> None:
    """Change nothing."""


def begins(kind: str, update: int = 1) -> Step:
    return lambda mark: mark.advance(kind, update)


class Ended(BaseException):
    """Raised instead of ending the process."""


@dataclass
class Clock:
    """The steps before each check of the watchdog, and the heartbeats that it published."""

    steps: list[Callable[[], object]] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    run: Callable[[], None] = lambda: None
    is_stopped: bool = False
    can_start: bool = True

    def pass_ticks(self, mark: ProgressMark, *steps: Step) -> list[Heartbeat]:
        """Run a check after each step; return the heartbeats that these checks published."""
        number = len(self.beats)
        self.steps = [partial(step, mark) for step in steps]
        self.run()
        return self.beats[number:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()

    class Event:
        def wait(self, timeout: float) -> bool:
            assert timeout == TICK_S
            if not result.steps:
                return True
            result.steps.pop(0)()
            return False

        def set(self) -> None:
            result.is_stopped = True

    class Thread:
        def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
            assert (name, daemon) == ("watchdog", True)
            result.run = target

        def start(self) -> None:
            if not result.can_start:
                raise RuntimeError("can't start new thread")

        def join(self) -> None:
            assert result.is_stopped

    class Table(HeartbeatTable):
        def publish(self, heartbeat: Heartbeat) -> None:
            super().publish(heartbeat)
            result.beats.append(heartbeat)

    patched = SimpleNamespace(**{**vars(threading), "Event": Event, "Thread": Thread})
    monkeypatch.setattr(watchdog, "threading", patched)
    monkeypatch.setattr(watchdog, "HeartbeatTable", Table)
    monkeypatch.setattr(watchdog, "descendants", lambda pid: {})
    return result


@contextmanager
def watch_rank(
    folder: Path | None, *settings: str, world_size: int = 2, traces: HangTraces | None = None
) -> Iterator[ProgressMark]:
    """Watch a rank whose heartbeats are in `folder`, or, if that is None, a process that ends itself."""
    args = ("device=cpu", *(f"watchdog.{limit}" for limit in LIMITS), *settings)
    plan = make_plan(compose(Request(args)), Inventory((), Cpu("a processor", 2, 4, 0)))
    world = World(CPU, rank=1 if world_size > 1 else 0, world_size=world_size, heartbeat_folder=folder)
    with run_watchdog(plan, world, traces or HangTraces(lambda text: None)) as mark:
        yield mark


def waited_ticks(beats: list[Heartbeat]) -> list[float]:
    return [beat.waited_s / TICK_S for beat in beats]


# ---------------------------------------------------------------- heartbeats


def test_the_time_of_an_operation_counts_from_its_first_check(clock: Clock, tmp_path: Path) -> None:
    with watch_rank(tmp_path) as mark:
        mark.begin("train")
        beats = clock.pass_ticks(mark, keep, keep, begins(DATA), keep, begins(DATA), begins(UPDATE, 2), keep, keep)
        assert [beat.ticks for beat in beats] == [2, 3, 4, 5, 6, 7, 8, 9]
        assert waited_ticks(beats) == [1, 2, 0, 1, 0, 0, 1, 2]
        assert [beat.kind for beat in beats] == [START, START, DATA, DATA, DATA, UPDATE, UPDATE, UPDATE]
        assert [beat.update for beat in beats] == [0, 0, 1, 1, 1, 2, 2, 2]
        assert {beat.phase for beat in beats} == {"train"}
        assert not any(beat.is_waiting for beat in beats)
        assert HeartbeatTable(tmp_path, 1).read() == beats[-1]
    assert clock.beats[0] == Heartbeat(ticks=1, limit_s=100.0, kind=START, is_first=True)
    assert clock.beats[-1] == Heartbeat()


def test_the_first_operation_of_a_kind_has_a_separate_limit(clock: Clock, tmp_path: Path) -> None:
    with watch_rank(tmp_path) as mark:
        mark.begin("train")
        beats = clock.pass_ticks(
            mark, begins(UPDATE), lambda mark: mark.completed_kinds.add(UPDATE), begins(UPDATE, 2), begins(DATA)
        )
        assert [beat.is_first for beat in beats] == [True, True, False, True]
        assert [beat.limit_s for beat in beats] == [100.0, 100.0, 3.0, 100.0]
        mark.completed_kinds.add(DATA)
        mark.completed_kinds.add(END)
        beats = clock.pass_ticks(mark, begins(DATA, 2), begins(END), begins(START))
        assert [beat.limit_s for beat in beats] == [5.0, 7.0, 100.0]


def test_derived_limits_follow_durations_and_are_reset_by_a_new_phase(clock: Clock, tmp_path: Path) -> None:
    with watch_rank(tmp_path, "watchdog.update_s=auto") as mark:
        mark.begin("first")
        mark.completed_kinds.add(UPDATE)
        beats = clock.pass_ticks(mark, begins(UPDATE), *[keep] * 40, begins(UPDATE, 2), keep)
        assert [beat.limit_s for beat in (beats[0], beats[40], *beats[-2:])] == [MIN_TIMEOUT_S] * 2 + [102.5] * 2
        assert [beat.phase for beat in clock.pass_ticks(mark, lambda mark: mark.begin("second"), keep)] == [
            "second"
        ] * 2

        def later(mark: ProgressMark) -> None:
            mark.completed_kinds.add(UPDATE)
            mark.advance(UPDATE, 1)

        (beat,) = clock.pass_ticks(mark, later)
        assert (beat.limit_s, beat.is_first) == (MIN_TIMEOUT_S, False)


def test_operations_completed_between_two_checks_count(clock: Clock, tmp_path: Path) -> None:
    def begin(mark: ProgressMark) -> None:
        mark.begin("second")
        mark.completed_kinds.add(UPDATE)
        mark.advance(UPDATE, 3)

    with watch_rank(tmp_path) as mark:
        (beat,) = clock.pass_ticks(mark, begin)
        assert (beat.is_first, beat.phase, beat.update, beat.limit_s) == (False, "second", 3, 3.0)


def test_a_writer_without_progress_is_reported_after_its_limit(clock: Clock, tmp_path: Path) -> None:
    with watch_rank(tmp_path) as mark:
        mark.begin("train")
        mark.write_progress = lambda: (6, "same")
        busy = [begins(UPDATE, number) for number in range(7, 40)]
        beats = clock.pass_ticks(mark, *busy)
        overdue = [number for number, beat in enumerate(beats) if beat.kind == CHECKPOINT]
        assert overdue == [29, 30, 31, 32], "more than 7 s after the first check that saw the write"
        assert beats[29] == Heartbeat(31, 7.25, 7.0, False, CHECKPOINT, False, 6, "train")
        assert beats[28].kind == UPDATE
        assert beats[29].is_overdue
        progress = iter(range(100))
        mark.write_progress = lambda: (6, next(progress))
        assert not any(beat.kind == CHECKPOINT for beat in clock.pass_ticks(mark, *busy))
        mark.write_progress = lambda: None
        assert not any(beat.kind == CHECKPOINT for beat in clock.pass_ticks(mark, *busy))


def test_writer_progress_counts_only_while_training_waits_for_it(clock: Clock, tmp_path: Path) -> None:
    with watch_rank(tmp_path) as mark:
        progress = iter([(6, number // 3) for number in range(100)])
        mark.write_progress = lambda: next(progress)
        beats = clock.pass_ticks(mark, begins(CHECKPOINT, 6), *[keep] * 8)
        assert waited_ticks(beats) == [0, 1, 2, 0, 1, 2, 0, 1, 2]
        assert {(beat.kind, beat.limit_s) for beat in beats} == {(CHECKPOINT, 7.0)}
        beats = clock.pass_ticks(mark, begins(UPDATE, 7), keep, keep, keep, keep)
        assert waited_ticks(beats) == [0, 1, 2, 3, 4], "training itself makes no progress"


FRAMES: dict[str, list[StackFrame]] = {
    "debugger": [StackFrame("/usr/lib/python3/pdb.py", 5, "readline"), StackFrame("/me/train.py", 5, "loss")],
    "collective": [StackFrame("/lib/torch/distributed/distributed_c10d.py", 5, "all_reduce")],
    "inside": [
        StackFrame("/me/train.py", 5, "loss"), StackFrame("/lib/torch/distributed/distributed_c10d.py", 5, "wait"),
    ],
    "user": [StackFrame("/me/train.py", 5, "loss")],
    "none": [],
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("frames", FRAMES)
def test_stacks_show_whether_a_rank_waits_or_is_in_a_debugger(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: str, world_size: int
) -> None:
    read: list[int] = []

    def current_frames(thread: int) -> list[StackFrame]:
        read.append(thread)
        return FRAMES[frames]

    monkeypatch.setattr("runner.host.stacks.current_frames", current_frames)
    with watch_rank(tmp_path, world_size=world_size) as mark:
        mark.begin("train")
        beats = clock.pass_ticks(mark, begins(UPDATE), *[keep] * 7)
    assert len(read) == (1 if frames == "debugger" else 3)
    assert set(read) == {threading.main_thread().ident}
    assert waited_ticks(beats) == ([0, 1, 2, 3, 4, 0, 1, 2] if frames == "debugger" else [0, 1, 2, 3, 4, 5, 6, 7])
    waits = frames == "collective" and world_size > 1
    assert [beat.is_waiting for beat in beats] == [False] * 5 + [waits] * 3


def test_ranks_publish_their_progress_even_without_a_watchdog(clock: Clock, tmp_path: Path) -> None:
    args = Request(("device=cpu", "watchdog=off"))
    plan = make_plan(compose(args), Inventory((), Cpu("a processor", 2, 4, 0)))
    with run_watchdog(plan, World(CPU, 1, 1, 2, 2, tmp_path), HangTraces(lambda text: None)) as mark:
        mark.num_updates.value, mark.is_ending.value = 5, True
        table = HeartbeatTable(tmp_path, 1)
        assert (table.num_updates().value, table.is_ending().value) == (5, True)
    assert clock.beats == []


def test_a_watchdog_thread_that_cannot_start_is_reported_as_a_system_limit(clock: Clock, tmp_path: Path) -> None:
    clock.can_start = False
    with pytest.raises(SystemLimit), watch_rank(tmp_path):
        pass


def test_a_new_progress_mark_starts_without_progress(tmp_path: Path) -> None:
    mark = ProgressMark()
    assert (mark.now, mark.phase, mark.completed_kinds, mark.write_progress()) == ((START, 0), "", set(), None)
    assert (mark.num_updates.value, mark.is_ending.value) == (0, False)


# ---------------------------------------------------------------- the end of a process


@dataclass
class Exits:
    """Exit codes, stacks, errors and removed folders of a process that ends itself."""

    codes: list[int] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    errors: list[Hang] = field(default_factory=list)
    removed: list[object] = field(default_factory=list)

    def traces(self, checkpoints: Path | None = None) -> HangTraces:
        return HangTraces(self.stacks.append, self.errors.append, checkpoints)


@pytest.fixture
def exits(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Exits:
    result = Exits()

    def end(code: int) -> None:
        result.codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("runner.host.scratch.shared_folder", lambda: tmp_path)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: result.removed.append(path))
    return result


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hanging_process_is_recorded_and_ends(
    clock: Clock, exits: Exits, tmp_path: Path, capfd: pytest.CaptureFixture[str], world_size: int
) -> None:
    (tmp_path / "update-0000000004").mkdir()
    with watch_rank(None, traces=exits.traces(tmp_path), world_size=world_size) as mark:
        mark.begin("train")
        mark.completed_kinds.add(UPDATE)
        mark.num_updates.value = 6
        clock.pass_ticks(mark, begins(UPDATE, 7), *[keep] * 12)
        assert exits.codes == [], "the limit is reached but not exceeded"
        with pytest.raises(Ended):
            clock.pass_ticks(mark, begins(UPDATE, 8), *[keep] * 13)
    assert exits.codes == [Exit.HANG]
    (error,) = exits.errors
    assert error.place == {"rank": world_size - 1, "phase": "train", "update": 8}
    assert (error.problems[0].where.startswith("rank 1 of 2")) == (world_size == 2)
    assert "watchdog.update_s=10" in error.problems[0].fix
    (note,) = error.__notes__
    assert "update 4 (2 " in note
    assert "test_watchdog_ticks.py" in exits.stacks[0]
    assert exits.removed == [tmp_path]
    printed = capfd.readouterr().err
    assert error.problems[0].what in printed
    assert note in printed
    assert "stacks.txt" in printed


def test_a_rank_waiting_for_others_has_the_limit_of_a_checkpoint(
    clock: Clock, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.host.stacks.current_frames", lambda thread: FRAMES["collective"])
    with watch_rank(None, traces=exits.traces()) as mark:
        mark.completed_kinds.add(UPDATE)
        clock.pass_ticks(mark, begins(UPDATE), *[keep] * 28)
        assert exits.codes == [], "at the limit of a checkpoint, 7 s"
        with pytest.raises(Ended):
            clock.pass_ticks(mark, begins(UPDATE, 2), *[keep] * 29)
    assert exits.codes == [Exit.HANG]


@pytest.mark.parametrize("fails", ["stacks", "nothing"])
def test_an_error_is_recorded_only_if_the_stacks_could_be_written(
    clock: Clock, exits: Exits, capfd: pytest.CaptureFixture[str], fails: str
) -> None:
    def write(text: str) -> None:
        exits.stacks.append(text)
        if fails == "stacks":
            raise OSError(28, "No space left on device")

    with watch_rank(None, traces=replace(exits.traces(), write_stacks=write), world_size=1) as mark:
        mark.completed_kinds.add(UPDATE)
        with pytest.raises(Ended):
            clock.pass_ticks(mark, begins(UPDATE), *[keep] * 13)
    assert (len(exits.stacks), len(exits.errors)) == (1, 0 if fails == "stacks" else 1)
    printed = capfd.readouterr().err
    assert ("stacks.txt" in printed) == (fails == "nothing")
    assert "last checkpoint" not in printed
    assert exits.codes == [Exit.HANG]


# ---------------------------------------------------------------- messages and settings


@pytest.mark.parametrize(
    ("kind", "is_first", "key"),
    [
        (UPDATE, False, "update_s"), (UPDATE, True, "first_update_s"), (DATA, False, "data_s"),
        (EVALUATION, False, "update_s"), (CHECKPOINT, True, "checkpoint_s"), (END, True, "checkpoint_s"),
        (START, False, "first_update_s"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("limit_s", "value"), [(0.5, 10), (3.0, 10), (9.0, 40), (50.0, 200)])
def test_the_fix_for_a_hang_names_the_setting_of_its_limit(
    kind: str, is_first: bool, key: str, limit_s: float, value: int
) -> None:
    beat = Heartbeat(9, limit_s + 1, limit_s, False, kind, is_first, 7, "train")
    error = hang_error(beat, 2, "rank 2 of 4", {"rank 2 of 4": "has no stacks to show"})
    (problem,) = error.problems
    assert problem.fix.endswith(f"watchdog.{key}={value}")
    assert problem.where == "rank 2 of 4"
    assert "of phase train" in problem.what
    assert error.place == {"rank": 2, "phase": "train", "update": 7}


def test_a_hang_before_any_phase_has_no_place() -> None:
    error = hang_error(Heartbeat(9, 4.0, 3.0, kind=START), 0, "", {"the main thread": ""})
    assert (error.place, error.problems[0].where) == ({}, "")
    assert "of phase" not in error.problems[0].what


def stack(file: str, number: int = 1) -> str:
    lines = "".join(f'  File "{file}", line {line} in call{line}\n' for line in range(1, number + 1))
    return f"Thread 0x0001 (most recent call first):\n{lines}"


def test_the_location_of_a_hang_is_in_user_code() -> None:
    traces = {"rank 0": stack(os.__file__), f"{WORKER} 7": stack("/home/me/data.py")}
    error = hang_error(Heartbeat(9, 4.0, 3.0, kind=DATA), 0, "", traces)
    assert "/home/me/data.py" in error.problems[0].where


def test_a_hang_message_shows_stacks_of_only_a_few_processes() -> None:
    traces = {f"rank {rank}": stack("/home/me/train.py", 9) for rank in range(9)}
    shown = [line for line in format_hang(traces).splitlines() if line.startswith("rank ")]
    assert len(shown) == 4, "4 lines each; no process is added once there are more than 12 lines"
    assert format_hang({"rank 0": "has none\n"}).splitlines()[0] == "rank 0 has none"
    assert "hang.txt" in format_hang({}, file="hang.txt").splitlines()[0]
    assert len(format_hang({}, file=None).splitlines()) == 2


def test_limits_follow_the_settings() -> None:
    default, off = WATCHDOGS["default"], WATCHDOGS["off"]
    assert default() == WatchdogLimits(None, 1800.0, None, 600.0)
    assert default(update_s=1.0, first_update_s=2.0, data_s=3.0, checkpoint_s=4.0) == WatchdogLimits(1.0, 2.0, 3.0, 4.0)
    assert off() is None


def test_derived_limits_have_a_minimum_and_explicit_limits_are_exact() -> None:
    derived, exact = WatchdogLimits(None, 100.0, None, 7.0), WatchdogLimits(3.0, 100.0, 5.0, 7.0)

    def limits(kind: str, **others: Any) -> tuple[float, float]:
        given = {"is_first": False, "longest_s": 0.0, **others}
        return derived.timeout_s(kind, **given), exact.timeout_s(kind, **given)

    assert limits(UPDATE) == (MIN_TIMEOUT_S, 3.0)
    assert limits(DATA, longest_s=6.0) == (60.0, 5.0)
    assert limits(UPDATE, longest_s=6.0, least_s=70.0) == (70.0, 3.0)
    assert limits(UPDATE, is_first=True, longest_s=600.0) == (100.0, 100.0)
    assert limits(START) == (100.0, 100.0)
    assert limits(CHECKPOINT, is_first=True) == limits(END) == (7.0, 7.0)


def test_the_time_of_an_interrupted_operation_restarts_even_after_an_error() -> None:
    mark = ProgressMark()
    mark.advance(UPDATE, 2)
    before = mark.now
    with pytest.raises(KeyError), mark.doing(EVALUATION, 2), mark.doing(CHECKPOINT, 1):
        assert mark.now == (CHECKPOINT, 1)
        raise KeyError
    assert mark.now == before
    assert mark.now is not before, "the time of the operation restarts"


def test_the_end_of_an_interruption_restores_the_outer_operation() -> None:
    mark = ProgressMark()
    mark.advance(UPDATE, 2)
    with mark.doing(EVALUATION, 2):
        mark.advance(SUMMARY, 2)
    assert mark.now == (UPDATE, 2)
