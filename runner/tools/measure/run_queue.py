"""Measure how long a thread waited in the run queue for cores used by other processes (Linux).

Two processes on one core alternate, so a block of updates takes longer than its updates. The kernel counts how long a
thread was runnable without a core. That time is subtracted, except the part in which this process's own threads and
data workers used the cores.
Source: /proc/PID/schedstat in the kernel's scheduler/sched-stats.rst.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from runner.host.cgroup import cgroup_cpu_limit
from runner.host.resources import affinity


@dataclass(frozen=True)
class QueueSample:
    """Seconds so far.

    waited  in which this thread was runnable without a core; 0 if the kernel does not count
    busy    CPU seconds of all cores that this process may use
    ours    CPU seconds of this process and its children
    own     CPU seconds of this thread
    """

    waited: float
    busy: float
    ours: float
    own: float


class RunQueueWait:
    """Reads the counters at both ends of a block, in its thread."""

    def __init__(self) -> None:
        self._cores = affinity()
        grant = cgroup_cpu_limit()
        # A cgroup that has used its quota waits too, but not for others.
        self._counts = grant is None or grant.amount >= len(self._cores)

    def look(self, *, begins: bool) -> QueueSample | None:
        """Return the seconds so far; None if they are not usable.

        begins  a block follows; else one is over. The wait of this thread is read next to the block, because reading
                all processes takes milliseconds
        """
        if not self._counts:
            return None
        waited, busy = waited_s(), 0.0
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            busy += times.user + times.nice + times.system if core in self._cores else 0.0
        ours, own = family_cpu_s(), time.thread_time()
        return QueueSample(waited_s() if begins else waited, busy, ours, own)

    @staticmethod
    def behind_others_s(before: QueueSample | None, after: QueueSample | None) -> float:
        """Return how long the thread waited for other processes between two samples."""
        if before is None or after is None:
            return 0.0
        ours = after.ours - before.ours
        others = max(0.0, after.busy - before.busy - ours)
        rivals = max(0.0, ours - (after.own - before.own))  # our own threads and workers
        if not others:
            return 0.0
        return max(0.0, after.waited - before.waited) * others / (others + rivals)


def waited_s() -> float:
    """Return the seconds in which this thread was runnable without a core; 0 if the kernel does not count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def family_cpu_s() -> float:
    """Return the CPU seconds of this process and its children."""
    seconds = time.process_time()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            used = child.cpu_times()
            seconds += used.user + used.system
    return seconds
