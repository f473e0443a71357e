"""Repetitions of trials, such as seeds and folds, are compared by their means, not one by one."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import main
from runner.records.sweep_record import Goal
from runner.sweeps.trials import BEST, Result, Sweep, Trial, find_best, format_summary, format_trial_table, to_csv
from tests.forkserver import ForkServer
from tests.sweeps.test_sweeps import TASK, run
from tests.tools.report.test_report import Page

OVER_FOLDS = Goal("val/pck", "max", ("task.fold",))


def trials(words: Sequence[str], values: Sequence[float | None]) -> list[Result]:
    """Return a result for each trial. A trial without a value has failed."""
    return [
        Result(
            Trial(number, f"mine-{number}", tuple(each.split())),
            "failed" if value is None else "finished",
            70 if value is None else 0,
            value,
            value,
            metrics={} if value is None else {"val/pck": value},
        )
        for number, (each, value) in enumerate(zip(words, values, strict=True), 1)
    ]


# With a learning rate of 0.1, one fold is the best of all, but the mean is worse.
GRID = [f"optimizer.lr={lr} task.fold={fold}" for lr in (0.1, 0.01) for fold in (1, 2, 3)]
VALUES = [0.9, 0.2, 0.1, 0.5, 0.6, 0.7]


def csv_rows(results: Sequence[Result], goal: Goal) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(results, goal))))


def test_the_best_combination_has_the_best_mean() -> None:
    """This combination need not have the best repetition."""
    results = trials(GRID, VALUES)
    best = find_best(results, OVER_FOLDS)
    assert best is not None
    assert best.settings == {"optimizer.lr": "0.01"}
    assert best.mean == statistics.mean(VALUES[3:])
    assert [row["is_best"] for row in csv_rows(results, OVER_FOLDS)] == list("000111")
    assert "optimizer.lr=0.01" in format_summary(results, OVER_FOLDS)


def test_the_table_marks_the_best_combination() -> None:
    """No single trial is marked."""
    lines = format_trial_table(trials(GRID, VALUES), OVER_FOLDS)
    marked = [line.split() for line in lines if line.endswith(BEST)]
    assert [line[:4] for line in marked] == [["0.01", "3", "of", "3"]]
    single = trials([f"task.fold={fold}" for fold in (1, 2, 3)], VALUES[:3])
    lines = format_trial_table(single, OVER_FOLDS)
    assert not [line for line in lines if line.endswith(BEST)]
    assert lines[-1].split() == ["3", "of", "3", "0.4", f"{statistics.stdev(VALUES[:3]):.3g}"]
    assert "3 of 3" in format_summary(single, OVER_FOLDS)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_the_standard_deviation_is_the_sample_standard_deviation(values: list[float]) -> None:
    results = trials([f"seed={seed}" for seed in range(len(values))], [*values])
    found = find_best(results, Goal("val/pck", "max", ("seed",)))
    assert found is not None
    assert (found.mean, found.std) == (statistics.mean(values), statistics.stdev(values))
    for row in csv_rows(results, Goal("val/pck", "max", ("seed",))):
        assert (float(row["val/pck mean"]), float(row["val/pck std"])) == (found.mean, found.std)
        assert row["val/pck count"] == str(len(values))


def test_a_combination_with_failed_repetitions_is_not_the_best() -> None:
    values = [*VALUES[:5], None]  # the remaining two repetitions have the best mean
    results = trials(GRID, values)
    best = find_best(results, OVER_FOLDS)
    assert best is not None
    assert best.settings == {"optimizer.lr": "0.1"}
    assert [row["val/pck count"] for row in csv_rows(results, OVER_FOLDS)] == list("333222")
    assert any(" 2 of 3 " in line for line in format_trial_table(results, OVER_FOLDS))
    assert find_best(trials(GRID, [None] * 6), OVER_FOLDS) is None


def test_a_single_repetition_has_no_standard_deviation() -> None:
    results = trials(GRID[:3], [0.5, None, None])
    (row, *_) = csv_rows(results, OVER_FOLDS)
    assert (row["val/pck mean"], row["val/pck std"], row["val/pck count"]) == ("0.5", "", "1")
    assert "nan" not in "".join([format_summary(results, OVER_FOLDS), *format_trial_table(results, OVER_FOLDS)])


def test_files_contain_no_means_without_repetitions() -> None:
    # a search may propose the same combination twice
    results = trials(["optimizer.lr=0.1", "optimizer.lr=0.1"], [0.5, 0.6])
    assert [row["is_best"] for row in csv_rows(results, Goal("val/pck", "max"))] == ["0", "1"]
    assert not [name for name in csv_rows(results, Goal("val/pck", "max"))[0] if name.endswith(("mean", "std"))]


@pytest.fixture(scope="module")
def swept(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep over two sizes and two seeds, and return the folder in which it was started."""
    folder = tmp_path_factory.mktemp("swept")
    code, _, err = run(server, ["train", "-m", "task.hidden=8,16", "seed=0,1", *TASK], folder)
    assert code == 0, err
    return folder


def sweep_json(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "outputs" / "mine" / "sweep.json").read_text())
    assert isinstance(content, dict)
    return content


def test_a_sweep_over_seeds_stores_the_means(swept: Path) -> None:
    """There is a mean for each combination of the other settings."""
    content = sweep_json(swept)
    values = [trial["last"] for trial in content["trials"]]
    assert len(set(values)) == 4, "trials must have different values"
    means = [
        (each["settings"], each["trials"], each["count"], each["mean"], each["std"]) for each in content["combinations"]
    ]
    assert means == [
        ({"task.hidden": size}, numbers, 2, statistics.mean(part), statistics.stdev(part))
        for size, numbers, part in (("8", [1, 2], values[:2]), ("16", [3, 4], values[2:]))
    ]
    best = find_best(Sweep.read(swept / "outputs" / "mine").results(), Sweep.read(swept / "outputs" / "mine").goal)
    assert best is not None
    assert [each["settings"] for each in content["combinations"] if each["is_best"]] == [best.settings]


@pytest.mark.parametrize(
    ("words", "over"),
    [
        ("seed=0,1", ["seed"]),
        ("task.fold=1,2", ["task.fold"]),
        ("task.fold=1,2 seed=0,1 task.hidden=8,16", ["task.fold", "seed"]),
        ("seed=3 task.hidden=8,16", []),
        ("task.folds=1,2", []),
    ],
)
def test_swept_seeds_and_folds_are_repetitions(words: str, over: list[str], server: ForkServer, tmp_path: Path) -> None:
    code, _, err = run(server, ["train", "-m", *words.split(), "task.seconds=0.01", *TASK], tmp_path)
    assert code == 0, err
    assert sweep_json(tmp_path)["goal"]["over"] == over


@pytest.mark.slow
def test_status_runs_and_report_show_the_means(
    swept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(swept)
    content = sweep_json(swept)
    (best,) = [each for each in content["combinations"] if each["is_best"]]
    assert main(["status", "mine"]) == 0
    (marked,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith(BEST)]
    assert marked.split()[4:6] == [f"{best['mean']:.5g}", f"{best['std']:.3g}"]
    assert main(["runs"]) == 0
    assert f"val/loss {best['mean']:.4g}" in capsys.readouterr().out
    assert main(["report", "mine"]) == 0
    words = Page((swept / "outputs" / "mine" / "report.html").read_text()).words
    assert f"{best['std']:.3g}" in words
    assert words.count(BEST) == 1
