"""What this process may use of the machine: all of it, or less where affinity and control groups leave less.

Without torch, but for the memory of a device.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from runner.base.accelerator import accelerator_of
from runner.base.cgroup import memory_grant

if TYPE_CHECKING:
    import torch

ROOT = Path("/")  # holds /proc and /sys


def affinity(pid: int = 0) -> Set[int]:
    """Return the numbers of the CPU threads on which a process may run; 0: this one."""
    try:
        return os.sched_getaffinity(pid)
    except (OSError, AttributeError):  # the process has ended, or the system has no such call
        return frozenset(range(psutil.cpu_count() or 1))


def memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process and those beside it may have in all."""
    grant, whole = memory_grant(root), int(psutil.virtual_memory().total)
    return whole if grant is None else min(whole, int(grant.amount))


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that may still be taken; all that a cgroup grants where nobody counts its use."""
    grant, free = memory_grant(root), int(psutil.virtual_memory().available)
    return free if grant is None else min(free, max(0, int(grant.amount) - (grant.memory_bytes() or 0)))


def device_bytes(device: torch.device) -> int:
    """Return the bytes of memory of a device of torch; those of the host for a CPU."""
    found = accelerator_of(device).free_memory()
    return memory_bytes() if found is None else found.total
