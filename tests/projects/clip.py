"""CLIP: a contrastive loss between all images and texts of a batch, with a learned temperature."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"updates": 5, "global_batch_size": 8, "optimizer.lr": 0.005, "scheduler": "cosine"}


def build(*, width: int = 8) -> Task:
    return Pairs(CLIP(width))


class CLIP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, width))
        self.text = nn.EmbeddingBag(32, 16, mode="mean")
        self.project = nn.Linear(16, width)
        self.log_scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.project(self.text(texts)), dim=1)


class Pairs(Task):
    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        number = 24 if split == "train" else 8
        texts = torch.randint(0, 32, (number, 6), generator=generator)
        images = torch.randn(number, 3, 8, 8, generator=generator) + texts.double().mean(1).view(-1, 1, 1, 1) / 16
        return torch.utils.data.TensorDataset(images.to(torch.get_default_dtype()), texts)

    def embed(self, model, batch):
        return model(*batch)

    def couple(self, embeddings):
        images, texts = embeddings
        logits = images @ texts.T * self.model.log_scale.exp()
        pairs = torch.arange(len(logits), device=logits.device)
        total = F.cross_entropy(logits, pairs, reduction="sum") + F.cross_entropy(logits.T, pairs, reduction="sum")
        return total / 2, len(logits)
