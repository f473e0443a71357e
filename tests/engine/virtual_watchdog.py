"""Imported first in a process: replaces the clock of the watchdog by one that ticks only when a task passes time.

An update that a busy machine delays never exceeds a limit of a few seconds, and no test waits for a limit. After a task
has called `hang`, ticks pass on their own. The supervisor of ranks uses the same time, which also passes after a rank
has stopped itself, because the other ranks must not seem to hang.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from types import SimpleNamespace

from runner.engine.process import watchdog
from runner.launch import hangs, local

POLL_S = 0.01
HANGS = Path("hangs")  # a file in the working directory, because another process may hang
STOPS = Path("stops")


class Ticks:
    """Ticks that `pass_time` grants to the watchdog thread, and the acknowledgements of the thread."""

    def __init__(self) -> None:
        self.granted, self.acknowledged = threading.Semaphore(0), threading.Semaphore(0)
        self.is_pending = False
        self.owed_s = 0.0
        self.lock = threading.Lock()


TICKS = Ticks()


class TickEvent(threading.Event):
    """The event that the watchdog thread waits for between two ticks."""

    def wait(self, timeout: float | None = None) -> bool:
        if TICKS.is_pending:
            TICKS.is_pending = False
            TICKS.acknowledged.release()
        while not self.is_set():
            if TICKS.granted.acquire(timeout=POLL_S):
                TICKS.is_pending = True
                return False
            if HANGS.exists():
                return False
        return True


def pass_time(seconds: float) -> None:
    """Let the watchdog count these seconds, and return once it has; does nothing if the watchdog is not running."""
    with TICKS.lock:
        TICKS.owed_s += seconds
        while TICKS.owed_s >= watchdog.TICK_S:
            TICKS.owed_s -= watchdog.TICK_S
            TICKS.granted.release()
            while not TICKS.acknowledged.acquire(timeout=POLL_S):
                if not is_watched():
                    TICKS.granted.acquire(blocking=False)
                    TICKS.is_pending = False
                    break


def is_watched() -> bool:
    """Return whether the watchdog thread is running."""
    return any(thread.name == "watchdog" for thread in threading.enumerate())


def hang() -> None:
    """Let time pass on its own from now on."""
    HANGS.touch()


class SupervisorClock:
    """A clock for which a check is due each time it is read, once a rank hangs or has stopped itself."""

    now = 0.0

    def __call__(self) -> float:
        self.now += hangs.TICK_S if HANGS.exists() or STOPS.exists() else 0.0
        return self.now


local.HangDetector = functools.partial(hangs.HangDetector, clock=SupervisorClock())  # type: ignore[assignment,misc]
local.TICK_S = POLL_S  # type: ignore[misc]
watchdog.threading = SimpleNamespace(**{**vars(threading), "Event": TickEvent})  # type: ignore[assignment]
