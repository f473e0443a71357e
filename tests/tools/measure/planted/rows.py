"""The data of the tasks with bottlenecks: rows of random numbers in memory."""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """`count` rows of `width` numbers, always the same, fetched as one tensor (B, width)."""

    def __init__(self, count: int, width: int) -> None:
        self.rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor]:
        return (self.rows[torch.tensor(indices)],)
