"""A small task with all kinds of state that an update changes besides weights, and planted out-of-memory errors."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from runner import Fit, Task
from tests.faults import shortages

SETTINGS = {
    "updates": 5, "global_batch_size": 8, "optimizer.lr": 0.02, "evaluate.every": 0, "log_every": 1, "seed": 3,
}  # fmt: skip
PHASES = {"train": {"kind": "train"}, "mean": {"kind": "fit"}}


def build(*, draws: bool = True, changes: str = "", samples: int = 44, plain: bool = False) -> Task:
    """A classifier of points.

    draws    forward passes draw from numpy's and Python's generators too
    changes  "weight" or "buffer", which forward passes change from update 2 on, and never before
    samples  number of training samples; the last update of an epoch is smaller than 32
    plain    an update changes only weights
    """
    return Points(draws, changes, samples, plain)


class Rows:
    def __init__(self, split, size):
        self.split, self.size = split, size

    def __len__(self):
        return self.size

    def __getitems__(self, indices):
        shortages.strike("reading" if self.split == "train" else "reading of held-out samples", len(indices))
        x = torch.tensor([[float(np.sin(7 * index + part)) for part in range(6)] for index in indices])
        y = (x.sum(1) > 0).long()
        if self.split == "train":  # the draws of a batch read in one call depend on all its samples
            x = x + 0.02 * torch.randn_like(x) + 0.02 * (np.random.normal() + random.gauss(0, 1))
        return x, y

    def __getitem__(self, index):
        x, y = self.__getitems__([index])
        return x[0], y[0]


class Bag(nn.Module):
    """Changes one buffer in place and replaces another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("constant", torch.arange(12.0))

    def forward(self, x):
        if self.training:
            self.seen.add_(len(x))
            self.replaced = self.replaced + x.detach().mean()
        return x + 0.01 * self.constant * self.replaced[0]


class Constant(nn.Module):
    """Has a buffer that never changes, such as a mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.arange(12.0))

    def forward(self, x):
        return x + 0.01 * self.constant


class Mean(Fit):
    def start(self):
        return {"sum": torch.zeros(6, dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}

    def add(self, model, state, batch):
        shortages.strike("fit", len(batch[0]))
        return {"sum": state["sum"] + batch[0].double().sum(0), "count": state["count"] + len(batch[0])}, len(batch[0])

    def merge(self, one, other):
        return {name: one[name] + other[name] for name in one}

    def finish(self, model, state):
        return {"mean": float(state["sum"].sum() / state["count"])}


class Points(Task):
    loss_is_additive = False  # skips the loss check, whose calls would be counted

    def __init__(self, draws, changes, samples, plain):
        self.draws, self.changes, self.samples = draws, changes, samples
        self.model = nn.Sequential(
            nn.Linear(6, 12),
            *([Constant()] if plain else [nn.Unflatten(1, (4, 3)), nn.BatchNorm1d(4), nn.Flatten(), Bag()]),
            nn.Dropout(0.2),
            nn.Linear(12, 2),
        )

    @property
    def fits(self):
        return {"mean": Mean()}

    def dataset(self, split):
        return Rows(split, self.samples if split == "train" else 21)

    def begin_update(self, progress):
        self.update = progress.update
        shortages.begin_update(progress.update)

    def loss(self, model, batch):
        x, y = batch
        if torch.is_grad_enabled():
            shortages.record_samples(len(x))
            if self.draws:
                x = x + 0.1 * (np.random.random() + random.random() + torch.rand(()).item())
            if self.changes and self.update >= 2:
                changed = {"weight": model[0].weight, "buffer": model[4].constant}[self.changes]
                with torch.no_grad():
                    changed.mul_(1.01)
        out = model(x)
        shortages.strike("forward" if torch.is_grad_enabled() else "evaluation", len(x))
        if out.requires_grad:
            out.register_hook(lambda _: shortages.strike("backward", len(x)))
        return F.cross_entropy(out, y, reduction="sum"), len(y)

    def predict(self, model, generator, *, samples: int = 6, batch_size: int = 6):
        from runner import Prediction

        for first in range(0, samples, batch_size):
            count = min(batch_size, samples - first)
            shortages.strike("predict", count)
            for number in range(first, first + count):
                yield Prediction({f"{number}.txt": f"{number}\n"})
