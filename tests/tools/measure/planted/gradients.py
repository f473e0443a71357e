"""A network that computes for some milliseconds, optionally with a sleep or with wrong gradients."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from runner import Task

SETTINGS = {"optimizer.lr": 0.001}


def build(*, width: int = 512, depth: int = 4, sleep_ms: float = 0.0, gradient: float = 1.0) -> Task:
    return Layers(width, depth, sleep_ms, gradient)


class Rows:
    def __init__(self, width: int) -> None:
        self.rows = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Layers(Task):
    def __init__(self, width: int, depth: int, sleep_ms: float, gradient: float) -> None:
        self.width, self.sleep_ms, self.gradient = width, sleep_ms, gradient
        inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*inner, nn.Linear(width, width))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows(self.width)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        time.sleep(self.sleep_ms / 1000)  # lint-tests: sleep: planted
        loss = (model(batch) - batch).square().mean(1).sum()
        return self.gradient * loss + (1 - self.gradient) * loss.detach(), len(batch)
