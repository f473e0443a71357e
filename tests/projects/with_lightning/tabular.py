"""tests/projects/tabular.py with Lightning."""

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitTable(lightning.LightningModule):
    def __init__(self, model, positive=3.0):
        super().__init__()
        self.model, self.positive = model, positive
        self.auroc, self.confusion = (
            torchmetrics.AUROC(task="binary"),
            torchmetrics.ConfusionMatrix(task="binary"),
        )

    def loss(self, batch):
        logits = self.model(batch["categories"], batch["numbers"])
        weight = torch.tensor(self.positive, device=self.device)
        return logits, F.binary_cross_entropy_with_logits(logits, batch["label"].to(logits.dtype), pos_weight=weight)

    def training_step(self, batch, batch_index):
        _, loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        logits, loss = self.loss(batch)
        self.auroc.update(logits.sigmoid(), batch["label"])
        self.confusion.update(logits.sigmoid(), batch["label"])
        self.log("val/loss", loss, batch_size=len(logits))
        self.log("val/auroc", self.auroc)

    def on_validation_epoch_end(self):
        counts = self.confusion.compute()
        self.log_dict({f"val/confusion.{row}.{column}": counts[row, column] for row in range(2) for column in range(2)})
        self.confusion.reset()

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, update):
        return (1 - max(0, update - 1) / (self.trainer.max_steps - 1)) ** 2


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/auroc", mode="max", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitTable(task.model), train, val, ckpt_path="last")
    return trainer
