"""Kill a process when its parent exits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends (Linux only).

    parent  PID of the parent process; if it has already exited, this process is killed at once. None: unknown
    by      the signal; one that the process handles gives it time to save
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
