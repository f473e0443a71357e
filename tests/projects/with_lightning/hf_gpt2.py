"""tests/projects/hf_gpt2.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


class LitGPT2(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, tokens):
        labels = tokens.masked_fill(tokens == 0, -100)
        return self.model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels).loss

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
    trainer.fit(LitGPT2(task.model), train, val, ckpt_path="last")
    return trainer
