"""tests/projects/clip.py with Lightning; its loss compares only the samples of one micro-batch."""

import math

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitCLIP(lightning.LightningModule):
    def __init__(self, model, warmup=1, low=0.1):
        super().__init__()
        self.model, self.warmup, self.low = model, warmup, low

    def loss(self, batch):
        images, texts = self.model(*batch)
        logits = images @ texts.T * self.model.log_scale.exp()
        pairs = torch.arange(len(logits), device=self.device)
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, update):
        done = max(0, update - self.warmup) / (self.trainer.max_steps - self.warmup)
        return self.low + (1 - self.low) * (1 + math.cos(math.pi * done)) / 2


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitCLIP(task.model), train, val, ckpt_path="last")
    return trainer
