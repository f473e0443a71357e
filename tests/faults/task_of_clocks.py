"""A task that moves the system clock by CLOCK_S seconds in every forward pass; the monotonic clock is unchanged."""

import datetime
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task

SETTINGS = {"updates": 40, "global_batch_size": 8, "log_every": 5, "evaluate.every": 10}
STEP_S = float(os.environ.get("CLOCK_S", "0"))
ahead = 0.0
real_time, real_datetime = time.time, datetime.datetime


class Jumping(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.fromtimestamp(real_time() + ahead, tz)


def build(*, hidden: int = 8) -> Task:
    jump()
    return Clocked(hidden)


def jump():
    """Move the clock of every module forward, or back."""
    global ahead
    if STEP_S:
        ahead = STEP_S - ahead  # forward, then back
        time.time, datetime.datetime = lambda: real_time() + ahead, Jumping
        for name, module in list(sys.modules.items()):
            if name.startswith("runner.") and getattr(module, "datetime", None) is real_datetime:
                module.datetime = Jumping


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, int(x[:4].sum() > 0)


class Clocked(Task):
    def __init__(self, hidden):
        self.model = nn.Sequential(nn.Linear(8, hidden), nn.Dropout(0.2), nn.ReLU(), nn.Linear(hidden, 2))

    def dataset(self, split):
        return Points()

    def loss(self, model, batch):
        jump()
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))
