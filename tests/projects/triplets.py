"""Metric learning with batch-hard triplets: the farthest sample of a class and the nearest of another."""

import torch
from torch import nn

from runner import Task

SETTINGS = {"updates": 5, "global_batch_size": 12, "optimizer": "adam", "optimizer.lr": 0.005, "scheduler": "step"}


def build(*, hidden: int = 16, margin: float = 0.3) -> Task:
    return Triplets(nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 4)), margin)


class Triplets(Task):
    def __init__(self, model, margin):
        self.model, self.margin = model, margin

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        labels = torch.arange(36 if split == "train" else 12) % 3
        return torch.utils.data.TensorDataset(
            torch.randn(len(labels), 6, generator=generator) + labels[:, None], labels
        )

    def embed(self, model, batch):
        return {"code": model(batch[0]), "label": batch[1]}

    def couple(self, embeddings):
        codes, labels = embeddings["code"], embeddings["label"]
        distances = (codes[:, None] - codes[None]).square().sum(2).add(1e-12).sqrt()
        same = labels[:, None] == labels[None]
        farthest = distances.masked_fill(~same, 0).amax(1)
        nearest = distances.masked_fill(same, float("inf")).amin(1)
        has_both = nearest.isfinite()
        return (farthest - nearest + self.margin).clamp(min=0)[has_both].sum(), has_both.sum()
