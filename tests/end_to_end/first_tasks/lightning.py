"""Train an unmodified LightningModule with accel-run: copy this file and replace LitModel with your module.

    accel-run train --task ./own_lightning.py precision=bf16 parallelism=ddp

Lightning is not needed: any nn.Module with training_step works. Its loss is a mean over the samples of a batch. It is
converted to a sum and a count, so accumulation and unequal ranks stay exact. If the loss is a mean over tokens or
pixels, and their number differs between batches, write the task's loss yourself.

supported  training_step, validation_step (return values and logged metrics), train_dataloader and val_dataloader
           (their data set and collate_fn), forward, and configure_optimizers, which must match SETTINGS
rejected   hooks that change an update or need a Trainer, manual optimization, several optimizers, or an optimizer with
           a schedule: reported together, before training
"""

import inspect

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"epochs": 5, "global_batch_size": 32, "optimizer": "adam", "optimizer.lr": 0.01, "scheduler": "constant"}


class LitModel(nn.Module):  # yours: import pytorch_lightning as pl; class LitModel(pl.LightningModule)
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

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        x = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.prod(1) > 0).long()), batch_size=32)

    val_dataloader = train_dataloader


def build(*, hidden: int = 32) -> Task:
    return LightningTask(LitModel(hidden))


class LightningTask(Task):
    """Convert the mean losses of the module to sums with counts."""

    def __init__(self, module):
        check_hooks(module)
        check_optimizer(module)
        self.model = Steps(module)
        self.loaders = {"train": module.train_dataloader, "val": getattr(module, "val_dataloader", None)}
        loader = module.train_dataloader()
        if loader.collate_fn is not torch.utils.data.default_collate:
            self.collate = loader.collate_fn

    def dataset(self, split):
        if split not in self.loaders or self.loaders[split] is None:
            raise NotImplementedError(f"the module has no {split}_dataloader")
        return self.loaders[split]().dataset

    def loss(self, model, batch):
        mean, _ = model("training_step", batch)
        count = samples_in(batch)
        return mean * count, count

    def evaluate(self, model, batch):
        mean, logged = model("validation_step", batch)
        count = samples_in(batch)
        means = {**({} if mean is None else {"loss": mean}), **logged}
        return {name.removeprefix("val_").removeprefix("val/"): (value * count, count) for name, value in means.items()}


class Steps(nn.Module):
    """Call a step through forward, so that wrappers of the model (ddp, fsdp, compile) apply to it."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.logged = {}
        module.log = lambda name, value, *args, **kwargs: self.logged.update({name: torch.as_tensor(value).detach()})
        module.log_dict = lambda values, *args, **kwargs: [module.log(name, value) for name, value in values.items()]

    def forward(self, step, batch):
        self.logged.clear()
        method = getattr(self.module, step)
        arguments = (batch, 0)[: len(inspect.signature(method).parameters)]
        found = method(*arguments)
        if isinstance(found, dict):
            found = found["loss"]
        return found, dict(self.logged)


def samples_in(batch):
    """Return the length of the first tensor in the batch."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    return samples_in(next(iter(batch.values() if isinstance(batch, dict) else batch)))


REFUSED = (
    "optimizer_step", "optimizer_zero_grad", "backward", "manual_backward", "configure_gradient_clipping",
    "lr_scheduler_step", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_start",
    "on_fit_start", "setup", "prepare_data", "transfer_batch_to_device", "on_before_batch_transfer",
    "on_after_batch_transfer", "on_validation_epoch_end", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip


def check_hooks(module):
    """Raise TypeError if the module defines hooks that accel-run does not call."""
    theirs = ("torch.", "pytorch_lightning", "lightning")
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(theirs)]
    found = [name for name in REFUSED if any(name in vars(kind) for kind in own)]
    if found:
        raise TypeError(f"accel-run does not call {', '.join(found)}: move it into training_step or the data set")
    if not getattr(module, "automatic_optimization", True):
        raise TypeError("automatic_optimization=False is not supported: write a task instead")


def check_optimizer(module):
    """Raise TypeError if configure_optimizers differs from SETTINGS, which the plan and the checkpoints use."""
    optimizer = module.configure_optimizers()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError("configure_optimizers must return one optimizer; set its schedule in SETTINGS: scheduler")
    lr, name = optimizer.defaults["lr"], type(optimizer).__name__.lower()
    if (SETTINGS.get("optimizer", "adamw"), SETTINGS.get("optimizer.lr")) != (name, lr):
        words = f'"optimizer": "{name}", "optimizer.lr": {lr}'
        raise TypeError(f"configure_optimizers returns {name} with lr={lr}: write {words} into SETTINGS")
