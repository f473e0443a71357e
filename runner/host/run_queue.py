"""Measure how long a thread waited in the run queue because other processes used its cores (Linux).

If another process shares a core, a measured block of updates includes time in which its thread was runnable but had to
wait for a core. The kernel counts this time, and benchmarks subtract it. Waits caused by other threads of this process
and by its data workers are part of the cost of training, and are not subtracted.
Source: Documentation/scheduler/sched-stats.rst of the Linux kernel, section /proc/<pid>/schedstat.
"""

from __future__ import annotations

import os
import time
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from runner.host.cgroup import cgroup_cpu_limit
from runner.host.resources import affinity


@dataclass(frozen=True)
class QueueSample:
    """Cumulative counters in seconds.

    wait_s        time that this thread spent in the run queue; 0 if the kernel does not count it
    busy_s        CPU time of all cores that this process may use
    tree_cpu_s    CPU time of a process and its descendants, including those that have ended
    thread_cpu_s  CPU time of this thread
    """

    wait_s: float
    busy_s: float
    tree_cpu_s: float
    thread_cpu_s: float


class RunQueueWait:
    """Samples the counters before and after a block of updates, in the thread that runs the block."""

    def __init__(self) -> None:
        self._cores = affinity()
        # Under a CPU quota, the wait includes throttling, which is not caused by other processes.
        self._is_usable = not has_cpu_quota(self._cores)

    def sample(self, *, begins: bool) -> QueueSample | None:
        """Sample the counters; None if they are not usable.

        begins  True before a block, False after it. Reading the counters of all processes takes milliseconds, so the
                wait of this thread is read last before a block, and first after it
        """
        if not self._is_usable:
            return None
        wait_s, busy_s = read_wait_s(), read_busy_s(self._cores)
        tree_cpu_s, thread_cpu_s = process_tree_cpu_s(), time.thread_time()
        return QueueSample(read_wait_s() if begins else wait_s, busy_s, tree_cpu_s, thread_cpu_s)

    @staticmethod
    def wait_for_others_s(before: QueueSample | None, after: QueueSample | None) -> float:
        """Return how long the thread waited for a core between two samples because other processes used the cores."""
        if before is None or after is None:
            return 0.0
        tree_cpu_s = after.tree_cpu_s - before.tree_cpu_s
        others_s = max(0.0, after.busy_s - before.busy_s - tree_cpu_s)
        siblings_s = max(0.0, tree_cpu_s - (after.thread_cpu_s - before.thread_cpu_s))  # other threads, data workers
        if not others_s:
            return 0.0
        return max(0.0, after.wait_s - before.wait_s) * others_s / (others_s + siblings_s)


def read_wait_s() -> float:
    """Return the seconds that this thread has spent in the run queue; 0 if the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def has_cpu_quota(cores: Set[int]) -> bool:
    """Return whether the cgroup of this process grants less CPU time than these cores have."""
    grant = cgroup_cpu_limit()
    return grant is not None and grant.amount < len(cores)


def read_busy_s(cores: Set[int]) -> float:
    """Return the CPU seconds of all processes on these cores."""
    times_by_core = enumerate(psutil.cpu_times(percpu=True))
    return float(sum(times.user + times.nice + times.system for core, times in times_by_core if core in cores))


def own_cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def process_tree_cpu_s(root: int | None = None) -> float:
    """Return the CPU seconds of process `root` (None: this process) and its descendants, including ended ones.

    Takes milliseconds, because all processes of the machine are searched.
    """
    seconds = own_cpu_s() if root is None else 0.0
    with suppress(psutil.Error):
        parent = psutil.Process(root)
        for process in [*([parent] if root is not None else []), *parent.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                used = process.cpu_times()
                seconds += used.user + used.system + used.children_user + used.children_system
    return seconds
