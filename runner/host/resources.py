"""CPU threads and memory available to this process, within CPU affinity and control groups.

Does not import torch, except for the memory of a device.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from runner.base.accelerator import get_accelerator
from runner.host.cgroup import memory_grant

if TYPE_CHECKING:
    import torch

ROOT = Path("/")  # holds /proc and /sys


def affinity(pid: int = 0) -> Set[int]:
    """Return the CPU threads on which a process may run; 0: the current process."""
    try:
        return os.sched_getaffinity(pid)
    except (OSError, AttributeError):  # the process has ended, or the system lacks the call
        return frozenset(range(psutil.cpu_count() or 1))


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory limit in bytes that this process and its siblings share."""
    grant, whole = memory_grant(root), int(psutil.virtual_memory().total)
    return whole if grant is None else min(whole, int(grant.amount))


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return the available memory in bytes; the full cgroup limit if its use is not accounted."""
    grant, free = memory_grant(root), int(psutil.virtual_memory().available)
    return free if grant is None else min(free, max(0, int(grant.amount) - (grant.memory_bytes() or 0)))


def device_bytes(device: torch.device) -> int:
    """Return the memory of a torch device in bytes; host memory for the CPU."""
    found = get_accelerator(device).free_memory()
    return memory_bytes() if found is None else found.total
