"""Virtual time: compared variants and the process that measures them share a clock that tests advance.

`time.sleep` returns immediately and advances the clock, and each reading of the clock by a variant advances it by
`read_s`, so that all other code takes a small constant time. The results do not depend on how busy the machine is.
"""

from __future__ import annotations

import importlib
import mmap
import os
import struct
import threading
import time as real_time
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

READ_S = 1e-4
TICK_S = 1e-5  # like `read_s`, for a rank
START_S = 1.0  # start-up time of a variant
_WORKERS, _READ, _CLOCKS = 0, 8, 16  # offsets in the shared memory
SLOTS = 251  # a prime: processes with close PIDs have separate ones
SIZE = _CLOCKS + 8 * SLOTS


class Planted:
    """Replaces the module `time` in this process and in the processes that share its memory.

    The time is the sum of what all processes have added. Each adds to a separate slot, because two that add to the same
    number at once would lose one addend, and the clock would run backwards. A lock is no alternative: a process may be
    stopped while it holds it.

    memory  a file descriptor: of an empty file, or of the memory of another instance
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
        """The virtual time in seconds."""
        return sum(struct.unpack_from(f"{SLOTS}d", self._shared, _CLOCKS))

    @property
    def workers(self) -> float:
        """The fraction of a data worker's sleep that advances the clock: 0 if reading overlaps computing, 1 if not."""
        return self._at(_WORKERS)

    @workers.setter
    def workers(self, share: float) -> None:
        struct.pack_into("d", self._shared, _WORKERS, share)

    @property
    def read_s(self) -> float:
        """Seconds by which each reading of the clock in the main thread of a variant advances it."""
        return self._at(_READ)

    @read_s.setter
    def read_s(self, seconds: float) -> None:
        struct.pack_into("d", self._shared, _READ, seconds)

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        slot = _CLOCKS + 8 * (os.getpid() % SLOTS)
        struct.pack_into("d", self._shared, slot, self._at(slot) + seconds)

    def rule(self) -> None:
        """Use only virtual time in this process, a variant that starts."""
        self._cell = os.getpid()
        for name in ("monotonic", "perf_counter", "sleep"):
            setattr(real_time, name, getattr(self, name))

    def let_ranks_rule(self) -> None:
        """Give each rank that this process forks a separate clock; in collectives, ranks wait for the latest one.

        The clock of the first rank advances this clock.
        """
        virtual_time = importlib.import_module("tests.engine.virtual_time")  # replaces time.perf_counter
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
        """Return the time; in the main thread of a variant, advance the clock by `read_s` first."""
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


class Wait:
    """Replaces `multiprocessing.connection.wait`: a wait times out by virtual time only."""

    def __init__(self, time: Planted) -> None:
        self._time = time

    def __call__(self, connections: list[Any], timeout_s: float) -> list[Any]:
        until = self._time.now + timeout_s
        ready = wait(connections, 120.0)
        assert ready, "a process did not reply"
        if self._time.now <= until:
            return ready
        self._time.advance(until - self._time.now)  # the wait has timed out by then
        return []
