"""Split the samples of a batch into two halves."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor

from runner.base.batch import BatchSamples, MicroBatch
from runner.engine.checks.controlled_pass import list_tensors


class BatchPart(NamedTuple):
    """Part of a batch, and its samples, which determine its random numbers."""

    batch: Any
    samples: BatchSamples | None


def split_in_halves(batch: MicroBatch) -> tuple[BatchPart, BatchPart] | None:
    """Split a batch into two parts; return None if it cannot safely be split by sample.

    Every tensor except scalars must have one row per sample. Lists with one element per sample are split too if they
    contain no tensors; scalars, numbers and strings are copied to both parts.
    """
    samples = batch.samples
    size = 0 if samples is None else len(samples.indices)
    if samples is None or size < 2 or not any(tensor.dim() for tensor in list_tensors(batch.batch)):
        return None
    rows = slice(0, size // 2), slice(size // 2, size)
    try:
        first_half, second_half = (
            BatchPart(
                _slice_rows(batch.batch, size, part),
                samples._replace(indices=samples.indices[part], places=samples.places[part]),
            )
            for part in rows
        )
    except _NotSplittable:
        return None
    return first_half, second_half


class _NotSplittable(Exception):
    pass


def _slice_rows(value: Any, size: int, rows: slice) -> Any:
    if isinstance(value, Tensor):
        if value.dim() and len(value) != size:
            raise _NotSplittable
        return value[rows] if value.dim() else value
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, list) and len(value) == size:
        if list_tensors(value):
            raise _NotSplittable  # ambiguous: one tensor per sample, or as many fields as samples
        return value[rows]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_slice_rows(item, size, rows) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_slice_rows(item, size, rows) for item in value)
    if isinstance(value, Mapping):
        items = {key: _slice_rows(item, size, rows) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return items
        copied = copy(value)  # keep the type: Hugging Face batches expose their keys as attributes
        copied.update(items)
        return copied
    raise _NotSplittable
