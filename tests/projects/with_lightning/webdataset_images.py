"""tests/projects/webdataset_images.py with Lightning. A resumed run starts again with the first file."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitImages(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(
        max_steps=6, gradient_clip_val=1.0, val_check_interval=3, callbacks=[best], default_root_dir=folder
    )
    train, val = (DataLoader(task.dataset(split), 6) for split in ("train", "val"))
    trainer.fit(LitImages(task.model), train, val, ckpt_path="last")
    return trainer
