"""Distillation: a student follows a frozen teacher, which stays in eval mode."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"updates": 5, "global_batch_size": 8, "optimizer": "adam", "optimizer.lr": 0.01, "scheduler": "linear"}


def build(*, hidden: int = 8, temperature: float = 2.0, weight: float = 0.7) -> Task:
    return Distillation(Pair(hidden), temperature, weight)


class Pair(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
        self.student = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 4))
        # in your own task, load the weights here, or with weights= on the command line
        self.teacher.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


class Distillation(Task):
    def __init__(self, model, temperature, weight):
        self.model, self.temperature, self.weight = model, temperature, weight

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.randn(24 if split == "train" else 8, 6, generator=generator)
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())

    def loss(self, model, batch):
        x, labels = batch
        logits, taught = model(x)
        t = self.temperature
        soft = F.kl_div(F.log_softmax(logits / t, 1), F.softmax(taught / t, 1), reduction="sum") * t * t
        hard = F.cross_entropy(logits, labels, reduction="sum")
        return self.weight * soft + (1 - self.weight) * hard, len(x)
