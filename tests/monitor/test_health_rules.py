"""Each verdict of a health rule quotes the measured figures, and missing data cause no verdict."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest

from runner.monitor.alerts import Alert
from runner.monitor.health_rules import (
    MEMORY,
    RULES,
    UTILIZATION,
    assess_health,
    format_metrics,
    format_phases,
)
from runner.monitor.nvml import THROTTLE_MEANINGS, THROTTLE_REASONS
from runner.monitor.sample_columns import summarize_samples
from runner.monitor.samples import MachineSamples, SampledGpu, Stat, Summary, SummaryPart


def summary_of(
    slowed: dict[str, dict[str, float]] | None = None, **metrics: float | tuple[float, float, float]
) -> Summary:
    """Return a summary of 60 s with constant metrics such as gpu0_util, or with (minimum, mean, maximum)."""
    result = {}
    for name, value in metrics.items():
        low, mean, high = value if isinstance(value, tuple) else (value, value, value)
        result[name.replace("_", "/", 1)] = Stat(mean, low, high, 60.0)
    return Summary(SummaryPart(60.0, 60, result, {}, slowed or {}), {}, {"gpu0": SampledGpu("Tesla T4", "GPU-1")})


def verdicts_of(summary: Summary, *, of_run: bool = True) -> dict[str, str]:
    return {verdict.subject: verdict.level for verdict in assess_health(summary, of_run=of_run)}


@pytest.mark.parametrize(("mean", "level"), [(1, "low"), (79.9, "low"), (80, "good"), (100, "good")])
def test_utilization_is_good_from_80_to_100_percent(mean: float, level: str) -> None:
    (verdict,) = assess_health(summary_of(gpu0_util=(0, mean, 100)))
    assert (verdict.subject, verdict.level) == ("GPU 0 utilization", level)
    assert f"mean {mean:.0f} %, 0 to 100 %" in verdict.evidence


@pytest.mark.parametrize(
    ("used", "level"),
    [(0.1, "low"), (4.9, "low"), (5, "good"), (7.9, "good"), (8.5, "note"), (9.0, "high"), (10, "high")],
)
def test_peak_memory_is_good_from_50_to_80_percent(used: float, level: str) -> None:
    summary = summary_of(gpu0_util=90, gpu0_memory_gib=(0, used / 2, used), gpu0_memory_total_gib=10.0)
    assert verdicts_of(summary)["GPU 0 memory"] == level


@pytest.mark.parametrize("bands", [UTILIZATION, MEMORY])
def test_rating_bands_cover_0_to_100_percent(bands: tuple[object, ...]) -> None:
    edges = [(band.low, band.high) for band in bands]  # type: ignore[attr-defined]
    assert edges[0][0] == 0
    assert edges[-1][1] > 100
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_missing_readings_cause_no_verdict() -> None:
    assert assess_health(Summary()) == []
    assert assess_health(summary_of(cpu_percent=50.0, ram_percent=50.0)) == []
    assert verdicts_of(summary_of(gpu0_temperature_c=99.0, gpu0_power_w=300.0)) == {}
    assert verdicts_of(summary_of(gpu0_memory_gib=9.9)) == {}, (
        "without the capacity, there must be no verdict on the memory"
    )
    assert verdicts_of(summary_of(cpu_percent=100.0)) == {}, "it is unknown whether a GPU waits for the CPU"


def test_an_idle_gpu_causes_no_advice() -> None:
    summary = summary_of(gpu0_util=0.0, gpu0_memory_gib=0.1, gpu0_memory_total_gib=15.0, cpu_percent=99.0)
    assert verdicts_of(summary) == {"GPU 0 utilization": "note"}


@pytest.mark.parametrize("reason", THROTTLE_REASONS.values())
def test_throttle_reasons_have_a_share_and_the_temperature(reason: str) -> None:
    assert reason in THROTTLE_MEANINGS
    (verdict,) = assess_health(summary_of({"gpu0": {reason: 0.4}}, gpu0_temperature_c=(40, 60, 87)))
    assert verdict.subject == "GPU 0 clocks"
    assert verdict.evidence.startswith(f"{reason}, 40 % ")
    assert verdict.evidence.endswith(" 87 °C")
    assert verdict.level == ("high" if "temperature" in reason or "hardware" in reason or "brake" in reason else "note")


def test_unthrottled_clocks_are_not_mentioned() -> None:
    assert verdicts_of(summary_of({"gpu0": {"power limit": 0.0}}, gpu0_power_w=50)) == {}


def test_other_processes_are_reported_for_runs_and_machines() -> None:
    one, two = (summary_of(gpu0_other_processes=count, gpu0_other_memory_gib=1.5) for count in (1, 2))
    assert verdicts_of(one) == verdicts_of(two) == {"GPU 0 processes": "high"}
    assert verdicts_of(one, of_run=False) == {}
    assert verdicts_of(two, of_run=False) == {"GPU 0 processes": "high"}
    assert re.findall(r"[\d.]+", assess_health(two)[0].evidence) == ["2", "1.5"]
    assert verdicts_of(summary_of(gpu0_other_processes=0)) == {}


def test_ram_and_cpu_are_reported_if_limiting() -> None:
    assert verdicts_of(summary_of(ram_percent=(10, 40, 95)))["RAM"] == "high"
    busy = summary_of(cpu_percent=97, gpu0_util=(0, 30, 60))
    assert verdicts_of(busy)["CPU"] == "high"
    assert "GPU 0 30 %" in next(verdict.evidence for verdict in assess_health(busy) if verdict.subject == "CPU")
    assert "CPU" not in verdicts_of(summary_of(cpu_percent=97, gpu0_util=95)), (
        "the CPU must not be reported if no GPU waits"
    )


def test_only_memory_errors_during_monitoring_count() -> None:
    assert verdicts_of(summary_of(gpu0_ecc_uncorrected=(3, 3, 3))) == {}
    assert verdicts_of(summary_of(gpu0_ecc_uncorrected=(3, 4, 5)))["GPU 0 memory errors"] == "high"


def of_gpu0(kind: str, says: str, **facts: object) -> Alert:
    return Alert(kind, f"gpu0 (Tesla T4) {says}", "warning", {"device": "gpu0", "uuid": "GPU-1", **facts})


def test_a_lost_gpu_comes_first_without_other_advice() -> None:
    summary = summary_of(
        {"gpu0": {"power brake": 1.0}}, gpu0_util=50, gpu0_memory_gib=1, gpu0_memory_total_gib=10, ram_percent=99
    )
    why = "it has fallen off the bus"
    result = assess_health(summary, [of_gpu0("lost", f"is lost: {why}")])
    assert [verdict.subject for verdict in result] == ["GPU 0 lost", "RAM"]
    assert (result[0].level, result[0].message) == ("high", why)
    assert "GPU-1" in result[0].evidence


def test_a_driver_error_is_severe_and_reported_once() -> None:
    what = "XID 48, a memory error; reset it"
    xid = Alert("xid", f"gpu0 (Tesla T4): {what}", "warning", {"device": "gpu0"})
    result = assess_health(summary_of(gpu0_util=90), [xid])
    assert (result[0].subject, result[0].level) == ("GPU 0 error", "high")
    assert result[0].message == what
    ecc = of_gpu0("ecc", "had memory errors that could not be corrected", ecc="uncorrected")
    assert verdicts_of(summary_of()) == {}
    assert [verdict.subject for verdict in assess_health(summary_of(), [ecc])] == ["GPU 0 memory errors"]
    counted = assess_health(summary_of(gpu0_ecc_uncorrected=(0, 1, 2)), [ecc])
    assert [verdict.subject for verdict in counted] == ["GPU 0 memory errors"], "one verdict for both reports"
    corrected = of_gpu0("ecc", "had a memory error that was corrected", ecc="corrected")
    assert assess_health(summary_of(), [corrected]) == []


def test_a_cpu_run_gets_no_verdicts_about_gpus() -> None:
    summary = summary_of(
        gpu0_util=90, gpu0_memory_gib=1, gpu0_memory_total_gib=10, gpu0_other_processes=1, ram_percent=99
    )
    result = assess_health(summary, on_gpu=False)
    assert [(verdict.level, verdict.subject) for verdict in result] == [("high", "RAM"), ("note", "GPUs")]
    assert assess_health(summary_of(ram_percent=50), on_gpu=False) == []


def test_verdicts_are_sorted_by_severity() -> None:
    summary = summary_of(
        {"gpu0": {"power limit": 1.0}}, gpu0_util=90, gpu0_memory_gib=1, gpu0_memory_total_gib=10, ram_percent=99
    )
    assert [verdict.level for verdict in assess_health(summary)] == ["high", "low", "note", "good"]


def test_every_rule_applies_to_a_summary() -> None:
    summary = summary_of(
        {"gpu0": {"power brake": 1.0}}, gpu0_util=50, gpu0_memory_gib=1, gpu0_memory_total_gib=10, ram_percent=99,
        cpu_percent=99, gpu0_ecc_uncorrected=(0, 1, 2),
    )  # fmt: skip
    for rule in RULES:
        assert list(rule(summary)), rule


def test_the_table_has_minimum_mean_and_maximum() -> None:
    lines = format_metrics(summary_of(gpu0_util=(80, 85, 90), ram_percent=(1, 2, 3)))
    assert [line.split() for line in lines] == [
        ["lowest", "mean", "highest"],
        ["GPU", "0", "Tesla", "T4"],
        ["utilization", "%", "80", "85", "90"],
        ["RAM", "%", "1.0", "2.0", "3.0"],
    ]
    assert format_metrics(Summary()) == []


def test_each_of_several_phases_has_a_line(screen: Callable[..., None]) -> None:
    times = np.arange(6.0)
    samples = MachineSamples(
        times, np.ones(6), ("lora",) * 2 + ("router",) * 4, {"gpu0/util": times * 10, "cpu/percent": times}
    )
    screen("\n".join(format_phases(summarize_samples(samples))))
    assert (
        format_phases(summarize_samples(MachineSamples(times, np.ones(6), ("train",) * 6, {"cpu/percent": times})))
        == []
    )
