"""A float64 regression whose two layers share their weight."""

from torch import nn

from runner import Task
from tests.engine.task_of_averages import Regression

SETTINGS = {"global_batch_size": 8, "scheduler": "constant", "scheduler.warmup": 0, "optimizer.lr": 0.01}


def build() -> Task:
    return Tied()


class Tied(Regression):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        self.model[2].weight = self.model[0].weight
