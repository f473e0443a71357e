"""tests/projects/resnet_augmented.py with Lightning."""

import math

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitResNet(lightning.LightningModule):
    def __init__(self, model, warmup=1, low=0.1):
        super().__init__()
        self.model, self.warmup, self.low = model, warmup, low
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)

    def training_step(self, batch, batch_index):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        images, labels = batch
        self.accuracy(self.model(images), labels)
        self.log("val/accuracy", self.accuracy)

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.0005}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, update):
        done = max(0, update - self.warmup) / (self.trainer.max_steps - self.warmup)
        return self.low + (1 - self.low) * (1 + math.cos(math.pi * done)) / 2


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/accuracy", mode="max", save_last=True)
    trainer = lightning.Trainer(max_steps=5, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitResNet(task.model), train, val, ckpt_path="last")
    return trainer
