"""The costs of layers are measured correctly and without side effects."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from runner.distributed.layer_costs import LayerCost, estimate_costs, layer_names, measure_costs


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def layers(self) -> list[nn.Module]:
        return [Scaled(self), *self.blocks, nn.Tanh()]


class Scaled(nn.Module):
    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.embedding, self.scale = whole.embedding, whole.scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale


def test_layers_are_named_after_their_modules_in_the_model() -> None:
    model = Whole()
    assert layer_names(model, model.layers()) == ["embedding+scale", "blocks.0", "blocks.1", "Tanh 3"]


def test_frozen_weights_and_buffers_have_no_gradient_or_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    linear, norm = estimate_costs(model, list(model))
    assert linear == LayerCost("0", 16, 4 * 4, seconds=20.0)
    assert linear.state_bytes() == 16 * 16 + 16
    assert linear.state_bytes(4.0) == 16 * 4 + 16
    assert norm.constant_bytes == 2 * 4 * 4 + 8  # mean, variance and count


def test_activations_are_counted_once_without_weights() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    costs = measure_costs(model, list(model), (x,), repeats=1)
    # A linear layer saves its input and a ReLU its output. Each layer is counted as if it were alone on its device.
    assert [cost.activation_bytes for cost in costs] == [32 * 8 * 4, 32 * 16 * 4, 32 * 16 * 4]
    twice = measure_costs(model, list(model), (x,), repeats=1, scale=2.0)
    assert [cost.activation_bytes for cost in twice] == [2 * cost.activation_bytes for cost in costs]
    assert all(cost.seconds > 0 for cost in costs)


def test_layer_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal now
            now += 1.0
            output: Tensor = super().forward(x)
            if torch.is_grad_enabled():
                output.register_hook(after)
            return output

    def after(_: Tensor) -> None:
        nonlocal now
        now += 2.0

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    model = nn.Sequential(nn.Linear(4, 4), Slow(4, 4), nn.Sequential(Slow(4, 4), Slow(4, 4)))
    assert [cost.seconds for cost in measure_costs(model, list(model), (torch.randn(2, 4),))] == [0.0, 3.0, 6.0]


class Center(nn.Module):
    """A layer that subtracts a moving average, which is a frozen parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return x - self.mean.clone()


def test_measuring_leaves_the_model_unchanged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5), Center(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():  # the training mode of the model does not matter
        measure_costs(model, list(model), (torch.randn(8, 4),))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(weight.grad is None for weight in model.parameters())


def test_measuring_does_not_advance_generators() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    measure_costs(model, list(model), (x,))
    assert torch.equal(torch.get_rng_state(), state)


def test_embedding_layers_are_measured() -> None:
    model = Whole()
    costs = measure_costs(model, model.layers(), (torch.randint(0, 10, (2, 3)),), repeats=1)
    assert [cost.num_trained for cost in costs] == [44, 20, 20, 0]
    assert costs[1].activation_bytes == 2 * 3 * 4 * 4


def test_the_device_is_synchronized_around_each_pass() -> None:
    """Otherwise, the timer would include work of the previous pass, and stop before the measured work is done."""
    events: list[str] = []

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            events.append("forward")
            output: Tensor = super().forward(x)
            if torch.is_grad_enabled():
                output.register_hook(lambda _: events.append("backward"))
            return output

    model = nn.Sequential(Noted(4, 4))
    measure_costs(model, list(model), (torch.randn(2, 4),), repeats=3, synchronize=lambda: events.append("wait"))
    timed = ["wait", "forward", "backward", "wait"] * 4  # the first repetition is a warm-up
    assert events == ["forward", *timed]  # activations are measured first, in a separate pass
