"""A parameter shared by several stages is updated identically on all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runner.base.world import World
from runner.distributed.layer_placement import Tie
from tests.distributed.ranks import run_ranks


def test_a_shared_parameter_has_the_sum_of_the_gradients_of_all_stages_also_where_one_has_none() -> None:
    def added(world: World) -> Any:
        weight = nn.Parameter(torch.ones(3))
        if world.rank != 1:
            weight.grad = torch.full((3,), 2.0 + world.rank)
        Tie(weight, None, counts_here=world.is_first).add()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(added, 3) == [[6.0] * 3] * 3


def test_a_shared_parameter_that_is_frozen_has_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    Tie(weight, None, counts_here=True).add()
    assert weight.grad is None
