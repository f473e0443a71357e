"""Divide all ranks into groups of consecutive ranks that each hold one copy of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runner.distributed.world import World


def new_groups(groups: Sequence[Sequence[int]], timeout_s: float) -> Any:
    """Create process groups of these ranks; return the group of this rank, or None if it is in none. Collective."""
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=timedelta(seconds=timeout_s)
    )
    dist.all_reduce(torch.zeros(()))  # wait until all ranks have connected, as `join_process_group` does
    return group


class RankGrid(NamedTuple):
    """The worlds of this rank.

    world     all ranks
    copy      ranks that together hold the same copy of the model as this rank
    replicas  ranks that hold the same part of the model as this rank, one rank in each copy
    """

    world: World
    copy: World
    replicas: World


def split_ranks(world: World, size: int) -> RankGrid:
    """Divide the ranks into copies of `size` consecutive ranks each. Collective, because it creates process groups.

    size  must divide the number of ranks
    """
    if size == world.world_size:
        return RankGrid(world, world, dataclasses.replace(world, rank=0, world_size=1))
    rows = torch.arange(world.world_size).view(-1, size)
    across, inside = (new_groups(ranks.tolist(), world.timeout_s) for ranks in (rows.t(), rows))
    return RankGrid(
        world,
        _part_of(world, rows[world.rank // size].tolist(), inside),
        _part_of(world, rows[:, world.rank % size].tolist(), across),
    )


def _part_of(world: World, ranks: Sequence[int], group: Any) -> World:
    number = ranks.index(world.rank)
    return dataclasses.replace(world, rank=number, world_size=len(ranks), group=group, global_ranks=ranks)
