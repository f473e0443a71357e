"""Find out whether a dataset can read many samples at once, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset, Subset, TensorDataset

from runner.base.task import Dataset


class TensorRows:
    """Reads a batch of a TensorDataset, or of a Subset of one, with one operation per tensor.

    This is a class, because a closure could not be sent to spawned workers.

    tensors  tensors of the TensorDataset
    subsets  indices of each Subset around it, the outermost first
    """

    def __init__(self, tensors: Sequence[Tensor], subsets: Sequence[Sequence[int]] = ()) -> None:
        self.tensors, self.subsets = tensors, subsets

    def __call__(self, indices: list[int]) -> list[Tensor]:
        """Return a list of tensors, as default_collate does for tuples of tensors."""
        for subset in self.subsets:
            indices = [int(subset[index]) for index in indices]
        positions = torch.from_numpy(np.array(indices, dtype=np.int64))  # torch.tensor takes four times as long
        return [tensor.index_select(0, positions.to(tensor.device)) for tensor in self.tensors]


def tensor_rows(dataset: Any) -> TensorRows | None:
    """Return the reader of a TensorDataset, or of a Subset of one; None for other datasets."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    is_plain = type(dataset) is TensorDataset and all(map(_is_plain, dataset.tensors))
    return TensorRows(dataset.tensors, subsets) if is_plain else None


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
