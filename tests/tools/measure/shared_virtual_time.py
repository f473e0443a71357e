"""A virtual clock that the processes of the compared variants share with the process that measures them.

`time.sleep` returns immediately and advances the clock. Each time a variant reads the clock, the clock advances by
`read_s`. Nothing else takes virtual time, so the results do not depend on how busy the machine is.
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
SLOTS = 251  # so that processes with nearby PIDs have separate slots
SIZE = _CLOCKS + 8 * SLOTS


class SharedVirtualTime:
    """Replaces the module `time` in this process and in all processes that use the same shared memory.

    The time is the sum over all processes, each of which adds to a separate slot: if two processes added to the same
    number at once, one addend would be lost, and the clock would run backwards. A lock is not an option, because a
    process may be stopped while it holds the lock.

    memory  file descriptor of an empty file, or of the memory of another instance
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
    def worker_sleep_fraction(self) -> float:
        """The fraction of a data worker's sleep that advances the clock: 0 if reading overlaps computing, else 1."""
        return self._at(_WORKERS)

    @worker_sleep_fraction.setter
    def worker_sleep_fraction(self, share: float) -> None:
        struct.pack_into("d", self._shared, _WORKERS, share)

    @property
    def read_s(self) -> float:
        """Seconds by which the clock advances when the main thread of a variant reads it."""
        return self._at(_READ)

    @read_s.setter
    def read_s(self, seconds: float) -> None:
        struct.pack_into("d", self._shared, _READ, seconds)

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        slot = _CLOCKS + 8 * (os.getpid() % SLOTS)
        struct.pack_into("d", self._shared, slot, self._at(slot) + seconds)

    def install(self) -> None:
        """Make this process, which runs a variant, use only virtual time."""
        self._cell = os.getpid()
        for name in ("monotonic", "perf_counter", "sleep"):
            setattr(real_time, name, getattr(self, name))

    def install_for_ranks(self) -> None:
        """Give a separate clock to each rank that this process forks. In a collective, all clocks advance to the latest
        one.

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
        """Return the time. In the main thread of a variant, first advance the clock by `read_s`."""
        if os.getpid() == self._cell and threading.current_thread() is threading.main_thread():
            self.advance(self.read_s)
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Advance the clock. A data worker advances it by a fraction of the time."""
        if os.getpid() == self._cell or not self._cell:
            self.advance(seconds)
        elif self.worker_sleep_fraction:
            self.advance(self.worker_sleep_fraction * seconds)

    def _at(self, place: int) -> float:
        return float(struct.unpack_from("d", self._shared, place)[0])


class Wait:
    """Replaces `multiprocessing.connection.wait`, with a timeout in virtual time."""

    def __init__(self, time: SharedVirtualTime) -> None:
        self._time = time

    def __call__(self, connections: list[Any], timeout_s: float) -> list[Any]:
        until = self._time.now + timeout_s
        ready = wait(connections, 120.0)
        assert ready, "a process did not reply"
        if self._time.now <= until:
            return ready
        self._time.advance(until - self._time.now)  # the wait timed out
        return []
