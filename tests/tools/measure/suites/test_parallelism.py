"""`accel-run benchmark suite=parallelism` finds the known speedup of two ranks, and rejects invalid requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runner.base.errors import AccelRunError, ConfigError
from runner.tools.measure import suite
from runner.tools.measure.compare import CompareLimits, Comparison, LogFunction
from runner.tools.measure.comparison_result import ComparisonResult, Variant
from runner.tools.measure.suite import SuiteReport
from runner.tools.measure.suites import parallelism
from runner.tools.measure.suites.parallelism import run
from tests.tools.measure.suites.asked import asked, blocks

TASK = Path(__file__).parents[1] / "task_of_sizes.py"
LAYERS = Path(__file__).parents[1] / "planted" / "layers.py"
SETTINGS = ("global_batch_size=32",)
TICKS = 0.02  # relative tolerance, because each reading of the clock takes 10 us


def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *args: str, **options: str) -> SuiteReport:
    monkeypatch.setattr(suite, "ROUNDS", (3, 4))
    return run(asked("parallelism", tmp_path, TASK, *SETTINGS, *args, **options))


@pytest.mark.slow
def test_two_ranks_reach_the_known_speedup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample takes 3 ms on each rank."""
    result = report(tmp_path, monkeypatch, "task.sample_ms=3", forms="single,equal,shares,pipeline", updates="3")

    ratios = result.data["ratios"]
    assert ratios["equal"]["verdict"] == "better"
    assert ratios["equal"]["middle"] == pytest.approx(2.0, rel=TICKS)
    assert ratios["shares"]["middle"] == pytest.approx(2.0, rel=TICKS)
    assert "equal against single: +" in result.headline
    assert "layers" in result.skipped["pipeline"]
    assert set(json.loads(result.files[0].read_text())["ratios"]) == {"equal", "shares"}


class Alone(Comparison):
    """Runs two updates of each variant and returns fixed times."""

    def compare(self, variants: Sequence[Variant], limits: CompareLimits, log: LogFunction = print) -> ComparisonResult:
        result = []
        for variant in variants:
            with self.open_variant(variant, limits) as (ask, measured):
                assert ask({"do": "run", "updates": 2})["updates"] == 2
            measured.blocks = blocks([1.0] * 3)
            result.append(measured)
        return ComparisonResult(result, "interleaved")


@pytest.mark.slow
@pytest.mark.usefixtures("real_time")  # stages do not join the collectives that synchronize virtual clocks
def test_a_pipeline_of_two_ranks_has_enough_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an update had a single micro-batch, each stage would always wait for the other."""
    monkeypatch.setattr(suite, "BLOCK_S", 0.01)
    monkeypatch.setattr(parallelism, "Comparison", Alone)

    result = run(asked("parallelism", tmp_path, LAYERS, forms="single,pipeline", updates="2"))

    rows = {row[0]: row for row in result.tables[0].rows}
    assert not result.skipped
    assert rows["pipeline"][1] == 2
    assert str(rows["pipeline"][2]).split() == ["parallelism=pipeline", "micro_batch_size=4"]
    assert all(len(each["blocks"]) == 3 for each in result.data["variants"])
    assert "pipeline against single: " in result.headline


@pytest.mark.slow
@pytest.mark.usefixtures("real_time")
def test_too_short_budgets_are_rejected(tmp_path: Path) -> None:
    wanted = replace(asked("parallelism", tmp_path, LAYERS, forms="single", updates="1"), budget_s=0.01)

    with pytest.raises(AccelRunError, match=r"budget_s: is too short"):
        run(wanted)


@pytest.mark.slow
def test_shares_without_effect_are_not_a_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = report(tmp_path, monkeypatch, "task.sample_ms=1", forms="equal", updates="5")

    assert [row[0] for row in result.tables[0].rows] == ["equal"]
    assert result.data["ratios"] == {}


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("ranks", "1", "integers of at least 2"), ("ranks", "two", "integers"), ("updates", "0", "integers"),
        ("forms", "fsdp2", "must be values from single"),
    ],
)  # fmt: skip
def test_impossible_requests_are_rejected(tmp_path: Path, key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={text}.*{message}"):
        run(asked("parallelism", tmp_path, TASK, **{key: text}))
