"""Planted: a line of its own is written to a slow disk, 2 ms away, before each update. Mended: in every 100th."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from runner import Task
from runner.base.task import Progress

SETTINGS = {"global_batch_size": 32, "optimizer.lr": 0.001}
WIDTH, WRITE_S = 256, 0.002


def build(*, mended: bool = False) -> Task:
    return Logged(mended)


class Rows:
    def __init__(self) -> None:
        self.rows = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor]:
        return (self.rows[torch.tensor(indices)],)


class Logged(Task):
    def __init__(self, mended: bool) -> None:
        self.every = 100 if mended else 1
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows()

    def begin_update(self, progress: Progress) -> None:
        if progress.update % self.every == 0:
            time.sleep(WRITE_S)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (rows,) = batch
        return (model(rows) - rows).square().mean(1).sum(), len(rows)
