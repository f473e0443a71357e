"""tests/projects/triplets.py with Lightning; its loss compares only the samples of one micro-batch."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class LitTriplets(lightning.LightningModule):
    def __init__(self, model, margin=0.3):
        super().__init__()
        self.model, self.margin = model, margin

    def loss(self, batch):
        codes, labels = self.model(batch[0]), batch[1]
        distances = (codes[:, None] - codes[None]).square().sum(2).add(1e-12).sqrt()
        same = labels[:, None] == labels[None]
        farthest = distances.masked_fill(~same, 0).amax(1)
        nearest = distances.masked_fill(same, float("inf")).amin(1)
        return (farthest - nearest + self.margin).clamp(min=0)[nearest.isfinite()].mean()

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.005)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, round(0.3 * self.trainer.max_steps), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 12, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitTriplets(task.model), train, val, ckpt_path="last")
    return trainer
