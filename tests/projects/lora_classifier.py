"""A transformer classifier with LoRA on its attention and a head of which all weights are trained."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer": "adam",
    "optimizer.lr": 0.01,
    "scheduler": "constant",
    "adapter": "lora",
    "adapter.target": ["query", "value"],
    "adapter.train": ["head"],
    "adapter.rank": 2,
}


def build(*, width: int = 16) -> Task:
    return Sentences(Classifier(width))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class Sentences(Task):
    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        tokens = torch.randint(0, 32, (24 if split == "train" else 8, 6), generator=generator)
        return torch.utils.data.TensorDataset(tokens, tokens.sum(1) % 3)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
