"""A task that records the draws of each loss, counts forward passes, and copies weights to a frozen parameter."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task


def build(*, first_copy: int = 0) -> Task:
    """A regression.

    first_copy  number of updates before the first copy of the weights
    """
    return Drawing(first_copy)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.copied = nn.Parameter(torch.zeros_like(self.line.weight), requires_grad=False)
        self.copies = False

    def forward(self, x):
        if self.training:
            self.calls += 1
        if self.training and self.copies:
            with torch.no_grad():
                self.copied.copy_(self.line.weight)
        return self.line(x)


class Drawing(Task):
    loss_is_additive = False

    def __init__(self, first_copy):
        self.model, self.first_copy = Net(), first_copy
        self.drawn = []

    def begin_update(self, progress):
        self.model.copies = progress.update >= self.first_copy

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(64, 4, generator=generator, dtype=torch.float64))

    def loss(self, model, batch):
        (x,) = batch
        if model.training:
            self.drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        return model(x).square().sum(), len(x)
