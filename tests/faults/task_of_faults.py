"""A task for complete runs that are killed at random: dropout, batch norm, random samples, a save every nine updates.

ACCEL_RUN_END="update 5" or "evaluation 3" in the environment kills the process there with SIGKILL.
"""

import os
import random
import signal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from runner import Task
from runner.base.task import sample_rng

SETTINGS = {
    "updates": 60, "global_batch_size": 8, "optimizer.lr": 0.01, "evaluate.every": 20, "log_every": 2,
    "checkpoint.every": 9, "checkpoint.keep": 2,
}  # fmt: skip


def build(*, hidden: int = 8) -> Task:
    return Faulty(hidden)


class Points(torch.utils.data.Dataset):
    def __init__(self, split):
        self.split = split
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 130 if self.split == "train" else 20

    def __getitem__(self, index):
        rng = sample_rng(7, self.epoch if self.split == "train" else 0, index)
        x = torch.from_numpy(rng.standard_normal(8)).float()
        drawn = 0.1 * (torch.randn(8) + float(np.random.normal()) + random.gauss(0, 1))  # like random transforms
        return x + drawn, int(x[:4].sum() > 0)


class Faulty(Task):
    def __init__(self, hidden):
        self.model = nn.Sequential(
            nn.Linear(8, hidden), nn.Dropout(0.2), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )
        self.end, _, number = os.environ.get("ACCEL_RUN_END", "").partition(" ")
        self.left = int(number or 1)

    def dataset(self, split):
        return Points(split)

    def loss(self, model, batch):
        if self.end == ("update" if model.training else "evaluation"):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))
