"""A task in which one rank fails during an update, while the others wait in a collective."""

import importlib
import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task


class Failing(Task):
    item = "sample"

    def __init__(self, rank: int, at: int, how: str) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.rank, self.at, self.how = rank, at, how
        self.is_due = False

    def begin_update(self, progress):
        self.is_due = progress.update == self.at and self.rank == (dist.get_rank() if dist.is_initialized() else 0)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 6, generator=generator)
        return TensorDataset(inputs, torch.randint(3, (96,), generator=generator))

    def loss(self, model, batch):
        is_due = self.is_due and model.training
        if is_due and self.how == "memory":
            torch.empty(1 << 40, device=batch[0].device)
        if is_due and self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_due and self.how == "assert":  # is raised by a later operation
            importlib.import_module("_stand_in").fail_after(0, "device-side assert triggered")
            self.is_due = False
        elif is_due:
            raise ValueError("planted")
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def build(*, rank: int = 1, at: int = 3, how: str = "raise") -> Task:
    return Failing(rank, at, how)
