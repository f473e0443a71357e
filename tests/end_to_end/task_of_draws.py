"""A task whose datasets draw random numbers from all global generators. Its model does not."""

import random

import numpy as np
import torch
from torch import nn

from runner import Fit, Prediction, Task

SETTINGS = {"global_batch_size": 8, "optimizer.lr": 0.01, "evaluate.every": 2, "log_every": 1}
PHASES = {"statistics": {"kind": "fit"}, "train": {"needs": ["statistics"], "updates": 6}}
NAMES = ("torch", "numpy", "python", "built")


def build() -> Task:
    return Draws()


class Drawn:
    def __init__(self, size):
        self.size, self.built = size, np.random.random()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        numbers = [torch.rand((), dtype=torch.float64).item(), np.random.normal(), random.gauss(0, 1), self.built]
        return torch.tensor(numbers, dtype=torch.float64)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.inner = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x):
        return self.inner(x - self.mean)


class Mean(Fit):
    def start(self):
        return {"sum": torch.zeros(4, dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}

    def add(self, model, state, batch):
        return {"sum": state["sum"] + batch.sum(0), "count": state["count"] + len(batch)}, len(batch)

    def merge(self, one, other):
        return {name: one[name] + other[name] for name in one}

    def finish(self, model, state):
        model.mean.copy_(state["sum"] / state["count"])
        return {}


class Draws(Task):
    def __init__(self):
        self.model = Shifted()

    @property
    def fits(self):
        return {"statistics": Mean()}

    def dataset(self, split):
        return Drawn({"train": 26, "val": 10, "test": 4}[split])

    def loss(self, model, batch):
        return (model(batch) ** 2).sum(), len(batch)

    def evaluate(self, model, batch):
        return {name: (batch[:, place].sum(), len(batch)) for place, name in enumerate(NAMES)}

    def predict(self, model, generator, *, samples: int = 3):
        data = self.dataset("test")
        for number in range(samples):
            yield Prediction({f"{number}.npy": data[number].numpy()})
