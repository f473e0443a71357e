"""A task whose updates and data workers print more than a pipe or terminal can buffer."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task

SETTINGS = {"global_batch_size": 4, "optimizer.lr": 0.01}


def build() -> Task:
    return Words()


class Words(Task):
    def __init__(self):
        self.model = nn.Linear(4, 2)

    def dataset(self, split):
        return Samples()

    def loss(self, model, batch):
        points, wanted = batch
        print("loss", "x" * 2000)
        print("loss", "y" * 2000, file=sys.stderr)
        return F.cross_entropy(model(points), wanted, reduction="sum"), len(points)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        print("sample", index, "z" * 500, flush=True)
        point = torch.full((4,), index / 64)
        return point, torch.tensor(index % 2)
