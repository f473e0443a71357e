"""tests/projects/nano_gpt.py with Lightning."""

import math

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitGPT(lightning.LightningModule):
    def __init__(self, model, warmup=2, low=0.1):
        super().__init__()
        self.model, self.warmup, self.low = model, warmup, low

    def loss(self, tokens):
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, batch_index):
        loss = self.loss(tokens)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, tokens, batch_index):
        self.log("val/loss", self.loss(tokens))

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, update):
        if update < self.warmup:
            return (update + 1) / self.warmup
        done = (update - self.warmup) / (self.trainer.max_steps - self.warmup)
        return self.low + (1 - self.low) * (1 + math.cos(math.pi * done)) / 2


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=6, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitGPT(task.model), train, val, ckpt_path="last")
    return trainer
