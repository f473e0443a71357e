"""A diffusion model: a small U-Net that predicts noise, with an exponential moving average of its weights."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task, per_sample_noise

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer": "adam",
    "optimizer.lr": 0.002,
    "scheduler": "constant",
    "max_grad_norm": 1.0,
    "averaging": "ema",
    "averaging.decay": 0.9,
}


def build(*, width: int = 8) -> Task:
    return Diffusion(UNet(width))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Sequential(
            nn.GroupNorm(2, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(nn.GroupNorm(2, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 1, 3, padding=1))

    def forward(self, x, t):
        angle = t.view(-1, 1) * torch.pi / 2
        first = self.first(x) + self.time(torch.cat([angle.cos(), angle.sin()], 1))[:, :, None, None]
        return self.last(torch.cat([first, self.up(self.middle(self.down(first)))], 1))


class Diffusion(Task):
    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        return torch.rand(24 if split == "train" else 8, 1, 8, 8, generator=generator)

    def loss(self, model, images):
        noise = per_sample_noise(images)
        t, drawn = noise.uniform(), noise.normal(*images.shape[1:])
        angle = t.view(-1, 1, 1, 1) * torch.pi / 2
        predicted = model(angle.cos() * images + angle.sin() * drawn, t)
        return F.mse_loss(predicted, drawn, reduction="none").mean((1, 2, 3)).sum(), len(images)
