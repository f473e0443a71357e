"""Replace the clock of the watchdog with one that ticks only when a task calls `pass_time`. Import this module first.

A delay on a busy machine therefore never exceeds a limit, and no test waits for one. After a task has called `hang`,
the clock ticks by itself. The clock of the supervisor of ranks also advances after a rank has stopped itself; the
watchdogs of the other ranks do not tick then, because they must not report a hang.
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
    """Advance the watchdog's clock by these seconds, and wait until it has counted them.

    Do nothing if the watchdog is not running.
    """
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
    """Make the clocks advance without `pass_time` from now on."""
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
