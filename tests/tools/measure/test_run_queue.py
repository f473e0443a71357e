from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.host.cgroup import CgroupLimit
from runner.tools.measure import run_queue
from runner.tools.measure.run_queue import QueueSample, RunQueueWait

NOTHING = QueueSample(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("after", "behind_s"),
    [
        (QueueSample(waited=0.0, busy=1.0, ours=1.0, own=1.0), 0.0),  # alone
        (QueueSample(waited=0.5, busy=1.0, ours=0.5, own=0.5), 0.5),  # one other on its core
        (QueueSample(waited=0.5, busy=1.0, ours=1.0, own=0.5), 0.0),  # a worker of its own on its core
        (QueueSample(waited=0.6, busy=1.5, ours=1.0, own=0.5), 0.3),  # as much of either
        (QueueSample(waited=0.0, busy=2.0, ours=1.0, own=1.0), 0.0),  # another on another core
        (QueueSample(waited=0.1, busy=0.9, ours=1.0, own=1.0), 0.0),  # the clocks of cores are coarse
    ],
)
def test_time_lost_to_others_is_separated_from_own_time(after: QueueSample, behind_s: float) -> None:
    assert RunQueueWait.behind_others_s(NOTHING, after) == pytest.approx(behind_s)


def test_a_cpu_quota_is_not_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "cgroup_cpu_limit", lambda: CgroupLimit(0.5, Path("/")))
    assert RunQueueWait().look(begins=True) is None
    assert RunQueueWait.behind_others_s(None, None) == 0.0


@pytest.mark.parametrize("block_s", [0.0, 0.25])
def test_waits_outside_of_a_block_do_not_count(monkeypatch: pytest.MonkeyPatch, block_s: float) -> None:
    """Each look waits for 5 ms; others are at work all the time."""
    waited, busy = [0.0], itertools.count(1.0)

    def looks_around() -> float:
        waited[0] += 0.005
        return 0.0

    monkeypatch.setattr(run_queue, "cgroup_cpu_limit", lambda: None)
    monkeypatch.setattr(run_queue, "affinity", lambda: {0})
    monkeypatch.setattr(run_queue, "waited_s", lambda: waited[0])
    monkeypatch.setattr(run_queue, "family_cpu_s", looks_around)
    cores = SimpleNamespace(cpu_times=lambda **_: [SimpleNamespace(user=next(busy), nice=0.0, system=0.0)])
    monkeypatch.setattr(run_queue, "psutil", cores)
    monkeypatch.setattr(run_queue, "time", SimpleNamespace(thread_time=lambda: 0.0))

    told = RunQueueWait()
    before = told.look(begins=True)
    waited[0] += block_s

    assert told.behind_others_s(before, told.look(begins=False)) == pytest.approx(block_s)


@contextmanager
def other_job(core: int) -> Iterator[None]:
    """Keep a core busy, by a process that is none of ours."""
    code = f"""import os
os.sched_setaffinity(0, {{{core}}})
if pid := os.fork():
    print(pid)
    os._exit(0)
os.close(1)
while True:
    sum(range(10_000))
"""
    pid = int(subprocess.run([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def compute_for(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").is_file(), reason="the system does not count it")
def test_waits_for_another_job_on_the_core_are_counted() -> None:
    """How much of them is found is measured by scripts/measure/run_queue.py."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        with other_job(core):
            told = RunQueueWait()
            look = told.look(begins=True)
            compute_for(0.5)
            over = told.look(begins=False)
    finally:
        os.sched_setaffinity(0, before)
    assert look is not None
    assert over is not None
    assert over.waited > look.waited, "the system lets the other job run, too"
    assert 0.0 <= told.behind_others_s(look, over) <= over.waited - look.waited
