"""A test task that can kill its own process, with dropout, random augmentation and a varying number of items."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task
from runner.base.task import Prediction, sample_rng
from tests.waiting import until_asked_to_stop, wait_until

SETTINGS = {"updates": 100, "global_batch_size": 12, "optimizer.lr": 0.01, "evaluate.every": 40, "checkpoint.every": 37}


def build(
    *,
    hidden: int = 16,
    kill_at: int = 0,
    wait_for: str = "",
    sleep_s: float = 0.0,
    stop_at: int = 0,
    held: str = "",
    fail_at: int = 0,
) -> Task:
    """Build the task. NO_KILL disables all faults except sleep_s.

    sleep_s  seconds that each batch sleeps
    kill_at  batch at which the process kills itself, after the folder `wait_for` exists
    stop_at  batch that creates the file `held`, and waits until the run has received a stop signal
    fail_at  batch whose loss raises an exception
    """
    return Everything(hidden, kill_at, wait_for, sleep_s, stop_at, held, fail_at)


class Points(torch.utils.data.Dataset):
    def __init__(self, split):
        self.split = split
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 130 if self.split == "train" else 40

    def __getitem__(self, index):
        rng = sample_rng(7, self.epoch if self.split == "train" else 0, index)
        x = torch.from_numpy(rng.standard_normal(8)).float()
        y = int(x[:4].sum() > 0) if index % 5 else -1  # the label of every fifth sample is ignored
        return x, y


class Everything(Task):
    def __init__(self, hidden, kill_at, wait_for, sleep_s, stop_at, held, fail_at):
        self.model = nn.Sequential(
            nn.Linear(8, hidden), nn.Dropout(0.2), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )
        self.kill_at, self.wait_for, self.sleep_s, self.fail_at = kill_at, Path(wait_for), sleep_s, fail_at
        self.stop_at, self.held = stop_at, Path(held)
        self.calls = 0

    def dataset(self, split):
        return Points(split)

    def loss(self, model, batch):
        x, y = batch
        if model.training:
            self.calls += 1
            time.sleep(self.sleep_s)  # lint-tests: sleep: duration of a batch
            harmless = "NO_KILL" in os.environ
            if self.calls == self.kill_at and not harmless:
                wait_until(self.wait_for.is_dir)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls == self.stop_at and not harmless:
                self.held.touch()
                until_asked_to_stop()
            if self.calls == self.fail_at and not harmless:
                raise KeyError("points")
        return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-1), (y >= 0).sum()

    def predict(self, model, generator, *, samples: int = 2):
        for number in range(samples):
            x = torch.randn(1, 8, generator=generator, device=generator.device)
            yield Prediction({f"answer-{number}.npy": model(x).cpu().numpy()}, items=1)
