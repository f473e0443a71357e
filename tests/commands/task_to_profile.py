"""A task for tests of the profiler: a module that sleeps in both passes, and lines that synchronize."""

import os
import signal
import time

import torch
from torch import nn

from runner import Task

SETTINGS = {"updates": 100, "global_batch_size": 8, "optimizer.lr": 0.01, "evaluate.every": 0}


def build(
    *, forward_s: float = 0.0, backward_s: float = 0.0, waits: bool = False, stop_at: int = 0, evaluation_s: float = 0.0
) -> Task:
    return ToProfile(forward_s, backward_s, waits, stop_at, evaluation_s)


def wait(seconds):
    """Sleep, or advance the virtual clock if a test has replaced the real one."""
    pause = getattr(time.perf_counter, "sleep", time.sleep)
    pause(seconds)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        wait(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x):
        wait(self.forward_s)
        return Slow.apply(x, self.backward_s)


class Net(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.first = nn.Linear(4, 256)
        self.inner = nn.Sequential(nn.Dropout(0.1), Sleeper(forward_s, backward_s), nn.ReLU())
        self.last = nn.Linear(256, 1)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class ToProfile(Task):
    def __init__(self, forward_s, backward_s, waits, stop_at, evaluation_s):
        self.evaluation_s = evaluation_s
        self.model = Net(forward_s, backward_s)
        self.waits, self.stop_at = waits, stop_at
        self.scale = 1.0

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(torch.randn(64, 4, generator=generator))

    def begin_update(self, progress):
        if progress.update == self.stop_at > 0:
            os.kill(os.getpid(), signal.SIGINT)
        if self.waits:
            self.scale = float(self.model.last.weight.norm() * 0 + 1)  # waits in begin_update

    def loss(self, model, batch):
        (x,) = batch
        wait(0.0 if self.model.training else self.evaluation_s)
        drawn = torch.rand(()).item()  # on the host, so it does not synchronize
        loss = (model(x) - x.sum(1, keepdim=True)).square().sum() * (self.scale if drawn < 2 else 0.0)
        if self.waits and loss.item() < 0:  # waits in loss
            raise AssertionError
        return loss, len(x)
