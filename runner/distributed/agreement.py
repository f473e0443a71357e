"""What ranks that read different data must agree on: where they start, and what each of them gathered on its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.base.task import State
from runner.base.world import World


def start_alike(model: nn.Module) -> None:
    """Parameters and buffers of every rank are those of rank 0."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def settle_buffers(model: nn.Module, world: World) -> None:
    """Average the running statistics of batch norms over the ranks; other buffers are those of rank 0."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    statistics = {id(buffer): buffer for module in norms for buffer in module.buffers()}
    for buffer in statistics.values():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world.world_size)
        else:
            dist.all_reduce(buffer, dist.ReduceOp.MAX)
    for buffer in model.buffers():
        if id(buffer) not in statistics:
            dist.broadcast(buffer, 0)


def merge_states(merge: Callable[[State, State], State], state: State, world: World) -> State:
    """Return the state of the data of all ranks, merged in the order of the ranks, on every rank alike."""
    result: State | None = None
    for rank in range(world.world_size):
        theirs = {name: _of_rank(tensor, rank) for name, tensor in state.items()}
        result = theirs if result is None else merge(result, theirs)
    assert result is not None
    return result


def _of_rank(tensor: Tensor, rank: int) -> Tensor:
    received = tensor.contiguous().clone()
    dist.broadcast(received, rank)
    return received
