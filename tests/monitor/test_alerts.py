"""Alerts about the machine are reported once, with advice; missing data cause no alerts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runner.monitor.alerts import MIN_THROTTLED_SAMPLES, XIDS, Alert, AlertMonitor, explain_xid
from runner.monitor.machine_sample import GpuUser
from runner.monitor.nvml import Gpu, GpuEvent, Nvml, decode_throttle_reasons
from runner.monitor.samples import Readings

T4 = Gpu(0, "GPU-a", "Tesla T4")
HOT: Readings = {"gpu0/throttle_reasons": 64, "gpu0/temperature_c": 95.4, "gpu0/clock_mhz": 300.0, "gpu0/power_w": 31.0}


def watchful(*gpus: Gpu) -> AlertMonitor:
    return AlertMonitor(Nvml(), gpus or (T4,))


def look(watch: AlertMonitor, readings: Readings, times: int = 1) -> list[Alert]:
    return [notice for _ in range(times) for notice in watch.check(readings, {}, ())]


def test_a_throttled_gpu_is_reported_once_with_its_readings(screen: Callable[..., None]) -> None:
    (notice,) = look(watchful(), HOT, times=20)

    screen(notice.text)
    assert (notice.kind, notice.level) == ("slowed", "warning")
    assert notice.facts["reason"] == "hardware temperature limit"


def test_a_busy_gpu_at_its_power_limit_causes_no_warning(screen: Callable[..., None]) -> None:
    (notice,) = look(watchful(), {"gpu0/throttle_reasons": 4}, times=MIN_THROTTLED_SAMPLES)

    assert notice.level == "info"
    screen(notice.text)


def test_a_short_slowdown_is_not_reported() -> None:
    watch = watchful()

    assert not look(watch, HOT, times=MIN_THROTTLED_SAMPLES - 1)
    assert not look(watch, {"gpu0/throttle_reasons": 0})
    assert not look(watch, HOT, times=MIN_THROTTLED_SAMPLES - 1)
    assert look(watch, HOT)


def test_idle_and_missing_readings_are_not_throttling() -> None:
    assert not look(watchful(), {"gpu0/throttle_reasons": 1 + 2 + 256}, times=9)
    assert not look(watchful(), {}, times=9)
    assert decode_throttle_reasons(None) == ()


def test_an_increase_of_memory_errors_is_reported(screen: Callable[..., None]) -> None:
    watch = watchful()

    assert not look(watch, {"gpu0/ecc_corrected": 7, "gpu0/ecc_uncorrected": 0}), (
        "earlier errors must not be attributed to this run"
    )
    (bad,) = look(watch, {"gpu0/ecc_corrected": 7, "gpu0/ecc_uncorrected": 1})
    screen(bad.text)
    assert bad.level == "warning"
    (good,) = look(watch, {"gpu0/ecc_corrected": 9, "gpu0/ecc_uncorrected": 1})
    assert (good.level, good.facts["number"]) == ("info", 2)


def test_an_xid_error_is_explained_and_reported_once() -> None:
    watch = watchful()
    notices = [notice for _ in range(3) for notice in watch.check({}, {}, [GpuEvent(T4, "xid", 79)])]

    assert [notice.text for notice in notices] == [f"gpu0 (Tesla T4): XID 79, {XIDS[79].meaning}; {XIDS[79].advice}"]
    assert notices[0].facts == {"device": "gpu0", "uuid": "GPU-a", "xid": 79}


def test_xid_errors_of_a_gpu_apply_to_its_mig_instances() -> None:
    cut = Gpu(3, "MIG-a", "slice")
    (notice,) = watchful(cut).check({}, {}, [GpuEvent(Gpu(3, "GPU-c", "whole"), "xid", 31)])

    assert notice.text.startswith("gpu0 (slice): XID 31, ")
    assert not watchful(cut).check({}, {}, [GpuEvent(Gpu(4, "GPU-d", "other"), "xid", 31)])


@pytest.mark.parametrize("number", [*XIDS, 999])
def test_known_xid_errors_have_a_meaning_and_advice(number: int) -> None:
    known = explain_xid(number)

    assert len(known.meaning.split()) > 2
    assert len(known.advice.split()) > 2


def test_other_processes_are_listed_once_sorted_by_memory(screen: Callable[..., None]) -> None:
    users = [GpuUser(pid, f"job{pid}", "alice", float(pid), is_ours=False) for pid in range(1, 6)]
    users.append(GpuUser(9, "python", "me", 3.0, is_ours=True))
    watch = watchful()
    notices = [notice for _ in range(3) for notice in watch.check({}, {0: users}, ())]

    assert len(notices) == 1
    screen(notices[0].text)
    assert notices[0].facts["pids"] == [5, 4, 3, 2, 1]


def test_unknown_processes_are_not_reported() -> None:
    assert not watchful().check({}, {0: [GpuUser(5, "", "", None, is_ours=None)]}, ())


def test_missing_permissions_are_reported_once(screen: Callable[..., None]) -> None:
    nvml = Nvml()
    nvml.denied[T4] = {"power_w", "energy_j"}
    watch = AlertMonitor(nvml, [T4])
    (notice,) = look(watch, {}, times=5)

    screen(notice.text)
