"""CPU and memory limits that control groups (cgroups) set for this process, and their current use.

Reads cgroup v1 and v2. The limits of all ancestors apply, so the smallest one is used. In a container, the directory
of the process's own cgroup is often not visible; its limits are then in the mount point itself.
Source: the kernel's admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1, and man 7 cgroups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CgroupLimit:
    """The lowest limit on a resource (in CPUs or bytes), and the directory of the cgroup that sets it."""

    amount: float
    folder: Path

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used by the group in seconds; None if no controller accounts for it."""
        micros = _read_entry(self.folder / "cpu.stat", "usage_usec")
        if micros is not None:
            return micros / 1e6
        # cgroup v1 accounts CPU time in a separate controller, possibly mounted elsewhere.
        folders = (Path(*("cpuacct" if part == "cpu" else part for part in self.folder.parts)), self.folder)
        nanos = next(
            (int(text) for folder in folders if (text := _read_text(folder / "cpuacct.usage")).isdigit()), None
        )
        return None if nanos is None else nanos / 1e9

    def memory_bytes(self) -> int | None:
        """Return the memory in use without the page cache, which the kernel can reclaim; None if not accounted.

        Source: memory.stat in the kernel's documentation of cgroups, versions 1 and 2.
        """
        used = _read_text(self.folder / "memory.current") or _read_text(self.folder / "memory.usage_in_bytes")
        if not used.isdigit():
            return None
        stat = self.folder / "memory.stat"
        prefix = "total_" if _read_entry(stat, "total_inactive_file") is not None else ""  # v1: including descendants
        pages = sum(_read_entry(stat, f"{prefix}{name}") or 0 for name in ("inactive_file", "active_file"))
        return max(0, int(used) - pages)


def cgroup_cpu_limit(root: Path = Path("/")) -> CgroupLimit | None:
    """Return the CPU limit as a number of CPUs, or None. `root` is the directory with /proc and /sys."""
    return _tightest_limit(root, "cpu", _read_cpu_quota)


def cgroup_memory_limit(root: Path = Path("/")) -> CgroupLimit | None:
    """Return the memory limit in bytes, or None. `root` is the directory with /proc and /sys."""
    return _tightest_limit(root, "memory", _read_memory_limit)


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """Return the CPU limit as a number of CPUs and the memory limit in bytes; each is None if it is not set."""
    cpu, memory = cgroup_cpu_limit(root), cgroup_memory_limit(root)
    return None if cpu is None else cpu.amount, None if memory is None else int(memory.amount)


def _tightest_limit(root: Path, controller: str, read_limit: Callable[[Path], float | None]) -> CgroupLimit | None:
    limits = [
        CgroupLimit(amount, folder)
        for folder in _cgroup_folders(root, {controller})
        if (amount := read_limit(folder)) is not None
    ]
    return min(limits, key=lambda limit: limit.amount, default=None)


def _read_cpu_quota(folder: Path) -> float | None:
    quota, _, period = _read_text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read_memory_limit(folder: Path) -> float | None:
    """Return the memory limit in bytes; without one, cgroup v1 reports a number larger than any machine's memory."""
    limit = _read_text(folder / "memory.max") or _read_text(folder / "memory.limit_in_bytes")
    return int(limit) if limit.isdigit() and int(limit) else None


def _cgroup_folders(root: Path, controllers: Set[str]) -> Iterator[Path]:
    """Yield the directories of this process's cgroups that have one of these controllers, and of their ancestors."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "" or controllers & set(names.split(",")):  # cgroup v2 lists no controllers here
            yield from _ancestor_folders(root / "sys/fs/cgroup", names, path)


def _ancestor_folders(mount: Path, controllers: str, path: str) -> Iterator[Path]:
    """Yield the directory of a cgroup and those of its ancestors, for any mount layout."""
    names = [controllers, *controllers.split(",")] if controllers else ["unified", "."]
    base = next((mount / name for name in names if (mount / name).is_dir()), mount)
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _read_entry(path: Path, key: str) -> int | None:
    pairs = dict(line.split(None, 1) for line in _read_text(path).splitlines() if " " in line.strip())
    return int(pairs[key]) if pairs.get(key, "").isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
