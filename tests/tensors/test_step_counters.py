"""A custom optimizer either resumes bit for bit, wherever it stores its numbers, or is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.axes.optimizer import build_optimizer
from runner.base.errors import TaskFault
from runner.tensors.optimizer_state import export_state
from runner.tensors.step_counters import is_number, remember_numbers
from tests.axes.test_optimizer import assert_resuming_changes_nothing, network, train


class Counting(torch.optim.SGD):
    """Counts steps in its groups and in attributes, like Prodigy, and lowers the learning rate with these counts."""

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
def test_optimizer_attributes_outside_the_state_survive_a_checkpoint(is_stateless: bool, tmp_path: Path) -> None:
    """The first parameter is frozen, so it has no gradient and no state."""
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
    kept = {name.rpartition(".")[2]: value for name, value in rest["numbers"].items()}
    assert (kept["_num_steps"], kept["mean"][0]) == (2, 0.375)
    assert all("momentum_buffer" in name for name in tensors)


UNUSABLE = {
    "torch.optim.LBFGS(weights)": "closure",
    "torch.optim.SGD(weights + weights, lr=0.1)": "each of the 6 parameters",
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


class Own(Optimizer):
    """The base class of the optimizers below, which define `prepare` and `change`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "t": 0, "rate": torch.tensor(1.0)})
        self.weights = [weight for group in self.param_groups for weight in group["params"]]
        self.prepare()

    def prepare(self) -> None: ...

    def change(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
        self.change()


class Flat(Own):
    """Makes all weights views of an attribute."""

    def prepare(self) -> None:
        self.flat = torch.cat([weight.detach().reshape(-1) for weight in self.weights])
        parts = self.flat.split([weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            weight.data = part.view_as(weight)

    def change(self) -> None:
        self.flat.sub_(torch.cat([weight.grad.reshape(-1) for weight in self.weights]), alpha=0.01)


class Last(Own):
    """Has a parameter and views of its elements as attributes."""

    def prepare(self) -> None:
        self.last, self.element, self.elements = self.weights[-1], self.weights[-1].data[0], [self.weights[-1][1:]]

    def change(self) -> None:
        self.last.sub_(self.last.grad, alpha=0.1)
        self.element.sub_(self.last.grad[0], alpha=0.1)


class Replacing(Own):
    """Replaces a tensor twice in a step, so the last one may get the address of the original one."""

    def prepare(self) -> None:
        self.scale: Tensor = torch.tensor(1.0)
        self.best: float | None = None
        self.lr, self.mode, self.large, self.loss = 1.0, "warm", 1, float("inf")

    def change(self) -> None:
        for weight in self.weights:
            weight.sub_(weight.grad * self.scale, alpha=0.01 * self.lr * float(self.param_groups[0]["rate"]))
        self.scale = self.scale * 0.9
        self.scale = self.scale.clamp(min=0.01)
        self.param_groups[0]["rate"] = self.param_groups[0]["rate"] * 0.8  # the groups shared a tensor
        with torch.inference_mode():
            self.made = torch.full((1, 1), 0.3, dtype=torch.bfloat16)
        self.best, self.lr = float(self.scale) if self.best is None else None, self.lr * 0.7
        self.mode, self.large, self.loss = "main", self.large * 9, -float("inf")


class Lazy(Own):
    """Like Lookahead, initializes a state if it is empty, and expects only tensors in it."""

    def change(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=0.01)
                if group["t"] % 3 == 0:
                    state = self.state[weight]
                    if not state:
                        state["slow"] = weight.clone()
                    for slow in self.state[weight].values():
                        slow.lerp_(weight, 0.5)
                    weight.copy_(state["slow"])


class Growing(Own):
    """Has a cache of views, and a history for a plot."""

    def prepare(self) -> None:
        self.views: dict[int, Tensor] = {}
        self.norms: list[float] = []

    def change(self) -> None:
        for number, weight in enumerate(self.weights):
            self.norms.append(float(weight.grad.norm()))
            self.views.setdefault(number, weight.view(-1)).sub_(weight.grad.view(-1), alpha=0.01)


@pytest.mark.parametrize("kind", [Flat, Last, Replacing, Lazy, Growing])
@pytest.mark.parametrize("updates", [1, 4])
def test_optimizer_attributes_change_neither_steps_nor_a_resumed_run(
    kind: type[Own], updates: int, tmp_path: Path
) -> None:
    """Steps are the same as without the runner, and a resumed run is the same as an uninterrupted one."""
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(
        f"from tests.tensors.test_step_counters import {kind.__name__} as Kind\n\n"
        "def kind(parameters):\n"
        "    weights = [weight for _, weight in parameters]\n"
        "    return Kind([{'params': [weight]} for weight in weights])\n\n"
        "OPTIMIZERS = {'kind': kind}\n"
    )

    def make(model: nn.Module) -> Optimizer:
        return build_optimizer(f"{file}:OPTIMIZERS:kind", [*model.named_parameters()], {})

    assert_resuming_changes_nothing(make, network(), updates)


def test_a_value_set_between_steps_is_kept() -> None:
    model = network()
    optimizer = torch.optim.SGD([{"params": [weight], "names": [name]} for name, weight in model.named_parameters()])
    remember_numbers(optimizer)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["momentum"] = 0.5
    train(model, optimizer, range(1))
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_an_optimizer_is_freed_without_garbage_collection() -> None:
    model = network()
    optimizer = torch.optim.SGD([{"params": [*model.parameters()], "names": [*dict(model.named_parameters())]}])
    remember_numbers(optimizer)
    gc.disable()
    try:
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


def test_only_valid_exported_values_are_accepted() -> None:
    kept = [True, 3, 2**70, 0.5, float("nan"), None, "main", [0.5, "torch.float32", [1, 1], True]]
    assert all(is_number(value) for value in kept)
    damaged = [{}, [], [0.5], ["0.5", "torch.float32", [], True], [0.5, "torch.os", [], True]]
    damaged += [
        [0.5, "torch.float32", [2], True],
        [0.5, ["torch.float32"], [], True],
        [0.5, "torch.float32", [], "cpu"],
    ]
    assert not any(is_number(value) for value in damaged)
