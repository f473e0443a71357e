"""Replace the clock with one that advances only when a task calls `sleep`. Import this module first in a process.

The time of each part of a run is therefore known, however busy the machine is. Each reading adds a microsecond, so
that no interval is zero.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from runner.base.stopwatch import Stopwatch
from runner.loading.loaders import ThreadLoader, WorkerLoader

TICK_S = 1e-6
READ_S = float(os.environ.get("READ_MS", "0")) / 1e3  # per training batch, if another process or thread reads it


class VirtualTime:
    def __init__(self) -> None:
        self.now = time.perf_counter()

    def __call__(self) -> float:
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock if called by the main thread; other threads and processes take no time."""
        if threading.current_thread() is threading.main_thread():
            self.now += seconds


CLOCK = VirtualTime()
sleep = CLOCK.sleep


def delay_batches(kind: Any) -> None:
    """Patch a loader class so that its batches arrive as if each took READ_S to read, in sequence, during training."""
    real = kind.batches

    def batches(self: Any, keys: Any) -> Iterator[Any]:
        read_s, began = READ_S if self.fetcher.streams.split == "train" else 0.0, CLOCK.now
        for number, batch in enumerate(real(self, keys), 1):
            CLOCK.now = max(CLOCK.now, began + number * read_s)
            yield batch

    kind.batches = batches


def synchronize_clocks(real: Any) -> Any:
    """Wrap `Stopwatch.lap`: at the end of communication, the clocks of all ranks advance to the latest one."""

    def lap(self: Any, part: str) -> None:
        if part == "wait":
            now = torch.tensor(CLOCK.now, dtype=torch.float64)
            dist.all_reduce(now, dist.ReduceOp.MAX)
            CLOCK.now = now.item()
        real(self, part)

    return lap


time.perf_counter = CLOCK
Stopwatch.lap = synchronize_clocks(Stopwatch.lap)  # type: ignore[method-assign]
delay_batches(ThreadLoader)
delay_batches(WorkerLoader)
