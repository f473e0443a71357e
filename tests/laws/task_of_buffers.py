"""A task whose forward pass in training changes and uses buffers, so later results depend on the samples of a rank."""

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task, sample_rng
from tests.faults.ending import reached

SETTINGS = {"global_batch_size": 8, "micro_batch_size": 2, "updates": 8, "optimizer.lr": 0.05, "log_every": 1}


def build(*, norm: bool = True, grows: bool = False, frozen: bool = False) -> Task:
    """A classifier of points.

    norm add a batch norm
    grows add a buffer that is not saved and grows to the size of the longest batch
    frozen make the codebook a parameter without gradients instead of a buffer
    """
    return Points(norm, grows, frozen)


class Center(nn.Module):
    """Subtracts a moving average of its inputs, and counts the inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)  # assigns a new tensor
            self.seen += len(x)
        return (x - self.mean) * (1 + 1e-3 * self.seen)


class Codebook(nn.Module):
    """Adds the nearest code vector. Code vectors move towards their inputs, even in evaluations, which is a mistake."""

    def __init__(self, frozen):
        super().__init__()
        if frozen:
            self.codes = nn.Parameter(torch.randn(4, 12), requires_grad=False)
        else:
            self.register_buffer("codes", torch.randn(4, 12))
        self.register_buffer("used", torch.ones(4), persistent=False)

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        with torch.no_grad():
            self.used.index_add_(0, nearest, torch.ones(len(x)))
            for code in nearest.unique():
                self.codes[code] += 0.1 * (x[nearest == code].mean(0) - self.codes[code])
        return x + (1 + 1e-3 * self.used[nearest, None]) * self.codes[nearest]


class Table(nn.Module):
    """Has a constant that is an expanded tensor, and a cache."""

    def __init__(self, grows):
        super().__init__()
        self.register_buffer("shift", torch.arange(12.0).expand(1, -1) / 100)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.grows = grows

    def forward(self, x):
        if self.grows and len(x) > len(self.cache):
            self.register_buffer("cache", torch.ones(len(x)), persistent=False)
        return x + self.shift


class Points(Task):
    def __init__(self, norm, grows, frozen):
        self.model = nn.Sequential(
            Center(), nn.Linear(6, 12), nn.BatchNorm1d(12) if norm else nn.Tanh(), Codebook(frozen), Table(grows),
            nn.Linear(12, 2),
        )  # fmt: skip
        self.update = 0

    def dataset(self, split):
        rngs = [sample_rng(3 + (split == "val"), 0, index) for index in range(28)]
        points = [rng.standard_normal(6, dtype="float32") * (1 + index % 5) for index, rng in enumerate(rngs)]
        return [(point, int(point.sum() > 0)) for point in points]

    def begin_update(self, progress):
        self.update = progress.update

    def loss(self, model, batch):
        x, y = batch
        if model.training:
            reached("update", self.update)
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def evaluate(self, model, batch):
        x, y = batch
        return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}
