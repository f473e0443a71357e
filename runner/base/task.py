"""The task contract: a model, its data, its loss as a sum with a count, and what it predicts.

A task never sees devices, ranks, autocast, loss scaling, accumulation or trackers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Sum = tuple[Tensor, "Tensor | int | float"]  # (sum over items, number of items)


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
class Progress:
    """Where a phase of training stands before its next update.

    update  updates made in this phase; `total` of them make it whole
    epoch   passes over the training data so far, with a fraction
    """

    phase: str
    update: int
    total: int
    epoch: float

    @property
    def share(self) -> float:
        """Return the share of the phase that is done, from 0 to below 1."""
        return self.update / max(1, self.total)


Content = str | bytes | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Prediction:
    """One result of inference: `files` maps a file name to text, bytes, or an array (written as .npy).

    text   what to show on the screen, may be empty
    items  how many items (tokens, samples) were made, for the throughput; 0: a picture or a table of what was made
           before, which counts as no prediction
    plots  pictures for plots/ of the run directory: file name, such as maps.png, to its bytes (see runner.base.picture)
    """

    files: Mapping[str, Content]
    text: str = ""
    items: int = 1
    plots: Mapping[str, bytes] = field(default_factory=dict)


State = dict[str, Tensor]


class Fit:
    """Statistics of the training data, without gradients: what a phase of kind "fit" does.

    The state is a dict of tensors on the model's device, of a size that does not depend on the data, so it streams and
    is saved in the middle. `merge` makes one state of two; in whatever parts the data is read, the result is the same
    but for rounding. So add what is exact when it is added: float64 sums, counts, Welford's moments.
    """

    def start(self) -> State:
        """Return the state of no data at all, on the CPU; the runner moves it to the model's device."""
        raise NotImplementedError(f"{type(self).__name__} must define start() -> dict of tensors")

    def add(self, model: nn.Module, state: State, batch: Any) -> tuple[State, int]:
        """Return the state with this batch, and how many items (see Task.item) the batch had."""
        raise NotImplementedError(f"{type(self).__name__} must define add(model, state, batch) -> (state, items)")

    def merge(self, one: State, other: State) -> State:
        """Return the state of the data of both."""
        raise NotImplementedError(f"{type(self).__name__} must define merge(one, other) -> state")

    def finish(self, model: nn.Module, state: State) -> Mapping[str, float]:
        """Put what was found into the model, once all data was read; return figures to show, may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must define finish(model, state)")


class Task:
    """Subclass this; set `model`; write `loss` and `dataset`. The rest has working defaults.

    item              name of what the loss averages over, e.g. "token"
    items_per_sample  expected number of items in a sample; keeps gradients in range, results do not depend on it
    phase             phase that is running, or whose checkpoint predicts; dataset, evaluate, baselines and the two
                      above may depend on it
    losses            phase name -> loss function, for tasks of several phases; "train" is `loss` by default
    fits              phase name -> Fit, for phases of kind "fit"
    loss_is_additive  False: the loss of a batch is not the sum over its samples, as in a contrastive loss; such a loss
                      depends on how an update is cut into micro-batches, and is not checked to be a sum

    A task of several phases says which ones in PHASES, a literal mapping in its file: see docs/phases.md.
    """

    model: nn.Module
    item: str = "sample"
    items_per_sample: float = 1.0
    phase: str = "train"
    loss_is_additive: bool = True

    def loss(self, model: nn.Module, batch: Any) -> Sum:
        """Return the loss summed over the items of this batch, and how many items there were."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch) -> (loss_sum, num_items)")

    def dataset(self, split: str) -> Dataset:
        """Return the samples of `split`: "train", "val" or "test"."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset(split)")

    @property
    def losses(self) -> Mapping[str, Callable[[nn.Module, Any], Sum]]:
        """Phase name -> (model, batch) -> (loss summed over items, items). A phase that is not here has `loss`."""
        return {}

    @property
    def fits(self) -> Mapping[str, Fit]:
        """Phase name -> statistics to gather, for each phase of kind "fit"."""
        return {}

    @property
    def packages(self) -> Mapping[str, Mapping[str, str]]:
        """Phase name, or "infer" -> packages that it imports only on the way -> extra of accel-run that installs each.

        They are looked for before the first update, so that a run does not train for hours and then stop for a package.
        The extra is "" for a package that is installed by its own name.
        """
        return {}

    def begin_phase(self, phase: str) -> None:
        """Be told which phase begins, before its data, loss and metrics are asked for; the base sets `phase`."""
        self.phase = phase

    def begin_update(self, progress: Progress) -> None:
        """Be told where training stands before each update: the place for temperatures and curricula.

        What is set here must follow from `progress` alone, so that a resumed run goes on as if it had not stopped.
        """

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

    def layers(self) -> Sequence[nn.Module]:
        """Return modules whose composition, each called with the one before's output, equals the model; for pipelines.

        They share the model's parameters, and hold all of them. The first takes what the model is called with; between
        them go floating-point tensors or tuples of such.
        """
        if isinstance(self.model, nn.Sequential):
            return list(self.model)
        raise NotImplementedError(
            f"{type(self).__name__} must define layers() -> modules whose composition is the model, for a pipeline"
        )

    def example(self) -> tuple[Tensor, ...]:
        """Return the arguments of one call of the model, a batch of two samples on the CPU: `export` traces them."""
        raise NotImplementedError(f"{type(self).__name__} defines no example()")

    def predict(self, model: nn.Module, generator: torch.Generator, /, **options: Any) -> Iterator[Prediction]:
        """Yield predictions with the trained model, in eval mode and without gradients.

        Write it as `def predict(self, model, generator, *, samples: int = 3, ...)`: what follows `*` are the keys
        under `inference` in the configuration, with these types and defaults.

        generator  seeded; lives on the model's device; the only source of randomness
        """
        raise NotImplementedError(f"{type(self).__name__} must define predict(...) to be used with `inference`")


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one sample in one epoch: the same for any worker, rank or share.

    The streams of two keys differ, and none is that of the order of an epoch.
    """
    # Two words for each number: SeedSequence takes more than one for a number from 2**32 on, and what they are read as
    # would depend on the numbers beside it.
    words = [word for number in (epoch, index) for word in divmod(number, 2**32)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_OF_SAMPLES, *words))))


_OF_SAMPLES = 0x73616D70  # apart from other streams of the same seed
