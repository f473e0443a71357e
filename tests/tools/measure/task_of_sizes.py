"""A task with a configurable memory limit and configurable times per micro-batch, sample and data row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner import Prediction, Task


def build(
    *,
    pass_ms: float = 0.0,
    sample_ms: float = 0.0,
    read_ms: float = 0.0,
    most: int = 1000,
    norm: bool = False,
    first_ms: float = 0.0,
) -> Task:
    return Sized(pass_ms, sample_ms, read_ms, most, norm, first_ms)


class Rows:
    def __init__(self, read_ms: float) -> None:
        self.rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        self.read_ms = read_ms

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if self.read_ms:
            time.sleep(self.read_ms / 1000)  # lint-tests: sleep: planted
        return self.rows[index]


class Sized(Task):
    item = "row"

    def __init__(
        self, pass_ms: float, sample_ms: float, read_ms: float, most: int, norm: bool, first_ms: float
    ) -> None:
        self.pass_ms, self.sample_ms, self.read_ms, self.most = pass_ms, sample_ms, read_ms, most
        self.first_ms, self.evaluated = first_ms, list[int]()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) if norm else nn.Linear(8, 8)

    def dataset(self, split: str) -> Any:
        if split == "infer":
            raise NotImplementedError
        return Rows(self.read_ms)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("Tried to allocate more than there is")
        time.sleep((self.pass_ms + self.sample_ms * len(batch)) / 1000)  # lint-tests: sleep: planted
        return (model(batch) - batch).square().sum(), len(batch)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, int]]:
        time.sleep(0.0 if len(batch) in self.evaluated else self.first_ms / 1000)  # lint-tests: sleep: planted
        self.evaluated.append(len(batch))
        return {"loss": self.loss(model, batch)}

    def predict(self, model: nn.Module, generator: torch.Generator, *, rows: int = 4) -> Iterator[Prediction]:  # type: ignore[override]
        for number in range(rows):
            time.sleep(self.pass_ms / 1000)  # lint-tests: sleep: planted
            model(torch.randn(1, 8, generator=generator))
            yield Prediction({f"{number}.txt": "x"})
