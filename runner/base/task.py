"""The task contract: a model, its data, its loss as a sum with a count, and what it predicts.

A task never sees devices, ranks, autocast, loss scaling, accumulation or trackers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Sum = tuple[Tensor, "Tensor | int"]  # (sum over items, number of items)


class Dataset(Protocol):
    """A map from sample index to sample.

    May also have `__getitems__(indices: list[int])`, which returns either a list of samples (they are collated) or
    the batch itself, any other type, such as a tuple or dict of tensors (faster: no sample is made on its own).
    May also have `set_epoch(epoch: int)`, called before samples of that epoch are read: random augmentation should
    draw from `sample_rng(seed, epoch, index)` so that a sample is the same whichever worker reads it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Context:
    """What the runner tells a task when it is built.

    seed       seed of the run; weights are drawn from torch's global generator, seeded with it already
    data_path  the user's `data.path`, or None for the task's own data
    cache      folder for prepared data that outlives a run; safe to delete
    """

    seed: int
    data_path: Path | None
    cache: Path


@dataclass(frozen=True)
class Prediction:
    """One result of inference: `files` maps a file name to text (str) or an array (written as .npy).

    text   what to show on the screen, may be empty
    items  how many items (tokens, samples) were made, for the throughput
    """

    files: Mapping[str, str | np.ndarray[Any, Any]]
    text: str = ""
    items: int = 1


class Task:
    """Subclass this; set `model`; write `loss` and `dataset`. The rest has working defaults.

    item              name of what the loss averages over, e.g. "token"
    items_per_sample  expected number of items in a sample; keeps gradients in range, results do not depend on it
    losses            phase name -> loss function, for tasks of several phases; "train" is `loss` by default
    """

    model: nn.Module
    item: str = "sample"
    items_per_sample: float = 1.0

    def loss(self, model: nn.Module, batch: Any) -> Sum:
        """Return the loss summed over the items of this batch, and how many items there were."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch) -> (loss_sum, num_items)")

    def dataset(self, split: str) -> Dataset:
        """Return the samples of `split`: "train", "val" or "test"."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset(split)")

    @property
    def losses(self) -> Mapping[str, Any]:
        """Phase name -> (model, batch) -> (loss summed over items, items)."""
        return {"train": self.loss}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Sum]:
        """Return metrics of one batch as sums and counts; added over batches and ranks, divided once."""
        return {"loss": self.loss(model, batch)}

    def summarize(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Turn the divided metrics into those shown, e.g. add bits per byte beside the loss."""
        return metrics

    def baselines(self) -> Mapping[str, float]:
        """Return metric name -> value of a trivial model, shown beside the metric of that name."""
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch of a list of samples."""
        return torch.utils.data.default_collate(list(samples))

    def blocks(self) -> Sequence[nn.Module]:
        """Return the repeated blocks of the model: units of checkpointing and of regional compilation."""
        return [layer for child in self.model.children() if isinstance(child, nn.ModuleList) for layer in child]

    def predict(self, model: nn.Module, generator: torch.Generator, /, **options: Any) -> Iterator[Prediction]:
        """Yield predictions with the trained model, in eval mode and without gradients.

        Write it as `def predict(self, model, generator, *, samples: int = 3, ...)`: what follows `*` are the keys
        under `inference` in the configuration, with these types and defaults.

        generator  seeded; lives on the model's device; the only source of randomness
        """
        raise NotImplementedError(f"{type(self).__name__} must define predict(...) to be used with `inference`")


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one sample in one epoch: the same for any worker, rank or share."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, index])))
