"""A batch on its way from the loader to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class MicroBatch(NamedTuple):
    """A batch; `last` closes the update of this rank; `bad` lists (index, reason) of samples that were left out.

    counts  False: it only keeps the ranks in step, and must add nothing to the update; `batch` may then be None
    """

    batch: Any
    last: bool
    bad: tuple[tuple[int, str], ...] = ()
    counts: bool = True


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to every tensor inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def first_shape(batch: Any) -> object:
    """Return the shape of the first tensor of a batch, None where there is none; costs next to nothing."""
    while isinstance(batch, (tuple, list)):
        batch = batch[0] if batch else None
    shape = getattr(batch, "shape", None)
    return first_shape(next(iter(batch.values()), None)) if shape is None and isinstance(batch, Mapping) else shape
