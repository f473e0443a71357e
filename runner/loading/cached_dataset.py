"""Datasets that keep samples as one tensor per field: entire samples, or only the part that never changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runner.base.batch import map_tensors


class CachedDataset:
    """All samples of a dataset as tensors; a batch is read with one `index_select` per tensor."""

    def __init__(self, samples: Any, num_samples: int) -> None:
        self.samples = samples
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self.samples)

    def __getitems__(self, indices: list[int]) -> Any:
        rows = torch.tensor(indices)
        return map_tensors(lambda tensor: tensor.index_select(0, rows.to(tensor.device)), self.samples)


class FixedPart:
    """The fixed part of a dataset, which `load_fixed` reads, as a separate dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset.load_fixed([index])

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset.load_fixed(indices)


class ComposedDataset:
    """A dataset whose fixed part is cached."""

    def __init__(self, dataset: Any, fixed: CachedDataset) -> None:
        self.dataset, self.fixed = dataset, fixed
        if hasattr(dataset, "set_epoch"):
            self.set_epoch = dataset.set_epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset.compose(self.fixed.__getitems__, indices)


def concatenate_batches(batches: list[Any]) -> Any:
    """Concatenate the tensors of batches. Raises TypeError for other values, RuntimeError for unequal shapes."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: concatenate_batches([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [concatenate_batches(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise TypeError(f"a batch holds {type(first).__name__}, not tensors")
