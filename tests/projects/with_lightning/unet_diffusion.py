"""tests/projects/unet_diffusion.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitDiffusion(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, images):
        t, drawn = torch.rand(len(images), device=self.device), torch.randn_like(images)
        angle = t.view(-1, 1, 1, 1) * torch.pi / 2
        predicted = self.model(angle.cos() * images + angle.sin() * drawn, t)
        return F.mse_loss(predicted, drawn)

    def training_step(self, images, batch_index):
        loss = self.loss(images)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, images, batch_index):
        self.log("val/loss", self.loss(images))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.002)


def fit(task, folder):
    callbacks = [EMAWeightAveraging(decay=0.9), ModelCheckpoint(folder, monitor="val/loss", save_last=True)]
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=callbacks, default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitDiffusion(task.model), train, val, ckpt_path="last")
    return trainer
