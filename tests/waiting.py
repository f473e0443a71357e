"""The only place where tests wait for another process or thread. Waiting never decides the order of events."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")

# Code to run before a command of the fork server, so that training waits until each checkpoint is written.
ON_DISK_AT_ONCE = """
from runner.durable.checkpoint_writer import CheckpointWriter
submit = CheckpointWriter.submit
def submit_and_wait(self, *args, **kwargs):
    submit(self, *args, **kwargs)
    self.wait()
CheckpointWriter.submit = submit_and_wait
"""


def wait_until(condition: Callable[[], Found], what: str = "", timeout_s: float = 120.0) -> Found:
    """Call `condition` until it returns a true value, and return that value.

    The timeout only ends a test that would hang: no result depends on how long something takes.
    Raises AssertionError naming `what` after `timeout_s` seconds.
    """
    began = time.monotonic()
    while not (result := condition()):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what or condition}")
        # Poll less often over time, because polling takes CPU time from the awaited process.
        time.sleep(min(0.005 + waited_s / 20, 0.2))  # lint-tests: sleep: polling interval; no order depends on it
    return result


def until_asked_to_stop() -> None:
    """Block inside a task until the run has received the stop signal and its handler has run."""
    handler: Any = signal.getsignal(signal.SIGUSR1)
    wait_until(lambda: handler.__self__.requested, "a signal")
