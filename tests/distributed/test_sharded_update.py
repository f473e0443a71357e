"""An update of shards computes on local tensors: it is bitwise equal to torch's optimizer, and plans no collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.axes.optimizer import adam, adamw
from runner.distributed.sharded import Sharded
from runner.distributed.world import World
from runner.plan.planning_rules import why_no_fsdp
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
TORCH = {adam: torch.optim.Adam, adamw: torch.optim.AdamW}


class Distributed(TorchDispatchMode):
    """Count the operations on DTensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def shards(world: World) -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
    """Return a sharded model. With more than three ranks, some shards of the first layer's three rows are empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 8))
    Sharded(world).wrap(model, list, [])
    return model, list(model.named_parameters())


def update(optimizer: Any, named: list[tuple[str, nn.Parameter]]) -> int:
    """Update with gradients that are determined by the weights; return the number of operations on DTensors."""
    for _, weight in named:
        weight.grad = (3 * weight).sin().detach()
    with Distributed() as mode:
        optimizer.step()
    return mode.count


def compare(world: World, function: Any) -> dict[str, Any]:
    (_, ours), (_, theirs) = shards(world), shards(world)
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    optimizer = function(ours, kernel="fused", decay_1d=True, **options)
    reference = TORCH[function]([weight for _, weight in theirs], fused=True, **options)
    counts = [(update(optimizer, ours), update(reference, theirs)) for _ in range(3)]
    pairs = [(mine.to_local(), other.to_local()) for (_, mine), (_, other) in zip(ours, theirs, strict=True)]
    states = [
        (optimizer.state[mine][name].to_local(), reference.state[other][name].to_local())
        for (_, mine), (_, other) in zip(ours, theirs, strict=True)
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return {
        "counts": counts[1:],  # the first update creates the state
        "equal": all(torch.equal(mine, other) for mine, other in pairs + states),
        "sizes": [mine.numel() for mine, _ in pairs],
    }


@pytest.mark.parametrize("function", TORCH)
def test_sharded_updates_equal_torch_without_dtensor_operations(function: Any) -> None:
    results = run_ranks(lambda world: compare(world, function), 4)
    assert any(0 in result["sizes"] for result in results)
    for result in results:
        assert result["equal"]
        for ours, theirs in result["counts"]:
            assert ours == 0
            assert theirs > 0


def update_with_placement(world: World, placement: Placement) -> bool:
    """Update with gradients of another placement; return whether the weights equal those of torch's optimizer."""
    (_, ours), (_, theirs) = shards(world), shards(world)
    for _, weight in (*ours, *theirs):
        placements = (
            [placement if weight.dim() > placement.dim else Replicate()] if placement.is_shard() else [placement]
        )
        gradient = (3 * weight.detach()).sin()
        weight.grad = gradient.redistribute(placements=placements)
    adamw(ours, kernel="fused", lr=0.1, decay_1d=True).step()
    torch.optim.AdamW([weight for _, weight in theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step()
    return all(
        torch.equal(mine.full_tensor(), other.full_tensor()) for (_, mine), (_, other) in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=["replicated", "by columns"])
def test_gradients_with_another_placement_are_redistributed(placement: Placement) -> None:
    """Hooks may replace gradients with the result of any operation on DTensors."""
    assert all(run_ranks(lambda world: update_with_placement(world, placement), 2))


def plain(world: World) -> str:
    """Return the error of an update with a gradient that is not a DTensor."""
    _, named = shards(world)
    for _, weight in named:
        weight.grad = torch.zeros(weight.shape)
    with pytest.raises(RuntimeError) as caught:
        adamw(named, kernel="fused", lr=0.1).step()
    return type(caught.value).__name__


def test_gradients_must_be_dtensors() -> None:
    assert run_ranks(plain, 2) == ["RuntimeError"] * 2
