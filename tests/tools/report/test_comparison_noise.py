"""A comparison states which differences are within the noise between seeds or between rows."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from runner.durable.directory import RunDirectory
from runner.tools.report.comparison_noise import describe_noise
from runner.tools.report.run_data import read_run_data
from tests.tools.report.runs import make_run, record


def compared(folder: Path, losses: dict[str, list[float]], *, median_ms: float = 11.0) -> str:
    """Return the statement about runs with these losses (learning rate -> loss for each seed)."""
    runs = []
    for lr, values in losses.items():
        for seed, loss in enumerate(values):
            output = record(f"{lr}-{seed}", metrics={"val/loss": loss})
            output["evidence"]["step_time_ms"] = median_ms if runs else 11.0
            path = make_run(
                folder, f"{lr}-{seed}", run__json=output, config__yaml=f"seed: {seed}\noptimizer:\n  lr: {lr}\n"
            )
            runs.append(read_run_data(RunDirectory(path, writable=False)))
    return describe_noise(runs, [run.name for run in runs])


def test_small_differences_are_within_noise(tmp_path: Path) -> None:
    found = compared(tmp_path, {"0.1": [2.0, 2.2], "0.2": [2.1, 2.3]})
    assert "exceed" not in found
    assert all(name in found for name in ("0.1-0", "0.1-1", "0.2-0", "0.2-1"))


def test_large_differences_exceed_the_noise(tmp_path: Path) -> None:
    assert "exceed" in compared(tmp_path, {"0.1": [2.0, 2.01], "0.2": [3.0, 3.01]})


def test_the_noise_limit_matches_a_t_test(tmp_path: Path) -> None:
    values = [2.0, 2.2, 2.1, 2.15]
    sigma = statistics.stdev(values)
    limit = 3.182 * sigma * math.sqrt(1 + 1 / 4)  # 97.5 % quantile with three degrees of freedom
    for factor, is_within in ((0.98, True), (1.02, False)):
        other = statistics.fmean(values) + factor * limit
        found = compared(tmp_path / str(factor), {"0.1": values, "0.2": [other]})
        assert ("exceed" in found) != is_within


def test_runs_with_one_seed_get_advice(tmp_path: Path) -> None:
    found = compared(tmp_path, {"0.1": [2.0], "0.2": [3.0]})
    script = str(tmp_path / "0.1-0" / "command.sh")
    assert found.split(script)[1].split()[:2] == ["run=0.1-0-seed1", "seed=1;"]


def test_repetitions_with_one_seed_show_no_noise(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    runs = []
    for name in names:
        lr, loss = ("0.2", 2.1) if name == "d" else ("0.1", 2.0)
        path = make_run(
            tmp_path, name, run__json=record(name, metrics={"val/loss": loss}),
            config__yaml=f"seed: 0\noptimizer:\n  lr: {lr}\n",
        )  # fmt: skip
        runs.append(read_run_data(RunDirectory(path, writable=False)))
    assert "exceed" not in describe_noise(runs, names)
    assert "seed" not in describe_noise(runs[:3], names), "only code or data may differ"


def test_an_unfinished_run_is_not_compared(tmp_path: Path) -> None:
    path = make_run(
        tmp_path, "stopped", run__json=record("stopped", metrics={"val/loss": 9.0}, state="interrupted"),
        config__yaml="seed: 5\noptimizer:\n  lr: 0.1\n",
    )  # fmt: skip
    compared(tmp_path, {"0.1": [2.0, 2.2], "0.2": [2.1, 2.3]})
    names = ["0.1-0", "0.1-1", "0.2-0", "0.2-1"]
    runs = [read_run_data(RunDirectory(tmp_path / name, writable=False)) for name in names]
    stopped = read_run_data(RunDirectory(path, writable=False))
    assert "val/loss" in describe_noise(runs, names)
    assert "val/loss" not in describe_noise([*runs, stopped], [*names, "stopped"])


def test_runs_with_different_seeds_are_within_noise(tmp_path: Path) -> None:
    found = compared(tmp_path, {"0.1": [2.0, 3.0]})
    assert "exceed" not in found
    assert "command.sh" not in found, "no advice is needed"


@pytest.mark.parametrize(("median_ms", "is_within"), [(12.0, True), (15.0, False)])
def test_time_differences_within_the_range_of_rows_are_noise(median_ms: float, is_within: bool, tmp_path: Path) -> None:
    found = compared(tmp_path, {"0.1": [2.0], "0.2": [2.0]}, median_ms=median_ms)
    assert (found.count("0.2-0") > 0) == is_within
