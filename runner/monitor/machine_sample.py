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

from runner.host.cgroup import Grant, cpu_grant, memory_grant
from runner.host.resources import affinity
from runner.monitor.nvml import METRICS, Gpu, Nvml

GIB, MB = 2**30, 1e6


@dataclass(frozen=True)
class GpuUser:
    """A process that computes on a GPU.

    name, user  empty where this machine's /proc does not know the process
    memory_gib  None where the driver hides it
    is_ours     of this run; None where it cannot be told, as in a container that sees the numbers of its host
    """

    pid: int
    name: str
    user: str
    memory_gib: float | None
    is_ours: bool | None


class Host:
    """Reads CPU, memory, disk and this run's processes, which no driver can hold up, once per `sample`.

    root    the process whose descendants are this run's, itself included
    folder  where the run is written: the disk that must not fill up
    system  holds /proc and /sys/fs/cgroup

    CPU and memory are those that the run may use: where affinity or a cgroup grants a part of the machine, the load is
    that of this part.
    """

    SELDOM_S = 10.0  # between two searches for processes
    SEARCH_SHARE = 0.002  # of one core may go into the search for children, which reads all of /proc

    def __init__(self, *, root: int | None = None, folder: Path | None = None, system: Path = Path("/")) -> None:
        self.family = ProcessTree(root or os.getpid())
        self._cpu, self._ram, self._disk = cpu_load(root or 0, system), _Ram(system), _Disk(folder)
        self._next_search = 0.0

    def sample(self) -> dict[str, float]:
        """Return metric name -> value, without what could not be read."""
        now = time.monotonic()
        if now >= self._next_search:
            self.family.search()
            took_s = time.monotonic() - now
            self._next_search = now + max(self.SELDOM_S, took_s / self.SEARCH_SHARE)
        found = {"cpu/percent": self._cpu.percent(), "ram/percent": self._ram.percent()}
        found |= self.family.load() | self._disk.load(now)
        return {name: float(value) for name, value in found.items() if value is not None}


