"""Sample the machine: GPUs and their processes, CPU, memory, disk, and this run's own processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from runner.host.cgroup import CgroupLimit, cgroup_cpu_limit, cgroup_memory_limit
from runner.host.resources import affinity
from runner.monitor.nvml import GIB, MB, METRICS, Gpu, Nvml


@dataclass(frozen=True)
class GpuUser:
    """A compute process on a GPU.

    name, user  names of the process and of its owner; empty if the process is not in /proc of this machine
    memory_gib  None if the driver hides it
    is_ours     whether it belongs to this run; None if unknown, as in a container, where NVML reports PIDs of the host
    """

    pid: int
    name: str
    user: str
    memory_gib: float | None
    is_ours: bool | None


class Host:
    """Samples CPU, memory, disk and this run's processes; does not wait for any driver.

    root    process whose descendants, itself included, belong to this run
    folder  folder of the run, whose disk is observed
    system  parent of /proc and /sys/fs/cgroup

    If affinity or a cgroup limits the run to a part of the machine, CPU and memory are those of this part.
    """

    SELDOM_S = 10.0  # minimum seconds between searches for processes
    SEARCH_SHARE = 0.002  # maximum fraction of one core that the search may use; it reads all of /proc

    def __init__(self, *, root: int | None = None, folder: Path | None = None, system: Path = Path("/")) -> None:
        self.process_tree = ProcessTree(root or os.getpid())
        self._cpu, self._ram, self._disk = make_cpu_load(root or 0, system), _Ram(system), _Disk(folder)
        self._next_search = 0.0

    def sample(self) -> dict[str, float]:
        """Return metric name -> value, without readings that failed."""
        now = time.monotonic()
        if now >= self._next_search:
            self.process_tree.search()
            took_s = time.monotonic() - now
            self._next_search = now + max(self.SELDOM_S, took_s / self.SEARCH_SHARE)
        found = {"cpu/percent": self._cpu.percent(), "ram/percent": self._ram.percent()}
        found |= self.process_tree.load() | self._disk.load(now)
        return {name: float(value) for name, value in found.items() if value is not None}


class Gpus:
    """Samples the GPUs and their processes; values that hardly change are read less often. Blocks if a driver hangs."""

    SELDOM_S = 10.0  # seconds between readings of values that hardly change, and of the lists of processes

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu], process_tree: ProcessTree) -> None:
        self.nvml, self.gpus = nvml, tuple(gpus)
        self.users: Mapping[int, tuple[GpuUser, ...]] = {}
        self._process_tree, self._process_names = process_tree, _ProcessNames()
        self._seldom_readings: list[dict[str, float | None]] = [{} for _ in gpus]
        self._next_seldom = 0.0

    def sample(self) -> dict[str, float]:
        """Return metric name -> value, without readings that failed."""
        now = time.monotonic()
        is_seldom = now >= self._next_seldom
        if is_seldom:
            self._next_seldom = now + self.SELDOM_S
            self._read_processes()
        found: dict[str, float | None] = {}
        for index, gpu in enumerate(self.gpus):
            if is_seldom:
                self._seldom_readings[index] = self.nvml.read(gpu, _SELDOM)
            seldom = {} if gpu in self.nvml.lost else self._seldom_readings[index]
            reading = {**seldom, **self.nvml.read(gpu, _ALWAYS)}
            found |= {
                f"gpu{index}/{metric.reading or metric.name}": _divide(reading.get(metric.name), metric.scale)
                for metric in METRICS
            }
            found |= self._other_users(index)
        return {name: float(value) for name, value in found.items() if value is not None}

    def _read_processes(self) -> None:
        processes_by_gpu = {
            index: self.nvml.processes(gpu) for index, gpu in enumerate(self.gpus) if gpu not in self.nvml.lost
        }
        pids = {process.pid for processes in processes_by_gpu.values() for process in processes or ()}
        comparable = pids_are_of_host() or not pids.isdisjoint(self._process_tree.pids)
        self.users = {
            index: tuple(
                self._process_names.identify(
                    process.pid, _divide(process.used_bytes, GIB), self._process_tree, comparable=comparable
                )
                for process in processes
            )
            for index, processes in processes_by_gpu.items()
            if processes is not None
        }
        self._process_names.keep_only(pids)

    def _other_users(self, index: int) -> dict[str, float | None]:
        users = None if self.gpus[index] in self.nvml.lost else self.users.get(index)
        if users is None or any(user.is_ours is None for user in users):
            return {}
        others = [user for user in users if not user.is_ours]
        memory = [user.memory_gib for user in others if user.memory_gib is not None]
        return {
            f"gpu{index}/other_processes": len(others),
            f"gpu{index}/other_memory_gib": sum(memory) if len(memory) == len(others) else None,
        }


class CpuLoad:
    """Utilization of `cores` since the previous call; None: all cores."""

    def __init__(self, cores: Set[int] | None = None) -> None:
        self._cores = cores
        self.num_cores = float(psutil.cpu_count() or 1) if cores is None else float(len(cores))
        self._before = self._times()

    def percent(self) -> float | None:
        before, self._before = self._before, self._times()
        busy, elapsed = (new - old for new, old in zip(self._before, before, strict=True))
        return min(100.0, max(0.0, 100 * busy / elapsed)) if elapsed > 0 else None

    def _times(self) -> tuple[float, float]:
        """Return busy and total seconds of the cores so far; all callers of psutil.cpu_percent share one state."""
        if self._cores is None:
            core_times = [psutil.cpu_times()]
        else:
            core_times = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in self._cores]
        busy = total = 0.0
        for times in core_times:
            guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them twice
            seconds = sum(times) - guests
            busy += seconds - times.idle - getattr(times, "iowait", 0.0)
            total += seconds
        return busy, total


class QuotaCpuLoad:
    """CPU time of a cgroup since the previous call, as a share of its quota."""

    now = staticmethod(time.monotonic)

    def __init__(self, limit: CgroupLimit) -> None:
        self._limit = limit
        self.num_cores = limit.amount
        self._before = self._times()

    def percent(self) -> float | None:
        (before, used_before), (now, used) = self._before, self._times()
        self._before = now, used
        if used is None or used_before is None or now <= before:
            return None
        return min(100.0, max(0.0, 100 * (used - used_before) / (self._limit.amount * (now - before))))

    def _times(self) -> tuple[float, float | None]:
        return self.now(), self._limit.cpu_seconds()


def make_cpu_load(root: int, system: Path) -> CpuLoad | QuotaCpuLoad:
    """Return the sampler of the CPU that this process tree may use: by cgroup quota, affinity, or the full machine."""
    present, cores = psutil.cpu_count() or 1, affinity(root)
    limit = cgroup_cpu_limit(system)
    if limit is not None and limit.amount < len(cores) and limit.cpu_seconds() is not None:
        return QuotaCpuLoad(limit)
    # If cores are offline, their numbers do not match psutil's list, so the load of all cores is measured.
    is_part = len(cores) < present and max(cores) < present
    return CpuLoad(cores if is_part else None)


class _Ram:
    """Memory in use, in percent of the cgroup's limit or of the machine's memory, whichever is less."""

    def __init__(self, system: Path) -> None:
        self._limit = cgroup_memory_limit(system)

    def percent(self) -> float | None:
        machine, limit = psutil.virtual_memory(), self._limit
        used = limit.memory_bytes() if limit is not None and limit.amount < machine.total else None
        return float(machine.percent) if used is None or limit is None else 100 * used / limit.amount


class _Disk:
    """Bytes per second of all disks since the previous call, and the free space in the folder of the run."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._before: tuple[float, int, int] | None = None

    def load(self, now: float) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        with contextlib.suppress(OSError):
            if self._folder is not None:
                free = os.statvfs(self._folder)
                found["disk/free_gib"] = free.f_bavail * free.f_frsize / GIB
        counters = None
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            counters = psutil.disk_io_counters(nowrap=False)
        if counters is not None:
            before, self._before = self._before, (now, *counters[2:4])  # read_bytes and write_bytes
            if before is not None and now > before[0]:
                read, written = (new - old for new, old in zip(self._before[1:], before[1:], strict=True))
                seconds = now - before[0]
                found["disk/read_mb_s"] = read / seconds / MB if read >= 0 else None
                found["disk/write_mb_s"] = written / seconds / MB if written >= 0 else None
        return found


