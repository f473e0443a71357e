"""CPU use of other processes, and the wait policy of idle threads that depends on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.host import other_load
from runner.host.cgroup import CgroupLimit
from runner.host.other_load import VARIABLES, OtherLoad, choose_wait_policy


@pytest.fixture(autouse=True)
def no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_load, "has_cpu_quota", lambda cores: False)
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # registers the variable to be removed at the end, if the code under test sets it


def load(other_cores: float, *, own_cores: float = 1.0, seconds: float = 2.0, num_cores: int = 4) -> OtherLoad:
    """Return a load that was measured for `seconds`, beside a run that used `own_cores`."""
    now = [0.0]
    started = OtherLoad(
        lambda: own_cores * now[0],
        busy_s=lambda: 7.0 + (own_cores + other_cores) * now[0],
        clock=lambda: now[0],
        num_cores=num_cores,
    )
    now[0] = seconds
    return started


@pytest.mark.parametrize(("other_cores", "measured"), [(0.0, 0.0), (1.25, 1.25), (-0.1, 0.0), (9.0, 4.0)])
def test_other_load_is_the_cpu_time_not_used_by_the_run(other_cores: float, measured: float) -> None:
    assert load(other_cores).cores() == pytest.approx(measured)


def test_a_load_measured_for_a_short_time_is_unknown() -> None:
    assert load(1.0, seconds=0.05).cores() is None
    assert load(1.0, seconds=0.05).describe() == ""


def test_the_load_under_a_cpu_quota_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_load, "has_cpu_quota", lambda cores: True)
    assert load(1.0).cores() is None
    assert choose_wait_policy(load(3.0)) == ""


@pytest.mark.parametrize(
    ("threads", "other_cores", "sleeps"),
    [
        ("4", 0.0, False),  # all cores are free
        ("4", 0.4, False),  # hardly used
        ("4", 0.6, True),
        ("4", 3.5, True),
        ("3", 1.0, False),  # there is a core for each thread
        ("3", 1.1, True),
        ("1", 2.9, False),  # a single thread waits for no other
    ],
)
def test_threads_sleep_if_they_outnumber_the_free_cores(
    threads: str, other_cores: float, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    reason = choose_wait_policy(load(other_cores))
    assert os.environ.get("OMP_WAIT_POLICY") == ("passive" if sleeps else None)
    assert (f"{other_cores:.1f} of 4 cores" in reason) == sleeps


def test_by_default_each_physical_core_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_load.psutil, "cpu_count", lambda logical=True: 4 if logical else 2)
    assert choose_wait_policy(load(1.5)) == ""
    assert choose_wait_policy(load(2.5)) != ""


@pytest.mark.parametrize("name", VARIABLES)
def test_a_wait_policy_set_by_the_user_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose_wait_policy(load(3.0)) == ""
    assert "OMP_WAIT_POLICY" not in os.environ or name == "OMP_WAIT_POLICY"


def test_processes_of_the_run_do_not_count_as_other_load() -> None:
    """Without other processes, the process tree of the run uses all CPU time between two samples."""
    own = [0.0]
    started = OtherLoad(lambda: own[0], busy_s=lambda: own[0], clock=lambda: own[0], num_cores=1)
    own[0] = 10.0
    assert started.cores() == 0.0


def test_a_cgroup_limit_below_the_core_count_is_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.host import run_queue

    for amount, is_quota in ((0.5, True), (1.0, False)):
        monkeypatch.setattr(run_queue, "cgroup_cpu_limit", lambda amount=amount: CgroupLimit(amount, Path("/")))
        assert run_queue.has_cpu_quota({0}) is is_quota
    monkeypatch.setattr(run_queue, "cgroup_cpu_limit", lambda: None)
    assert not run_queue.has_cpu_quota({0})
