"""A LightningModule with its own optimizer, schedule, loaders and logged metrics."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task
from runner.adapters.lightning import LightningTask, configured_optimizer, configured_schedule

try:
    from lightning import LightningModule
except ImportError:  # any module with these methods works
    from torch.nn import Module as LightningModule

SETTINGS = {
    "updates": 5,
    "global_batch_size": 8,
    "optimizer": "configured",
    "scheduler": "configured",
    "max_grad_norm": None,
}


class LitRegression(LightningModule):
    def __init__(self, hidden=16, lr=0.02):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x) - y).abs().mean())
        return F.smooth_l1_loss(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
        return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    def val_dataloader(self):
        x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
        return torch.utils.data.DataLoader(data, batch_size=4)


def optimizer(parameters):
    """The optimizer of configure_optimizers."""
    return configured_optimizer(parameters)


def schedule(updates):
    """The schedule of configure_optimizers."""
    return configured_schedule(updates)


OPTIMIZERS = {"configured": optimizer}
SCHEDULERS = {"configured": schedule}


def build() -> Task:
    return LightningTask(LitRegression())
