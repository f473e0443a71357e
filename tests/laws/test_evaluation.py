"""An evaluation counts each sample once and does not affect training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.fetcher import Fetcher
from runner.base.task import Sum, Task
from runner.base.world import World
from runner.engine.evaluate import BatchSizes, evaluate
from runner.loading.loaders import Loader
from tests.parts import parts_of
from tests.rounding import allowed

WORLD = World(torch.device("cpu"))


class Sampling(Task):
    """A metric whose count depends on the samples, and one that draws random numbers."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(1, 1, dtype=torch.float64), nn.Dropout(0.5))
        self.modes: list[bool] = []

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, Sum]:
        self.modes.append(model.training)
        counted = batch > 3
        drawn = torch.rand(len(batch), dtype=torch.float64)
        return {"mean": (batch[counted].sum(), counted.sum()), "drawn": (drawn.sum(), len(batch))}


def measured(task: Sampling, batch_size: int, seed: int = 0, sizes: BatchSizes | None = None) -> dict[str, float]:
    samples = [torch.tensor(float(number)) for number in range(11)]
    loader = Loader(Fetcher(samples, task.collate, bad_samples="stop"))  # type: ignore[arg-type]

    def as_it_is(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return batches

    parts = parts_of(task, Path(__file__), WORLD, seed=seed, prefetch=as_it_is)
    result = evaluate(parts, loader, list(range(11)), sizes or BatchSizes(batch_size))
    assert result is not None
    return result.metrics


ROUNDED = allowed(torch.float64, 11)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 100])
def test_each_item_counts_once_for_any_batch_size(batch_size: int) -> None:
    assert measured(Sampling(), batch_size)["mean"] == pytest.approx(
        sum(range(4, 11)) / 7, rel=allowed(torch.float64, 11)
    )


def test_train_mode_and_generators_are_restored() -> None:
    task = Sampling()
    task.model.train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    measured(task, 4)
    assert task.modes == [False] * 3
    assert all(module.training for module in task.model.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_metric_that_samples_depends_only_on_the_seed() -> None:
    task = Sampling()
    torch.manual_seed(1)
    first = measured(task, 4)["drawn"]
    torch.manual_seed(2)
    assert measured(task, 4)["drawn"] == first
    assert measured(task, 4, seed=1)["drawn"] != first


class Replaying(Sampling):
    """Returns sums in memory that the next batch overwrites, like a model in CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.zeros(2, dtype=torch.float64)

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, Sum]:
        self.output.copy_(torch.stack([batch.double().sum(), torch.tensor(float(len(batch)), dtype=torch.float64)]))
        return {"mean": (self.output[0], self.output[1])}


def test_sums_in_reused_memory_are_counted() -> None:
    assert measured(Replaying(), 4)["mean"] == pytest.approx(5.0, rel=ROUNDED)
