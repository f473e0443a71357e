"""A resumed run compares lengths and samples of its datasets with those of its checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import IncompatibleResume
from runner.distributed.world import World
from runner.engine.hooks.data_changes import DataChanges
from tests.opened import opened


class Compared:
    """Runs the hook of a phase, and collects its reports."""

    def __init__(self, phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase, self.provenance = phase, phase.run.provenance
        self.warned: list[str] = []
        self.events: list[Any] = []
        self.num_recorded = 0
        screen = phase.run.observers.screen
        monkeypatch.setattr(screen, "warn", self.warned.append)
        monkeypatch.setattr(screen, "record_event", lambda kind, **values: self.events.append((kind, values)))
        monkeypatch.setattr(self.provenance, "on_change", self._record)
        monkeypatch.setattr(self.provenance, "is_compared", True)

    def _record(self) -> None:
        self.num_recorded += 1

    def begin(self, state: Any) -> Any:
        """Start a hook with this state; return its state."""
        hook = DataChanges(self.phase)
        hook.load_state_dict(state)
        hook.begin()
        return hook.state_dict()


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    with opened(tmp_path, "checkpoint=off") as phase:
        yield Compared(phase, monkeypatch)


def test_equal_data_are_recorded_and_not_reported(compared: Compared) -> None:
    state = compared.begin(None)
    assert state["train"]["samples"] == 64
    assert state["train"]["hashes"]
    assert "sampler" in state["train"]
    assert compared.begin(copy.deepcopy(state)) == state
    assert compared.begin({"val": {"samples": 9, "hashes": {}}}) == state  # the split is no longer evaluated
    assert (compared.warned, compared.events, compared.provenance.changes, compared.num_recorded) == ([], [], [], 0)


@pytest.mark.parametrize("files", [[], ["task.py"]])
@pytest.mark.parametrize("has_sample", [True, False])
def test_changed_samples_and_code_are_reported_once_and_recorded(
    files: list[str], has_sample: bool, compared: Compared
) -> None:
    state = compared.begin(None)
    before = copy.deepcopy(state)
    first = next(iter(before["train"]["hashes"]))
    if has_sample:
        before["train"]["hashes"][first] = "another"
    compared.provenance.edited = list(files)
    compared.phase.position.update = 3
    assert compared.begin(before) == state
    samples = [f"train sample {first}"] if has_sample else []
    change = {"phase": "train", "update": 3, "files": files, "samples": samples}
    num_changes = int(bool(files) or has_sample)
    assert compared.events == [("changed", change)] * num_changes
    assert compared.provenance.changes == [change] * num_changes
    assert compared.num_recorded == num_changes
    assert len(compared.warned) == num_changes
    for name in [*files, *samples]:
        assert name in compared.warned[0]
    compared.begin(state)  # as in the next phase
    assert len(compared.warned) == num_changes


@pytest.mark.parametrize("state", [{"samples": 63, "hashes": {}}, {"samples": 64, "sampler": "another", "hashes": {}}])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_different_length_or_sampler_is_rejected_on_every_rank(
    is_first: bool, state: Any, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "is_first", is_first)
    with pytest.raises(IncompatibleResume):
        compared.begin({"train": state})


def test_only_the_first_rank_reads_samples(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copy.deepcopy(compared.begin(None))
    before["train"]["hashes"] = dict.fromkeys(before["train"]["hashes"], "another")
    monkeypatch.setattr(World, "is_first", False)
    assert compared.begin(before) == {}
    assert compared.warned == []


@pytest.mark.parametrize(
    ("is_compared", "is_resumed", "is_over", "is_read"),
    [(False, False, False, False), (True, True, True, False), (True, True, False, True), (True, False, True, True)],
)
def test_data_are_not_read_if_not_compared_or_no_update_is_left(
    is_compared: bool,
    is_resumed: bool,
    is_over: bool,
    is_read: bool,
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compared.provenance, "is_compared", is_compared)
    monkeypatch.setattr(compared.phase, "start", object() if is_resumed else None)
    compared.phase.position.update = compared.phase.total if is_over else 0
    state = {"train": {"samples": 64, "hashes": {}}}
    assert (compared.begin(state) != state) == is_read


def test_nondeterministic_samples_are_reported_but_not_as_a_change(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(range(1000))
    monkeypatch.setattr(
        type(compared.phase.parts.task.dataset("train")), "__getitem__", lambda _, index: torch.tensor(next(drawn))
    )
    state = compared.begin(None)
    compared.begin(copy.deepcopy(state))
    assert ["train" in text for text in compared.warned] == [True, True]
    assert compared.events == []
