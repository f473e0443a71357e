"""Imported first in a process, it replaces the clock: time passes where a task calls `sleep`, and nowhere else.

So the seconds of each part of a run are known, whatever else the machine does. Each call takes a microsecond,
so that no time between two is zero.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from runner.axes.dataloader import ThreadLoader, WorkerLoader
from runner.base.stopwatch import Stopwatch

TICK_S = 1e-6
READ_S = float(os.environ.get("READ_MS", "0")) / 1e3  # of a batch, where another process or thread reads it


class VirtualTime:
    def __init__(self) -> None:
        self.now = time.perf_counter()

    def __call__(self) -> float:
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass for the main thread; what other threads and processes do takes none of it."""
        if threading.current_thread() is threading.main_thread():
            self.now += seconds


CLOCK = VirtualTime()
sleep = CLOCK.sleep


def late(kind: Any) -> None:
    """Let the batches of a loader come as if each took READ_S to read, one after the other, beside training."""
    real = kind.batches

    def batches(self: Any, keys: Any) -> Iterator[Any]:
        began = CLOCK.now
        for number, batch in enumerate(real(self, keys), 1):
            CLOCK.now = max(CLOCK.now, began + number * READ_S)
            yield batch

    kind.batches = batches


def waited(real: Any) -> Any:
    """At the end of what ranks exchange, it is as late on each as on the last to come."""

    def lap(self: Any, part: str) -> None:
        if part == "wait":
            now = torch.tensor(CLOCK.now, dtype=torch.float64)
            dist.all_reduce(now, dist.ReduceOp.MAX)
            CLOCK.now = now.item()
        real(self, part)

    return lap


time.perf_counter = CLOCK
Stopwatch.lap = waited(Stopwatch.lap)  # type: ignore[method-assign]
late(ThreadLoader)
late(WorkerLoader)
