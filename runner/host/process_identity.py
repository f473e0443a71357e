"""Identify a process by PID and start time, because PIDs are reused."""

from __future__ import annotations

from pathlib import Path


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
