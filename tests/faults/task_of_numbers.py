"""A task with a value that stops being finite at a chosen update and place."""

import os

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task

SETTINGS = {"updates": 30, "global_batch_size": 4, "checkpoint.every": 5, "optimizer.lr": 0.01, "evaluate.every": 0}


def build(*, fault: str = "none", at: int = 12, ghost: bool = False) -> Task:
    return Numbers("none" if "FIXED" in os.environ else fault, at, ghost)


class Points(torch.utils.data.Dataset):
    def __init__(self, fault):
        self.bad = (37, 41) if fault == "samples" else ()
        self.is_augmented = fault == "augmentation"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.full((4,), index / 64)
        if index in self.bad:
            x[2] = float("nan")
        if self.is_augmented and index % 8 == 0 and torch.rand(()) < 0.05:
            x[3] = float("nan")
        return x, index % 2


class Middle(nn.Module):
    """Has a non-finite output or gradient if switched on."""

    fault = "none"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.weight
        if self.fault == "module":
            x = x / torch.zeros_like(x)
        if self.fault == "backward":
            x = x + torch.sqrt(x * 0)
        return x


class Numbers(Task):
    def __init__(self, fault, at, ghost):
        self.model = nn.Sequential()
        self.model.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.model.middle = Middle()
        self.model.head = nn.Linear(4, 2)
        if ghost:
            self.model.register_parameter("ghost", nn.Parameter(torch.full((3,), float("nan"))))
        self.fault, self.at, self.calls, self.update = fault, at, 0, 0

    def begin_update(self, progress):
        self.update = progress.update + 1

    def dataset(self, split):
        return Points(self.fault)

    def loss(self, model, batch):
        x, y = batch
        bad = self.update >= self.at
        self.calls += bad
        self.model.middle.fault = self.fault if bad else "none"
        total = F.cross_entropy(model(x), y, reduction="sum")
        if self.fault == "loss" and bad:
            total = total * float("nan")
        if self.fault == "once" and self.calls == 1:
            total = total * float("inf")
        if self.fault == "half":
            total = total * 1e9
        if self.fault == "gradient" and bad:
            model.head.weight.register_hook(lambda gradient: gradient * float("inf"))
        return total, torch.tensor(0 if self.fault == "nothing" and bad else len(y))
