"""CPU threads and memory available to this process, within CPU affinity and control groups."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from runner.host.cgroup import cgroup_cpu_limit, cgroup_memory_limit

ROOT = Path("/")  # holds /proc and /sys


def affinity(pid: int = 0) -> Set[int]:
    """Return the CPU threads on which a process may run; 0: the current process."""
    try:
        return os.sched_getaffinity(pid)
    except (OSError, AttributeError):  # the process has ended, or the system lacks the call
        return frozenset(range(psutil.cpu_count() or 1))


def granted_cores() -> int | None:
    """Return the number of cores that the CPU quota of the cgroup grants, at least 1; None if there is no quota."""
    limit = cgroup_cpu_limit(ROOT)
    return None if limit is None else max(1, int(limit.amount))


def memory_bytes() -> int:
    """Return the memory of the machine in bytes, or the limit of the cgroup of this process, if that is lower."""
    limit, total = cgroup_memory_limit(ROOT), int(psutil.virtual_memory().total)
    return total if limit is None else min(total, int(limit.amount))


def free_memory_bytes() -> int:
    """Return the available memory in bytes; the full limit of the cgroup if the kernel does not account its use."""
    limit, free = cgroup_memory_limit(ROOT), int(psutil.virtual_memory().available)
    return free if limit is None else min(free, max(0, int(limit.amount) - (limit.memory_bytes() or 0)))
