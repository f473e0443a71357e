"""A task that records what each loss drew from the global generators, and counts forward passes in a buffer."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task


def build() -> Task:
    return Drawing()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.line(x)


class Drawing(Task):
    loss_is_additive = False

    def __init__(self):
        self.model = Net()
        self.drawn = []

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(64, 4, generator=generator, dtype=torch.float64))

    def loss(self, model, batch):
        (x,) = batch
        if model.training:
            self.drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        return model(x).square().sum(), len(x)
