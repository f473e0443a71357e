"""Compute the SHA-256 of buffers while the caller writes them to disk."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress


def split_into_blocks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes in order, in blocks: merge small views and split large ones.

    Merged views share one buffer: a block is valid until the next one is requested.
    """
    buffer = memoryview(bytearray(min(MERGED, sum(map(len, views)))))
    used = 0
    for view in views:
        if used + len(view) > len(buffer) and used:
            yield buffer[:used]
            used = 0
        if len(view) > len(buffer):
            yield from (view[start : start + BLOCK] for start in range(0, len(view), BLOCK))
        else:
            buffer[used : used + len(view)] = view
            used += len(view)
    if used:
        yield buffer[:used]


class HashThread:
    """The SHA-256 of `views`, computed on a thread if they are large enough for that to be faster.

    Without a thread, the caller passes the blocks of `views` to `update` in order, so that small views are merged
    only once.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._digest = hashlib.sha256()
        self._is_stopped = self._is_done = False
        self._thread: threading.Thread | None = None
        if sum(map(len, views)) >= BLOCK:
            thread = threading.Thread(target=self._work, name="checkpoint-hash", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: `update` computes the hash
                thread.start()
                self._thread = thread

    def update(self, block: memoryview) -> None:
        """Hash the next block, unless the thread does."""
        if self._thread is None:
            self._digest.update(block)

    def hexdigest(self) -> str:
        """Wait for the hash and return it."""
        if self._thread is not None:
            self._thread.join()
            assert self._is_done, "the hash thread failed"
        return self._digest.hexdigest()

    def close(self) -> None:
        """Stop the thread after its current block, and wait for it."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        for block in split_into_blocks(self._views):
            if self._is_stopped:
                return
            self._digest.update(block)
        self._is_done = True


BLOCK = 8 << 20  # bytes per write or hash call; below 4 MiB the call overhead matters
MERGED = 4 << 20  # maximum bytes of small views in a call; each of the two threads allocates a buffer of this size
