"""A plain network of configurable width and depth. The bottleneck is in its training settings.

pass_ms  milliseconds that each micro-batch takes in addition to its computation
"""

from __future__ import annotations

import time
from typing import Any

from rows import Rows
from torch import Tensor, nn

from runner import Task

SETTINGS = {"global_batch_size": 32, "optimizer.lr": 0.001}


def build(*, width: int = 64, depth: int = 2, pass_ms: float = 0.0) -> Task:
    return Layers(width, depth, pass_ms)


class Layers(Task):
    def __init__(self, width: int, depth: int, pass_ms: float) -> None:
        self.width, self.pass_ms = width, pass_ms
        inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*inner, nn.Linear(width, width))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows(4096, self.width)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (rows,) = batch
        if self.pass_ms:
            time.sleep(self.pass_ms / 1000)  # lint-tests: sleep: planted
        return (model(rows) - rows).square().mean(1).sum(), len(rows)
