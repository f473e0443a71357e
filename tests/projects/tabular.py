"""Tabular data with categorical and numeric columns, a rare positive class, and AUROC from torchmetrics."""

import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer.lr": 0.02,
    "scheduler": "polynomial",
    "max_grad_norm": 1.0,
    "checkpoint.best": "val/auroc",
    "checkpoint.best_is": "max",
}


def build(*, width: int = 8, pos_weight: float = 3.0) -> Task:
    return Table(Network(width), pos_weight)


class Network(nn.Module):
    def __init__(self, width, categories=(5, 7), numbers=3):
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(size, width) for size in categories)
        self.body = nn.Sequential(
            nn.Linear(width * len(categories) + numbers, 2 * width), nn.LayerNorm(2 * width), nn.SiLU(),
            nn.Linear(2 * width, 1),
        )  # fmt: skip

    def forward(self, categories, numbers):
        embedded = [each(categories[:, place]) for place, each in enumerate(self.categories)]
        return self.body(torch.cat([*embedded, numbers], 1)).squeeze(1)


class Table(Task):
    item = "row"

    def __init__(self, model, pos_weight):
        self.model, self.pos_weight = model, pos_weight

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        size = 24 if split == "train" else 30
        categories = torch.stack([torch.randint(0, high, (size,), generator=generator) for high in (5, 7)], 1)
        numbers = torch.randn(size, 3, generator=generator)
        labels = (numbers[:, 0] + categories[:, 0] - 2 > 1.2).long()
        return [
            {"categories": categories[row], "numbers": numbers[row], "label": labels[row]} for row in range(len(labels))
        ]

    def loss(self, model, batch):
        logits, labels = model(batch["categories"], batch["numbers"]), batch["label"].to(batch["numbers"].dtype)
        weight = torch.tensor(self.pos_weight, device=logits.device)
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction="sum"), len(labels)

    def metrics(self, split):
        return {"auroc": torchmetrics.AUROC(task="binary"), "confusion": torchmetrics.ConfusionMatrix(task="binary")}

    def evaluate(self, model, batch):
        probability = model(batch["categories"], batch["numbers"]).sigmoid()
        given = probability, batch["label"]
        return {"loss": self.loss(model, batch), "auroc": given, "confusion": given}
