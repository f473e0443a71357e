"""A variational autoencoder that reports both terms of its loss."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task, per_sample_noise

SETTINGS = {"updates": 5, "global_batch_size": 8, "optimizer": "adam", "optimizer.lr": 0.01, "scheduler": "constant"}


def build(*, hidden: int = 16, latent: int = 3, beta: float = 0.5) -> Task:
    return Autoencoding(VAE(hidden, latent), beta)


class VAE(nn.Module):
    def __init__(self, hidden, latent, size=36):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + noise.normal(mean.shape[1]) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


class Autoencoding(Task):
    def __init__(self, model, beta):
        self.model, self.beta = model, beta

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        return torch.rand(24 if split == "train" else 8, 36, generator=generator).round()

    def loss(self, model, x):
        logits, mean, log_variance = model(x, per_sample_noise(x))
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        more = {"reconstruction": (reconstruction, len(x)), "divergence": (divergence, len(x))}
        return reconstruction + self.beta * divergence, len(x), more
