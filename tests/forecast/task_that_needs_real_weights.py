"""A task whose constructor reads values of its weights, with a phase of kind fit."""

import torch
from torch import nn

from runner import Fit, Task

PHASES = {"statistics": {"kind": "fit"}, "first": {"updates": 3}}


class Mean(Fit):
    def start(self):
        return {"sum": torch.zeros(8)}

    def add(self, model, state, batch):
        return {"sum": state["sum"] + model(batch[0]).sum(0)}, len(batch[0])

    def merge(self, one, other):
        return {"sum": one["sum"] + other["sum"]}

    def finish(self, model, state):
        return {}


class ChecksWeights(Task):
    def __init__(self):
        self.model = nn.Linear(8, 8)
        self.sum = self.model.weight.detach().numpy().sum()  # needs real weights

    @property
    def fits(self):
        return {"statistics": Mean()}

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, 8))


def build():
    return ChecksWeights()
