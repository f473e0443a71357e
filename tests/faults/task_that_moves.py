"""A task that moves, replaces, deletes or unlocks the folder of its own run at update 25."""

import fcntl
import os
import shutil
from pathlib import Path

import torch
from torch import nn

from runner import Task

SETTINGS = {"updates": 60, "global_batch_size": 10, "checkpoint.every": 10}
RUN = Path("outputs/mine").absolute()
HELD = []


def build():
    return Moving()


def disturb(act):
    lock = RUN / ".lock"
    if act == "move":
        RUN.rename(RUN.with_name("moved"))
    elif act == "replace":
        RUN.rename(RUN.with_name("moved"))
        RUN.mkdir()
        (RUN / "kept").write_text("of somebody else")
    elif act == "delete":
        while RUN.exists():  # a running save renames its files meanwhile
            shutil.rmtree(RUN, ignore_errors=True)
    elif act == "unlock":
        lock.unlink()
    elif act == "take":  # like a second process that finds no lock
        lock.unlink()
        HELD.append(os.open(lock, os.O_RDWR | os.O_CREAT))
        fcntl.flock(HELD[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)


class Moving(Task):
    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.done = 0

    def begin_update(self, progress):
        if progress.update == 25 and "ACT" in os.environ:
            disturb(os.environ.pop("ACT"))

    def dataset(self, split):
        return [torch.full((2,), float(number)) for number in range(40)]

    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
