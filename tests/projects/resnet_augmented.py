"""A ResNet with batch norms, label smoothing, and random crops, flips, color jitter and erasing."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer": "sgd",
    "optimizer.lr": 0.05,
    "optimizer.nesterov": True,
    "optimizer.weight_decay": 0.0005,
    "scheduler": "cosine",
    "scheduler.warmup": 1,
    "max_grad_norm": None,
}


def build(*, width: int = 8, smoothing: float = 0.1) -> Task:
    return Classification(ResNet(width), smoothing)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.skip(x))


class ResNet(nn.Sequential):
    def __init__(self, width, classes=4):
        super().__init__(
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, classes),
        )


class Images(torch.utils.data.Dataset):
    def __init__(self, number, seed, *, augment):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(number) % 4
        self.images = torch.rand(number, 3, 12, 12, generator=generator) + self.labels.view(-1, 1, 1, 1) / 4
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return (augmented(image) if self.augment else image), int(self.labels[index])


def augmented(image):
    size = random.randint(8, 12)
    top, left = random.randint(0, 12 - size), random.randint(0, 12 - size)
    image = F.interpolate(image[None, :, top : top + size, left : left + size], (12, 12), mode="bilinear")[0]
    if random.random() < 0.5:
        image = image.flip(2)
    image = image * torch.empty(3, 1, 1).uniform_(0.6, 1.4)
    if torch.rand(()) < 0.25:
        top, left = torch.randint(0, 9, (2,)).tolist()
        image[:, top : top + 4, left : left + 4] = torch.randn(3, 4, 4)
    return image


class Classification(Task):
    def __init__(self, model, smoothing):
        self.model, self.smoothing = model, smoothing

    def dataset(self, split):
        return Images(24, 0, augment=True) if split == "train" else Images(8, 1, augment=False)

    def loss(self, model, batch):
        images, labels = batch
        total = F.cross_entropy(model(images), labels, label_smoothing=self.smoothing, reduction="sum")
        return total, len(labels)

    def evaluate(self, model, batch):
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}
