"""Gather tensors whose sizes differ between ranks: rows in rank order, or any tensors by rank."""

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


def gather_rows(mine: Tensor | None, of_ranks: Sequence[RowSpec | None], world: World) -> Tensor:
    """Return the rows of all ranks, (sum of N, ...), without gradients; every rank calls it.

    mine      rows of this rank, (N, ...); None: it has none
    of_ranks  specification of each rank's rows; None: it has none
    """
    if world.world_size == 1:
        assert mine is not None, "the only rank has the rows"
        return mine.detach()
    spec = next(each for each in of_ranks if each is not None)
    counts = [0 if each is None else each.size for each in of_ranks]
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
        return [[each.detach() for each in mine]]
    specs = world.gather([[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in mine])
    packed = torch.cat(
        [torch.zeros(0, dtype=torch.uint8, device=world.device), *(view_bytes(each).to(world.device) for each in mine)]
    )
    sizes = [[math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in there] for there in specs]
    of_ranks = [None if not sum(there) else RowSpec(sum(there), [], "uint8", has_gradient=False) for there in sizes]
    if not any(of_ranks):
        return [[torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in there] for there in specs]
    rows = gather_rows(packed if len(packed) else None, of_ranks, world)
    parts = iter(torch.split(rows, [size for there in sizes for size in there]))
    return [
        # a slice may start at any offset, but views of numbers must be aligned
        [next(parts).clone().view(getattr(torch, dtype)).view(shape) for shape, dtype in there]
        for there in specs
    ]
