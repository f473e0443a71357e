"""What this process started, and what that started in turn: followed, and cleared away at the end (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LAST_S = 10.0  # a process that does not die of SIGKILL within this time is left to the system


def children() -> set[int]:
    """Return the numbers of the processes that this one started or adopted."""
    return {process.pid for process in _processes() if process.parent == os.getpid()}


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Orphans among the descendants become children of this process, not of the first one (Linux)."""
    library = ctypes.CDLL(None)
    before = ctypes.c_int()
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def clear_away(sessions: Set[int], known: Set[int], others_s: float | None) -> None:
    """Kill the descendants of this process in `sessions`, and all others after `others_s`; None: let those be.

    known  children this process had before, which are not asked about
    """
    began, num_empty = time.monotonic(), 0
    while num_empty < 2:  # one look may miss a process whose parent ends during it
        waited_s = time.monotonic() - began
        left = list(_left(known, sessions))
        ours = [process for process in left if process.session in sessions]
        if waited_s > LAST_S:
            return
        num_empty = 0 if ours or (left and others_s is not None) else num_empty + 1
        for process in left if others_s is not None and waited_s >= others_s else ours:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if left:
            time.sleep(0.005)


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int
    is_zombie: bool


def _left(known: Set[int], sessions: Set[int]) -> Iterator[_Process]:
    """Yield what lives of the descendants and sessions; orphans that have ended are reaped, ranks are not."""
    by_parent: dict[int, list[_Process]] = {}
    for process in _processes():
        by_parent.setdefault(process.parent, []).append(process)
        if process.session in sessions and not process.is_zombie:
            yield process
    waiting = [process for process in by_parent.get(os.getpid(), ()) if process.pid not in known]
    while waiting:
        process = waiting.pop()
        waiting += by_parent.get(process.pid, ())
        if not process.is_zombie and process.session not in sessions:
            yield process
        elif process.is_zombie and process.parent == os.getpid() and process.pid not in sessions:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _processes() -> Iterator[_Process]:
    """Yield what runs on this machine."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent, _, session, *_ = path.read_text(errors="replace").rpartition(") ")[2].split()
            yield _Process(int(path.parent.name), int(parent), int(session), state == "Z")


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
