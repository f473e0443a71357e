"""A task with batch normalization and one sample that overflows float16, or running statistics that become infinite."""

import torch
from torch import nn

from runner import Task

SETTINGS = {"updates": 20, "global_batch_size": 4, "checkpoint.every": 5, "evaluate.every": 0}


def build(*, large: float = 60_000.0, breaks_at: int = 0) -> Task:
    return Norms(large, breaks_at)


class Rows(torch.utils.data.Dataset):
    def __init__(self, large):
        self.large = large

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), self.large if index == 5 else index / 64)


class Norms(Task):
    def __init__(self, large, breaks_at):
        first = nn.Linear(4, 8)
        nn.init.constant_(first.weight, 1.0)
        self.model = nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.large, self.breaks_at = large, breaks_at

    def begin_update(self, progress):
        if progress.update == self.breaks_at > 0:
            self.model[1].running_var.fill_(float("inf"))

    def dataset(self, split):
        return Rows(self.large)

    def loss(self, model, batch):
        return model(batch).float().pow(2).sum(), len(batch)

    def evaluate(self, model, batch):
        return {"loss": (model(batch).float().pow(2).sum(), len(batch))}
