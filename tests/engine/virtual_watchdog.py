"""Imported first in a process, it replaces the time of the watchdog: a tick passes only where a task passes time.

So a limit of a few seconds is never exceeded by an update that a busy machine delays, and no test waits for a limit.
Once a task has called `hang`, ticks pass by themselves.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

from runner.engine import watchdog

POLL_S = 0.01
HANGS = Path("hangs")  # in the folder of the run, because another process may hang


class Ticks:
    """Permits of `pass_time` for the watchdog thread, and its answers."""

    def __init__(self) -> None:
        self.asked, self.taken = threading.Semaphore(0), threading.Semaphore(0)
        self.is_pending = False
        self.owed_s = 0.0
        self.lock = threading.Lock()


TICKS = Ticks()


class TickEvent(threading.Event):
    """The event that the watchdog thread waits for between two ticks."""

    def wait(self, timeout: float | None = None) -> bool:
        if TICKS.is_pending:
            TICKS.is_pending = False
            TICKS.taken.release()
        while not self.is_set():
            if TICKS.asked.acquire(timeout=POLL_S):
                TICKS.is_pending = True
                return False
            if HANGS.exists():
                return False
        return True


def pass_time(seconds: float) -> None:
    """Let the watchdog count so many seconds, and return once it has; before and after it nothing counts them."""
    with TICKS.lock:
        TICKS.owed_s += seconds
        while TICKS.owed_s >= watchdog.TICK_S:
            TICKS.owed_s -= watchdog.TICK_S
            TICKS.asked.release()
            while not TICKS.taken.acquire(timeout=POLL_S):
                if not is_watched():
                    TICKS.asked.acquire(blocking=False)
                    TICKS.is_pending = False
                    break


def is_watched() -> bool:
    """Return whether the watchdog's thread runs."""
    return any(thread.name == "watchdog" for thread in threading.enumerate())


def hang() -> None:
    """Let time pass from now on."""
    HANGS.touch()


watchdog.threading = SimpleNamespace(**{**vars(threading), "Event": TickEvent})  # type: ignore[assignment]
