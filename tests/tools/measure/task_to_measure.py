"""A task that sleeps, fails or synchronizes, as configured."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from runner import Task


def build(
    *,
    sleep_ms: float = 4.0,
    sample_ms: float = 0.0,
    scale: float = 1.0,
    gradient: float = 1.0,
    items: int = 0,
    dies_at: int = 0,
    raises_at: int = 0,
    start_s: float = 0.0,
) -> Task:
    time.sleep(start_s)  # lint-tests: sleep: planted
    return Measured(sleep_ms, sample_ms, scale, gradient, items, dies_at, raises_at)


class Rows:
    def __init__(self, sample_ms: float) -> None:
        self.rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        self.sample_ms = sample_ms

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if self.sample_ms:
            # lint-tests: sleep: planted
            time.sleep(self.sample_ms / 1000)
        return self.rows[index]


class Measured(Task):
    def __init__(
        self,
        sleep_ms: float,
        sample_ms: float,
        scale: float,
        gradient: float,
        items: int,
        dies_at: int,
        raises_at: int,
    ) -> None:
        self.sleep_ms, self.sample_ms, self.scale, self.items = sleep_ms, sample_ms, scale, items
        self.gradient = gradient  # scales the gradient without changing the loss
        self.dies_at, self.raises_at = dies_at, raises_at
        self.calls = 0
        self.model = nn.Linear(8, 8)

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows(self.sample_ms)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        if self.calls == self.dies_at:
            os._exit(9)
        if self.calls == self.raises_at:
            raise ValueError("as planned")
        time.sleep(self.sleep_ms / 1000)  # lint-tests: sleep: planted
        out = model(batch)
        for row in out.detach().flatten()[: self.items]:
            row.item()  # synchronizes
        loss = self.scale * ((out - batch).square().sum() + out.abs().sum())
        return self.gradient * loss + (1 - self.gradient) * loss.detach(), len(batch)
