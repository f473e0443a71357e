"""Measure how many cores other processes use, to choose whether torch's idle threads spin or sleep.

By default, libgomp's threads spin between parallel regions, which is fastest on free cores. If another process uses
one of the cores, each region waits for the thread that lost its core, while the spinning threads prevent it from
getting one back. Sleeping threads free their cores at once, but waking them takes time in every region. The policy
does not change results.

libgomp reads the policy when it is loaded, so it has to be chosen before torch is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import psutil  # type: ignore[import-untyped]

from runner.host.resources import affinity
from runner.host.run_queue import has_cpu_quota, own_cpu_s, read_busy_s

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # of libgomp, and of LLVM's and Intel's libomp
MIN_OTHER_CORES = 0.5
MIN_MEASURED_S = 0.1  # the kernel counts CPU time in steps of 10 ms


class OtherLoad:
    """CPU use of the processes that do not belong to a run, since the creation of this object.

    own_s      returns the CPU seconds of the run; default: those of this process and its children that have ended
    busy_s     returns the CPU seconds of all processes on the cores
    clock      returns the time in seconds
    num_cores  cores that this process may use
    """

    def __init__(
        self,
        own_s: Callable[[], float] = own_cpu_s,
        *,
        busy_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_cores: int | None = None,
    ) -> None:
        cores = affinity()
        self._own_s, self._busy_s, self._clock = own_s, busy_s or partial(read_busy_s, cores), clock
        self.num_cores = num_cores or len(cores)
        self._is_usable = not has_cpu_quota(cores)  # the kernel counts whole cores, but a quota grants less
        self._before, self._start = self._others_s(), clock()

    def _others_s(self) -> float:
        return self._busy_s() - self._own_s() if self._is_usable else 0.0

    def cores(self) -> float | None:
        """Return how many cores others used on average; None under a CPU quota, or before MIN_MEASURED_S."""
        seconds = self._clock() - self._start
        if not self._is_usable or seconds < MIN_MEASURED_S:
            return None
        return min(max(0.0, (self._others_s() - self._before) / seconds), float(self.num_cores))

    def describe(self) -> str:
        """Describe the number of cores in use; empty if other processes hardly used any."""
        cores = self.cores()
        return "" if cores is None or cores < MIN_OTHER_CORES else self.format(cores)

    def format(self, cores: float) -> str:
        """Describe a number of cores that other processes used."""
        return f"other processes used {cores:.1f} of {self.num_cores} cores"


def choose_wait_policy(load: OtherLoad) -> str:
    """Set OMP_WAIT_POLICY=passive if torch would start more threads than other processes leave cores.

    Returns the reason. It is empty if nothing was set, because the cores are free or the user has chosen a policy.
    """
    cores = load.cores()
    if cores is None or cores < MIN_OTHER_CORES or not os.environ.keys().isdisjoint(VARIABLES):
        return ""
    if load.num_cores - cores >= _num_threads(load.num_cores):
        return ""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    return f"{load.format(cores)}: idle threads sleep instead of spinning (OMP_WAIT_POLICY=passive)"


def _num_threads(num_cores: int) -> int:
    """Return the number of threads that torch starts, by default one for each physical core."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isascii() and requested.isdigit():
        return int(requested)
    return min(psutil.cpu_count(logical=False) or num_cores, num_cores)
