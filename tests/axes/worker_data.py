"""A dataset of numbers for worker processes, in which reading one number may hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import torch


class Numbers(torch.utils.data.Dataset[int]):
    """Samples that are their own index; reading sample `hangs_at - 7` never returns."""

    def __init__(self, hangs_at: int) -> None:
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        while index == self.hangs_at - 7:
            signal.pause()
        return index


class Readers:
    """Samples that are the PID of the process that reads them, plus `offset`."""

    offset = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return os.getpid() + self.offset


class Owner:
    """Like a task, this object has a model, a method `collate`, and a dataset that refers to it."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        self.model.no_pickle = lambda: None  # type: ignore[assignment]
        self.transform = torch.nn.Identity()  # a module outside of the model
        self.first = self.model[0]

    def dataset(self) -> Samples:
        return Samples(self)

    def collate(self, samples: Sequence[int]) -> torch.Tensor:
        if samples[0] == 1:
            self.model(torch.ones(2))
        return torch.as_tensor(self.transform(torch.tensor([*samples])))


class Samples:
    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index
