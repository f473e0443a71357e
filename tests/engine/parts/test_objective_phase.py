"""Phases with several objectives: state at their end, skipped updates, schedulers and loss scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.base.errors import NumericError
from runner.config.request import Request
from runner.engine.hooks.metrics import Metrics
from runner.engine.opening import open_phase

TASK = """
import torch
from torch import nn
from runner import Task

OBJECTIVES = {"first": {"trains": ["one"]}, "second": {"trains": ["two"]}}

def build():
    return Mine()

class Mine(Task):
    def __init__(self):
        self.model = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 1), "frozen": nn.Linear(2, 2)})
        self.model["frozen"].requires_grad_(False)
    def dataset(self, split):
        if split != "train":
            raise NotImplementedError
        return torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    def loss(self, model, batch, objective):
        x = model["two"](model["one"](batch[0]))
        return (x.square() if objective == "first" else (x - 1).square()).sum(), len(batch[0])
"""


def test_a_finished_phase_frees_its_state_and_leaves_weights_trainable(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    settings = ("updates=4", "global_batch_size=8", "device=cpu", "monitor=off", f"output_root={tmp_path}")
    with open_phase(Request((*settings, "backend.threads=1", "checkpoint=off"), tmp_path / "mine.py")) as phase:
        for _ in range(2):
            next(phase.updates())
        model = phase.run.parts.bare
        optimizers = [training.optimizer for _, training in phase.work.objectives.parts]  # type: ignore[attr-defined]
        assert all(optimizer.state for optimizer in optimizers)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        phase.work.release()
        assert not any(optimizer.state for optimizer in optimizers)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert trained == {"one.weight", "one.bias", "two.weight", "two.bias"}
        assert all(weight.grad is None for weight in model.parameters())


OVERFLOWS = {
    "second": {"(x - 1).square())": "(x - 1).square() * 1e30)"},
    "first": {"x.square() if": "1e30 * x.square() if", '"trains": ["one"]': '"trains": ["one"], "every": 2'},
}


@pytest.mark.parametrize("objective", OVERFLOWS)
def test_skipping_all_updates_of_an_objective_is_an_error(objective: str, tmp_path: Path) -> None:
    text = TASK
    for old, new in OVERFLOWS[objective].items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "mine.py").write_text(text)
    settings = ("updates=4", "global_batch_size=8", "device=cpu", "monitor=off", f"output_root={tmp_path}")
    half = ("precision=fp16", "precision.init_scale=16")
    request = Request((*settings, *half, "backend.threads=1", "checkpoint=off"), tmp_path / "mine.py")
    with open_phase(request) as phase:
        for _ in phase.updates():
            pass
        columns = phase.hook(Metrics).readings()
        skipped = {"first": 2.0 * (objective == "first"), "second": 4.0 * (objective == "second")}
        assert columns["precision/skipped_updates"] == skipped["first"]
        assert columns["precision/second/skipped_updates"] == skipped["second"]
        assert phase.run.num_skipped == skipped["first"] + skipped["second"]
        with pytest.raises(NumericError, match=objective):
            phase.work.close()


def test_skipped_updates_of_all_objectives_are_counted_once_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    settings = ("run=mine", "global_batch_size=8", "device=cpu", "monitor=off", f"output_root={tmp_path}")
    half = ("precision=fp16", "precision.init_scale=1e7", "precision.backoff_factor=0.1", "resume_allow=[updates]")
    num_skipped = 0
    for updates in (4, 8):
        request = Request((*settings, *half, f"updates={updates}", "backend.threads=1"), tmp_path / "mine.py")
        with open_phase(request) as phase:
            assert phase.run.num_skipped == num_skipped
            phase.run_updates()
            num_skipped = phase.run.num_skipped
            by_objective = [training.precision.num_skipped() for training in phase.work.trainings.values()]  # type: ignore[attr-defined]
            assert min(by_objective) > 0
            assert num_skipped == sum(by_objective)


def test_one_objective_can_be_resumed_with_a_different_scheduler(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    settings = ("run=mine", "global_batch_size=8", "device=cpu", "monitor=off", f"output_root={tmp_path}")
    settings += ("scheduler=plateau", "scheduler.patience=0", "scheduler.gamma=0.5", "backend.threads=1")
    another = ("objective.first.scheduler=constant", "resume_allow=[updates,objective.first.scheduler]")
    factors = []
    for args in (("updates=2",), ("updates=4", *another)):
        with open_phase(Request((*settings, *args), tmp_path / "mine.py")) as phase:
            if phase.position.update == 0:
                for _ in range(2):
                    phase.work.observe({"val/loss": 1.0})
            factors.append([each.schedule.factor(2) for each in phase.work.trainings.values()])  # type: ignore[attr-defined]
            phase.run_updates()
    assert factors == [[0.5, 0.5], [1.0, 0.5]]


def test_the_minimum_loss_scale_applies_to_each_objective(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("(x - 1).square())", "(x - 1).square() * 1e30)"))
    settings = ("updates=4", "global_batch_size=8", "device=cpu", "monitor=off", f"output_root={tmp_path}")
    half = ("precision=fp16", "precision.init_scale=1024", "precision.min_scale=512")
    request = Request((*settings, *half, "backend.threads=1", "checkpoint=off"), tmp_path / "mine.py")
    with open_phase(request) as phase:
        updates = phase.updates()
        for _ in range(3):
            next(updates)
        with pytest.raises(NumericError, match="min_scale"):
            phase.hook(Metrics).readings()
