"""`accel-run benchmark suite=batch`: the update stays the same, and sizes that do not fit are skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.commands.benchmark import run as benchmark
from runner.tools.measure.suite import SuiteReport, screen
from runner.tools.measure.suites.batch import halve_repeatedly, run
from tests.forkserver import ForkServer
from tests.tools.measure.suites.asked import asked

TASK = Path(__file__).parents[1] / "task_of_sizes.py"
SETTINGS = ("updates=100", "device=cpu", "backend.threads=1", "global_batch_size=16")


def report(tmp_path: Path, *args: str, **options: str) -> SuiteReport:
    return run(asked("batch", tmp_path, TASK, *SETTINGS, *args, **options))


def rows(result: SuiteReport) -> dict[tuple[object, object], Mapping[str, object]]:
    (table,) = result.tables
    named = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return {(row["of an update"], row["micro-batch"]): row for row in named}


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_the_fastest_size_that_fits_is_recommended(tmp_path: Path) -> None:
    """A micro-batch of any size takes 6 ms, and 16 samples do not fit."""
    result = report(tmp_path, "micro_batch_size=2", "task.pass_ms=6", "task.most=8", micro="2,4,8,16,3,32")

    assert result.data["recommended_micro_batch_size"] == 8
    assert "micro_batch_size=8" in result.headline
    assert "micro 16" in result.skipped
    assert "does not divide" in result.skipped["micro 3"]
    assert "exceeds the 16" in result.skipped["micro 32"]
    assert set(rows(result)) == {(16, 2), (16, 4), (16, 8)}
    eight = rows(result)[16, 8]
    assert eight["micro-batches"] == 2
    assert eight["samples/s"] == pytest.approx(16e3 / eight["update, ms"])  # type: ignore[operator]
    (file,) = result.files
    assert json.loads(file.read_text())["recommended_micro_batch_size"] == 8
    assert result.headline in screen(result)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_measurements_start_at_the_first_fitting_size(tmp_path: Path) -> None:
    result = report(tmp_path, "task.pass_ms=4", "task.most=4", micro="8,4,2")

    assert set(result.skipped) == {"as it is", "micro 8"}
    assert result.data["recommended_micro_batch_size"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_no_size_is_recommended_for_models_with_batch_norm(tmp_path: Path) -> None:
    """Batch norm statistics depend on the micro-batch, so another size would change the results."""
    result = report(tmp_path, "micro_batch_size=4", "task.pass_ms=6", "task.norm=true", micro="8")

    assert float(str(rows(result)[16, 4]["samples/s"])) < float(str(rows(result)[16, 8]["samples/s"]))
    assert result.data["recommended_micro_batch_size"] == 4
    assert any("batch norms" in note for note in result.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_settings_that_change_training_are_not_recommended(tmp_path: Path) -> None:
    """An update with twice as many samples takes the same time, but changes the training."""
    result = report(tmp_path, "task.pass_ms=8", **{"global": "16,32", "micro": "16,32"})

    assert result.data["recommended_micro_batch_size"] == 16
    twice = rows(result)[32, 32]
    assert twice["sure"] == "better"
    assert any("changes the training" in note for note in result.notes)


@pytest.mark.parametrize("key", ["micro", "global"])
@pytest.mark.parametrize("text", ["0", "-4", "2.5", "many", "", "4,,8", "٣"])
def test_sizes_must_be_positive_integers(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}={text}.*integers of at least 1"):
        report(tmp_path, **{key: text})


def test_unknown_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plots: is not an argument of this suite"):
        benchmark(["suite=batch", "plots", f"folder={tmp_path}"])


@pytest.mark.parametrize(
    ("samples", "sizes"), [(16, [16, 8, 4, 2, 1]), (12, [12, 6, 3]), (512, [512, 256, 128, 64, 32, 16])]
)
def test_default_sizes_divide_the_update_evenly(samples: int, sizes: list[int]) -> None:
    assert list(halve_repeatedly(samples)) == sizes


@pytest.mark.slow
def test_a_too_short_budget_is_rejected(server: ForkServer, tmp_path: Path) -> None:
    """Runs in real time. If the baseline does start within the budget, the table reports that no other variant did."""
    result = server.run(f"benchmark suite=batch --task {TASK} {' '.join(SETTINGS)} budget_s=0.01", tmp_path)
    assert result.code in (0, 78), result.err
    assert "budget_s" in (result.err if result.code else result.out)
