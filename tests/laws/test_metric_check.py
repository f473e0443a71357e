"""A metric that is a mean instead of a sum is detected before the first update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from runner import per_sample_noise
from runner.axes.precision import fp32
from runner.axes.prefetch import Prefetch
from runner.base.errors import TaskFault
from runner.base.task import Gather, Task
from runner.config.configuration import Choice
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.engine.checks.additivity_check import check_metrics_are_sums
from runner.engine.evaluation.undeclared_states import AttributeWatch, are_equal_numbers
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from tests.distributed.ranks import run_ranks
from tests.forkserver import ForkServer

WORLD = World(torch.device("cpu"))
SIZE, WIDTH, CLASSES = 16, 6, 3
Evaluate = Callable[[Any, nn.Module, Any], Mapping[str, Any]]


def checked(
    evaluate: Evaluate, *, additive: bool = True, metrics: Any = None, world: World = WORLD
) -> dict[str, list[str]]:
    """Check a task with this `evaluate` and these metrics that are not sums; return reason -> unchecked metrics."""
    names = {"evaluate": evaluate, "loss_is_additive": additive}
    task = type(
        "Points",
        (Task,),
        names
        if metrics is None
        else {**names, "metrics": lambda self, split: metrics() if callable(metrics) else metrics},
    )()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.5), nn.Linear(12, CLASSES))
    parts: Any = SimpleNamespace(
        world=world, bare=model, model=model, parallel=Parallel(world), precision=fp32(world, model), task=task,
        source=Path(__file__), prefetch=Prefetch(world.device),
        plan=SimpleNamespace(choices={"compile": Choice("off", "off", {})}, settings=SimpleNamespace(seed=0)),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SIZE, WIDTH, generator=generator), torch.randint(0, CLASSES, (SIZE,), generator=generator)
    samples = list(zip(x, y, strict=True))
    return check_metrics_are_sums(
        parts, Loader(Fetcher(samples, default_collate, bad_samples="stop")), list(range(SIZE))
    )


def correct(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch[0]).argmax(1) == batch[1]
    return result


SUMS: dict[str, Evaluate] = {
    "sums": lambda self, model, batch: {
        "loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
        "accuracy": (correct(model, batch).sum(), len(batch[1])),
    },
    "draws for each sample": lambda self, model, batch: {
        "loss": ((model(batch[0]) - per_sample_noise(batch).normal(CLASSES)).square().sum(), len(batch[1]))
    },
    "a constant": lambda self, model, batch: {"temperature": (0.7, 1)},
    "the largest": lambda self, model, batch: {"error": (model(batch[0]).abs().max(), 1)},
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_accepted(name: str) -> None:
    assert checked(SUMS[name]) == {}


def test_a_mean_of_batches_is_reported() -> None:
    """A mean over batches equals the metric of the complete data only if all batches have the same size."""
    reasons = checked(lambda self, model, batch: {"loss": (F.cross_entropy(model(batch[0]), batch[1]), 1)})
    assert list(reasons.values()) == [["loss"]]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, True),
        ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}, True),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0}, False),
        ({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0}, False),
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, False),
        ({"a": math.nan}, {"a": math.nan}, True),
        ({"a": math.nan}, {"a": 1.0}, False),
        ({"a": 1.0}, {"a": 1.0 + 1e-6}, True),
        ({"a": 1.0}, {"a": 1.0 + 1e-4}, False),
    ],
)
def test_results_are_compared_by_their_numbers(one: dict[str, float], other: dict[str, float], expected: bool) -> None:
    assert are_equal_numbers(one, other) == are_equal_numbers(other, one) == expected


def mean_accuracy(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
    total = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return {"loss": (total, len(batch[1])), "accuracy": (correct(model, batch).float().mean(), len(batch[1]))}


def mean_loss(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1]), len(batch[1]))}


def constant_count(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch))}


@pytest.mark.parametrize(
    ("evaluate", "fix"),
    [
        (mean_accuracy, "x.sum() instead of x.mean()"),
        (mean_loss, 'reduction="sum"'),
        (constant_count, "len(y)"),
    ],
)
def test_a_mean_is_rejected_with_a_fix(evaluate: Evaluate, fix: str) -> None:
    with pytest.raises(TaskFault) as result:
        checked(evaluate)
    assert fix in str(result.value)


def retrieval(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """A metric of all pairs in a batch."""
    codes = model(batch[0])
    return {"pairs": ((codes @ codes.T).square().sum(), len(codes))}


def test_metrics_of_pairs_need_a_declaration() -> None:
    assert [*checked(retrieval).values()] == [["pairs"]]
    assert checked(retrieval, additive=False) == {}


def fails(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
    raise ValueError("not yet")


def test_undecidable_metrics_are_reported() -> None:
    assert len(checked(fails)) == 1
    assert [*checked(lambda self, model, batch: {"none": (0.0, len(batch[1]))}).values()] == [["none"]]


FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from runner import Task

SETTINGS = {"updates": 4, "global_batch_size": 8, "micro_batch_size": 4}


def build() -> Task:
    return Points()


class Points(Task):
    def __init__(self):
        self.model = nn.Linear(6, 3)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def evaluate(self, model, batch):
        return {"loss": (F.cross_entropy(model(batch[0]), batch[1]), len(batch[1]))}
"""


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", ["parallelism=single", "parallelism=ddp parallelism.world_size=2"])
def test_a_mean_ends_the_run_before_the_first_update(server: ForkServer, tmp_path: Path, args: str) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    result = server.run(f"train --task mine.py run=mine device=cpu monitor=off {args}", tmp_path)
    assert result.code == 70
    assert "mine.py:24" in result.err
    assert (
        not (tmp_path / "outputs/mine/metrics.jsonl").exists()
        or not (tmp_path / "outputs/mine/metrics.jsonl").read_text()
    )


