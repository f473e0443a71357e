"""A DCGAN: convolutions with batch norms, and two alternating optimizers."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task, per_sample_noise

SETTINGS = {"updates": 5, "global_batch_size": 8, "scheduler": "constant", "max_grad_norm": None}
OBJECTIVES = {
    "discriminator": {
        "trains": ["discriminator"], "optimizer": "adam", "optimizer.lr": 2e-4, "optimizer.betas": [0.5, 0.999],
    },
    "generator": {
        "trains": ["generator"], "optimizer": "adam", "optimizer.lr": 2e-4, "optimizer.betas": [0.5, 0.999],
    },
}  # fmt: skip


def build(*, width: int = 8, latent: int = 6) -> Task:
    return Images(DCGAN(width, latent), latent)


class DCGAN(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4, 1, 0, bias=False),
            nn.Flatten(),
        )


class Images(Task):
    def __init__(self, model, latent):
        self.model, self.latent = model, latent

    def dataset(self, split):
        if split == "val":
            raise NotImplementedError
        generator = torch.Generator().manual_seed(0)
        return torch.rand(24, 1, 8, 8, generator=generator) * 2 - 1

    def loss(self, model, real, objective):
        fake = model.generator(per_sample_noise(real).normal(self.latent, 1, 1))
        if objective == "generator":
            return F.softplus(-model.discriminator(fake)).sum(), len(real)
        fooled = F.softplus(model.discriminator(fake.detach()))
        return (F.softplus(-model.discriminator(real)) + fooled).sum(), len(real)
