"""A test task with four phases (statistics, pretraining, adapter, early stopping) that can signal its own process."""

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runner import Fit, Prediction, Task, sample_rng

PHASES = {
    "statistics": {"kind": "fit", "global_batch_size": 10, "micro_batch_size": 5},
    "pretrain": {"updates": 12},
    "adapter": {
        "needs": ["pretrain"],
        "trains": ["adapter", "head"],
        "updates": 9,
        "optimizer": "adam",
        "optimizer.lr": 0.002,
        "optimizer.lr_scales": {"head": 0.5},
        "scheduler": "linear",
        "max_grad_norm": 0.1,
    },
    "patient": {"needs": ["adapter"], "trains": ["head"], "updates": 40, "optimizer.lr": 1e-12, "evaluate.every": 2},
}
SETTINGS = {
    "optimizer": "sgd",
    "optimizer.lr": 0.1,
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "evaluate.every": 5,
    "log_every": 1,
    "phase.patient.early_stopping.patience": 3,
    "phase.patient.early_stopping.min_delta": 0.001,
}


def build(
    *,
    stop_at: str = "",
    wait_for: str = "",
    by: str = "SIGKILL",
    unused: bool = False,
    fits: bool = True,
    losses: str = "pretrain",
    added: str = "",
) -> Task:
    """Build a task with four phases.

    stop_at   send a signal at this batch (PHASE:NUMBER) or in an evaluation (PHASE:eval), unless NO_KILL is set
    wait_for  file that must exist before the signal is sent
    by name of the signal
    added     if not empty, Fit.add returns an invalid value
    """
    task = Phases(stop_at, wait_for, unused, fits)
    task.by, task.name_of_loss, task.added = getattr(signal, by), losses, added
    return task


class Model(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("times", torch.zeros((), dtype=torch.int64))
        self.base = nn.Linear(4, 6)
        self.adapter = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        if unused:
            self.head.extra = nn.Parameter(torch.zeros(3))
        self.temperature = 1.0

    def forward(self, x):
        x = (x - self.mean).to(x.dtype)
        return self.head(torch.tanh(self.base(x)) + self.adapter(torch.tanh(self.base(x)))) / self.temperature


class Mean(Fit):
    """The mean of the inputs, from their sum and count."""

    def __init__(self, task):
        self.task = task

    def start(self):
        return {"sum": torch.zeros(4, dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}

    def add(self, model, state, batch):
        self.task.count_batch()
        x, _ = batch
        if self.task.added:
            return state
        return {"sum": state["sum"] + x.double().sum(0), "count": state["count"] + len(x)}, len(x)

    def merge(self, one, other):
        return {name: one[name] + other[name] for name in one}

    def finish(self, model, state):
        model.mean.copy_(state["sum"] / state["count"])
        model.times += 1
        return {"mean": float(model.mean.mean())}


class Samples:
    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, 4, generator=generator) + 3.0
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        noise = sample_rng(0, self.epoch, index).normal(size=4).astype("float32")
        x = self.x[index] + 0.01 * torch.from_numpy(noise)
        return x, (x.sum() > 12).long()


class Phases(Task):
    def __init__(self, stop_at, wait_for, unused, fits):
        self.model = Model(unused)
        self.stop_at, self.wait_for, self.with_fits = stop_at, wait_for, fits
        self.batches = 0

    @property
    def losses(self):
        return {self.name_of_loss: self.reconstruct}

    @property
    def fits(self):
        return {"statistics": Mean(self)} if self.with_fits else {}

    def begin_phase(self, phase):
        super().begin_phase(phase)
        self.batches = 0

    def begin_update(self, progress):
        self.model.temperature = 1.0 + progress.share

    def dataset(self, split):
        return Samples(33 if split == "train" else 12)

    def count_batch(self):
        self.batches += 1
        self.stop_if(self.batches)

    def stop_if(self, where):
        if self.stop_at == f"{self.phase}:{where}" and "NO_KILL" not in os.environ:
            while self.wait_for and not Path(self.wait_for).exists():
                torch.zeros(1)
            self.stop_at = ""  # a second signal would end the run without saving
            os.kill(os.getpid(), self.by)

    def reconstruct(self, model, batch):
        if torch.is_grad_enabled():  # false in the check before the first update
            self.count_batch()
        x, y = batch
        return F.cross_entropy(model(F.dropout(x, 0.2)), y, reduction="sum"), len(y)

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            self.count_batch()
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def evaluate(self, model, batch):
        if self.batches:  # false in the check before the first update
            self.stop_if("eval")
        noise = torch.rand(len(batch[1])).double()
        return {"loss": self.loss(model, batch), "noise": (noise.sum(), len(noise))}

    def baselines(self):
        return {"loss": 0.6931}

    def predict(self, model, generator, *, samples: int = 2):
        for number in range(samples):
            drawn = torch.rand(1, generator=generator).item()
            yield Prediction(
                {f"{number}.txt": f"{self.phase} {model.temperature:.2f} {drawn:.3f}", f"{number}.bin": b"\x00\x01"},
                plots={f"{number}.png": b"\x89PNG"},
            )
