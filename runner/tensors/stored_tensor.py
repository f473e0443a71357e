"""Tensors in files, read on demand: the complete tensor, or a range of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    fill  fill(first, rows) reads consecutive rows, from row `first` on, into the contiguous CPU tensor `rows`; raises
          DataError or StorageError
    """

    shape: torch.Size
    dtype: torch.dtype
    fill: Callable[[int, Tensor], None]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Return whether the dtype is a floating-point type."""
        return self.dtype.is_floating_point

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop` (excluded) in new memory; by default all of them."""
        shape = self.shape
        if shape:
            stop = shape[0] if stop is None else min(stop, shape[0])
            shape = torch.Size((max(0, stop - start), *shape[1:]))
        rows = torch.empty(shape, dtype=self.dtype)
        if rows.numel():
            self.fill(start, rows)
        return rows


Saved = Mapping[str, Tensor | StoredTensor]  # tensors of a checkpoint by name


def first_row(num_rows: int, num_ranks: int, rank: int) -> int:
    """Return the first row of a rank's shard; rows are divided among ranks as by torch's Shard(0)."""
    return min(-(-num_rows // num_ranks) * rank, num_rows)


def in_memory(tensor: Tensor | StoredTensor) -> Tensor:
    """Return the tensor; if it is in a file, read it first."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def read_in_groups(saved: Saved, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in groups of about `max_bytes`; the tensors of a module stay in one group."""
    group: dict[str, Tensor] = {}
    size, module = 0, None
    for name, tensor in saved.items():
        if size >= max_bytes and name.rpartition(".")[0] != module:
            yield group
            group, size = {}, 0
        module = name.rpartition(".")[0]
        group[name] = in_memory(tensor)
        size += tensor.nbytes
    yield group
