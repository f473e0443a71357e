"""Selection of a checkpoint of a run: the best one, the last one or that of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import DataError, InputMissing
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save
from runner.durable.checkpoint_choice import choose_checkpoint, find_best_checkpoints, label_checkpoints
from runner.durable.directory import RunDirectory

VALUES = {"checkpoint.best": "val/loss", "checkpoint.best_is": "min", "checkpoint.keep_best": 1}


def save_update(run: RunDirectory, update: int, bests: list[tuple[float, int]], **changes: Any) -> Path:
    state = {
        "phase": "train", "phase_update": update, "values": VALUES, "bests": [list(each) for each in bests],
        "metrics": {"val/loss": float(update)}, "evaluated_at": update,
    }  # fmt: skip
    return save(run.checkpoints, Snapshot(update, {"model": {"weight": torch.ones(2)}}, state | changes, {}))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    with RunDirectory.create_or_open(tmp_path, "mine") as directory:
        save_update(directory, 5, [(0.9, 5)])
        save_update(directory, 15, [(0.3, 15)])  # was kept in memory, and is written after that of update 20
        save_update(directory, 20, [(0.9, 5)])
    return RunDirectory.find(tmp_path, "mine")


def bests(run: RunDirectory, update: int) -> list[tuple[float, int]]:
    return find_best_checkpoints(load(checkpoint_path(run.checkpoints, update)))


def test_a_best_checkpoint_written_late_is_listed(run: RunDirectory) -> None:
    assert bests(run, 20) == [(0.3, 15)]
    assert bests(run, 15) == [(0.3, 15)]
    assert bests(run, 5) == [(0.9, 5)], "a checkpoint must not list later ones"


@pytest.mark.parametrize(("wanted", "update"), [(None, 15), ("best", 15), ("last", 20), ("5", 5), ("update-15", 15)])
def test_best_last_or_an_update_select_a_checkpoint(wanted: str | None, update: int, run: RunDirectory) -> None:
    assert choose_checkpoint(run, wanted).checkpoint.update == update


def test_the_best_and_the_last_checkpoint_are_labeled(run: RunDirectory) -> None:
    result = label_checkpoints([checkpoint_path(run.checkpoints, update) for update in (5, 15, 20)])
    first = {name: marked[0] for name, marked in result.items()}
    assert first == {"update-0000000015": "best", "update-0000000020": "last"}
    assert choose_checkpoint(run, None).labels == result["update-0000000015"]


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "other"}, {"values": {**VALUES, "checkpoint.best": "val/accuracy"}},
        {"values": {**VALUES, "checkpoint.best_is": "max"}}, {"bests": [["x", 15]]}, {"bests": [[0.1, -3]]},
    ],
)  # fmt: skip
def test_checkpoints_of_other_phases_or_metrics_are_not_compared(changes: Mapping[str, Any], tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path, "mine") as run:
        save_update(run, 5, [(0.9, 5)])
        save_update(run, 15, **{"bests": [(0.3, 15)], **changes})
        save_update(run, 20, [(0.9, 5)])
        assert bests(run, 20) == [(0.9, 5)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(0.1, 15)]),
        ({"evaluated_at": 14}, [(0.4, 20)]),
        ({"phase": "other"}, [(0.4, 20)]),
        ({"metrics": {"val/loss": 0.1}}, [(0.4, 20)]),
        ({"metrics": {"val/error": math.nan}}, [(0.4, 20)]),
    ],
)
def test_after_a_change_of_metric_recorded_evaluations_are_compared(
    changes: Mapping[str, Any], expected: list[tuple[float, int]], tmp_path: Path
) -> None:
    with RunDirectory.create_or_open(tmp_path, "mine") as run:
        save_update(run, 5, [(0.2, 5)], metrics={"val/error": 0.7})
        save_update(run, 15, [(0.2, 5)], **{"metrics": {"val/error": 0.1}, **changes})
        save_update(run, 20, [(0.4, 20)], values={**VALUES, "checkpoint.best": "val/error"})
        assert bests(run, 20) == expected


@pytest.mark.parametrize(("better", "expected"), [("min", [(0.1, 10), (0.2, 30)]), ("max", [(0.4, 20), (0.2, 30)])])
def test_best_checkpoints_are_listed_best_first(better: str, expected: list[tuple[float, int]], tmp_path: Path) -> None:
    """At most `checkpoint.keep_best` checkpoints are listed."""
    values = {**VALUES, "checkpoint.best_is": better, "checkpoint.keep_best": 2}
    with RunDirectory.create_or_open(tmp_path, "mine") as run:
        for value, update in ((0.1, 10), (0.4, 20), (0.2, 30)):
            save_update(run, update, [(value, update)], values=values)
        assert bests(run, 30) == expected


@pytest.mark.parametrize("better", ["min", "max"])
def test_the_earliest_of_equally_good_checkpoints_is_selected(better: str, tmp_path: Path) -> None:
    values = {**VALUES, "checkpoint.best_is": better, "checkpoint.keep_best": 2}
    with RunDirectory.create_or_open(tmp_path, "mine") as run:
        for update in (10, 20, 30):
            save_update(run, update, [(0.5, 10), (0.5, 20)][: update // 10], values=values)
        assert bests(run, 30) == [(0.5, 10), (0.5, 20)]
        assert choose_checkpoint(run, "best").checkpoint.update == 10


def test_a_damaged_best_checkpoint_is_skipped_unless_requested(run: RunDirectory) -> None:
    """A message reports that it is skipped."""
    path = checkpoint_path(run.checkpoints, 15)
    (path / "model.safetensors").write_bytes(b"damaged")
    messages: list[str] = []
    assert choose_checkpoint(run, None, messages.append).checkpoint.update == 20
    assert len(messages) == 1
    assert path.name in messages[0]
    for wanted in ("best", "15"):
        with pytest.raises(DataError):
            choose_checkpoint(run, wanted)


def test_selecting_a_missing_checkpoint_is_an_error(run: RunDirectory) -> None:
    with pytest.raises(InputMissing):
        choose_checkpoint(run, "7")
    with pytest.raises(InputMissing):
        choose_checkpoint(run, str(10**9))


@pytest.mark.parametrize("wanted", [None, "best", "last", "7"])
def test_selecting_from_a_run_without_checkpoints_is_an_error(wanted: str | None, tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path, "mine") as directory, pytest.raises(InputMissing):
        choose_checkpoint(directory, wanted)
