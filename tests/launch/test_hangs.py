"""Hang detection finds the rank that blocks the others, as observed from outside."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.axes import precision
from runner.config.configuration import Choice
from runner.distributed.world import World
from runner.engine.process import watchdog
from runner.engine.process.watchdog import CHECKPOINT, MIN_TIMEOUT_S, START, UPDATE
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.host.process_tree import process_state
from runner.host.stacks import StackFrame, waits_for_ranks
from runner.launch.hangs import HangDetector, RankState, blocking_rank
from runner.tensors import async_copy

# A child asks to be traced and stops. Its parent keeps it stopped, as gdb does.
TRACED = """
import ctypes, os, signal, time
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).ptrace(0, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(pid, os.WUNTRACED)
print(pid, flush=True)
input()
os.kill(pid, signal.SIGKILL)
"""


def sign(
    waited_s: float, limit_s: float = 50.0, *, waits: bool = False, update: int = 7, kind: str = UPDATE
) -> Heartbeat:
    return Heartbeat(100, waited_s, limit_s, waits, kind, False, update, "train")


BUSY, WAITS = RankState(sign(10.0)), RankState(sign(10.0, waits=True))
OVERDUE, OVERDUE_WAITS = RankState(sign(51.0)), RankState(sign(51.0, waits=True))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([BUSY, BUSY], None),
        ([WAITS, BUSY], None),
        ([OVERDUE_WAITS, BUSY], None),  # rank 1 is within its time limit
        ([OVERDUE_WAITS, RankState(sign(500.0, 600.0, kind=CHECKPOINT))], None),
        ([OVERDUE_WAITS, RankState(sign(601.0, 600.0, kind=CHECKPOINT))], 1),
        ([OVERDUE_WAITS, OVERDUE], 1),
        ([OVERDUE, OVERDUE_WAITS], 0),
        ([OVERDUE_WAITS, WAITS], 0),  # the ranks wait for each other
        ([OVERDUE_WAITS, RankState(sign(51.0, waits=True, update=6))], 1),  # the rank that is furthest behind blocks
        ([RankState(sign(51.0, update=8)), OVERDUE], 1),
        ([OVERDUE, RankState(sign(51.0, 600.0, kind=CHECKPOINT))], None),  # on a GPU, rank 0 may be waiting for rank 1
        ([OVERDUE, RankState(sign(51.0, 600.0, waits=True, kind=CHECKPOINT))], 0),
        ([OVERDUE, RankState(sign(0.1))], None),
        ([RankState(sign(0.6)), OVERDUE], None),
        ([RankState(sign(0.1)), OVERDUE, OVERDUE_WAITS], None),
        ([OVERDUE, RankState(sign(0.1, waits=True))], 0),
        ([OVERDUE, RankState(sign(60.0))], 1),  # the rank that waits longest in the same update blocks
        ([OVERDUE_WAITS, RankState(sign(10.0, waits=True), is_traced=True)], None),
        ([OVERDUE_WAITS, RankState(sign(0.0), is_traced=True)], None),
        ([BUSY, RankState(sign(0.0, 1800.0), stopped_s=MIN_TIMEOUT_S + 1)], 1),
        ([BUSY, RankState(sign(0.0, 1800.0), stopped_s=MIN_TIMEOUT_S - 1)], None),
        ([RankState(sign(0.0, 2.0)), RankState(sign(0.0, 1800.0), stopped_s=3.0)], 1),
        ([WAITS, RankState(sign(0.0), silent_s=51.0)], 1),
        ([WAITS, RankState(sign(0.0, 1800.0), silent_s=51.0)], None),
        # rank 1 was stopped before its first heartbeat
        ([OVERDUE_WAITS, RankState(Heartbeat(), stopped_s=MIN_TIMEOUT_S + 1)], 1),
        ([OVERDUE_WAITS, RankState(Heartbeat())], None),  # nothing is known about rank 1 yet, or it has ended
        ([RankState(Heartbeat(), stopped_s=1000.0), RankState(Heartbeat(), silent_s=1000.0)], None),  # watchdog=off
    ],
)
def test_the_blocking_rank_is_the_one_others_wait_for(states: list[RankState], expected: int | None) -> None:
    assert blocking_rank(dict(enumerate(states))) == expected


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        (torch.distributed.distributed_c10d.__file__, "all_reduce", True),
        (precision.__file__, "_look", True),
        (async_copy.__file__, "read", True),
        (torch.cuda.__file__, "synchronize", True),
        (__file__, "loss", False),
        (torch.nn.functional.__file__, "linear", False),
    ],
)
def test_the_innermost_call_tells_what_a_rank_waits_for(file: str, function: str, expected: bool) -> None:
    """A rank waits for other ranks, or for the device."""
    assert waits_for_ranks(StackFrame(file, 1, function)) is expected


def test_a_debugged_rank_is_neither_stopped_nor_silent(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", TRACED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        traced = int(child.stdout.readline())
        HeartbeatTable(tmp_path, 0).publish(sign(1.0, 2.0))
        ticks = count(step=int(2 * watchdog.TICK_S) + 1)
        hangs = HangDetector(tmp_path, {0: traced}, clock=lambda: next(ticks))
        states = []
        for _ in range(4):
            assert hangs.check([0]) is None
            states.append(hangs.states[0])
        assert process_state(traced) == "t"
        assert all(state.is_traced and not state.stopped_s and not state.silent_s for state in states)
        child.stdin.write("\n")


def test_a_rank_is_watched_before_its_first_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_S", 1000.0)
    options = {"update_s": 2.0, "first_update_s": 30.0, "data_s": 2.0, "checkpoint_s": 4.0}
    plan: Any = SimpleNamespace(
        choices={
            "watchdog": Choice("default", "default", options),
            "compile": Choice("off", "off", {}),
        }
    )
    board = HeartbeatTable(tmp_path, 1)
    world = World(torch.device("cpu"), rank=1, world_size=2, heartbeat_folder=tmp_path)
    with watchdog.run_watchdog(plan, world, watchdog.HangTraces(lambda _: None)):
        assert board.read() == Heartbeat(ticks=1, limit_s=30.0, kind=START, is_first=True)
    assert board.read() == Heartbeat()


def test_a_rank_without_a_watchdog_reports_updates_and_end(tmp_path: Path) -> None:
    """The launcher needs both even without hang detection."""
    plan: Any = SimpleNamespace(choices={"watchdog": Choice("off", "off", {})})
    hangs = HangDetector(tmp_path, {0: 1, 1: 2})
    world = World(torch.device("cpu"), rank=0, world_size=2, heartbeat_folder=tmp_path)
    with watchdog.run_watchdog(plan, world, watchdog.HangTraces(lambda _: None)) as progress_mark:
        progress_mark.num_updates.value = 7
        assert (hangs.num_updates(), hangs.is_ending()) == (7, False)
        progress_mark.is_ending.value = True
        assert hangs.is_ending()
    assert hangs.num_updates() == 7


def test_a_heartbeat_is_read_as_written(tmp_path: Path) -> None:
    mine, theirs = HeartbeatTable(tmp_path, 3), HeartbeatTable(tmp_path, 3)
    assert theirs.read() == Heartbeat()
    shown = Heartbeat(2**40, 1.5, 50.25, True, CHECKPOINT, True, 10**9, "a phase with a long name é")
    mine.publish(shown)
    assert theirs.read() == shown
    mine.close()
    theirs.close()