class Gpus:
    """Reads the GPUs and who uses them once per `sample`. What hardly changes, or costs much, is read less often.

    A driver may never answer: a caller that must go on asks in a thread of its own (see `Aside`).
    """

    SELDOM_S = 10.0  # between two readings of what hardly changes, and between two lists of processes
    TURN_S = 0.5  # between two queries in which the driver waits: they take 40 ms, of one GPU at a time

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu], family: ProcessTree) -> None:
        self.nvml, self.gpus = nvml, tuple(gpus)
        self.users: Mapping[int, tuple[GpuUser, ...]] = {}
        self._family, self._known = family, _Known()
        self._kept: list[dict[str, float | None]] = [{} for _ in gpus]
        self._turn, self._next_turn, self._next_seldom = 0, 0.0, 0.0
        self._held: dict[str, float] = {}

    def sample(self) -> dict[str, float]:
        """Return metric name -> value, without what could not be read or was not asked for this time."""
        now = time.monotonic()
        is_seldom = now >= self._next_seldom
        if is_seldom:
            self._next_seldom = now + self.SELDOM_S
            self._look_at_processes()
        found: dict[str, float | None] = {}
        for index, gpu in enumerate(self.gpus):
            if is_seldom:
                self._kept[index] = self.nvml.read(gpu, _SELDOM)
            kept = {} if gpu in self.nvml.lost else self._kept[index]
            reading = {**kept, **self.nvml.read(gpu, _ALWAYS)}
            found |= self._named(index, reading) | self._shared(index)
        found |= self._in_turn(now)
        return {name: float(value) for name, value in found.items() if value is not None}

    def held(self) -> Mapping[str, float]:
        """Return the last readings of the GPUs whose turn it was not, none older than one round."""
        return self._held

    def _named(self, index: int, reading: Mapping[str, float | None]) -> dict[str, float | None]:
        return {
            f"gpu{index}/{name}": None if (value := reading.get(query)) is None else value / unit
            for name, (query, unit) in READINGS.items()
            if query in reading
        }

    def _in_turn(self, now: float) -> dict[str, float | None]:
        if not self.gpus or now < self._next_turn:
            return {}
        index = self._turn % len(self.gpus)
        self._turn, self._next_turn = self._turn + 1, now + self.TURN_S
        found = self._named(index, self.nvml.read(self.gpus[index], _IN_TURN))
        self._held = {name: value for name, value in self._held.items() if name not in found}
        self._held |= {name: value for name, value in found.items() if value is not None}
        return found

    def _look_at_processes(self) -> None:
        listed = {index: self.nvml.processes(gpu) for index, gpu in enumerate(self.gpus) if gpu not in self.nvml.lost}
        pids = {each.pid for processes in listed.values() for each in processes or ()}
        comparable = numbers_are_the_hosts() or not pids.isdisjoint(self._family.pids)
        self.users = {
            index: tuple(
                self._known.user(each.pid, _over(each.used_bytes, GIB), self._family, comparable=comparable)
                for each in processes
            )
            for index, processes in listed.items()
            if processes is not None
        }
        self._known.forget_all_but(pids)

    def _shared(self, index: int) -> dict[str, float | None]:
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
    """Load of these cores since the previous call; None: of all cores."""

    def __init__(self, cores: Set[int] | None = None) -> None:
        self._cores = cores
        self.num_cores = float(psutil.cpu_count() or 1) if cores is None else float(len(cores))
        self._before = self._times()

    def percent(self) -> float | None:
        before, self._before = self._before, self._times()
        busy, passed = (new - old for new, old in zip(self._before, before, strict=True))
        return min(100.0, max(0.0, 100 * busy / passed)) if passed > 0 else None

    def _times(self) -> tuple[float, float]:
        """Return the seconds of the cores so far: busy, and in all. psutil.cpu_percent keeps one state for all."""
        if self._cores is None:
            chosen = [psutil.cpu_times()]
        else:
            chosen = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in self._cores]
        busy = whole = 0.0
        for times in chosen:
            guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them twice
            total = sum(times) - guests
            busy += total - times.idle - getattr(times, "iowait", 0.0)
            whole += total
        return busy, whole


class GrantedCpuLoad:
    """CPU time that a cgroup has used since the previous call, as a share of what it is granted."""

    now = staticmethod(time.monotonic)

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self.num_cores = grant.amount
        self._before = self._times()

    def percent(self) -> float | None:
        (before, used_before), (now, used) = self._before, self._times()
        self._before = now, used
        if used is None or used_before is None or now <= before:
            return None
        return min(100.0, max(0.0, 100 * (used - used_before) / (self._grant.amount * (now - before))))

    def _times(self) -> tuple[float, float | None]:
        return self.now(), self._grant.cpu_seconds()


def cpu_load(root: int, system: Path) -> CpuLoad | GrantedCpuLoad:
    """Return what tells the load of the CPU that this process tree may use: by its cgroup, its affinity, or all."""
    present, cores = psutil.cpu_count() or 1, affinity(root)
    grant = cpu_grant(system)
    if grant is not None and grant.amount < len(cores) and grant.cpu_seconds() is not None:
        return GrantedCpuLoad(grant)
    is_part = len(cores) < present and max(cores) < present  # numbers have gaps where cores are switched off
    return CpuLoad(cores if is_part else None)


class _Ram:
    """The memory in use, as a share of what the cgroup grants, or of the machine's where that is less."""

    def __init__(self, system: Path) -> None:
        self._grant = memory_grant(system)

    def percent(self) -> float | None:
        machine, grant = psutil.virtual_memory(), self._grant
        used = grant.memory_bytes() if grant is not None and grant.amount < machine.total else None
        return float(machine.percent) if used is None or grant is None else 100 * used / grant.amount


