"""Track the descendants of a process and kill them at the end (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

KILL_TIMEOUT_S = 10.0  # s; a process that survives SIGKILL for this long is left to the system


def descendants(pid: int) -> dict[int, str]:
    """Return the living descendants of `pid` as PID -> state, such as R, S, D or T (stopped).

    Session leaders, such as the service process of a tracker, are omitted together with their descendants.
    """
    return descendants_of([pid])[pid]


def descendants_of(pids: Iterable[int]) -> dict[int, dict[int, str]]:
    """Return the descendants of each process; scans all processes of the machine only once."""
    by_parent = _group_by_parent(_processes())
    return {pid: _find_descendants(pid, by_parent) for pid in pids}


def _find_descendants(pid: int, by_parent: Mapping[int, Sequence[_Process]]) -> dict[int, str]:
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for process in by_parent.get(waiting.pop(), ()):
            if process.session != process.pid and not process.is_zombie:
                found[process.pid] = process.state
                waiting.append(process.pid)
    return found


def process_state(pid: int) -> str:
    """Return the process state: R, S, D, T (stopped), t (traced), Z or another letter of proc(5); "" if it is gone."""
    process = _read(Path(f"/proc/{pid}/stat"))
    return process.state if process else ""


def children() -> set[int]:
    """Return the PIDs of the children of this process, including adopted ones."""
    return {process.pid for process in _processes() if process.parent == os.getpid()}


@contextmanager
def subreaper() -> Iterator[None]:
    """Make this process a subreaper: orphaned descendants become its children instead of init's (Linux)."""
    library = ctypes.CDLL(None)
    before = ctypes.c_int()
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def kill_descendants(sessions: Set[int], ignored: Set[int], others_s: float | None) -> None:
    """Kill the processes of `sessions`, and after `others_s` seconds all other descendants (None: never).

    ignored  PIDs of children that are not killed, because they existed before
    """
    started, num_empty = time.monotonic(), 0
    while num_empty < 2:  # one scan may miss a process whose parent exits during it
        waited_s = time.monotonic() - started
        left = list(_live_processes(ignored, sessions))
        # The leader of a new session may not have called setsid yet.
        in_sessions = [process for process in left if sessions & {process.session, process.pid}]
        if waited_s > KILL_TIMEOUT_S:
            return
        num_empty = 0 if in_sessions or (left and others_s is not None) else num_empty + 1
        for process in left if others_s is not None and waited_s >= others_s else in_sessions:
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
        """True if all of its threads have ended and it can be reaped.

        The state is also Z while only the main thread has ended, which happens briefly whenever a multi-threaded
        process is killed; the process is then still running and cannot be reaped yet.
        """
        return self.state == "Z" and self.num_threads <= 1


def _live_processes(ignored: Set[int], sessions: Set[int]) -> Iterator[_Process]:
    """Yield the living processes of the sessions and other descendants. Reaps orphans that have ended, but no ranks."""
    processes = list(_processes())
    yield from (process for process in processes if process.session in sessions and not process.is_zombie)
    by_parent = _group_by_parent(processes)
    waiting = [process for process in by_parent.get(os.getpid(), ()) if process.pid not in ignored]
    while waiting:
        process = waiting.pop()
        waiting += by_parent.get(process.pid, ())
        if not process.is_zombie and process.session not in sessions:
            yield process
        elif process.is_zombie and process.parent == os.getpid() and process.pid not in sessions:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _group_by_parent(processes: Iterable[_Process]) -> dict[int, list[_Process]]:
    found: dict[int, list[_Process]] = {}
    for process in processes:
        found.setdefault(process.parent, []).append(process)
    return found


def _processes() -> Iterator[_Process]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        process = _read(path)
        if process is not None:
            yield process


def _read(path: Path) -> _Process | None:
    try:
        # After the last parenthesis, because the name of a program may contain spaces and parentheses.
        fields = path.read_text(errors="replace").rpartition(") ")[2].split()  # from field 3 on, see proc_pid_stat(5)
        return _Process(int(path.parent.name), int(fields[1]), int(fields[3]), fields[0], int(fields[17]))
    except (OSError, ValueError, IndexError):
        return None


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


def process_identity(pid: int) -> str:
    """Return an identifier of a process that is unique on this machine and independent of the clock; empty if unknown.

    It consists of the boot ID and the start time in clock ticks since boot (Linux). Zombies have none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, ticks = fields[0], fields[19]  # the fields 3 and 22 of proc(5)
    return "" if state == "Z" else f"{boot} {ticks}"
