"""A GAN: two objectives in one update, each with its own parameters and optimizer.

accel-run train --task ./own_gan.py global_batch_size=128 micro_batch_size=32
"""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task, per_sample_noise

SETTINGS = {"updates": 100, "global_batch_size": 64, "checkpoint.best": None}

OBJECTIVES = {  # in this order, on the same samples
    "discriminator": {"trains": ["discriminator"], "optimizer": "adam", "optimizer.lr": 1e-3},
    "generator": {"trains": ["generator"], "optimizer": "adam", "optimizer.lr": 5e-4, "every": 1},
}


def build(context, *, hidden: int = 64, latent: int = 8) -> Task:
    return Ring(hidden, latent, context.seed)


class Pair(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))


class Ring(Task):
    def __init__(self, hidden, latent, seed):
        self.model, self.seed = Pair(hidden, latent), seed

    def dataset(self, split):  # yours: real samples
        angle = torch.rand(1024 if split == "train" else 256, generator=torch.Generator().manual_seed(self.seed)) * 6.28
        return torch.utils.data.TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))

    def loss(self, model, batch, objective):  # the loss summed over the items, and the number of items
        (real,) = batch
        fake = model.generator(per_sample_noise(batch).normal(model.latent))  # the same fakes for both objectives
        if objective == "generator":
            return F.softplus(-model.discriminator(fake)).sum(), len(real)
        if objective == "discriminator":
            fooled = F.softplus(model.discriminator(fake.detach()))
            return (F.softplus(-model.discriminator(real)) + fooled).sum(), len(real)
        raise ValueError(f"unknown objective {objective}")  # a misspelled name would otherwise train another loss

    def evaluate(self, model, batch):
        (real,) = batch
        fake = model.generator(per_sample_noise(batch).normal(model.latent))
        return {"radius_error": ((fake.norm(dim=1) - 1).abs().sum(), len(real))}
