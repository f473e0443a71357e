"""Raise an error if a thread ends before it runs, instead of waiting for it forever.

If a thread runs out of memory in its first instructions, as under `ulimit -v`, its error is lost, and `Thread.start`
waits for the thread forever. torch and multiprocessing also start threads, so `Thread.start` itself is replaced.
Checked on Python 3.11 to 3.13.
"""

from __future__ import annotations

import threading

WAITS, WAIT_S = 25, 0.2  # waits are counted, because the clock continues while a process is stopped


class _BoundedEvent(threading.Event):
    """The event that `Thread.start` waits for."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        for _ in range(WAITS):
            if super().wait(WAIT_S):
                return True
        raise RuntimeError("can't start new thread: it ended before it ran")  # begins like Python's own message


_start = threading.Thread.start


def _start_bounded(thread: threading.Thread) -> None:
    if thread._initialized and not thread._started.is_set():  # type: ignore[attr-defined]
        thread._started = _BoundedEvent()  # type: ignore[attr-defined]
    try:
        _start(thread)
    except RuntimeError:
        threading._limbo.pop(thread, None)  # type: ignore[attr-defined]  # it does not count as a thread
        raise


def limit_thread_starts() -> None:
    """Raise RuntimeError if a thread of this process, or of one it forks, does not start within seconds."""
    threading.Thread.start = _start_bounded  # type: ignore[assignment, method-assign]
