"""A float64 regression whose metric is a simple function of the weights."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Gather, Task
from runner.base.task import Prediction

SETTINGS = {"global_batch_size": 8, "scheduler": "constant", "scheduler.warmup": 0, "optimizer.lr": 0.01}


def build() -> Task:
    return Regression()


class Regression(Task):
    def __init__(self):
        self.split = "val"
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed({"train": 0, "val": 1, "test": 2}[split])
        x = torch.randn(37 if split == "test" else 64, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().sum(), len(x)

    def example(self):
        return (torch.ones(2, 4, dtype=torch.float64),)

    def metrics(self, split):
        self.split = split
        return {"largest": Gather(lambda y: y.max())} if split == "test" else {}

    def evaluate(self, model, batch):
        return {"loss": self.loss(model, batch)} | ({"largest": batch[1]} if self.split == "test" else {})

    def predict(self, model, generator):
        yield Prediction({"bias.txt": repr(model[2].bias.item())})
