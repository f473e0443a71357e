"""CPU, memory and process limits that control groups (cgroups) set for this process, and their current use.

Reads cgroup v1 and v2. Limits of all ancestors apply, so the smallest one is used. In a container the process's own
path is often not mounted, and only the mount point itself is visible.
Source: the kernel's admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1, and man 7 cgroups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Grant:
    """The tightest limit of one resource, and the directory of the cgroup that sets it."""

    amount: float
    folder: Path

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used by the group in seconds; None if no controller accounts for it."""
        micros = _entry(self.folder / "cpu.stat", "usage_usec")
        if micros is not None:
            return micros / 1e6
        # cgroup v1 accounts CPU time in a separate controller, which may be mounted beside that of the quota.
        beside = (Path(*("cpuacct" if part == "cpu" else part for part in self.folder.parts)), self.folder)
        nanos = next((int(text) for each in beside if (text := _text(each / "cpuacct.usage")).isdigit()), None)
        return None if nanos is None else nanos / 1e9

    def memory_bytes(self) -> int | None:
        """Return the memory in use without inactive page cache, which the kernel reclaims first; None if not accounted.

        Source: memory.stat in the kernel's documentation of cgroups, versions 1 and 2.
        """
        used = _text(self.folder / "memory.current") or _text(self.folder / "memory.usage_in_bytes")
        if not used.isdigit():
            return None
        stat = self.folder / "memory.stat"
        of_all = "total_" if _entry(stat, "total_inactive_file") is not None else ""  # v1: including descendants
        pages = sum(_entry(stat, f"{of_all}{each}") or 0 for each in ("inactive_file", "active_file"))
        return max(0, int(used) - pages)


def cpu_grant(root: Path = Path("/")) -> Grant | None:
    """Return the CPU limit in threads, None if the cgroups set none. `root` is the folder with /proc and /sys."""
    return _tightest(root, "cpu", _quota)


def memory_grant(root: Path = Path("/")) -> Grant | None:
    """Return the memory limit in bytes, None if the cgroups set none. `root` is the folder with /proc and /sys."""
    return _tightest(root, "memory", _memory_limit)


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """Return the CPU limit in threads and the memory limit in bytes, None for each that the cgroups do not set."""
    cpu, memory = cpu_grant(root), memory_grant(root)
    return None if cpu is None else cpu.amount, None if memory is None else int(memory.amount)


def cgroup_processes(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the tightest limit of processes and threads, and the current count; None without a limit."""
    found: list[tuple[int, int]] = []
    for folder in _folders(root, {"pids"}):
        granted, counted = _text(folder / "pids.max"), _text(folder / "pids.current")
        found += [(int(granted), int(counted))] if granted.isdigit() and counted.isdigit() else []
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _tightest(root: Path, controller: str, limit_of: Callable[[Path], float | None]) -> Grant | None:
    limits = [
        Grant(limit, folder) for folder in _folders(root, {controller}) if (limit := limit_of(folder)) is not None
    ]
    return min(limits, key=lambda grant: grant.amount, default=None)


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of this cgroup in threads."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory_limit(folder: Path) -> float | None:
    """Return the memory limit in bytes. Without a limit, cgroup v1 reports a number above the memory of any machine."""
    limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
    return int(limit) if limit.isdigit() and int(limit) else None


def _folders(root: Path, wanted: Set[str]) -> Iterator[Path]:
    """Yield the directories of this process's cgroups with one of these controllers, and of their ancestors."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or wanted & set(controllers.split(",")):
            yield from _folders_up(root / "sys/fs/cgroup", controllers, path)


def _folders_up(mount: Path, controllers: str, path: str) -> Iterator[Path]:
    """Yield the directory of a cgroup and those of its ancestors, for whichever mount layout this system uses."""
    names = [controllers, *controllers.split(",")] if controllers else ["unified", "."]
    base = next((mount / name for name in names if (mount / name).is_dir()), mount)
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _entry(path: Path, key: str) -> int | None:
    """Return the value of a key in a flat-keyed file (lines `key number`)."""
    pairs = dict(line.split(None, 1) for line in _text(path).splitlines() if " " in line.strip())
    return int(pairs[key]) if pairs.get(key, "").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