class _Disk:
    """Bytes a second of all disks since the look before, and what is left where the run is written."""

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
    """A process and what it started, and that in turn."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._members: dict[int, psutil.Process] = {}
        self.search()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._members)

    def has(self, pid: int) -> bool:
        """Tell whether this process belongs to it, also one that was started after the last search."""
        if pid in self._members:
            return True
        parents: list[psutil.Process] = _alive(lambda: psutil.Process(pid).parents()) or []
        return any(parent.pid == self._root for parent in parents)

    def search(self) -> None:
        found = []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._root)
            found = [root, *root.children(recursive=True)]
        new = {each.pid: each for each in found if each != self._members.get(each.pid)}
        # Who is known stays the same object, which remembers its last look; the new are looked at for the first time.
        self._members = {each.pid: new.get(each.pid) or self._members[each.pid] for each in found}
        for each in new.values():
            _alive(each.cpu_percent)

    def load(self) -> dict[str, float | None]:
        """Return CPU percent (100 is one thread) and resident GiB of them all; the dead count nothing."""
        members = tuple(self._members.values())
        percents = [_alive(each.cpu_percent) for each in members]
        memory = [_alive(each.memory_info) for each in members]
        if not any(memory):
            return {}
        return {
            "process/cpu_percent": sum(each or 0.0 for each in percents),
            "process/memory_gib": sum(each.rss for each in memory if each) / GIB,
        }


class _Known:
    """Names and users of processes, asked for once each."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, str]] = {}

    def user(self, pid: int, memory_gib: float | None, family: ProcessTree, *, comparable: bool) -> GpuUser:
        if pid not in self._names:
            self._names[pid] = _name_and_user(pid) if comparable else ("", "")
        name, user = self._names[pid]
        is_ours = family.has(pid) if comparable else None
        return GpuUser(pid, name, user, memory_gib, is_ours)

    def forget_all_but(self, pids: set[int]) -> None:
        self._names = {pid: names for pid, names in self._names.items() if pid in pids}


def _name_and_user(pid: int) -> tuple[str, str]:
    try:
        process = psutil.Process(pid)
        return str(process.name()), str(_alive(process.username) or "")
    except (psutil.Error, KeyError):
        return "", ""


def numbers_are_the_hosts() -> bool:
    """Tell whether a process has the number here that the driver knows it by: outside of containers, on Linux."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _alive(query: Callable[[], Any]) -> Any:
    """Return what a process answers, None when it has ended."""
    try:
        return query()
    except (psutil.Error, KeyError):
        return None


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in linux/proc_ns.h
_ALWAYS, _SELDOM, _IN_TURN = (
    frozenset(metric.name for metric in METRICS if metric.pace == pace) for pace in ("always", "seldom", "in turn")
)

# Reading of a GPU, after its `gpu0/` -> metric of NVML, and what it is divided by.
READINGS: Mapping[str, tuple[str, float]] = {
    "util": ("util_percent", 1),
    "memory_util": ("memory_util_percent", 1),
    "memory_gib": ("memory_used_bytes", GIB),
    "memory_reserved_gib": ("memory_reserved_bytes", GIB),
    "memory_free_gib": ("memory_free_bytes", GIB),
    "memory_total_gib": ("memory_total_bytes", GIB),
    "temperature_c": ("temperature_c", 1),
    "temperature_limit_c": ("temperature_limit_c", 1),
    "power_w": ("power_w", 1),
    "power_limit_w": ("power_limit_w", 1),
    "energy_j": ("energy_j", 1),
    "clock_mhz": ("sm_clock_mhz", 1),
    "memory_clock_mhz": ("memory_clock_mhz", 1),
    "throttle_reasons": ("throttle_reasons", 1),
    "pcie_generation": ("pcie_generation", 1),
    "pcie_width": ("pcie_width", 1),
    "pcie_rx_mb_s": ("pcie_rx_bytes_s", MB),
    "pcie_tx_mb_s": ("pcie_tx_bytes_s", MB),
    "ecc_corrected": ("ecc_corrected", 1),
    "ecc_uncorrected": ("ecc_uncorrected", 1),
}
