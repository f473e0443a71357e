"""A task that trains on a stream of `tests/laws/streams.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task
from tests.faults.ending import reached
from tests.laws.streams import FILES, KINDS, Undivided, Unseeded

SETTINGS = {"optimizer": "sgd", "optimizer.lr": 0.05, "scheduler": "constant", "global_batch_size": 8, "log_every": 1}


def build(*, kind: str = "plain") -> Task:
    """Train on a stream.

    kind  name of the stream in `tests/laws/streams.py`
    """
    return Divided(kind) if kind in KINDS else Whole(kind)


class Numbers(Task):
    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, nn.Linear(2, 1)

    def begin_update(self, progress: Any) -> None:
        reached("update", progress.update + 1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        inputs = torch.stack([batch[:, 0] / 71, batch[:, -1]], 1)
        return (model(inputs).squeeze(1) - inputs[:, 0].square()).square().sum(), len(batch)


class Divided(Numbers):
    def stream(self, split: str, shard: int, num_shards: int) -> Any:
        return KINDS[self.kind](FILES[shard::num_shards])

    def dataset(self, split: str) -> Any:
        assert split == "val"
        return TensorDataset(torch.linspace(0, 70, 11)[:, None].expand(11, 2))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return super().loss(model, batch[0] if isinstance(batch, (list, tuple)) else batch)


class Whole(Numbers):
    def dataset(self, split: str) -> Any:
        return {"undivided": Undivided, "unseeded": Unseeded}[self.kind]()
