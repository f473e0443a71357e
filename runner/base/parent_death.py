"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """The process is killed when the thread that started it ends (Linux), and at once if that was before now.

    parent  number of the process that started it; None: unknown, then an earlier end is not noticed
    by      the signal that it gets then: one that it can save at
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
