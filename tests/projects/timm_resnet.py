"""A ResNet from timm with its augmentation: random resized crops, flips, RandAugment and random erasing."""

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform
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
SIZE = 32


def build(*, model: str = "test_resnet", smoothing: float = 0.1) -> Task:
    return Classification(timm.create_model(model, num_classes=4), smoothing)


class Pictures(torch.utils.data.Dataset):
    def __init__(self, number, seed, transform):
        self.labels = np.arange(number) % 4
        drawn = np.random.default_rng(seed).integers(0, 160, (number, SIZE, SIZE, 3))
        self.pictures = (drawn + 30 * self.labels[:, None, None, None]).astype(np.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pictures[index])), int(self.labels[index])


class Classification(Task):
    def __init__(self, model, smoothing):
        self.model, self.smoothing = model, smoothing

    def dataset(self, split):
        if split == "train":
            augmented = create_transform(SIZE, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
            return Pictures(24, 0, augmented)
        return Pictures(8, 1, create_transform(SIZE))

    def loss(self, model, batch):
        images, labels = batch
        total = F.cross_entropy(model(images), labels, label_smoothing=self.smoothing, reduction="sum")
        return total, len(labels)

    def evaluate(self, model, batch):
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}
