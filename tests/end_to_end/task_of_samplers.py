"""A test task for every sampler: two datasets of numbers, with weights and lengths, and two custom samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from runner import Task
from tests.faults.ending import reached

SETTINGS = {"optimizer": "sgd", "optimizer.lr": 0.05, "scheduler": "constant", "global_batch_size": 8, "log_every": 1}


def backwards(samples: Any, *, step: int = 1):
    """Visit the samples in reverse order.

    step  stride
    """
    order = np.arange(samples.num_samples)[::-1][::step]
    return samples.in_order(lambda seed, epoch: order, len(order))


def nothing(samples: Any):
    """Return no sampler."""


SAMPLERS = {"backwards": backwards, "nothing": nothing}


def build() -> Task:
    return Numbers()


class Part(Dataset):
    def __init__(self, size: int, first: int) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.first + index, 1.0]) / 50 + 0.01 * torch.rand(2)


class Numbers(Task):
    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)

    def dataset(self, split: str) -> Any:
        return ConcatDataset([Part(30, 0), Part(7, 30)]) if split == "train" else Part(5, 0)

    def sample_weights(self, dataset: Any) -> list[float]:
        return [1.0 + index % 3 for index in range(len(dataset))]

    def sample_lengths(self, dataset: Any) -> list[int]:
        return [1 + index % 7 for index in range(len(dataset))]

    def begin_update(self, progress: Any) -> None:
        reached("update", progress.update + 1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch).squeeze(1) - batch[:, 0].square()).square().sum(), len(batch)
