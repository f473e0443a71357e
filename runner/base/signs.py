"""What a rank says of itself, in memory that it shares with the process that watches over all of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sign:
    """How a rank stands.

    ticks      how often its watchdog has looked; 0: it does not, or not yet, or no longer
    waited_s   seconds since anything changed
    limit_s    seconds that it may take
    waits      it is in a collective: for other ranks
    kind       what it does, a word of runner.engine.watchdog
    is_first   the first time in this phase
    """

    ticks: int = 0
    waited_s: float = 0.0
    limit_s: float = 0.0
    waits: bool = False
    kind: str = ""
    is_first: bool = False
    update: int = 0
    phase: str = ""

    @property
    def is_overdue(self) -> bool:
        """True once it takes longer than it may."""
        return self.ticks > 0 and self.waited_s > self.limit_s


class SignBoard:
    """The sign of one rank: put up by it, read by another process. It outlives the rank, in whatever way that ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        size = _END + ctypes.sizeof(ctypes.c_bool)
        descriptor = os.open(folder / f"sign-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def made(self) -> ctypes.c_uint64:
        """Return the number of updates that the rank has made, in the memory itself: to be set, or read, by value."""
        return ctypes.c_uint64.from_buffer(self._memory, _OFFSET)

    def ending(self) -> ctypes.c_bool:
        """Return whether the rank's training is over, in the memory itself, as `made` does."""
        return ctypes.c_bool.from_buffer(self._memory, _END)

    def put(self, sign: Sign) -> None:
        """Show this one. A reader may see half of it: what it concludes must hold twice."""
        _FORMAT.pack_into(
            self._memory, 0, sign.ticks, sign.waited_s, sign.limit_s, sign.waits, sign.is_first, sign.update,
            sign.kind.encode()[:24], sign.phase.encode()[:64],
        )  # fmt: skip

    def read(self) -> Sign:
        """Return what the rank has put up last."""
        ticks, waited_s, limit_s, waits, is_first, update, kind, phase = _FORMAT.unpack_from(self._memory, 0)
        return Sign(ticks, waited_s, limit_s, waits, _text(kind), is_first, update, _text(phase))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


_FORMAT = struct.Struct("<Qdd??q24s64s")
_OFFSET = 128  # of the updates made: aligned, so that they are never seen half written
_END = _OFFSET + ctypes.sizeof(ctypes.c_uint64)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
