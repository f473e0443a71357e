"""A data set of numbers for worker processes; reading one of them may never end."""

from __future__ import annotations

import time

import torch


class Numbers(torch.utils.data.Dataset[int]):
    """The number of each index; that of `hangs_at - 7` is never read to its end."""

    def __init__(self, hangs_at: int) -> None:
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        while index == self.hangs_at - 7:
            time.sleep(60)
        return index
