"""The text of a profile: the overhead of an instrument is never negative."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.profiling.profile_report import NO_INSTRUMENT, Findings, format_profile


@pytest.mark.parametrize(("milliseconds", "is_noise"), [(5.0, True), (99.0, True), (100.0, False), (140.0, False)])
def test_instrument_overhead_is_never_negative(milliseconds: float, is_noise: bool) -> None:
    times = {NO_INSTRUMENT: 100.0, "operators": milliseconds}
    text = format_profile(Findings("train", "cpu", 1, 0, times, dict.fromkeys(times, 3)), Path("profile"), 120)

    (line,) = [line for line in text.splitlines() if line.strip().startswith("operators")]
    assert "-" not in line
    assert ("%" not in line) == is_noise
    assert ("noise" in text) == is_noise
