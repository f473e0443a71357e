"""A test task with two phases, optionally without validation data or with a different metric."""

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task
from tests.faults.ending import reached

SETTINGS = {"updates": 20, "global_batch_size": 8, "optimizer.lr": 0.01, "evaluate.every": 7, "log_every": 6}
PHASES = {"one": {}, "two": {}}


def build(*, val: bool = True, metric: str = "loss", hidden: int = 8) -> Task:
    return TwoPhases(val, metric, hidden)


class TwoPhases(Task):
    def __init__(self, val, metric, hidden):
        self.model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.val, self.metric = val, metric

    def begin_update(self, progress):
        reached("update", progress.update + 1, progress.phase)

    def dataset(self, split):
        if split == "val" and not self.val:
            raise NotImplementedError
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def evaluate(self, model, batch):
        return {self.metric: self.loss(model, batch)}