def test_a_missing_declared_metric_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Task, "metrics", lambda self, split: {"auroc": Gather(lambda scores, labels: scores.mean())})
    checked(lambda self, model, batch: {"auroc": (model(batch[0])[:, 0], batch[1])})
    with pytest.raises(TaskFault, match="auroc"):
        checked(lambda self, model, batch: {"accuracy": (correct(model, batch).sum(), len(batch[1]))})


@pytest.mark.parametrize("metrics", [[3], {"mine": 3}, {"mine": Gather(len), "other": len}])
def test_an_invalid_metric_is_found(metrics: Any) -> None:
    with pytest.raises(TaskFault):
        checked(lambda self, model, batch: {"mine": model(batch[0]), "other": model(batch[0])}, metrics=metrics)


def test_the_check_does_not_call_the_function_of_gather() -> None:
    """The function may return None for a few samples, or write files."""
    calls: list[Tensor] = []
    checked(lambda self, model, batch: {"mine": model(batch[0])}, metrics={"mine": Gather(calls.append)})
    assert not calls


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(()),
        (torch.zeros(3), torch.zeros(2)),
        (1.0, torch.ones(3)),
        (torch.zeros(3), 3),
        (torch.zeros(1001), torch.ones(1001)),
    ],
    ids=str,
)
def test_a_metric_without_sum_and_count_is_found(wrong: Any) -> None:
    with pytest.raises(TaskFault, match="mine"):
        checked(lambda self, model, batch: {"mine": wrong})


@pytest.mark.parametrize(
    "unreduced", [lambda logits: logits, lambda logits: logits[:, 0], lambda logits: logits[:, :1]]
)
def test_values_that_were_not_summed_are_found(unreduced: Any) -> None:
    def evaluate(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        values = unreduced(model(batch[0]))
        return {"mine": (values, torch.ones_like(values))}

    with pytest.raises(TaskFault, match="mine"):
        checked(evaluate)


def test_a_sum_per_class_passes_the_check() -> None:
    def evaluate(self: Any, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        logits = model(batch[0])
        return {"mine": (logits.sum(0), torch.full((CLASSES,), len(logits)))}

    assert not checked(evaluate)


def test_predictions_that_a_metric_rejects_are_found() -> None:
    metric = pytest.importorskip("torchmetrics").AUROC(task="binary")
    with pytest.raises(TaskFault):
        checked(lambda self, model, batch: {"mine": model(batch[0])}, metrics={"mine": metric})


def test_checking_a_valid_metric_does_not_update_it() -> None:
    metric = pytest.importorskip("torchmetrics").Accuracy(task="multiclass", num_classes=CLASSES)
    assert not checked(lambda self, model, batch: {"mine": (model(batch[0]), batch[1])}, metrics={"mine": metric})
    assert not metric.update_called


@pytest.fixture(scope="module")
def counted() -> Callable[[], Any]:
    """A mean whose number of samples is not a state and is therefore not reset."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Counted(torchmetrics.Metric):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
            self.num_samples = 0

        def update(self, x: Tensor) -> None:
            self.total, self.num_samples = self.total + x.sum(), self.num_samples + len(x)

        def compute(self) -> Tensor:
            result: Tensor = self.total / self.num_samples
            return result

    return Counted


def message_of(world: World, metrics: Callable[[], Any]) -> str:
    """Return the error of the check, or "" if there is none."""
    try:
        checked(lambda self, model, batch: {"own": batch[0]}, metrics=metrics, world=world)
    except TaskFault as fault:
        return str(fault)
    return ""


def test_an_undeclared_state_is_found(counted: Callable[[], Any]) -> None:
    assert not message_of(WORLD, lambda: {"own": counted()})
    found = run_ranks(lambda world: message_of(world, lambda: {"own": counted()}), 2)
    assert all("num_samples" in message for message in found)


def test_attributes_without_effect_are_accepted() -> None:
    class Kept(pytest.importorskip("torchmetrics").MeanMetric):  # type: ignore[misc]
        kind = np.float64

        def update(self, x: Tensor) -> None:
            self.history = [*getattr(self, "history", []), x]
            self.last = x
            super().update(x)

    kept = Kept()
    assert not message_of(WORLD, lambda: {"own": kept})
    assert not any(run_ranks(lambda world: message_of(world, lambda: {"own": Kept()}), 2))


def test_library_attributes_need_no_declaration() -> None:
    running = pytest.importorskip("torchmetrics").wrappers.Running
    mean = pytest.importorskip("torchmetrics").MeanMetric
    for message in run_ranks(lambda world: message_of(world, lambda: {"own": running(mean(), window=2)}), 2):
        assert "runner.Gather" in message
        assert "add_state" not in message


def test_metrics_with_declared_states_are_not_copied() -> None:
    metric = pytest.importorskip("torchmetrics").MeanMetric()
    watch = AttributeWatch(metric, lambda _: {})
    metric.update(torch.tensor([1.0, 2.0]))
    repeated: list[nn.Module] = []
    assert watch.find_undeclared((), repeated.append) == []
    assert not repeated
