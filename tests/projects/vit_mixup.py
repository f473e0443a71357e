"""A vision transformer with mixup in the dataset, so that pairs do not depend on the micro-batch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer.lr": 0.003,
    "optimizer.weight_decay": 0.05,
    "scheduler": "cosine",
    "max_grad_norm": 1.0,
}


def build(*, width: int = 16, layers: int = 2, patch: int = 4, alpha: float = 0.8) -> Task:
    return Mixed(ViT(width, layers, patch), alpha)


class ViT(nn.Module):
    def __init__(self, width, layers, patch, classes=4, image=12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def images(number, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (number,), generator=generator)
    return torch.randn(number, 3, 12, 12, generator=generator) + labels.view(-1, 1, 1, 1), labels


class Mixup(torch.utils.data.Dataset):
    def __init__(self, images, labels, alpha):
        self.images, self.labels, self.alpha = images, F.one_hot(labels, 4).to(images.dtype), alpha

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        other, share = int(torch.randint(len(self), ())), np.random.beta(self.alpha, self.alpha)
        image = share * self.images[index] + (1 - share) * self.images[other]
        return image, share * self.labels[index] + (1 - share) * self.labels[other]


class Mixed(Task):
    def __init__(self, model, alpha):
        self.model, self.alpha = model, alpha

    def dataset(self, split):
        if split == "train":
            return Mixup(*images(24, 0), self.alpha)
        return torch.utils.data.TensorDataset(*images(10, 1))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])
