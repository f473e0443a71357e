"""Agreement of ranks that read different data: their starting point, merged statistics, and gathered rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.base.bitwise import view_bytes
from runner.base.errors import TaskFault
from runner.base.task import State
from runner.base.world import World


def broadcast_model(model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to every rank; tensors on the meta device have no values."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_meta:
                _copy_from_rank_0(tensor)


def merge_states(merge: Callable[[State, State], State], state: State, world: World) -> State:
    """Return the merged state of the data of all ranks, in rank order and identical on every rank.

    Raises TaskFault, on every rank, if their states differ in names, shapes or types.
    """
    kinds = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()}
    kinds_per_rank = world.gather(kinds)
    if any(others != kinds_per_rank[0] for others in kinds_per_rank):
        raise TaskFault(
            "the state of a fit must have the same names, shapes and types with and without data,"
            f" but is {kinds_per_rank}",
            fix="return tensors of the same types from add as from start",
        )
    result: State | None = None
    for rank in range(world.world_size):
        theirs = {name: _broadcast(state[name], rank) for name in sorted(state)}  # dict order may differ between ranks
        result = theirs if result is None else merge(result, theirs)
    assert result is not None
    return result


def _broadcast(tensor: Tensor, rank: int) -> Tensor:
    """Return the tensor of a rank, sent as bytes: not every type can be sent, and not every tensor is dense."""
    received = tensor.detach().clone(memory_format=torch.contiguous_format)
    if received.numel():
        dist.broadcast(received.view(-1).view(torch.uint8), rank)
    return received


def _copy_from_rank_0(tensor: Tensor) -> None:
    theirs = _broadcast(tensor, 0)
    mine = tensor.detach().clone(memory_format=torch.contiguous_format)
    if mine.numel() and not torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)):
        tensor.copy_(theirs)


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
