"""Bottleneck: each micro-batch takes an extra 3 ms, and the settings split an update into 16 micro-batches."""

from __future__ import annotations

import time
from typing import Any

from rows import Rows
from torch import Tensor, nn

from runner import Task

SETTINGS = {"global_batch_size": 16, "micro_batch_size": 1, "optimizer.lr": 0.001}
PASS_S = 0.003


def build() -> Task:
    return Passes()


class Passes(Task):
    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows(4096, 8)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (rows,) = batch
        time.sleep(PASS_S)  # lint-tests: sleep: planted
        return (model(rows) - rows).square().mean(1).sum(), len(rows)
