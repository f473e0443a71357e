"""A float64 regression with a hook that clips the gradient of each parameter and a hook that records its calls."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import runner

SETTINGS = {
    "global_batch_size": 8, "scheduler": "constant", "optimizer": "sgd", "optimizer.lr": 0.25,
    "optimizer.momentum": 0.9, "max_grad_norm": None,
}  # fmt: skip
LIMIT = 0.0625


class ClipEach(runner.Hook):
    """Clip the gradient of each parameter to the same norm."""

    def before_step(self, parameters, objective):
        for weight in parameters.values():
            weight.grad *= (LIMIT / weight.grad.norm()).clamp(max=1.0)


class Record(runner.Hook):
    """Record the calls before and after the optimizer step.

    decays add a fraction of each weight to its gradient
    """

    def __init__(self, phase, *, decays: bool = False):
        super().__init__(phase)
        self.decays, self.calls = decays, []

    def before_step(self, parameters, objective):
        norm = torch.stack([weight.grad.norm() for weight in parameters.values()]).norm()
        self.calls.append((self.phase.position.update, objective, [*parameters], float(norm)))
        for weight in parameters.values() if self.decays else ():
            weight.grad += 0.5 * weight

    def after_update(self, step):
        assert all(weight.grad is None for weight in self.phase.model.parameters())


HOOKS = [ClipEach, Record]


def build() -> runner.Task:
    return Regression()


class Regression(runner.Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed({"train": 0, "val": 1}[split])
        x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch, objective=""):
        x, y = batch
        return (model(x) - y).square().sum(), len(x)
