"""A task of my own: accel-run train --task ./my_task.py"""

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task

SETTINGS = {"updates": 200, "global_batch_size": 64, "optimizer.lr": 0.01}  # defaults; arguments override them


def build(*, hidden: int = 64, depth: int = 2) -> Task:  # each is a setting: task.hidden=128
    return MyTask(hidden, depth)


class MyTask(Task):
    def __init__(self, hidden, depth):
        layers = [nn.Linear(2, hidden), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(hidden, 2))

    def dataset(self, split):  # "train" or "val": anything with len() and [index]
        generator = torch.Generator().manual_seed({"train": 0, "val": 1}[split])
        points = torch.rand(4096 if split == "train" else 512, 2, generator=generator) * 2 - 1
        inside = (points.norm(dim=1) < 0.7).long()
        return torch.utils.data.TensorDataset(points, inside)

    def loss(self, model, batch):  # the SUM over the samples, and how many there were
        points, inside = batch
        return F.cross_entropy(model(points), inside, reduction="sum"), len(points)

    def predict(self, model, generator, *, samples: int = 3):  # each is a setting: inference.samples=5
        from runner.base.task import Prediction

        points = torch.rand(samples, 2, generator=generator, device=generator.device) * 2 - 1
        yield Prediction({"inside.txt": str(model(points).argmax(1).tolist())}, f"{points.tolist()}", items=samples)
