"""What a process started, and what that started in turn: followed, and cleared away at the end (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LAST_S = 10.0  # a process that does not die of SIGKILL within this time is left to the system


def descendants(pid: int) -> dict[int, str]:
    """Return what `pid` started, and that in turn, and lives: number -> state, such as R, S, D or T (stopped).

    What leads a session of its own, as the process behind a tracker does, is left out with all that it started.
    """
    by_parent = _by_parent(_processes())
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for process in by_parent.get(waiting.pop(), ()):
            if process.session != process.pid and not process.is_zombie:
                found[process.pid] = process.state
                waiting.append(process.pid)
    return found


def state_of(pid: int) -> str:
    """Return R, S, D, T (stopped by a signal), t (by a debugger), Z or another letter of the system's; "" when gone."""
    process = _read(Path(f"/proc/{pid}/stat"))
    return process.state if process else ""


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
        ours = [process for process in left if sessions & {process.session, process.pid}]  # it may not lead it yet
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
    state: str
    num_threads: int

    @property
    def is_zombie(self) -> bool:
        """True once all of it has ended, and it can be reaped.

        Where only its first thread has ended, as for a moment in every process of several threads that is killed, its
        state is Z, too: it is neither gone nor to be reaped yet.
        """
        return self.state == "Z" and self.num_threads <= 1


def _left(known: Set[int], sessions: Set[int]) -> Iterator[_Process]:
    """Yield what lives of the descendants and sessions; orphans that have ended are reaped, ranks are not."""
    processes = list(_processes())
    yield from (process for process in processes if process.session in sessions and not process.is_zombie)
    by_parent = _by_parent(processes)
    waiting = [process for process in by_parent.get(os.getpid(), ()) if process.pid not in known]
    while waiting:
        process = waiting.pop()
        waiting += by_parent.get(process.pid, ())
        if not process.is_zombie and process.session not in sessions:
            yield process
        elif process.is_zombie and process.parent == os.getpid() and process.pid not in sessions:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _by_parent(processes: Iterable[_Process]) -> dict[int, list[_Process]]:
    found: dict[int, list[_Process]] = {}
    for process in processes:
        found.setdefault(process.parent, []).append(process)
    return found


def _processes() -> Iterator[_Process]:
    """Yield what runs on this machine."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        process = _read(path)
        if process is not None:
            yield process


def _read(path: Path) -> _Process | None:
    """Return the process of a file /proc/PID/stat; None where it has ended."""
    try:
        fields = path.read_text(errors="replace").rpartition(") ")[2].split()  # from the third on, see proc_pid_stat(5)
        return _Process(int(path.parent.name), int(fields[1]), int(fields[3]), fields[0], int(fields[17]))
    except (OSError, ValueError, IndexError):
        return None


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
