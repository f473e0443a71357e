"""Bottleneck: the task writes a line to a slow disk (2 ms) before each update. Fix: write before every 100th update."""

from __future__ import annotations

import time
from typing import Any

from rows import Rows
from torch import Tensor, nn

from runner import Task
from runner.base.task import Progress

SETTINGS = {"global_batch_size": 32, "optimizer.lr": 0.001}
WIDTH, WRITE_S = 256, 0.002


def build(*, fixed: bool = False) -> Task:
    return Logged(fixed)


class Logged(Task):
    def __init__(self, fixed: bool) -> None:
        self.every = 100 if fixed else 1
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows(4096, WIDTH)

    def begin_update(self, progress: Progress) -> None:
        if progress.update % self.every == 0:
            time.sleep(WRITE_S)  # lint-tests: sleep: planted

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (rows,) = batch
        return (model(rows) - rows).square().mean(1).sum(), len(rows)
