"""Which process a number means: the same number is given again, but not the same birth."""

from __future__ import annotations

from pathlib import Path


def birth_of(pid: int) -> str:
    """Return what no other process of this machine has, whatever the clock is set to; empty where it is not known.

    It is the system's start and the ticks from there to the process's own (Linux); a zombie has none any more.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, ticks = fields[0], fields[19]  # the fields 3 and 22 of proc(5)
    return "" if state == "Z" else f"{boot} {ticks}"
