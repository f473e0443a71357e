"""Measure peak host memory since a chosen time, and report statistics of torch's allocator."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def restart_host_peak() -> None:
    """Restart the measurement of peak resident memory; without effect on systems other than Linux."""
    with suppress(OSError):
        _CLEAR.write_text("5")  # resets VmHWM to the current size, see proc_pid_clear_refs(5)


def host_peak_gib() -> float:
    """Return the peak of resident memory in GiB."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def allocator_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the columns of a metrics row from torch's memory_stats: GiB, shares and counts.

    fragmentation  share of the reserved memory that is free, but in segments that also hold memory in use
    retries        number of times torch released its cache and called cudaMalloc again, since the start
    ooms           number of times cudaMalloc failed again
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
    """Return notes on the allocator for the end of a run; an argument is None if it is unknown."""
    notes = []
    if retries:
        notes.append(
            f"the GPU was nearly full: torch had to release its cache {retries} times, which is slow;"
            " use a smaller micro_batch_size, or memory.allocator=expandable_segments:True"
        )
    if fragmentation is not None and (reserved_gib or 0) >= MIN_RESERVED_GIB and fragmentation > MIN_FRAGMENTATION:
        notes.append(
            f"{fragmentation:.0%} of the {reserved_gib:.2f} GiB that torch has reserved is fragmented;"
            " use memory.allocator=expandable_segments:True"
        )
    return notes


MIN_RESERVED_GIB = 0.5  # with less reserved memory, fragmentation is not worth a setting
MIN_FRAGMENTATION = 0.2  # below this, fragmentation is not worth a setting
