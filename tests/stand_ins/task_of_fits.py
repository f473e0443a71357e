"""A task whose phases fit statistics in different ways, and then train."""

import torch
from torch import nn

from runner import Fit, Task

WIDTH, LENGTH = 256, 64
PHASES = {
    "covariance": {"kind": "fit"},
    "projection": {"kind": "fit"},
    "selection": {"kind": "fit"},
    "train": {"updates": 3},
}
SETTINGS = {"global_batch_size": 32, "micro_batch_size": 16, "evaluate.every": 3, "evaluate.samples": 4}


class Sums(Fit):
    def __init__(self, shapes):
        self.shapes = shapes

    def start(self):
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}

    def merge(self, one, other):
        return {name: one[name] + other[name] for name in one}

    def finish(self, model, state):
        return {}


class Covariance(Sums):
    """A fit that uses float64 only on a GPU, as a task may do because float64 is slow on a CPU."""

    def add(self, model, state, batch):
        rows = batch[0].flatten(0, 1)
        rows = rows if rows.device.type == "cpu" else rows.double()
        count = torch.tensor(float(len(rows)), device=rows.device)
        return {"products": state["products"] + rows.T @ rows, "count": state["count"] + count}, len(batch[0])


class Projection(Sums):
    """A fit that sums the outputs of the model under its autocast."""

    def add(self, model, state, batch):
        return {"sum": state["sum"] + model(batch[0]).sum((0, 1)).double()}, len(batch[0])


class Selection(Sums):
    """A fit whose number of values depends on the data, so it cannot be traced without them."""

    def add(self, model, state, batch):
        return {"sum": state["sum"] + batch[0][batch[0] > 0].double().sum()}, len(batch[0])


class Fits(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    @property
    def fits(self):
        return {
            "covariance": Covariance({"products": (WIDTH, WIDTH), "count": ()}),
            "projection": Projection({"sum": (WIDTH,)}),
            "selection": Selection({"sum": ()}),
        }

    def dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        return torch.utils.data.TensorDataset(torch.randn(64, LENGTH, WIDTH, generator=generator))

    def loss(self, model, batch):
        return model(batch[0]).float().square().mean((1, 2)).sum(), len(batch[0])


def build() -> Task:
    return Fits()
