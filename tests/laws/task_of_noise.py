"""A small float64 diffusion task that draws in the loss, the metrics and every layer."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

from runner import Progress, Task, per_sample_noise, sample_rng

SETTINGS = {
    "global_batch_size": 16,
    "updates": 6,
    "evaluate.every": 3,
    "optimizer": "adamw",
    "optimizer.lr": 0.01,
    "log_every": 1,
}
WIDTH = 6


def build(*, full_above: int = 0, end: str = "", end_at: int = 4) -> Task:
    """Points to denoise.

    full_above  micro-batches with more samples run out of memory in the third update; 0: none do
    end         name of a signal that the first process sends itself before update `end_at`
    """
    return Points(full_above, end, end_at)


class Layer(nn.Module):
    """A linear layer with noise and dropout, whose draws depend on its name."""

    def __init__(self, name, before, after):
        super().__init__()
        self.name = name
        self.linear = nn.Linear(before, after, dtype=torch.float64)

    def forward(self, x):
        x = self.linear(x)
        if not self.training:
            return x
        noise = per_sample_noise(x, self.name)
        x = x + 0.1 * noise.normal(x.shape[1], dtype=x.dtype)
        return noise.dropout(torch.tanh(x), 0.25) + x


class Points(Task):
    def __init__(self, full_above, end, end_at):
        self.full_above, self.end, self.end_at, self.update = full_above, end, end_at, 0
        widths = [WIDTH + 1, 8, 8, 8, WIDTH]
        self.model = nn.Sequential(*(Layer(str(i), *widths[i : i + 2]) for i in range(4)))

    def begin_update(self, progress: Progress):
        self.update = progress.update
        there = Path(f"ended-{self.end}")
        if self.end and self.update == self.end_at and not there.exists():
            there.touch()
            os.kill(os.getpid(), getattr(signal, self.end))

    def dataset(self, split):
        count, first = {"train": (41, 0), "val": (13, 100)}[split]  # the last update of an epoch is smaller
        return [torch.from_numpy(sample_rng(5, 0, first + i).standard_normal(WIDTH)) for i in range(count)]

    def loss(self, model, batch):
        if self.full_above and self.update == 2 and model.training and len(batch) > self.full_above:
            raise torch.OutOfMemoryError("CUDA out of memory")
        noise = per_sample_noise(batch)
        t = noise.uniform(1, dtype=batch.dtype)
        drawn = noise.normal(WIDTH, dtype=batch.dtype)
        kept = noise.bernoulli(0.8, 1)
        half = torch.zeros(len(batch), dtype=batch.dtype).index_fill_(0, noise.every(2), 1.0)
        predicted = model(torch.cat([(1 - t) * batch + t * drawn, t], dim=1))
        squares = ((predicted - drawn) ** 2 * kept).sum(dim=1)
        return (squares * (1 + half)).sum(), len(batch)

    def evaluate(self, model, batch):
        noise = per_sample_noise(batch)
        flips = noise.integers(0, 2, WIDTH)
        return {"loss": self.loss(model, batch), "flips": ((flips * batch).sum(), flips.numel())}

    def blocks(self):
        return list(self.model)
