"""How long a thread stood in line for a core behind processes of others (Linux).

Two processes on one core take turns, so what a block of updates takes then is more than the updates take. The system
counts how long a thread was ready and had no core: that is taken off, as far as it was not this process's own threads
and data workers that had the cores.
Source: /proc/PID/schedstat in the kernel's scheduler/sched-stats.rst.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from runner.host.cgroup import cpu_grant
from runner.host.resources import affinity


@dataclass(frozen=True)
class QueueSample:
    """Seconds so far.

    waited  this thread was ready to run, and had no core; 0 where the kernel does not count
    busy    of the cores that this process may use, together
    ours    of one core, by this process and what it has started
    own     of that, by this thread
    """

    waited: float
    busy: float
    ours: float
    own: float


class RunQueueWait:
    """Asked at both ends of a block by the thread that makes it."""

    def __init__(self) -> None:
        self._cores = affinity()
        grant = cpu_grant()
        # A group that has used up what it is granted waits too, for nobody but itself.
        self._counts = grant is None or grant.amount >= len(self._cores)

    def look(self, *, begins: bool) -> QueueSample | None:
        """Return the seconds so far; None where they tell nothing.

        begins  a block follows; else one is over. What this thread waited is read next to the block: to look at all
                processes takes milliseconds, and what it waits meanwhile is not the block's
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
        """Return how long the thread stood in line for others between two looks."""
        if before is None or after is None:
            return 0.0
        ours = after.ours - before.ours
        others = max(0.0, after.busy - before.busy - ours)
        rivals = max(0.0, ours - (after.own - before.own))  # our own threads and workers
        if not others:
            return 0.0
        return max(0.0, after.waited - before.waited) * others / (others + rivals)


def waited_s() -> float:
    """Return the seconds for which this thread was ready and had no core; 0 where the kernel does not count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def family_cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    seconds = time.process_time()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            used = child.cpu_times()
            seconds += used.user + used.system
    return seconds
