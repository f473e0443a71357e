"""A coupled loss that returns a mean and the number of samples is detected before the first update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.axes.precision import bf16, fp32
from runner.axes.prefetch import Prefetch
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import TaskFault
from runner.base.task import Task
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.engine.checks.additivity_check import BatchReader, check_coupled_loss
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader

WORLD = World(torch.device("cpu"))
Rows = Callable[[Tensor, Tensor], Tensor]  # functions from codes and labels to the loss of each sample


def clip(codes: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(codes @ codes.roll(1, 1).T / 0.2, torch.arange(len(codes)), reduction="none")


def simclr(codes: Tensor, labels: Tensor) -> Tensor:
    both = torch.cat((codes, codes.roll(1, 1)))
    logits = (both @ both.T / 0.1).fill_diagonal_(float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(both)).roll(len(codes)), reduction="none").view(2, -1).sum(0)


def supervised(codes: Tensor, labels: Tensor) -> Tensor:
    logits = (codes @ codes.T / 0.1).fill_diagonal_(float("-inf"))
    same = (labels[:, None] == labels).float().fill_diagonal_(0)
    logs = F.log_softmax(logits, dim=1).nan_to_num(neginf=0.0)
    return -(logs * same).sum(1) / same.sum(1).clamp(min=1)


def triplets(codes: Tensor, labels: Tensor) -> Tensor:
    distances, same = torch.cdist(codes, codes), labels[:, None] == labels
    negative = distances.masked_fill(same, 10.0).amin(1)
    return F.softplus(distances.masked_fill(~same, 0.0).amax(1) - negative)


def sigmoid(codes: Tensor, labels: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(codes)) - 1
    return -F.logsigmoid(signs * (codes @ codes.T * 10 - 10)).sum(1)


def neighbors(codes: Tensor, labels: Tensor) -> Tensor:
    logits = (codes @ codes.T).fill_diagonal_(float("-inf"))
    return -(F.softmax(logits, 1) * (labels[:, None] == labels)).sum(1).clamp(min=1e-4).log()


def cross_correlation(codes: Tensor, labels: Tensor) -> Tensor:
    """Return a loss of the whole batch, multiplied by the number of samples, as for Barlow Twins."""
    normalized = (codes - codes.mean(0)) / codes.std(0)
    off_diagonal = (normalized.T @ normalized.roll(1, 1) / len(codes) - torch.eye(codes.shape[1])).square().sum()
    return off_diagonal.expand(len(codes))


ROWS = {rows.__name__: rows for rows in (clip, simclr, supervised, triplets, sigmoid, neighbors, cross_correlation)}


def message(
    couple: Callable[[Any], Any],
    size: int,
    *,
    micro: int | None = None,
    classes: int = 4,
    precision: Any = fp32,
    seed: int = 0,
) -> str:
    """Return the message about the loss of a batch of `size` samples, or "" if there is none."""
    torch.manual_seed(seed)

    class Coupled(Task):
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))

        def embed(self, model: nn.Module, batch: Any) -> Any:
            return F.normalize(model(batch[0]).float(), dim=1), batch[1]

        def couple(self, embeddings: Any) -> Any:
            return couple(embeddings)

    task = Coupled()
    parts: Any = SimpleNamespace(
        world=WORLD, bare=task.model, model=task.model, parallel=Parallel(WORLD),
        precision=precision(WORLD, task.model), source=Path(__file__), task=task,
    )  # fmt: skip
    x, y = torch.randn(max(size, 64), 6), torch.randint(0, classes, (max(size, 64),))
    samples: Any = list(zip(x, y, strict=True))
    loader = Loader(Fetcher(samples, task.collate, bad_samples="stop"))
    taken = list(range(micro or size))
    first = MicroBatch((x[taken], y[taken]), last=True, samples=BatchSamples(0, 0, taken, taken))
    before = torch.get_rng_state(), *(buffer.clone() for buffer in task.model.buffers())
    try:
        check_coupled_loss(parts, first, BatchReader(loader, Prefetch(WORLD.device)))
    except TaskFault as fault:
        return str(fault)
    finally:
        after = torch.get_rng_state(), *task.model.buffers()
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return ""


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("name", ROWS)
def test_a_sum_is_not_reported(name: str, size: int) -> None:
    assert message(lambda pair: (ROWS[name](*pair).sum(), len(pair[0])), size) == ""


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("name", ROWS)
def test_means_with_count_1_are_not_reported(name: str, size: int) -> None:
    assert message(lambda pair: (ROWS[name](*pair).mean(), 1), size) == ""


@pytest.mark.parametrize("precision", [fp32, bf16])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("sigmoid", "neighbors", "cross_correlation")])
def test_a_mean_with_the_number_of_samples_is_rejected(name: str, size: int, precision: Any) -> None:
    found = message(lambda pair: (ROWS[name](*pair).mean(), len(pair[0])), size, precision=precision)
    assert "couple() returns a mean" in found
    assert "loss_is_additive" in found


@pytest.mark.parametrize(("size", "classes"), [(8, 4), (16, 10), (32, 16), (64, 32)])
@pytest.mark.parametrize("name", ["neighbors", "supervised", "triplets"])
def test_sums_with_rare_classes_are_not_reported(name: str, size: int, classes: int) -> None:
    """Repeating a row adds a sample of its class, which reduces its loss."""
    for seed in range(4):
        assert message(lambda pair: (ROWS[name](*pair).sum(), len(pair[0])), size, classes=classes, seed=seed) == ""


@pytest.mark.parametrize(("size", "classes"), [(16, 4), (32, 32), (64, 48), (64, 64)])
def test_a_sum_over_classes_is_not_reported(size: int, classes: int) -> None:
    """Repeated rows change neither the sum nor the number of classes."""

    def prototypes(pair: Any) -> Any:
        codes, labels = pair
        present = labels.unique()
        means = torch.stack([codes[labels == label].mean(0) for label in present])
        return F.softplus(-5 * means @ means.T).mean(1).sum(), len(present)

    assert message(prototypes, size, classes=classes) == ""


def test_the_check_extends_small_micro_batches() -> None:
    assert "couple() returns a mean" in message(lambda pair: (clip(*pair).mean(), len(pair[0])), 16, micro=1)
    assert message(lambda pair: (clip(*pair).sum(), len(pair[0])), 16, micro=1) == ""


def test_failing_or_zero_losses_are_not_reported() -> None:
    def fails(pair: Any) -> Any:
        raise ValueError

    assert message(fails, 16) == ""
    assert message(lambda pair: (0.0 * clip(*pair).sum(), len(pair[0])), 16) == ""


def test_the_check_limits_the_compared_samples() -> None:
    """Many coupled losses need memory for all pairs of rows."""
    sizes = []

    def couple(pair: Any) -> Any:
        sizes.append(len(pair[0]))
        return clip(*pair).mean(), len(pair[0])

    assert "couple() returns a mean" in message(couple, 200)
    assert max(sizes) == 128  # 32 samples, repeated four times


def test_zero_losses_of_repeated_rows_are_not_reported() -> None:
    def nearest(pair: Any) -> Any:
        codes = pair[0]
        distances = (codes[:, None] - codes).abs().sum(2) + torch.eye(len(codes)) * 100
        return distances.amin(1).mean(), len(codes)

    assert message(nearest, 16) == ""
