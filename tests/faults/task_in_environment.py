"""A task that disturbs its own machine during a run: the disk fills up, a worker dies, a limit is reached.

The environment variables ACT=NAME and AT=UPDATE select the disturbance, so that the settings of the run stay the same.
Without them, nothing is disturbed. sample-... and worker-... take effect at fixed samples and ignore AT.
"""

import errno
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from runner import Task
from runner.base.task import sample_rng
from tests.waiting import wait_until

SETTINGS = {
    "updates": 60, "global_batch_size": 8, "optimizer.lr": 0.01, "evaluate.every": 0, "checkpoint.every": 10,
    "log_every": 5, "checkpoint.best": None, "seed": 3,
}  # fmt: skip


def build(*, hidden: int = 16, sleep_s: float = 0.0) -> Task:
    return Disturbing(hidden, sleep_s)


class Points(torch.utils.data.Dataset):
    def __init__(self, split):
        self.split = split
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 130 if self.split == "train" else 16

    def __getitem__(self, index):
        act = os.environ.get("ACT", "") if self.split == "train" else ""
        if act.startswith("sample-") and index in (17, 77):
            return return_bad_sample(act)
        if act.startswith("worker-") and index == 77 and torch.utils.data.get_worker_info():
            WORKER[act]()
        rng = sample_rng(7, self.epoch if self.split == "train" else 0, index)
        x = torch.from_numpy(rng.standard_normal(8)).float()
        return x, int(x[:4].sum() > 0)


def return_bad_sample(act):
    if act == "sample-raises":
        raise ValueError("this one is \x1b[31mbroken\nand says so in two lines")
    if act == "sample-unprintable":
        raise Unprintable
    if act == "sample-shape":
        return torch.zeros(9), 0
    if act == "sample-type":
        return torch.zeros(8), "one"
    if act == "sample-nothing":
        return None
    return torch.full((8,), float("nan")), 0


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.two = (lambda: two)  # fmt: skip


def raise_in_worker():
    raise Unpicklable("a", "b")


WORKER = {
    "worker-killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "worker-aborts": os.abort,
    "worker-calls-os-exit": lambda: os._exit(3),
    "worker-calls-sys-exit": lambda: __import__("sys").exit(3),
    "worker-raises": raise_in_worker,
    "worker-out-of-memory": lambda: torch.empty(1 << 50),
}


class Disturbing(Task):
    def __init__(self, hidden, sleep_s):
        self.model = nn.Sequential(
            nn.Linear(8, hidden), nn.Dropout(0.2), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )
        self.sleep_s = sleep_s
        self.kept = []

    def dataset(self, split):
        return Points(split)

    def begin_update(self, progress):
        if progress.update == int(os.environ.get("AT", "-1")):
            if "WAIT" in os.environ:  # until this checkpoint has been written
                wait_until(Path(os.environ["WAIT"]).exists)
            ACTS.get(os.environ["ACT"], lambda task: None)(self)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def fill(task):
    """Fill the rest of the disk."""
    with Path(os.environ["DISK"], "ballast-of-task").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


def empty(task):
    for path in Path(os.environ["DISK"]).glob("ballast*"):
        path.unlink()


def make_read_only(task):
    """Make every change fail with EROFS, as on an ext4 file system that became read-only after an error.

    The calls are replaced, because a mount with open files cannot be made read-only.
    """
    from runner.durable.system import System

    def refuse(*given):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("open", "write", "truncate", "fsync", "mkdir", "rename", "unlink", "rmdir"):
        setattr(System, name, refuse)


def exhaust_file_descriptors(task):
    """Leave no free descriptor. Open descriptors stay open."""
    for thread in threading.enumerate():  # a running save would later free descriptors
        if thread.name == "checkpoint-writer":
            thread.join()
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def limit_file_size(task):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))


def limit_memory(task):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    task.kept.append(torch.zeros(1 << 26))


def allocate_too_much_with_numpy(task):
    task.kept.append(np.zeros(1 << 50))


def hold(task):
    """Wait until the test lets the run continue."""
    wait_until(Path(os.environ["HOLD"]).exists)


def hang_up(task):
    os.kill(os.getpid(), signal.SIGHUP)


def fail(task):
    raise KeyError("points")


def raise_gpu_out_of_memory(task):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def kill_rank(task):
    if int(torch.distributed.get_rank()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def interrupt_twice(task):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


ACTS = {
    "raise": fail, "gpu-memory": raise_gpu_out_of_memory, "kill-rank": kill_rank, "interrupt-twice": interrupt_twice,
    "fill": fill, "empty": empty, "read-only": make_read_only, "file-descriptors": exhaust_file_descriptors,
    "file-size": limit_file_size, "hold": hold,
    "memory": limit_memory, "numpy-memory": allocate_too_much_with_numpy, "hang-up": hang_up,
}  # fmt: skip
