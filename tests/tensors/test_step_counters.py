"""An optimizer of a task resumes bit for bit, wherever it keeps its numbers, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from runner.axes.optimizer import build_optimizer
from runner.base.errors import TaskFault
from runner.tensors.optimizer_state import export_state
from tests.axes.test_optimizer import assert_resuming_changes_nothing, network, train


class Counting(torch.optim.SGD):
    """Counts steps in its groups and in attributes, as Prodigy does, and slows down with them."""

    def __init__(self, parameters: Any, *, is_stateless: bool) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.0 if is_stateless else 0.9)
        self._num_steps, self.mean = 0, torch.zeros(())

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._num_steps += 1
        self.mean.mul_(0.5).add_(0.25)
        for number, group in enumerate(self.param_groups):
            group["d"] = group.get("d", 1.0) * 0.75
            group["lr"] = 0.01 * group["d"] / (self._num_steps + number + float(self.mean))
        super().step()


@pytest.mark.parametrize("is_stateless", [False, True])
def test_numbers_that_an_optimizer_keeps_outside_of_its_state_survive_a_checkpoint(
    is_stateless: bool, tmp_path: Path
) -> None:
    """Also if the first parameter has no gradient, and thus no state, in the first updates."""
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(
        "from tests.tensors.test_step_counters import Counting\n\n"
        "def counting(parameters):\n"
        "    weights = [weight for _, weight in parameters]\n"
        f"    groups = [{{'params': weights[:2]}}, {{'params': weights[2:]}}]\n"
        f"    return Counting(groups, is_stateless={is_stateless})\n\n"
        "OPTIMIZERS = {'counting': counting}\n"
    )

    def make(model: nn.Module) -> Optimizer:
        return build_optimizer(f"{file}:OPTIMIZERS:counting", [*model.named_parameters()], {})

    model = network()
    model[0].weight.requires_grad_(False)
    assert_resuming_changes_nothing(make, model, 3)
    train(model, optimizer := make(model), range(2))
    tensors, rest = export_state(optimizer)
    assert [value for name, value in rest["numbers"].items() if name.endswith("_num_steps")] == [2]
    assert [name for name in tensors if name.endswith(".mean")]


UNUSABLE = {
    "torch.optim.LBFGS(weights)": "closure",
    "torch.optim.SGD(weights + weights, lr=0.1)": "all 6 parameters",
    "torch.optim.Optimizer(weights, {})": "no lr",
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(("text", "what"), UNUSABLE.items())
def test_an_unusable_optimizer_is_refused_before_training(text: str, what: str, tmp_path: Path) -> None:
    lines = (
        f"import torch\n\ndef mine(parameters):\n    weights = [each for _, each in parameters]\n    return {text}\n"
    )
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(f"{lines}\nOPTIMIZERS = {{'mine': mine}}\n")
    with pytest.raises(TaskFault, match=what):
        build_optimizer(f"{file}:OPTIMIZERS:mine", [*network().named_parameters()], {})


def test_an_optimizer_with_history_in_an_attribute_is_refused_at_its_first_step(tmp_path: Path) -> None:
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(
        "import torch\n\n"
        "class Listing(torch.optim.SGD):\n"
        "    history = ()\n"
        "    def step(self, closure=None):\n"
        "        self.history.append(1)\n"
        "        super().step()\n\n"
        "def listing(parameters):\n"
        "    result = Listing([weight for _, weight in parameters], lr=0.1)\n"
        "    result.history = []\n"
        "    return result\n\n"
        "OPTIMIZERS = {'listing': listing}\n"
    )
    model = network()
    optimizer = build_optimizer(f"{file}:OPTIMIZERS:listing", [*model.named_parameters()], {})
    with pytest.raises(TaskFault, match="history"):
        train(model, optimizer, range(1))
