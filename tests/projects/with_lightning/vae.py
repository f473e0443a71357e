"""tests/projects/vae.py with Lightning."""

from types import SimpleNamespace

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitVAE(lightning.LightningModule):
    def __init__(self, model, beta=0.5):
        super().__init__()
        self.model, self.beta = model, beta

    def loss(self, x, stage):
        noise = SimpleNamespace(normal=lambda size: torch.randn(len(x), size, device=self.device))
        logits, mean, log_variance = self.model(x, noise)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        self.log_dict({f"{stage}/reconstruction": reconstruction, f"{stage}/divergence": divergence})
        return reconstruction + self.beta * divergence

    def training_step(self, x, batch_index):
        return self.loss(x, "train")

    def validation_step(self, x, batch_index):
        self.log("val/loss", self.loss(x, "val"))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitVAE(task.model), train, val, ckpt_path="last")
    return trainer
