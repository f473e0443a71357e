"""Costs and devices determine the placement of layers, and stages that share a parameter update it identically."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from runner.distributed import layer_placement
from runner.distributed.layer_costs import LayerCost, estimate_costs
from runner.distributed.layer_placement import PlacementRequest, Tie, place_layers
from runner.distributed.rank_grid import RankGrid
from runner.distributed.world import World
from tests.distributed.ranks import run_ranks


def test_gradients_of_a_shared_parameter_are_summed() -> None:
    def add_gradients(world: World) -> Any:
        weight = nn.Parameter(torch.ones(3))
        if world.rank != 1:
            weight.grad = torch.full((3,), 2.0 + world.rank)
        Tie(weight, None, counts_here=world.is_first).add()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(add_gradients, 3) == [[6.0] * 3] * 3


def test_a_frozen_shared_parameter_has_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    Tie(weight, None, counts_here=True).add()
    assert weight.grad is None


# ---------------------------------------------------------------- costs and devices

GIB = 2**30


class Ranks(World):
    """The first of several ranks; the others report the given times and memory."""

    def __init__(self, *others: tuple[float, int]) -> None:
        super().__init__(torch.device("cpu"), world_size=1 + len(others))
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        if not isinstance(value, dict):
            return [value] * self.world_size
        return [value, *({**value, "seconds": seconds, "memory": memory} for seconds, memory in self.others)]


def place(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    *,
    copies: int = 1,
    example: Any = lambda: (torch.ones(4, 2),),
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Place three layers that take 1 s each and fit anywhere. Return the placement and how costs were measured."""
    measured: dict[str, Any] = {}

    def measure(model: Any, layers: Any, inputs: Any, **given: Any) -> list[LayerCost]:
        measured.update(given, inputs=inputs, layers=layers, model=model)
        return [replace(cost, seconds=1.0) for cost in estimate_costs(model, layers)]

    monkeypatch.setattr(layer_placement, "measure_costs", measure)
    monkeypatch.setattr(layer_placement, "device_bytes", lambda _: 8 * GIB)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    size = world.world_size // copies
    copy = World(torch.device("cpu"), world_size=size)
    grid = RankGrid(world, copy, World(torch.device("cpu"), world_size=copies))
    result = place_layers(grid, model, list(model), PlacementRequest(**options), example)
    return result, measured


@pytest.mark.parametrize(
    ("seconds", "speed"),
    [(3.0, 1.0), (6.0, 0.5), (1.5, 2.0), (3.2, 1.0), (2.8, 1.0), (3.4, 3 / 3.4), (2.0, 1.5), (0.0, 1.0)],
)
def test_stage_speeds_ignore_differences_within_noise(
    seconds: float, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, _ = place(monkeypatch, Ranks((seconds, 8 * GIB)))
    first, second = placement.devices
    assert (first.speed, second.speed) == (1.0, pytest.approx(speed))


def test_a_stage_has_the_limits_of_its_weakest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Ranks((3.0, 6 * GIB), (6.0, 4 * GIB), (1.5, 7 * GIB))
    placement, _ = place(monkeypatch, world, copies=2)
    first, second = placement.devices
    assert (first.memory_bytes, second.memory_bytes) == (4 * GIB, 6 * GIB)
    assert (first.speed, second.speed) == (0.5, 1.0)
    assert first.name != second.name


@pytest.mark.parametrize(
    ("options", "scale", "repeats"),
    [
        ({}, 1.0, 1),
        ({"samples": 8}, 2.0, 1),
        ({"balance": "time"}, 1.0, 3),
        ({"samples": 2, "balance": "time"}, 0.5, 3),
    ],
)
def test_measurements_are_scaled_from_example_to_micro_batch(
    options: dict[str, Any], scale: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = lambda: (torch.tensor(3.0), torch.ones(4, 2))  # noqa: E731
    _, measured = place(monkeypatch, Ranks((3.0, 8 * GIB)), example=example, **options)
    assert (measured["scale"], measured["repeats"]) == (scale, repeats)
    assert [tuple(tensor.shape) for tensor in measured["inputs"]] == [(), (4, 2)]
    with measured["weights"](measured["model"]):
        assert measured["layers"] == [*measured["model"]]


def test_an_example_without_a_batch_counts_as_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    _, measured = place(monkeypatch, Ranks((3.0, GIB)), example=lambda: (torch.tensor(3.0), 7), samples=8)
    assert measured["scale"] == 8.0


def test_costs_of_unmeasurable_layers_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    for example in (None, Mock(side_effect=NotImplementedError)):
        placement, measured = place(monkeypatch, Ranks((0.0, 8 * GIB)), example=example)
        assert measured == {}
        assert len(placement.costs) == 3
