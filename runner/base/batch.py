"""Batches and micro-batches, as passed from the loader to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils import pin_memory


class BatchSamples(NamedTuple):
    """The samples of a batch, in order; random numbers per sample are seeded from them.

    seed     seed of the run
    indices  index of each sample in its dataset
    places   positions of the samples in the order of the epoch
    """

    seed: int
    epoch: int
    indices: Sequence[int]
    places: Sequence[int]


class ShardMark(NamedTuple):
    """A position in a shard of a stream, with the state needed to resume there. JSON-serializable.

    item      number of the next sample of the shard
    epoch     number of the pass over the shard
    passed    number of samples in earlier passes, for a stream of unknown length
    hash      hash of sample `item` - 1
    state     state of the stream before sample `item` - 1; None if it has none
    sample_s  mean seconds to read a sample
    note      warning about an earlier resume of this shard, for the user
    """

    item: int
    epoch: int
    passed: int
    hash: str
    state: Any = None
    sample_s: float = 0.0
    note: str = ""


class MicroBatch(NamedTuple):
    """A micro-batch; `last` marks the last one of this rank's update; `bad` lists (index, reason) of skipped samples.

    is_counted  False: a micro-batch without readable samples, or a dummy one that keeps the ranks in lockstep; it must
                not contribute to gradients and metrics, and `batch` may be None
    samples     None if unknown, as for batches that were not read from a dataset
    marks       shard -> position after this batch, for the shards of a stream that it read
    """

    batch: Any
    last: bool
    bad: tuple[tuple[int, str], ...] = ()
    is_counted: bool = True
    samples: BatchSamples | None = None
    marks: Mapping[int, ShardMark] = {}

    def pin_memory(self) -> MicroBatch:
        """Return the micro-batch with its tensors in page-locked memory.

        DataLoader calls this method instead of visiting each index in `samples`.
        """
        return self._replace(batch=_pin(self.batch))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple or type(value) is list:  # first, because most batches are a tuple or list
        return type(value)([map_tensors(function, item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def count_samples(arguments: Any) -> int:
    """Return the batch size of the arguments of a model: the length of the first tensor that is not a scalar, or 1."""
    return next((len(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _pin(value: Any) -> Any:
    """Return the value with its tensors in page-locked memory.

    Tensors that a loader read onto a GPU cannot be pinned and are kept. Less common types are handled by a private
    function of torch, which DataLoader calls for a batch without a method `pin_memory` (torch 2.11 to 2.13).
    """
    if type(value) is Tensor:
        return _pin_tensor(value) if value.device.type == "cpu" else value
    if type(value) is tuple or type(value) is list:
        return type(value)([_pin(item) for item in value])
    if type(value) is dict:
        return {key: _pin(item) for key, item in value.items()}
    return pin_memory.pin_memory(value)  # type: ignore[no-untyped-call]


def _pin_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor in page-locked memory without gaps or overlaps.

    `Tensor.pin_memory` preserves gaps, such as those in images[:, 1:]. To copy such a tensor to the device, torch first
    copies it to pageable memory, so the host waits for the transfer. `Tensor.pin_memory` raises an error for
    overlapping memory, such as that of an expanded tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor.pin_memory()
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor.detach())
    return pinned.requires_grad_(tensor.requires_grad)


def copy_batch(batch: Any) -> Any:
    """Return a copy of a batch for task code that may change it in place.

    If a value in it cannot be copied, such as a result of autograd or a lock, only containers and tensors are copied.
    """
    try:
        return deepcopy(batch)
    except Exception:
        return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), batch)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold equal tensors (NaN equals NaN); values other than tensors are not compared."""
    first_tensors: list[Tensor] = []
    other_tensors: list[Tensor] = []
    map_tensors(first_tensors.append, one)
    map_tensors(other_tensors.append, other)
    return len(first_tensors) == len(other_tensors) and all(map(_tensors_equal, first_tensors, other_tensors))


def _tensors_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (
        one.equal(other) or bool((one.eq(other) | (one.ne(one) & other.ne(other))).all())
    )


def first_shape(batch: Any) -> object:
    """Return the shape of the first value of a batch, None if it is not a tensor; does not synchronize."""
    while isinstance(batch, (tuple, list)):
        batch = batch[0] if batch else None
    shape = getattr(batch, "shape", None)
    return first_shape(next(iter(batch.values()), None)) if shape is None and isinstance(batch, Mapping) else shape
