"""Descriptors, reads and messages of ranks and of the supervisor do not grow with the square of the number of ranks.

`scripts/measure/bookkeeping.py` measures up to 256 ranks.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import RankLost
from runner.base.rank_env import RankInfo
from runner.base.stopwatch import PARTS
from runner.distributed.world import World
from runner.engine.hooks.hook import Wants
from runner.engine.hooks.rank_sync import Exchange
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.launch import hangs, local

SIZES = [4, 12]


def num_descriptors(member: RankInfo) -> tuple[int, Any]:
    return 0, sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_rank_holds_no_descriptor_for_another_rank(num_ranks: int) -> None:
    """The supervisor holds n descriptors when it forks rank n."""
    gc.collect()  # otherwise, some ranks would close files that earlier tests have left in reference cycles
    assert len(set(local.run_ranks(num_descriptors, num_ranks).results)) == 1


@contextmanager
def waiting_children(number: int) -> Iterator[list[int]]:
    """Yield the PIDs of processes that wait for a signal."""
    pids = []
    try:
        for _ in range(number):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", SIZES)
def test_reporting_a_hang_scans_the_processes_once(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(step=2 * hangs.TICK_S)
    with waiting_children(num_ranks) as pids:
        detector = hangs.HangDetector(tmp_path, dict(enumerate(pids)), clock=lambda: next(ticks))
        for rank in range(num_ranks):
            HeartbeatTable(tmp_path, rank).publish(Heartbeat(1, 51.0, 50.0, rank != 1, "update", False, 7, "train"))
        assert detector.check(range(num_ranks)) is None
        reads: Counter[str] = Counter()
        read_text = Path.read_text

        def count_and_read(path: Path, **options: Any) -> str:
            reads[str(path)] += 1
            return read_text(path, **options)

        monkeypatch.setattr(Path, "read_text", count_and_read)
        found = detector.check(range(num_ranks))
    assert found is not None
    assert found.rank == 1
    assert max(reads[f"/proc/{pid}/stat"] for pid in pids) <= 3, (
        "the state of a process is read twice, and the scan reads it once"
    )


def test_the_error_of_a_lost_rank_has_a_constant_length() -> None:
    """The length does not depend on the number of ranks."""

    def text(num_ranks: int) -> str:
        failure = local.Failure(1, 71, None, "lost its peers", (), "", True, 1.0)
        others = tuple(rank for rank in range(num_ranks) if rank != 1)
        error = local.to_error(local.LaunchResult(71, failure, (failure,), others, (None,) * num_ranks, None))
        assert isinstance(error, RankLost)
        return str(error)

    assert len(text(256)) <= len(text(8)) + 10


class RecordingWorld(World):
    """A world whose all-reduce records the bytes that a rank sends."""

    sent: list[int]

    def __init__(self, num_ranks: int) -> None:
        super().__init__(torch.device("cpu"), 1, world_size=num_ranks)
        object.__setattr__(self, "sent", [])

    def sum_async(self, tensor: torch.Tensor) -> Any:
        self.sent.append(tensor.nbytes)
        return torch.futures.Future()


class NoAttachment:
    def attached_sums(self) -> None:
        return None

    def attach_numbers(self, vector: torch.Tensor | None) -> bool:
        return False


def test_exchanged_flags_are_linear_in_the_number_of_ranks() -> None:
    def sent(num_ranks: int) -> int:
        world = RecordingWorld(num_ranks)
        exchange = Exchange(world, NoAttachment())  # type: ignore[arg-type]
        exchange(Wants(), num_bad=0, seconds=dict.fromkeys(PARTS, 0.1), samples=4)
        return world.sent[-1]

    four, eight, many = sent(4), sent(8), sent(256)
    assert many - eight == (256 - 8) * (eight - four) // 4
    assert many <= 256 * 100
