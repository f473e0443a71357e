"""Ranks are grouped by copy of the model, and by the part of the model that they hold."""

from __future__ import annotations

import pytest
import torch

from runner.distributed.rank_grid import split_ranks
from runner.distributed.world import World
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize("rank", [0, 2])
def test_one_copy_over_all_ranks_needs_no_process_groups(rank: int) -> None:
    world = World(torch.device("cpu"), rank, rank, 3, 3)
    grid = split_ranks(world, 3)
    assert grid.world is grid.copy is world
    assert (grid.replicas.rank, grid.replicas.world_size) == (0, 1)


def test_ranks_have_an_index_within_and_across_copies() -> None:
    def sums(world: World) -> list[list[float]]:
        grid = split_ranks(world, 2)
        mine = torch.tensor([float(10**world.rank)], dtype=torch.float64)
        parts = [grid.world, grid.copy, grid.replicas]
        return [[part.rank, part.world_size, *map(part.global_rank, range(part.world_size)),
                 part.sum(mine.clone()).item()] for part in parts]  # fmt: skip

    assert run_ranks(sums, 4) == [
        [[0, 4, 0, 1, 2, 3, 1111], [0, 2, 0, 1, 11], [0, 2, 0, 2, 101]],
        [[1, 4, 0, 1, 2, 3, 1111], [1, 2, 0, 1, 11], [0, 2, 1, 3, 1010]],
        [[2, 4, 0, 1, 2, 3, 1111], [0, 2, 2, 3, 1100], [1, 2, 0, 2, 101]],
        [[3, 4, 0, 1, 2, 3, 1111], [1, 2, 2, 3, 1100], [1, 2, 1, 3, 1010]],
    ]
