"""Bottleneck: slow storage takes 2 ms per sample. Samples differ in each epoch and are not prefetched."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from runner import Task
from runner.base.task import sample_rng

SETTINGS = {"global_batch_size": 16, "optimizer.lr": 0.001}
WIDTH, FETCH_S = 256, 0.002


def build(*, pass_ms: float = 0.0) -> Task:
    return Remote(pass_ms)


class Rows:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(FETCH_S)  # lint-tests: sleep: planted
        return torch.from_numpy(sample_rng(0, self.epoch, index).standard_normal(WIDTH, dtype="float32"))


class Remote(Task):
    def __init__(self, pass_ms: float) -> None:
        self.pass_ms = pass_ms
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        if self.pass_ms:
            time.sleep(self.pass_ms / 1000)  # lint-tests: sleep: planted
        return (model(batch) - batch).square().mean(1).sum(), len(batch)
