"""A small task that draws random numbers in each update."""

import torch
from torch import nn

from runner import Task


def build() -> Task:
    return Small()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Small(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def dataset(self, split):
        if split != "train":
            raise NotImplementedError
        return Rows()

    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
