"""A small classifier that can run out of memory, be stopped, or use dropout."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from runner import Prediction, Task
from tests.waiting import wait_until

TOO_MUCH = 1 << 44  # bytes


class Small(Task):
    item = "sample"

    def __init__(self, width: int, dropout: float, batch_norm: bool, short_in: str, rank: int) -> None:
        norm = [nn.BatchNorm1d(width)] if batch_norm else []
        self.model = nn.Sequential(
            nn.Linear(6, width),
            *norm,
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 3),
        )
        # used by the loss, but not part of any layer of a pipeline
        self.model.register_buffer("temperature", torch.ones(3))
        self.short_in, self.rank = short_in, rank
        self.is_due = self.was_short = False
        if short_in == "optimizer":
            register_optimizer_step_pre_hook(self.before_step)

    def begin_update(self, progress):
        rank = dist.get_rank() if dist.is_initialized() else 0
        # may be called again, because an update may be repeated
        self.is_due = progress.update == 2 and rank == self.rank and not self.was_short
        if str(progress.update) == os.environ.get("STOP_AT"):
            os.kill(os.getpid(), signal.SIGTERM)
        if progress.update == 2 and (awaited := os.environ.get("WAIT_FOR_LINES")):
            file, num_lines = awaited.split(":")
            wait_until(lambda: has_lines(Path(file), int(num_lines)), awaited)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 6, generator=generator)
        return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 0).long())

    def loss(self, model, batch):
        inputs, targets = batch
        if self.short_in == "forward":
            self.take_too_much(inputs.device)
        loss = F.cross_entropy(model(inputs) / self.model.temperature, targets, reduction="sum")
        if self.short_in == "backward" and loss.requires_grad:
            loss.register_hook(lambda gradient: self.take_too_much(gradient.device))
        return loss, len(targets)

    def before_step(self, optimizer, args, kwargs):
        self.take_too_much(optimizer.param_groups[0]["params"][0].device)

    def take_too_much(self, device):
        if self.is_due and (torch.is_grad_enabled() or self.short_in != "forward"):
            self.is_due, self.was_short = False, True
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=device)

    def example(self):
        return (torch.linspace(-1, 1, 12).view(2, 6),)

    def predict(self, model, generator, *, samples: int = 4):  # type: ignore[override]
        device = next(model.parameters()).device
        inputs = torch.linspace(-1, 1, 6 * samples, device=device).view(samples, 6)
        yield Prediction({"scores.npy": model(inputs).float().cpu().numpy()}, items=samples)


def has_lines(file: Path, num_lines: int) -> bool:
    return file.exists() and file.read_text().count("\n") >= num_lines


def build(
    *,
    width: int = 16,
    dropout: float = 0.0,
    batch_norm: bool = False,
    short_in: str = "",
    rank: int = 0,
) -> Task:
    return Small(width, dropout, batch_norm, short_in, rank)
