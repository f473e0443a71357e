"""tests/projects/graph_network.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitGraphs(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, batch):
        number = len(batch["target"])
        return F.mse_loss(self.model(batch["nodes"], batch["edges"], batch["graph"], number), batch["target"])

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss, batch_size=len(batch["target"]))
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch), batch_size=len(batch["target"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (
        DataLoader(task.dataset(split), 8, shuffle=split == "train", collate_fn=task.collate)
        for split in ("train", "val")
    )
    trainer.fit(LitGraphs(task.model), train, val, ckpt_path="last")
    return trainer
