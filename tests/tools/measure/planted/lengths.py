"""Bottleneck: images of many sizes, each of which starts a kernel search. Slow only on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Task
from runner.base.task import sample_rng

SETTINGS = {"global_batch_size": 8, "optimizer.lr": 0.001}


def build() -> Task:
    return Sizes()


class Rows:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        rng = sample_rng(0, 0, index)
        size = 32 + int(rng.integers(0, 96))
        return torch.from_numpy(rng.standard_normal((3, size, size), dtype="float32"))


class Sizes(Task):
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows()

    def collate(self, samples: Sequence[Tensor]) -> Tensor:
        size = max(sample.shape[-1] for sample in samples)
        return torch.stack(
            [F.pad(sample, (0, size - sample.shape[-1], 0, size - sample.shape[-1])) for sample in samples]
        )

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return (model(batch) - batch).square().mean((1, 2, 3)).sum(), len(batch)
