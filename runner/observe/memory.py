"""The most memory this process has held since a moment that can be chosen."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def restart_host_peak() -> None:
    """Count the peak of resident memory from now on, where the system lets us (Linux); else from the start."""
    with suppress(OSError):
        _CLEAR.write_text("5")  # man 5 proc_pid_clear_refs: resets VmHWM to the present size


def host_peak_gib() -> float:
    """Return the peak of resident memory in GiB."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
