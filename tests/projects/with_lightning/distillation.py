"""tests/projects/distillation.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitDistillation(lightning.LightningModule):
    def __init__(self, model, temperature=2.0, weight=0.7):
        super().__init__()
        self.model, self.temperature, self.weight = model, temperature, weight
        self.model.teacher.eval()  # Lightning keeps the mode of each module, and does not call train()

    def loss(self, batch):
        x, labels = batch
        logits, taught = self.model(x)
        t = self.temperature
        soft = F.kl_div(F.log_softmax(logits / t, 1), F.softmax(taught / t, 1), reduction="batchmean") * t * t
        return self.weight * soft + (1 - self.weight) * F.cross_entropy(logits, labels)

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.model.student.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, update):
        return 1 - max(0, update - 1) / (self.trainer.max_steps - 1)


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitDistillation(task.model), train, val, ckpt_path="last")
    return trainer
