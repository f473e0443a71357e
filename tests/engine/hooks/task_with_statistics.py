"""A small task with batch norm and dropout: its passes change buffers and draw random numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from runner import Task


def build() -> Task:
    return Normalized()


class Normalized(Task):
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return torch.utils.data.TensorDataset(torch.arange(256.0).view(64, 4) / 64)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        (rows,) = batch
        return model(rows).square().sum(), len(rows)
