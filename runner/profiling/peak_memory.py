"""Measure peak host memory since a chosen time, and report statistics of torch's allocator."""

from __future__ import annotations

import resource
from collections.abc import Mapping
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


def allocator_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """Return what belongs into a row of metrics of torch's memory_stats, in GiB, shares and counts.

    fragmentation  share of what torch has taken from the driver that is free, but in pieces beside what is in use
    retries        times that torch gave back all that it had cached and asked the driver again, since the start
    ooms           times that this did not help either
    """
    reserved = stats.get("reserved_bytes.all.current", 0)
    return {
        "memory/allocated_gib": stats.get("allocated_bytes.all.current", 0) / 2**30,
        "memory/reserved_gib": reserved / 2**30,
        "memory/peak_gib": stats.get("allocated_bytes.all.peak", 0) / 2**30,
        "memory/fragmentation": stats.get("inactive_split_bytes.all.current", 0) / reserved if reserved else 0.0,
        "memory/retries": stats.get("num_alloc_retries", 0),
        "memory/ooms": stats.get("num_ooms", 0),
    }


def allocator_notes(retries: int | None, fragmentation: float | None, reserved_gib: float | None) -> list[str]:
    """Return what a person should know of a run's allocator at its end; None is unknown."""
    found = []
    if retries:
        found.append(
            f"the GPU was nearly full: torch had to give memory back {retries} times, which is slow;"
            " a smaller micro_batch_size, or memory.allocator=expandable_segments:True"
        )
    if fragmentation is not None and (reserved_gib or 0) >= WORTH_GIB and fragmentation > FRAGMENTED:
        found.append(
            f"{fragmentation:.0%} of the {reserved_gib:.2f} GiB that torch has reserved is fragmented;"
            " memory.allocator=expandable_segments:True"
        )
    return found


WORTH_GIB = 0.5  # of reserved memory: the fragments of less are not worth a setting
FRAGMENTED = 0.2  # of the reserved memory: below it there is little to gain
