"""SimCLR: find the two random views of the same image among all views of the batch."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer": "sgd",
    "optimizer.lr": 0.05,
    "optimizer.weight_decay": 1e-4,
    "scheduler": "cosine",
    "scheduler.final_factor": 0.0,
}


def build(*, width: int = 16, temperature: float = 0.5) -> Task:
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, width))
    head = nn.Sequential(nn.ReLU(), nn.Linear(width, 8))
    return Views(nn.Sequential(encoder, head), temperature)


class TwoViews(torch.utils.data.Dataset):
    def __init__(self, number, seed):
        self.images = torch.rand(number, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.view(index), self.view(index)

    def view(self, index):
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image * torch.empty(3, 1, 1).uniform_(0.6, 1.4) + 0.1 * torch.randn_like(image)


class Views(Task):
    def __init__(self, model, temperature):
        self.model, self.temperature = model, temperature

    def dataset(self, split):
        return TwoViews(24, 0) if split == "train" else TwoViews(8, 1)

    def embed(self, model, batch):
        return F.normalize(model(torch.cat(batch)), dim=1).chunk(2)

    def couple(self, embeddings):
        codes = torch.cat(embeddings)
        logits = codes @ codes.T / self.temperature
        logits.fill_diagonal_(float("-inf"))
        partner = torch.arange(len(codes), device=codes.device).roll(len(codes) // 2)
        return F.cross_entropy(logits, partner, reduction="sum"), len(codes)
