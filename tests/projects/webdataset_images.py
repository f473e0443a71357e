"""Images that webdataset reads from tar files, decoded and augmented on the fly."""

from pathlib import Path

import torch
import webdataset
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"updates": 6, "global_batch_size": 6, "optimizer": "sgd", "optimizer.lr": 0.05, "scheduler": "constant"}


def build(context) -> Task:
    return Images(Path(context.data_path))


def augmented(sample):
    image, label = sample
    image = torch.as_tensor(image, dtype=torch.get_default_dtype()) / 255
    return (image.flip(2) if torch.rand(()) < 0.5 else image), label


class Images(Task):
    def __init__(self, folder):
        self.files = sorted(str(file) for file in folder.glob("*.tar"))
        self.model = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 3))

    def dataset(self, split):
        files = self.files[:-1] if split == "train" else self.files[-1:]
        result = webdataset.WebDataset(files, shardshuffle=False, empty_check=False)
        return result.decode().to_tuple("npy", "cls").map(augmented)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
