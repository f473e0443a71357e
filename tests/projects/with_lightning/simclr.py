"""tests/projects/simclr.py with Lightning; its loss compares only the samples of one micro-batch."""

import math

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitSimCLR(lightning.LightningModule):
    def __init__(self, model, temperature=0.5):
        super().__init__()
        self.model, self.temperature = model, temperature

    def loss(self, views):
        codes = F.normalize(self.model(torch.cat(views)), dim=1)
        logits = codes @ codes.T / self.temperature
        logits.fill_diagonal_(float("-inf"))
        partner = torch.arange(len(codes), device=self.device).roll(len(codes) // 2)
        return F.cross_entropy(logits, partner)

    def training_step(self, views, batch_index):
        loss = self.loss(views)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, views, batch_index):
        self.log("val/loss", self.loss(views))

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, update, warmup=1):
        done = max(0, update - warmup) / (self.trainer.max_steps - warmup)
        return (1 + math.cos(math.pi * done)) / 2


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitSimCLR(task.model), train, val, ckpt_path="last")
    return trainer
