"""The state of a checkpoint is accepted only if every field is valid and all fields are consistent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.base.errors import DataError
from runner.durable.checkpoint import LoadedCheckpoint, load, newest_valid
from runner.engine.checkpoints.checkpoint_state import check_state, convert_state_errors
from tests.opened import opened


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> LoadedCheckpoint:
    """Run three updates and load the last checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    with opened(folder, "updates=3", "checkpoint.every=1") as phase:
        phase.run_updates()
    path = newest_valid(folder / "small" / "checkpoints")
    assert path is not None
    return load(path)


def apply_change(start: LoadedCheckpoint, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> LoadedCheckpoint:
    state, manifest = copy.deepcopy(start.state), copy.deepcopy(start.manifest)
    change(state, manifest)
    return replace(start, state=state, manifest=manifest)


def test_a_state_written_by_this_program_is_accepted(start: LoadedCheckpoint) -> None:
    assert check_state(start) is start


def test_missing_fields_and_wrong_types_are_rejected(start: LoadedCheckpoint) -> None:
    needed = ["phase", "phase_update", "records", "updates_before", "early_stopping", "precision", "meter", "random"]
    for name in needed:
        with pytest.raises(DataError, match=name):
            check_state(apply_change(start, lambda state, _, name=name: state.pop(name)))
        with pytest.raises(DataError, match=name):
            check_state(apply_change(start, lambda state, _, name=name: state.update({name: None})))


@pytest.mark.parametrize("name", ["level", "metric"])
def test_in_schedule_state_only_the_metric_can_be_a_string(name: str, start: LoadedCheckpoint) -> None:
    valid = {"level": 0.5, "best": None, "metric": "val/loss", "mode": "min"}
    check_state(apply_change(start, lambda state, _: state.update(schedule=valid)))
    other = {**valid, name: 1.0 if name == "metric" else "val/loss"}
    with pytest.raises(DataError, match="schedule"):
        check_state(apply_change(start, lambda state, _: state.update(schedule=other)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, _: state.update(phase="another"), "records"),
        (lambda state, _: state.update(phase_update=state["phase_update"] + 1), "sum"),
        (lambda state, _: state.update(updates_before=1), "sum"),
        (lambda _, manifest: manifest.update(metrics_bytes=-1), "metrics_bytes"),
        (lambda _, manifest: manifest.pop("metrics_bytes"), "metrics_bytes"),
    ],
)
def test_inconsistent_or_invalid_fields_are_rejected(
    start: LoadedCheckpoint, change: Callable[..., Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_state(apply_change(start, change))


@pytest.mark.parametrize(
    "change",
    [
        lambda random: random["numpy"][1].pop(),
        lambda random: random["numpy"][1].append(0),
        lambda random: random["numpy"].__setitem__(2, 625),
        lambda random: random["numpy"].__setitem__(2, -1),
        lambda random: random["numpy"].__setitem__(0, "PCG64"),
        lambda random: random["numpy"][1].__setitem__(0, 1 << 32),
        lambda random: random["python"][1].pop(),
        lambda random: random["python"][1].__setitem__(-1, 625),
        lambda random: random["python"].__setitem__(0, 2),
        lambda random: random.pop("python"),
    ],
)
def test_invalid_generator_states_are_rejected(start: LoadedCheckpoint, change: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="random"):
        check_state(apply_change(start, lambda state, _: change(state["random"])))


@pytest.mark.parametrize("error", [DataError("another"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_errors_not_caused_by_the_state_are_raised_unchanged(error: Exception, start: LoadedCheckpoint) -> None:
    with pytest.raises(type(error)) as caught, convert_state_errors(start):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyError("field"), RuntimeError("shape\nsecond line"), AssertionError()])
def test_an_error_while_a_state_is_restored_names_the_checkpoint(error: Exception, start: LoadedCheckpoint) -> None:
    with pytest.raises(DataError) as caught, convert_state_errors(start):
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.problems[0].where == str(start.path)
    assert "second" not in str(caught.value)
