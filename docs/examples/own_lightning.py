"""Train a LightningModule with accel-run: copy this file and import your module instead of LitModel.

    accel-run train --task ./own_lightning.py precision=bf16 parallelism=ddp

The optimizer and the schedule are those of configure_optimizers, and the datasets are those of the data loaders.
Lightning need not be installed: any nn.Module with these methods works. docs/adapters.md lists what is not supported.
"""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task
from runner.adapters.lightning import LightningTask, configured_optimizer, configured_schedule

SETTINGS = {"epochs": 5, "global_batch_size": 32, "optimizer": "configured", "scheduler": "configured"}


class LitModel(nn.Module):  # yours: import lightning as L; class LitModel(L.LightningModule)
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(1) == y).float().mean())
        return F.cross_entropy(self(x), y)

    def predict_step(self, batch, batch_idx):  # accel-run inference: a row per sample in predictions/val.csv
        x, _ = batch
        return {"label": self(x).argmax(1)}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]

    def train_dataloader(self):
        x = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.prod(1) > 0).long()), batch_size=32)

    val_dataloader = train_dataloader


def optimizer(parameters):
    """The optimizer of configure_optimizers."""
    return configured_optimizer(parameters)


def schedule(updates, *, epochs: float = 5):
    """The schedule of configure_optimizers.

    epochs  number of epochs of the run, for a schedule that steps once per epoch
    """
    return configured_schedule(updates, epochs)


OPTIMIZERS = {"configured": optimizer}
SCHEDULERS = {"configured": schedule}


def build(*, hidden: int = 32) -> Task:
    return LightningTask(LitModel(hidden))
