"""The models and datasets of scripts/measure/loaders.py: a task whose samples take a chosen time to read.

reads  memory: tensors; compute: every sample is augmented in NumPy; storage: every sample waits `ms` milliseconds, as a
       file in a network does
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Task

SETTINGS = {"updates": 100000, "global_batch_size": 64, "optimizer.lr": 0.001, "evaluate.every": 0}
CLASSES = 10


def build(
    *,
    model: Literal["mlp", "convolutional", "residual", "transformer"] = "mlp",
    reads: Literal["memory", "compute", "storage"] = "memory",
    ms: float = 0.5,
) -> Task:
    """Return the task with a model and a dataset; `ms` is the time of a sample in milliseconds."""
    return LoaderTask(MODELS[model](), reads, ms)


class Pictures:
    """Noise of (3, 32, 32) with labels, read as `reads` says."""

    def __init__(self, reads: str, ms: float) -> None:
        self.reads, self.seconds = reads, ms / 1e3
        self.pictures = np.random.default_rng(0).normal(size=(512, 3, 40, 40)).astype(np.float32)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index % len(self.pictures)]
        if self.reads == "storage":
            time.sleep(self.seconds)
        if self.reads == "compute":
            began = time.thread_time()
            while time.thread_time() - began < self.seconds:
                np.ascontiguousarray(picture[:, ::-1, ::-1]).clip(-1.0, 1.0)
        return torch.from_numpy(picture[:, 4:36, 4:36].copy()), index % CLASSES


class LoaderTask(Task):
    """Classify noise: only the time of an update is of interest."""

    def __init__(self, model: nn.Module, reads: str, ms: float) -> None:
        self.model, self.reads, self.ms = model, reads, ms

    def dataset(self, split: str) -> Any:
        if split != "train":
            raise NotImplementedError
        return Pictures(self.reads, self.ms)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        pictures, labels = batch
        return F.cross_entropy(model(pictures), labels, reduction="sum"), len(labels)


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H, W) for an input of the same shape."""
        return x + self.body(x)  # type: ignore[no-any-return]


class Patches(nn.Module):
    """A small vision transformer on patches of 4 x 4 pixels."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, CLASSES) for pictures (B, 3, 32, 32)."""
        return self.head(self.encoder(self.embed(x).flatten(2).transpose(1, 2)).mean(1))  # type: ignore[no-any-return]


def convolution(channels_in: int, channels: int, stride: int = 1) -> nn.Module:
    """Return a convolution with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


def _pool() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    "convolutional": lambda: nn.Sequential(
        convolution(3, 16), convolution(16, 32, 2), convolution(32, 64, 2), *_pool(), nn.Linear(64, CLASSES)
    ),
    "residual": lambda: nn.Sequential(
        convolution(3, 32), Residual(32), convolution(32, 64, 2), Residual(64), *_pool(), nn.Linear(64, CLASSES)
    ),
    "transformer": Patches,
}
