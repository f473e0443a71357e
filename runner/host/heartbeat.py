"""Heartbeats of ranks, in memory shared with the supervising process."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a rank.

    ticks     number of checks by its watchdog; 0: not running
    waited_s  seconds without progress
    limit_s   timeout of the current operation in seconds
    is_waiting  whether the rank waits for other ranks in a collective
    kind      current operation, a constant of runner.engine.process.watchdog
    is_first  whether this is the first operation of its kind in the phase
    """

    ticks: int = 0
    waited_s: float = 0.0
    limit_s: float = 0.0
    is_waiting: bool = False
    kind: str = ""
    is_first: bool = False
    update: int = 0
    phase: str = ""

    @property
    def is_overdue(self) -> bool:
        """True once the operation has exceeded its timeout."""
        return self.ticks > 0 and self.waited_s > self.limit_s


class HeartbeatTable:
    """Shared heartbeat of one rank, written by the rank and read by its supervisor. The file outlives the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        size = _IS_ENDING_OFFSET + ctypes.sizeof(ctypes.c_bool)
        descriptor = os.open(folder / f"heartbeat-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def num_updates(self) -> ctypes.c_uint64:
        """Return the number of completed updates as a shared value; set or read its attribute `value`."""
        return ctypes.c_uint64.from_buffer(self._memory, _NUM_UPDATES_OFFSET)

    def is_ending(self) -> ctypes.c_bool:
        """Return whether the rank has finished training, as a shared value like `num_updates`."""
        return ctypes.c_bool.from_buffer(self._memory, _IS_ENDING_OFFSET)

    def publish(self, heartbeat: Heartbeat) -> None:
        """Publish a heartbeat. Not atomic: a reader must see a condition twice before it acts."""
        beat = heartbeat
        _FORMAT.pack_into(
            self._memory, 0, beat.ticks, beat.waited_s, beat.limit_s, beat.is_waiting, beat.is_first, beat.update,
            beat.kind.encode()[:24], beat.phase.encode()[:64],
        )  # fmt: skip

    def read(self) -> Heartbeat:
        """Return the last heartbeat of the rank."""
        ticks, waited_s, limit_s, is_waiting, is_first, update, kind, phase = _FORMAT.unpack_from(self._memory, 0)
        return Heartbeat(ticks, waited_s, limit_s, is_waiting, _decode(kind), is_first, update, _decode(phase))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


_FORMAT = struct.Struct("<Qdd??q24s64s")
_NUM_UPDATES_OFFSET = 128  # after the 122 bytes of _FORMAT; aligned, so that reads and writes are atomic
_IS_ENDING_OFFSET = _NUM_UPDATES_OFFSET + ctypes.sizeof(ctypes.c_uint64)


def _decode(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
