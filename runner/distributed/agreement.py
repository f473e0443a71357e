"""Agreement of ranks that read different data: their starting point, and their merged statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
