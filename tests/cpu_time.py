"""CPU time of this process and its children, including running ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def used_cpu_s() -> float:
    """Return the user and system time of this process, of children that ended, and of running ones.

    The CPU time of a child that serves many tests, such as a fork server, is thus attributed to the test that used it.
    """
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(_cpu_s_of(pid) for pid in children_of(os.getpid()))


def _cpu_s_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0.0  # it has just ended
    own = sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S  # utime, stime, cutime and cstime
    return own + sum(_cpu_s_of(child) for child in children_of(pid))


def children_of(pid: int) -> Iterator[int]:
    """Yield the PIDs of the living children; none if the kernel does not list them."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except OSError:
        return
