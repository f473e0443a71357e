"""The text of a profile, in which the overhead of an instrument is never negative."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.profiling.profile_report import NO_INSTRUMENT, TOP, Findings, Kernel, format_profile, make_summary


@pytest.mark.parametrize(("milliseconds", "is_noise"), [(5.0, True), (99.0, True), (100.0, False), (140.0, False)])
def test_instrument_overhead_is_never_negative(milliseconds: float, is_noise: bool) -> None:
    times = {NO_INSTRUMENT: 100.0, "operators": milliseconds}
    text = format_profile(Findings("train", "cpu", 1, 0, times, dict.fromkeys(times, 3)), Path("profile"), 120)

    (line,) = [line for line in text.splitlines() if line.strip().startswith("operators")]
    assert "-" not in line
    assert ("%" not in line) == is_noise
    assert ("noise" in text) == is_noise


def test_the_summary_counts_all_kernels_and_lists_the_longest() -> None:
    findings = Findings("train", "a GPU", 1, 0, {}, {})
    findings.operators.kernels = [Kernel(f"kernel {number}", 2.0, 20.0 - number) for number in range(TOP + 3)]
    summary = make_summary(findings)
    assert summary["kernels_per_update"] == 2 * (TOP + 3)
    assert [row["name"] for row in summary["kernels"]] == [f"kernel {number}" for number in range(TOP)]


def test_kernel_names_are_shortened_to_the_distinctive_part() -> None:
    findings = Findings("train", "a GPU", 1, 0, {}, {})
    name = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<4u> >(int)"
    findings.operators.kernels = [Kernel(name, 1.0, 1.0)]
    assert "  CatArrayBatchedCopy<OpaqueType<4u> >(int) " in format_profile(findings, Path("profile"), 140)
