"""A torchvision model that is selected by name.

accel-run train --task ./own_torchvision.py task.model=resnet50
"""

import torch
import torchvision
from torch.nn import functional as F

from runner import Task

SETTINGS = {"epochs": 5, "global_batch_size": 32, "optimizer": "sgd", "optimizer.lr": 0.05}


def build(context, *, model: str = "resnet18", classes: int = 3, image: int = 64) -> Task:
    return Images(torchvision.models.get_model(model, weights=None, num_classes=classes), classes, image, context.seed)


class Images(Task):
    def __init__(self, model, classes, image, seed):
        self.model, self.classes, self.image, self.seed = model, classes, image, seed

    def dataset(self, split):  # yours: anything with len() and [index] that returns (image, label)
        return Noise(256 if split == "train" else 64, self.classes, self.image, self.seed + (split == "val"))

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def evaluate(self, model, batch):
        images, labels = batch
        outputs = model(images)
        right = (outputs.argmax(1) == labels).sum()
        return {
            "loss": (F.cross_entropy(outputs, labels, reduction="sum"), len(labels)),
            "accuracy": (right, len(labels)),
        }


class Noise:
    """Noise images whose brightness depends on the label, so that the model can learn without a download."""

    def __init__(self, length, classes, image, seed):
        self.length, self.classes, self.image, self.seed = length, classes, image, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % self.classes
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return torch.randn(3, self.image, self.image, generator=generator) + label, label
