"""Gather tensors whose sizes differ between ranks, as concatenated rows or as a list per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runner.base.bitwise import view_bytes
from runner.base.world import World


class RowSpec(NamedTuple):
    """Rows of one rank: their number, the shape of a row, the dtype, and whether gradients flow into them."""

    size: int
    shape: Sequence[int]
    dtype: str
    has_gradient: bool

    @classmethod
    def of(cls, rows: Tensor, has_gradient: bool = False) -> RowSpec:
        """Describe a tensor of rows, (N, ...)."""
        return cls(len(rows), list(rows.shape[1:]), str(rows.dtype).removeprefix("torch."), has_gradient)


def gather_rows(mine: Tensor | None, specs: Sequence[RowSpec | None], world: World) -> Tensor:
    """Return the rows of all ranks, (sum of N, ...), without gradients; every rank calls it.

    mine   rows of this rank, (N, ...); None: it has none
    specs  specification of each rank's rows; None: it has none
    """
    if world.world_size == 1:
        assert mine is not None, "the only rank has the rows"
        return mine.detach()
    spec = next(spec_of_rank for spec_of_rank in specs if spec_of_rank is not None)
    counts = [0 if spec_of_rank is None else spec_of_rank.size for spec_of_rank in specs]
    dtype = getattr(torch, spec.dtype)
    gathered = torch.zeros(sum(counts), *spec.shape, dtype=dtype, device=world.device)
    start = sum(counts[: world.rank])
    if mine is not None:
        gathered[start : start + len(mine)] = mine.detach()
    if gathered.numel():
        # A sum of bytes where all but one rank have zeros is a copy of any dtype. all_gather needs equal sizes, and
        # gloo adds no bfloat16.
        world.sum(gathered.view(-1).view(torch.uint8))
    return gathered


def gather_tensors(mine: Sequence[Tensor], world: World) -> list[list[Tensor]]:
    """Return the tensors of each rank; shapes, dtypes and number may differ between ranks. Every rank calls it."""
    if world.world_size == 1:
        return [[tensor.detach() for tensor in mine]]
    specs = world.gather([[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in mine])
    packed = torch.cat(
        [
            torch.zeros(0, dtype=torch.uint8, device=world.device),
            *(view_bytes(tensor).to(world.device) for tensor in mine),
        ]
    )
    sizes = [[math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in rank_specs] for rank_specs in specs]
    of_ranks = [
        None if not sum(rank_specs) else RowSpec(sum(rank_specs), [], "uint8", has_gradient=False)
        for rank_specs in sizes
    ]
    if not any(of_ranks):
        return [
            [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in rank_specs] for rank_specs in specs
        ]
    rows = gather_rows(packed if len(packed) else None, of_ranks, world)
    parts = iter(torch.split(rows, [size for rank_specs in sizes for size in rank_specs]))
    return [
        # a slice may start at any offset, but views of numbers must be aligned
        [next(parts).clone().view(getattr(torch, dtype)).view(shape) for shape, dtype in rank_specs]
        for rank_specs in specs
    ]
