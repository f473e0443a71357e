"""Time that passes only where a test plants it: cells of trials and the process that asks them share one clock.

Inside, `time.sleep` returns at once and moves the clock, and each reading of the clock in a cell moves it by `read_s`,
so that what is not planted takes a little time, too, and the same each time. How busy the machine is changes no figure.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select as real_select
import struct
import threading
import time as real_time
from typing import Any

import torch.distributed as dist

READ_S = 1e-4
TICK_S = 1e-5  # as `read_s`, of a rank
START_S = 1.0  # that a cell takes to begin
_CLOCK, _WORKERS, _READ, SIZE = 0, 8, 16, 24  # where they are in the shared memory, and its bytes


class Planted:
    """In the place of the module `time`, in this process and in those that share its memory.

    memory  a file descriptor; empty, or another's
    """

    def __init__(self, memory: int) -> None:
        is_first = os.fstat(memory).st_size == 0
        os.ftruncate(memory, SIZE)
        self.memory = memory
        self._shared = mmap.mmap(memory, SIZE)
        self._cell = 0
        if is_first:
            self.read_s = READ_S

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)

    @property
    def now(self) -> float:
        """Seconds that have passed."""
        return self._at(_CLOCK)

    @property
    def workers(self) -> float:
        """How much of what a data worker sleeps moves the clock: 0: it reads while others compute, 1: it never does."""
        return self._at(_WORKERS)

    @workers.setter
    def workers(self, share: float) -> None:
        struct.pack_into("d", self._shared, _WORKERS, share)

    @property
    def read_s(self) -> float:
        """Seconds by which a reading of the clock moves it, in the main thread of a cell."""
        return self._at(_READ)

    @read_s.setter
    def read_s(self, seconds: float) -> None:
        struct.pack_into("d", self._shared, _READ, seconds)

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        struct.pack_into("d", self._shared, _CLOCK, self.now + seconds)

    def rule(self) -> None:
        """From now on this process, a cell that begins, has no other time."""
        self._cell = os.getpid()
        self.advance(START_S)
        for name in ("monotonic", "perf_counter", "sleep"):
            setattr(real_time, name, getattr(self, name))

    def let_ranks_rule(self) -> None:
        """From now on each rank that this process forks has its own time, and waits for the latest in collectives.

        That of the first rank moves the clock.
        """
        self.advance(START_S)
        virtual_time = importlib.import_module("tests.engine.virtual_time")  # which replaces time.perf_counter
        virtual_time.TICK_S = TICK_S
        clock, before = virtual_time.CLOCK, [virtual_time.CLOCK.now]

        def perf_counter() -> float:
            now = float(clock())
            if not dist.is_initialized() or dist.get_rank() == 0:
                self.advance(now - before[0])
            before[0] = now
            return now

        for name, function in (("perf_counter", perf_counter), ("sleep", clock.sleep)):
            setattr(real_time, name, function)

    def monotonic(self) -> float:
        """Return the seconds that have passed, and let some pass if this is the main thread of a cell."""
        if os.getpid() == self._cell and threading.current_thread() is threading.main_thread():
            self.advance(self.read_s)
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        if os.getpid() == self._cell or not self._cell:
            self.advance(seconds)
        elif self.workers:
            self.advance(self.workers * seconds)

    def _at(self, place: int) -> float:
        return float(struct.unpack_from("d", self._shared, place)[0])


class Select:
    """In the place of the module `select`: who waits gives up once the planted time is over, and not before."""

    def __init__(self, time: Planted) -> None:
        self._time = time

    def select(self, readers: list[Any], writers: list[Any], others: list[Any], timeout_s: float) -> Any:
        until = self._time.now + timeout_s
        ready = real_select.select(readers, writers, others, 120.0)
        assert any(ready), "a process that was asked did not answer"
        if self._time.now <= until:
            return ready
        self._time.advance(until - self._time.now)  # who waits has given up by then
        return [], [], []
