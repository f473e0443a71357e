"""The one place where tests wait for another process or thread: order is forced there, and the wait only ends here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")

# Run before a command of the fork server: its training waits for each save, as long as the disk takes.
ON_DISK_AT_ONCE = """
from runner.durable.checkpoint_writer import CheckpointWriter
submit = CheckpointWriter.submit
def submit_and_wait(self, *args, **kwargs):
    submit(self, *args, **kwargs)
    self.wait()
CheckpointWriter.submit = submit_and_wait
"""


def wait_until(condition: Callable[[], Found], what: str = "", timeout_s: float = 120.0) -> Found:
    """Call `condition` until it returns something true, and return that.

    The limit only ends a test that would hang: no test passes or fails by how long something took.
    Raises AssertionError, with `what` was waited for, after `timeout_s` seconds.
    """
    began = time.monotonic()
    while not (found := condition()):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what or condition}")
        # The longer it has lasted, the rarer the looks, which take time from what is waited for.
        time.sleep(min(0.005 + waited_s / 20, 0.2))  # lint-tests: sleep: between two looks; nothing is ordered by it
    return found


def until_asked_to_stop() -> None:
    """Hold the task of a run until the run was asked to stop: the signal has come, and its handler has run."""
    handler: Any = signal.getsignal(signal.SIGUSR1)
    wait_until(lambda: handler.__self__.requested, "a signal")
