"""An evaluation counts each sample once and does not affect training."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes.dataloader import default
from runner.axes.precision import bf16
from runner.base.batch import MicroBatch
from runner.base.task import Gather, Sum, Task
from runner.distributed.world import World
from runner.engine.evaluation.evaluate import BatchSizes, evaluate
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from tests.parts import parts_of
from tests.rounding import allowed

WORLD = World(torch.device("cpu"))


class Sampling(Task):
    """A metric whose count depends on the samples, and a metric that draws random numbers."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(1, 1, dtype=torch.float64), nn.Dropout(0.5))
        self.modes: list[bool] = []

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, Sum]:
        self.modes.append(model.training)
        counted = batch > 3
        drawn = torch.rand(len(batch), dtype=torch.float64)
        return {"mean": (batch[counted].sum(), counted.sum()), "drawn": (drawn.sum(), len(batch))}


def measured(
    task: Task, batch_size: int, seed: int = 0, sizes: BatchSizes | None = None, **options: Any
) -> dict[str, float]:
    samples: Any = [torch.tensor(float(number)) for number in range(11)]
    loader = Loader(Fetcher(samples, task.collate, bad_samples="stop"))

    def as_it_is(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return batches

    parts = parts_of(task, Path(__file__), WORLD, seed=seed, prefetch=as_it_is, **options)
    result = evaluate(parts, loader, list(range(11)), sizes or BatchSizes(batch_size, 0))
    assert result is not None
    return result.metrics


ROUNDED = allowed(torch.float64, 11)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 100])
def test_items_count_once_with_any_batch_size(batch_size: int) -> None:
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


def test_a_sampling_metric_depends_only_on_the_seed() -> None:
    task = Sampling()
    torch.manual_seed(1)
    first = measured(task, 4)["drawn"]
    torch.manual_seed(2)
    assert measured(task, 4)["drawn"] == first
    assert measured(task, 4, seed=1)["drawn"] != first


class Replaying(Sampling):
    """Returns sums in memory that the next batch overwrites, like a model compiled to CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.zeros(2, dtype=torch.float64)

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, Sum]:
        self.output.copy_(torch.stack([batch.double().sum(), torch.tensor(float(len(batch)), dtype=torch.float64)]))
        return {"mean": (self.output[0], self.output[1])}


def test_overwritten_sums_are_added_correctly() -> None:
    assert measured(Replaying(), 4)["mean"] == pytest.approx(5.0, rel=ROUNDED)


class Bootstrapped(Task):
    """Draws and uses modules after the last batch, in `couple` or a metric, and in `summarize`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))

    def rows(self, model: Any, batch: Tensor) -> Any:
        return model[0](batch[:, None])

    def value(self, rows: Tensor) -> Any:
        model: Any = self.model
        return model[1:](rows)[torch.randint(len(rows), (len(rows),))].sum()

    def summarize(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {**metrics, "drawn": torch.rand(()).item()}


class BootstrappedLoss(Bootstrapped):
    def embed(self, model: nn.Module, batch: Tensor) -> Any:
        return self.rows(model, batch)

    def couple(self, embeddings: Tensor) -> Sum:
        return self.value(embeddings), len(embeddings)


class BootstrappedMetric(Bootstrapped):
    def metrics(self, split: str) -> Mapping[str, Any]:
        return {"loss": Gather(self.value)}

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, Any]:
        return {"loss": self.rows(model, batch)}


@pytest.mark.parametrize("kind", [BootstrappedLoss, BootstrappedMetric])
def test_random_code_after_the_last_batch_is_reproducible(
    kind: type[Bootstrapped],
) -> None:
    task = kind()
    task.model.train()
    before = torch.get_rng_state(), *(buffer.clone() for buffer in task.model.buffers())
    results = [measured(task, batch_size) for batch_size in (4, 4, 11)]
    after = torch.get_rng_state(), *task.model.buffers()
    assert [torch.equal(old, new) for old, new in zip(before, after, strict=True)] == [True] * len(before)
    assert results[0] == results[1]
    assert results[2]["drawn"] == results[0]["drawn"]
    assert results[2]["loss"] == pytest.approx(results[0]["loss"], rel=allowed(torch.float32, 11))


def test_couple_runs_under_autocast() -> None:
    task = BootstrappedLoss()
    precision = bf16(WORLD, task.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "value", lambda rows: nn.Linear(2, 1)(rows).sum())
        assert math.isfinite(measured(task, 4, precision=precision)["loss"])


def test_workers_end_before_an_evaluation_is_retried() -> None:
    class Scarce(Sampling):
        def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, Sum]:
            if len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().evaluate(model, batch)

    left: list[int] = []

    def halved(error: Exception, size: int) -> int:
        left.append(len(multiprocessing.active_children()))
        return size // 2

    task, before = Scarce(), len(multiprocessing.active_children())
    samples: Any = [torch.tensor(float(number)) for number in range(11)]
    fetcher = Fetcher(samples, task.collate, bad_samples="stop")
    loader = default(fetcher, torch.device("cpu"), num_workers=2, pin_memory=False)
    parts = parts_of(task, Path(__file__), WORLD)
    result = evaluate(parts, loader, range(11), BatchSizes(8, 0, halved))
    assert result is not None
    assert result.metrics["mean"] == pytest.approx(sum(range(4, 11)) / 7, rel=ROUNDED)
    assert left == [before, before]
    assert len(multiprocessing.active_children()) == before
