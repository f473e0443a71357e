"""Make ranks agree: broadcast the model, merge statistics, gather and compare tensors, and share errors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import AccelRunError, RankLost, TaskFault
from runner.base.task import State
from runner.base.text import dtype_name
from runner.distributed.world import World
from runner.tensors.bitwise import view_bytes


def broadcast_model(model: nn.Module, world: World) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, except those on the meta device."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_meta:
                _copy_from_rank_0(tensor, world)


def merge_states(merge: Callable[[State, State], State], state: State, world: World) -> State:
    """Merge the states that the ranks have computed from their data, in rank order; the result is equal on all ranks.

    Raises TaskFault, on every rank, if their states differ in names, shapes or dtypes.
    """
    kinds = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()}
    kinds_per_rank = world.gather(kinds)
    if any(others != kinds_per_rank[0] for others in kinds_per_rank):
        raise TaskFault(
            "the state of a fit must have the same names, shapes and dtypes on all ranks, including ranks without data,"
            f" but is {kinds_per_rank}",
            fix="return tensors of the same names, shapes and dtypes from start() and add()",
        )
    result: State | None = None
    for rank in range(world.world_size):
        # sorted, because the order of a dict may differ between ranks
        theirs = {name: _broadcast(state[name], rank, world) for name in sorted(state)}
        result = theirs if result is None else merge(result, theirs)
    assert result is not None
    return result


def _broadcast(tensor: Tensor, rank: int, world: World) -> Tensor:
    """Return the tensor of a rank.

    The bytes of a contiguous copy are sent, because backends support neither all dtypes nor non-contiguous tensors.
    """
    received = tensor.detach().clone(memory_format=torch.contiguous_format)
    if received.numel():
        world.broadcast_tensor(received.view(-1).view(torch.uint8), rank)
    return received


def _copy_from_rank_0(tensor: Tensor, world: World) -> None:
    # A separate function, so that its copies are freed before those of the next tensor are allocated.
    theirs = _broadcast(tensor, 0, world)
    mine = tensor.detach().clone(memory_format=torch.contiguous_format)
    if mine.numel() and not torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)):
        tensor.copy_(theirs)


def gather_tensors(mine: Sequence[Tensor], world: World) -> list[list[Tensor]]:
    """Return the tensors of each rank; shapes, dtypes and number may differ between ranks. Collective."""
    if world.world_size == 1:
        return [[tensor.detach() for tensor in mine]]
    specs = world.gather([[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in mine])
    sizes = [[math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in rank_specs] for rank_specs in specs]
    content = torch.zeros(sum(map(sum, sizes)), dtype=torch.uint8, device=world.device)
    start = sum(map(sum, sizes[: world.rank]))
    for tensor, size in zip(mine, sizes[world.rank], strict=True):
        content[start : start + size] = view_bytes(tensor)
        start += size
    if len(content):
        # Every byte is zero on all ranks but one, so the sum copies values of any dtype, including those that gloo
        # cannot send, such as int16 and float8. all_gather is not used, because it needs equal sizes on all ranks.
        world.sum(content)
    parts = iter(torch.split(content, [size for rank_sizes in sizes for size in rank_sizes]) if len(content) else ())
    return [
        # Cloned, because a slice may start at any offset, but a view with a wider dtype must be aligned.
        [next(parts, content).clone().view(getattr(torch, dtype)).view(shape) for shape, dtype in rank_specs]
        for rank_specs in specs
    ]


def find_unequal(tensors: Mapping[str, Tensor], world: World) -> list[str]:
    """Return the names of tensors whose bits differ between the ranks that have them. Collective."""
    digests = {
        name: hashlib.sha256(view_bytes(tensor).cpu().numpy().data).hexdigest() for name, tensor in tensors.items()
    }
    digests_by_name: dict[str, set[str]] = {}
    for rank_digests in world.gather(digests):
        for name, digest in rank_digests.items():
            digests_by_name.setdefault(name, set()).add(digest)
    return [name for name, found in digests_by_name.items() if len(found) > 1]


def find_unequal_sums(tensors: Mapping[str, Tensor], world: World) -> list[str]:
    """Return the names of tensors whose sums differ between the ranks that have them. Collective.

    Unlike `find_unequal`, it copies no tensor to the host. Rounding differences are ignored.
    """
    sums = torch.stack([_sums(tensor, world) for tensor in tensors.values()]).tolist() if tensors else []
    sums_by_name: dict[str, list[tuple[float, float]]] = {}
    for rank_sums in world.gather(dict(zip(tensors, sums, strict=True))):
        for name, pair in rank_sums.items():
            sums_by_name.setdefault(name, []).append(pair)
    return [name for name, pairs in sums_by_name.items() if not all(_are_close(pairs[0], pair) for pair in pairs)]


def _sums(tensor: Tensor, world: World) -> Tensor:
    """Return the sum of the elements and the sum of their absolute values, (2,), in the device's widest dtype."""
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    result = world.zeros(2)
    for part in torch.split(values.reshape(-1), _SUM_PART):
        wide = part.to(world.widest)
        result += torch.stack([wide.sum(), wide.abs().sum()]).to(world.device)
    return result


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two results of `_sums` are equal up to rounding: different GPUs may add in different orders."""
    tolerance = 1e-12 * min(one[1], other[1])
    return all(
        abs(a - b) <= tolerance or a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )


_SUM_PART = 2**22  # elements that are converted to the widest dtype at a time


def catch_exception(function: Callable[[], Any]) -> Exception | None:
    """Return the exception that the function raises, or None; the caller passes it to `raise_on_all_ranks`."""
    try:
        function()
    except Exception as error:  # of any type, because the other ranks must be informed
        return error
    return None


def raise_on_all_ranks(failure: Exception | None, world: World, where: str) -> None:
    """Raise this rank's failure, or RankLost if only another rank failed. Collective."""
    texts = world.gather(None if failure is None else format_error_line(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise RankLost(f"rank {world.global_rank(rank)} failed: {text}", where=where)


def format_error_line(error: Exception) -> str:
    """Format an error as one line."""
    return str(error).splitlines()[0] if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
