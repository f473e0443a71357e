"""A small task with all state that a resumed run could lose: dropout, all generators, bad samples, custom state.

Samples also draw from the global generators, as transforms do, in training and in evaluation.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from runner import Fit, Task, sample_rng
from tests.faults.ending import reached

SETTINGS = {"global_batch_size": 8, "evaluate.every": 3, "log_every": 2, "optimizer.lr": 0.02}


def build(
    *,
    samples: int = 26,
    dropout: float = 0.2,
    noise: float = 0.1,
    batch_norm: bool = False,
    bad: bool = False,
    own: bool = False,
    average: bool = False,
    double: bool = False,
) -> Task:
    """A classifier of points.

    samples     number of training samples; with 26, the last update of an epoch has 2 instead of 8
    noise       weight of draws from the generators of torch, numpy and Python in the loss
    batch_norm  use batch norm, which has running statistics
    bad         some samples cannot be read
    own         the task has its own generator and counter, kept in buffers of the model
    average     the forward pass uses a moving average of training inputs
    double      use float64
    """
    return Points(samples, dropout, noise, batch_norm, bad, own, average, double)


class Shift(nn.Module):
    """Subtracts a mean that a fit may have computed; holds further state of the task."""

    def __init__(self, own, average):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.average = average
        if average:
            self.register_buffer("center", torch.zeros(6))
        if own:
            self.register_buffer("generator", torch.Generator().manual_seed(3).get_state())
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if not self.average:
            return x - self.mean
        if self.training:
            self.center.lerp_(x.detach().mean(0), 0.2)
        return x - self.mean - self.center


class Samples:
    def __init__(self, split, size, bad, dtype):
        self.split, self.size, self.dtype, self.epoch = split, size, dtype, 0
        self.bad = {1, 7, 8, 20} if bad and split == "train" else set()

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        if index in self.bad and index % 2:
            raise ValueError(f"sample {index} cannot be read")
        noise = torch.randn(6, dtype=torch.float64).numpy() + np.random.normal(size=6) + random.gauss(0, 1)
        if index in self.bad:  # after random numbers have been drawn
            raise ValueError(f"sample {index} cannot be read")
        x = 0.05 * noise + sample_rng(5, 0, index).standard_normal(6) + 0.5
        y = int(x[:3].sum() > 1.5)
        if self.split == "train":
            x = x + 0.1 * sample_rng(5, self.epoch + 1, index).standard_normal(6)
        return torch.from_numpy(x).to(self.dtype), y


class Mean(Fit):
    """The mean of the inputs."""

    def __init__(self, task):
        self.task = task

    def start(self):
        return {"sum": torch.zeros(6, dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}

    def add(self, model, state, batch):
        reached("update", self.task.update, self.task.phase)
        return {"sum": state["sum"] + batch[0].double().sum(0), "count": state["count"] + len(batch[0])}, len(batch[0])

    def merge(self, one, other):
        return {name: one[name] + other[name] for name in one}

    def finish(self, model, state):
        mean = state["sum"] / state["count"]
        model[0].mean.copy_(mean)
        return {"mean": float(mean.mean())}


class Points(Task):
    def __init__(self, samples, dropout, noise, batch_norm, bad, own, average, double):
        self.samples, self.noise, self.bad, self.own = samples, noise, bad, own
        self.dtype = torch.float64 if double else torch.float32
        norm = nn.BatchNorm1d(12) if batch_norm else nn.LayerNorm(12)
        self.model = nn.Sequential(
            Shift(own, average), nn.Linear(6, 12), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 2)
        ).to(self.dtype)
        self.update, self.share, self.evaluations, self.in_evaluation = 0, 0.0, 0, False
        reached("build", 0)

    def dataset(self, split):
        return Samples(split, self.samples if split == "train" else 10, self.bad, self.dtype)

    def begin_update(self, progress):
        self.update, self.share, self.in_evaluation = progress.update, progress.share, False
        reached("begin", progress.update, self.phase)

    def loss(self, model, batch):
        x, y = batch
        if torch.is_grad_enabled():
            reached("update", self.update, self.phase)
            x = x + self.noise * (self.draw() - 0.5)
        total = F.cross_entropy(model(x) * (1 + self.share), y, reduction="sum")
        return total, len(y)

    def draw(self):
        """Return the sum of one number from each generator that the runner restores, and from that of the task."""
        result = torch.rand(()).item() + np.random.random() + random.random()
        if self.own:
            shift, generator = self.model[0], torch.Generator()
            generator.set_state(shift.generator)
            result += torch.rand((), generator=generator).item() + 0.001 * int(shift.seen)
            shift.generator.copy_(generator.get_state())
            shift.seen += 1
        return result

    def evaluate(self, model, batch):
        if not self.in_evaluation:
            self.evaluations, self.in_evaluation = self.evaluations + 1, True
        reached("evaluation", self.evaluations)
        count = len(batch[1])
        drawn = torch.rand(count).double().sum() + sum(np.random.random(count)) + random.random()
        return {"loss": self.loss(model, batch), "drawn": (self.noise * drawn, count)}
