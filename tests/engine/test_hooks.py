"""Hooks: their order, their state in checkpoints, and their requests to save or stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runner.durable import checkpoint
from runner.engine.hooks import HOOKS
from runner.engine.hooks.checkpointing import Checkpointing, hook_state
from runner.engine.hooks.hook import Hook, PhaseView, Wants
from runner.engine.phase import Phase
from runner.engine.update.loop import StepInfo
from tests.opened import opened

# The order must be the same on all ranks and after a resume; runner/engine/hooks/__init__.py gives the reasons.
ORDER = [
    "DataChanges",
    "StreamPosition",
    "NanSearch",
    "OutOfMemory",
    "Metrics",
    "RankSync",
    "BadSamples",
    "LoadBalance",
    "FirstUpdate",
    "ShowProgress",
    "ForwardState",
    "AttributeCheck",
    "Averaging",
    "OptimizerAverage",
    "EarlyStopping",
    "Evaluation",
    "Checkpointing",
    "Timekeeping",
    "Profiling",
]


def test_the_order_of_hooks_is_fixed() -> None:
    assert [kind.__name__ for kind in HOOKS] == ORDER


def test_checkpointing_follows_all_hooks_with_state() -> None:
    behind = HOOKS[HOOKS.index(Checkpointing) + 1 :]
    assert not [kind.__name__ for kind in behind if kind.name]


def test_no_two_hooks_have_the_same_key_in_a_checkpoint() -> None:
    names = [kind.name for kind in HOOKS if kind.name]
    assert len(set(names)) == len(names)


class Counting(Hook):
    """Counts updates on the device and on the host; requests a save after the third and a stop after the fifth."""

    name = "counting"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.seen: list[str] = []
        self.counts = torch.zeros(2, dtype=torch.float64)

    def begin(self) -> None:
        self.seen.append("begin")

    def after_update(self, step: StepInfo) -> None:
        self.seen.append(f"update {step.update}")
        self.counts += step.update

    def wants(self) -> Wants:
        return Wants(save=self.phase.position.update == 3, stop=self.phase.position.update == 5)

    def readings(self) -> dict[str, Any]:
        return {"counting/sum": float(self.counts.sum())}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.counts, self.seen = state["counts"].clone(), [*state["seen"]]

    def end(self) -> None:
        self.seen.append("end")


class Counted(Phase):
    kinds_of_hooks = (Counting, *HOOKS)


def test_a_hook_is_called_between_updates_and_restored_from_a_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("runner.engine.opening.Phase", Counted)
    with opened(tmp_path, "checkpoint=off", "checkpoint.best=null") as phase:
        stopped_by = phase.run_updates()
        mine, folder = phase.hook(Counting), phase.run.directory.checkpoints
    assert stopped_by == "as requested"
    assert mine.seen == ["begin", *(f"update {number}" for number in range(1, 6)), "end"]
    assert mine.counts.tolist() == [15.0, 15.0]
    saved = {
        number: hook_state("counting", checkpoint.load(checkpoint.checkpoint_path(folder, number))) for number in (3, 5)
    }
    assert saved[3]["counts"].tolist() == [6.0, 6.0]
    assert saved[5]["counts"].tolist() == [15.0, 15.0]
    with opened(tmp_path) as phase:
        again = phase.hook(Counting)
        assert (again.seen, again.counts.tolist()) == (mine.seen, [15.0, 15.0])
        next(phase.updates())
        assert again.seen[-2:] == ["begin", "update 6"]
