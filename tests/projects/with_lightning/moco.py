"""tests/projects/moco.py with Lightning; several ranks would have to gather the keys of all ranks."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitMoCo(lightning.LightningModule):
    def __init__(self, model, temperature=0.2):
        super().__init__()
        self.model, self.temperature = model, temperature

    def loss(self, batch):
        with torch.no_grad():
            keys = F.normalize(self.model.keys(batch[1]), dim=1)
        queries = F.normalize(self.model.encoder(batch[0]), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.model.queue.clone().T], dim=1)
        own = torch.zeros(len(queries), dtype=torch.long, device=self.device)
        return F.cross_entropy(logits / self.temperature, own), keys

    def training_step(self, batch, batch_index):
        loss, keys = self.loss(batch)
        self.model.enqueue(keys)
        self.log("train/loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_index):
        self.model.move_keys()

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch)[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.encoder.parameters(), lr=0.1, momentum=0.9)


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=6, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitMoCo(task.model), train, val, ckpt_path="last")
    return trainer
