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

from runner.host import run_queue
from runner.host.cgroup import CgroupLimit
from runner.host.run_queue import QueueSample, RunQueueWait

NOTHING = QueueSample(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("after", "behind_s"),
    [
        (QueueSample(wait_s=0.0, busy_s=1.0, tree_cpu_s=1.0, thread_cpu_s=1.0), 0.0),  # no other process
        (QueueSample(wait_s=0.5, busy_s=1.0, tree_cpu_s=0.5, thread_cpu_s=0.5), 0.5),  # another process on its core
        (QueueSample(wait_s=0.5, busy_s=1.0, tree_cpu_s=1.0, thread_cpu_s=0.5), 0.0),  # one of its workers on its core
        (QueueSample(wait_s=0.6, busy_s=1.5, tree_cpu_s=1.0, thread_cpu_s=0.5), 0.3),  # equal parts of both
        (QueueSample(wait_s=0.0, busy_s=2.0, tree_cpu_s=1.0, thread_cpu_s=1.0), 0.0),  # another process on another core
        (QueueSample(wait_s=0.1, busy_s=0.9, tree_cpu_s=1.0, thread_cpu_s=1.0), 0.0),  # the CPU clocks are coarse
    ],
)
def test_run_queue_wait_is_separated_from_cpu_time(after: QueueSample, behind_s: float) -> None:
    assert RunQueueWait.wait_for_others_s(NOTHING, after) == pytest.approx(behind_s)


def test_a_cpu_quota_is_not_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "cgroup_cpu_limit", lambda: CgroupLimit(0.5, Path("/")))
    assert RunQueueWait().sample(begins=True) is None
    assert RunQueueWait.wait_for_others_s(None, None) == 0.0


@pytest.mark.parametrize("block_s", [0.0, 0.25])
def test_waits_outside_the_measured_block_do_not_count(monkeypatch: pytest.MonkeyPatch, block_s: float) -> None:
    """Each sample itself waits for 5 ms, and other processes are always busy."""
    waited, busy = [0.0], itertools.count(1.0)

    def looks_around() -> float:
        waited[0] += 0.005
        return 0.0

    monkeypatch.setattr(run_queue, "cgroup_cpu_limit", lambda: None)
    monkeypatch.setattr(run_queue, "affinity", lambda: {0})
    monkeypatch.setattr(run_queue, "read_wait_s", lambda: waited[0])
    monkeypatch.setattr(run_queue, "process_tree_cpu_s", looks_around)
    cores = SimpleNamespace(cpu_times=lambda **_: [SimpleNamespace(user=next(busy), nice=0.0, system=0.0)])
    monkeypatch.setattr(run_queue, "psutil", cores)
    monkeypatch.setattr(run_queue, "time", SimpleNamespace(thread_time=lambda: 0.0))

    waits = RunQueueWait()
    before = waits.sample(begins=True)
    waited[0] += block_s

    assert waits.wait_for_others_s(before, waits.sample(begins=False)) == pytest.approx(block_s)


@contextmanager
def other_job(core: int) -> Iterator[None]:
    """Keep a core busy with a process outside of this process tree."""
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").is_file(), reason="the system has no schedstat")
def test_waits_for_another_job_on_the_core_are_counted() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        with other_job(core):
            waits = RunQueueWait()
            sample = waits.sample(begins=True)
            compute_for(0.5)
            over = waits.sample(begins=False)
    finally:
        os.sched_setaffinity(0, before)
    assert sample is not None
    assert over is not None
    assert over.wait_s > sample.wait_s, "the wait must have increased, because the other job runs on the same core"
    assert 0.0 <= waits.wait_for_others_s(sample, over) <= over.wait_s - sample.wait_s
