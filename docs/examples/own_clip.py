"""A contrastive loss over the whole global batch, as in CLIP: two encoders and a temperature.

accel-run train --task ./own_clip.py global_batch_size=256 micro_batch_size=32
"""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"updates": 100, "global_batch_size": 64, "optimizer": "adam", "optimizer.lr": 1e-3}


def build(context, *, width: int = 32) -> Task:
    return Clip(width, context.seed)


class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, width))
        self.text = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, width))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)


class Clip(Task):
    def __init__(self, width, seed):
        self.model, self.seed = Towers(width), seed

    def dataset(self, split):  # yours: pairs of (image, text)
        generator = torch.Generator().manual_seed(self.seed)
        to_image, to_text = torch.randn(8, 16, generator=generator), torch.randn(8, 12, generator=generator)
        topics = torch.randn(1024 + 256, 8, generator=generator)
        topics = topics[:1024] if split == "train" else topics[1024:]
        return torch.utils.data.TensorDataset(topics @ to_image, topics @ to_text)

    def embed(self, model, batch):  # called with one micro-batch; returns tensors with one row per sample
        return model(*batch)

    def couple(self, embeddings):  # called with the rows of all samples of an update
        images, texts = embeddings
        logits = self.model.scale.exp() * images @ texts.T
        labels = torch.arange(len(logits), device=logits.device)
        loss = F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(logits.T, labels, reduction="sum")
        return loss / 2, len(logits)
