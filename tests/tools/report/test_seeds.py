"""A comparison shows mean and standard deviation of runs that differ only in their seed."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from runner.durable.directory import RunDirectory
from runner.tools.report.comparison import describe_seeds
from runner.tools.report.run_data import RunData, read_run_data
from tests.tools.report.runs import make_run, record


def run_of(folder: Path, name: str, loss: float, *, seed: int, lr: float = 0.1, state: str = "done") -> RunData:
    settings = f"seed: {seed}\nrun: {name}\noptimizer:\n  lr: {lr}\n"
    path = make_run(
        folder, name, run__json=record(name, metrics={"val/loss": loss}, state=state), config__yaml=settings
    )
    return read_run_data(RunDirectory(path, writable=False))


def test_runs_with_other_seeds_have_a_mean_and_a_deviation(tmp_path: Path) -> None:
    losses = [2.0, 2.2, 2.1]
    runs = [run_of(tmp_path, f"run{seed}", loss, seed=seed) for seed, loss in enumerate(losses)]
    runs.append(run_of(tmp_path, "another", 3.0, seed=0, lr=0.2))

    text = describe_seeds(runs, [run.name for run in runs])

    mean, deviation = text.rpartition(": ")[2].split(" \N{PLUS-MINUS SIGN} ")
    assert float(mean) == pytest.approx(statistics.fmean(losses))
    assert float(deviation) == pytest.approx(statistics.stdev(losses), rel=0.1)
    assert "another" not in text


def test_repetitions_with_one_seed_are_not_averaged(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, name, 2.0, seed=1) for name in ("one", "two")]

    assert describe_seeds(runs, ["one", "two"]) == ""


def test_runs_that_are_not_finished_are_not_averaged(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, "one", 2.0, seed=0), run_of(tmp_path, "two", 2.0, seed=1, state="failed")]

    assert describe_seeds(runs, ["one", "two"]) == ""
