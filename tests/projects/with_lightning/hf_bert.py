"""tests/projects/hf_bert.py with Lightning."""

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


class LitBERT(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_index):
        loss = self.model(**batch).loss
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        result = self.model(**batch)
        self.accuracy(result.logits, batch["labels"])
        self.log_dict({"val/loss": result.loss, "val/accuracy": self.accuracy})

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.002, betas=(0.9, 0.95))
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=4, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (
        DataLoader(task.dataset(split), 8, shuffle=split == "train", collate_fn=task.collate)
        for split in ("train", "val")
    )
    trainer.fit(LitBERT(task.model), train, val, ckpt_path="last")
    return trainer
