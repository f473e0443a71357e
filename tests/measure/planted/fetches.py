"""A task whose loss fetches numbers from the device in every way, and whose data set only looks at what is its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import Task

HOST = torch.device("cpu")
SETTINGS = {"global_batch_size": 4}


def build() -> Task:
    return Waits()


class Rows:
    def __init__(self) -> None:
        self.rows = torch.arange(24.0).reshape(8, 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Tensor:
        first = self.rows[0]
        assert first.sum().item() >= 0
        assert bool(first[0] < 9)
        assert float(first[1]) < first.tolist()[2] == first.numpy()[2] == first.cpu()[2] == first.to("cpu").to(HOST)[2]
        return self.rows[: len(indices)]  # a batch that lies in the memory that is looked at

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Waits(Task):
    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Rows()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        out = model(batch)
        total, seen = out.square().sum(), out.detach()
        (seen + 1).sum().item()  # waits
        float((seen + 2).sum())  # waits
        if bool((seen > 3).any()):  # waits
            pass
        if (seen + 4).isnan().any():  # waits
            pass
        (seen + 5).cpu()  # waits
        (seen + 6).numpy()  # waits
        (seen + 7).tolist()  # waits
        (seen + 8).to("cpu")  # waits
        (seen + 9).to(HOST)  # waits
        (seen + 10).to(device=HOST, dtype=torch.float64)  # waits
        [row.item() for row in seen[:, 0] + 11]  # waits four times
        (seen + 12).to(batch.device)
        torch.arange(3).tolist()
        batch[0].sum().item()  # waits
        return total, len(batch)