class ProcessTree:
    """A process and its descendants."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._members: dict[int, psutil.Process] = {}
        self.search()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._members)

    def has(self, pid: int) -> bool:
        """Return whether a process belongs to the tree, including one that was started after the last search."""
        if pid in self._members:
            return True
        parents: list[psutil.Process] = _query(lambda: psutil.Process(pid).parents()) or []
        return any(parent.pid == self._root for parent in parents)

    def search(self) -> None:
        found = []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._root)
            found = [root, *root.children(recursive=True)]
        new = {process.pid: process for process in found if process != self._members.get(process.pid)}
        # Known processes keep their objects, which hold the previous CPU times; new ones get their first sample here.
        self._members = {process.pid: new.get(process.pid) or self._members[process.pid] for process in found}
        for process in new.values():
            _query(process.cpu_percent)

    def load(self) -> dict[str, float | None]:
        """Return the sum of CPU percent (100 is one core) and resident GiB; processes that have ended count as 0."""
        members = tuple(self._members.values())
        percents = [_query(process.cpu_percent) for process in members]
        memory = [_query(process.memory_info) for process in members]
        if not any(memory):
            return {}
        return {
            "process/cpu_percent": sum(percent or 0.0 for percent in percents),
            "process/memory_gib": sum(info.rss for info in memory if info) / GIB,
        }


class _ProcessNames:
    """Caches the names of processes and of their owners."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, str]] = {}

    def identify(self, pid: int, memory_gib: float | None, process_tree: ProcessTree, *, comparable: bool) -> GpuUser:
        if pid not in self._names:
            self._names[pid] = _name_and_user(pid) if comparable else ("", "")
        name, user = self._names[pid]
        is_ours = process_tree.has(pid) if comparable else None
        return GpuUser(pid, name, user, memory_gib, is_ours)

    def keep_only(self, pids: set[int]) -> None:
        self._names = {pid: names for pid, names in self._names.items() if pid in pids}


def _name_and_user(pid: int) -> tuple[str, str]:
    try:
        process = psutil.Process(pid)
        return str(process.name()), str(_query(process.username) or "")
    except (psutil.Error, KeyError):
        return "", ""


def pids_are_of_host() -> bool:
    """Return whether the PIDs that the driver reports are valid in this process: on Linux, outside of containers."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _query(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except (psutil.Error, KeyError):
        return None


def _divide(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in linux/proc_ns.h
_ALWAYS, _SELDOM = (frozenset(metric.name for metric in METRICS if metric.seldom == seldom) for seldom in (False, True))
