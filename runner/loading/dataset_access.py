"""Whether a dataset reads many samples at once, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset, Subset, TensorDataset

from runner.base.task import Dataset


def tensor_row_reader(dataset: Any) -> Callable[[list[int]], Any] | None:
    """Return a function that reads a batch of a TensorDataset, or of a Subset of one, with one operation per tensor.

    The batch is a list of tensors, as from default_collate, which turns tuples of tensors into a list of columns.
    """
    if type(dataset) is Subset:
        inner, positions = tensor_row_reader(dataset.dataset), dataset.indices
        return inner and (lambda indices: inner([int(positions[index]) for index in indices]))
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    tensors = dataset.tensors

    def read_rows(indices: list[int]) -> list[Tensor]:
        positions = torch.from_numpy(np.array(indices, dtype=np.int64))  # torch.tensor takes four times as long
        return [tensor.index_select(0, positions.to(tensor.device)) for tensor in tensors]

    return read_rows


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad


def has_fixed_part(dataset: Any) -> bool:
    """Return whether a dataset divides reading into `load_fixed`, which can be cached, and `compose`."""
    return hasattr(dataset, "load_fixed") and hasattr(dataset, "compose")


def batch_reader(dataset: Dataset) -> Callable[[list[int]], Any] | None:
    """Return the `__getitems__` of a dataset; None if it would read sample by sample.

    Samples that are read together share one random stream, which depends on the micro-batch.
    """
    return getattr(dataset, "__getitems__", None) if _has_batch_access(dataset) else None


def _has_batch_access(dataset: Any) -> bool:
    """Return whether `__getitems__` is more than a loop over [index]; in Subset and StackDataset, it may be a loop."""
    method = getattr(type(dataset), "__getitems__", None)
    if method is Subset.__getitems__:
        return _has_batch_access(dataset.dataset)
    if method is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(_has_batch_access, parts.values() if isinstance(parts, dict) else parts))
    return hasattr(dataset, "__getitems__")
