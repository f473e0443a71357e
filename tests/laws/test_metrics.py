"""A metric that is not a sum does not depend on how samples are divided into batches and ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from runner import Gather
from runner.axes.parallelism import ddp
from runner.axes.prefetch import Prefetch
from runner.base.errors import TaskFault
from runner.base.task import Task
from runner.distributed.world import World
from runner.engine.evaluation.evaluate import BatchSizes, EvaluationResult, evaluate
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from tests.distributed.ranks import CPU, run_ranks
from tests.parts import parts_of
from tests.rounding import PROMISED

ALONE = World(CPU)
WIDTH, NUM_SAMPLES = 6, 37
HERE = Path(__file__)
torchmetrics = pytest.importorskip("torchmetrics")
FrechetInceptionDistance = pytest.importorskip("torchmetrics.image.fid").FrechetInceptionDistance


def auroc(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of correctly ordered pairs of a positive and a negative sample."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    return (positive[:, None] > negative).double().mean()


class Total(torchmetrics.Metric):
    """A metric with a sum, and a list of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.double().sum()
        self.seen.append(values)

    def compute(self) -> dict[str, Tensor]:
        seen = torch.cat(self.seen)
        return {"mean": self.total / len(seen), "median": seen.median()}


class Longest(torchmetrics.Metric):
    """The largest sum over a sample, in a list state with one tensor per sample, as in detection metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("of_samples", [], dist_reduce_fx=None)
        self.add_state("level", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, x: Tensor) -> None:
        self.of_samples += [row[: 1 + number % 3] for number, row in enumerate(x)]
        self.level = torch.ones(())

    def compute(self) -> dict[str, Tensor]:
        return {"max": torch.stack([each.sum() for each in self.of_samples]).max(), "level": self.level}


class Points(Task):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, 1).double()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        scores = model(x).flatten()
        one_hot = F.one_hot(y, 2).double()
        answers = {"auroc": (scores, y), "order": scores, "score": scores, "mean": (scores.sum(), len(y))}
        return {
            **answers,
            "of": (scores @ one_hot, one_hot.sum(0)),
            "table": (table := one_hot.T @ x[:, :2], torch.full_like(table, len(y))),
        }

    def metrics(self, split: str) -> Mapping[str, Any]:
        weights = torch.arange(NUM_SAMPLES).double().cos()
        return {
            "auroc": Gather(auroc),
            "score": Total(),
            "order": Gather(lambda scores: weights[: len(scores)] @ scores),
        }


class Contrast(Task):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, 4).double()

    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]

    def couple(self, embeddings: Tensor) -> tuple[Tensor, int]:
        codes = F.normalize(embeddings)
        return F.cross_entropy(5 * codes @ codes.T, torch.arange(len(codes)), reduction="sum"), len(codes)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (NUM_SAMPLES,), generator=generator)


def measured(world: World, task: Task, size: int, coupled: int = 16, number: int = NUM_SAMPLES) -> dict[str, float]:
    parallel = ddp(world)
    model = parallel.wrap(task.model, list, [])
    loader = Loader(Fetcher(list(zip(*data(), strict=True)), default_collate, bad_samples="stop"))
    parts = parts_of(task, HERE, world, model=model, parallel=parallel, prefetch=Prefetch(CPU))
    result = evaluate(parts, loader, list(range(number)), BatchSizes(size, coupled=coupled))
    assert isinstance(result, EvaluationResult)
    return result.measured()


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [37, 8, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_and_ranks_do_not_change_a_metric(size: int, world_size: int) -> None:
    result = run_ranks(lambda world: measured(world, Points(), size), world_size)
    task = Points()
    with torch.no_grad():
        scores, labels = task.model(data()[0]).flatten(), data()[1]
    whole = {
        "auroc": auroc(scores, labels), "score.mean": scores.mean(), "score.median": scores.median(),
        "order": torch.arange(NUM_SAMPLES).double().cos() @ scores, "mean": scores.mean(),
        **{f"of.{label}": scores[labels == label].mean() for label in range(2)},
        **{f"table.{i}.{j}": data()[0][labels == i, j].sum() / NUM_SAMPLES for i in range(2) for j in range(2)},
    }  # fmt: skip
    for one in result:
        assert one == pytest.approx({name: float(value) for name, value in whole.items()}, rel=PROMISED[torch.float64])


@pytest.mark.slow_beyond(1)
class NotSummed(Points):
    """Returns one value per sample, with a count for each."""

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        scores = model(batch[0]).flatten()
        return {**super().evaluate(model, batch), "mine": (scores, torch.ones_like(scores))}


@pytest.mark.parametrize("size", [36, 5])
def test_values_that_were_not_summed_are_rejected(size: int) -> None:
    world = World(torch.device("cpu"))
    assert "mine.36" in measured(world, NotSummed(), NUM_SAMPLES)  # with one batch, these could be sums per class
    with pytest.raises(TaskFault, match="mine"):
        measured(world, NotSummed(), size)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(("size", "world_size"), [(16, 1), (5, 1), (5, 2), (3, 3)])
def test_coupled_losses_are_evaluated_on_global_batches(size: int, world_size: int) -> None:
    result = run_ranks(lambda world: measured(world, Contrast(), size), world_size)
    task = Contrast()
    with torch.no_grad():
        losses = [task.loss(task.model, (part,)) for part in data()[0].split(16)]
    loss = sum(float(total) for total, _ in losses) / NUM_SAMPLES
    assert [one["loss"] for one in result] == pytest.approx([loss] * world_size, rel=PROMISED[torch.float64])


def test_a_rank_without_samples_participates() -> None:
    alone = measured(ALONE, Points(), 8, number=4)
    assert run_ranks(lambda world: measured(world, Points(), 8, number=4), 2) == [alone, alone]


def test_evaluate_must_return_declared_metrics() -> None:
    class Forgot(Points):
        def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {"auroc": (model(batch[0]).flatten(), batch[1])}

    with pytest.raises(TaskFault):
        measured(ALONE, Forgot(), 8)


@pytest.mark.parametrize("other", [{"auroc.x": Gather(auroc)}, {}], ids=["two metrics", "a metric and a sum"])
def test_duplicate_metric_names_are_rejected(other: dict[str, Gather]) -> None:
    class Twice(Points):
        def metrics(self, split: str) -> Any:
            return {"auroc": Gather(lambda scores, labels: {"x": 1.0}), **other}

        def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            given = model(batch[0]).flatten(), batch[1]
            return {"auroc": given, "auroc.x": given if other else (given[0].sum(), len(batch[1]))}

    with pytest.raises(TaskFault, match=r"auroc\.x"):
        measured(ALONE, Twice(), 8)


@pytest.mark.parametrize(
    "declared",
    [
        {"auroc": auroc},
        [Gather(auroc)],
        {"auroc": Gather(partial(torch.add, alpha=2))},  # returns several values
        {"order": torchmetrics.AUROC(task="binary")},  # `update` needs two arguments
    ],
    ids=["function", "list", "vector", "arguments"],
)
def test_invalid_metrics_are_rejected(declared: Any) -> None:
    class Wrong(Points):
        def metrics(self, split: str) -> Any:
            return declared

    with pytest.raises(TaskFault):
        measured(ALONE, Wrong(), 8)


class Measured(Points):
    """Metrics of torchmetrics that use sums or lists, have no reduction, are wrapped, or are in a collection."""

    def __init__(self) -> None:
        super().__init__()
        both = {"f1": torchmetrics.F1Score(task="binary"), "recall": torchmetrics.Recall(task="binary")}
        self.kept = {
            "auroc": torchmetrics.AUROC(task="binary"),
            "accuracy": torchmetrics.Accuracy(task="binary"),
            "longest": Longest(),
            "pearson": torchmetrics.PearsonCorrCoef().set_dtype(torch.float64),
            "of": torchmetrics.ClasswiseWrapper(torchmetrics.Accuracy("multiclass", num_classes=2, average=None)),
            "both": torchmetrics.MetricCollection(both),
        }

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        scores = model(x).flatten().sigmoid()
        answers = dict.fromkeys(self.kept, (scores, y))
        return {**answers, "longest": x, "pearson": (scores, y.double()), "of": ((scores > 0.5).long(), y)}

    def metrics(self, split: str) -> Mapping[str, Any]:
        return self.kept


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("number", "world_size"), [(NUM_SAMPLES, 1), (NUM_SAMPLES, 2), (NUM_SAMPLES, 3), (5, 2)])
def test_torchmetrics_are_merged(number: int, world_size: int) -> None:
    (first, *others) = run_ranks(lambda world: measured(world, Measured(), 5, number=number), world_size)
    task, whole = Measured(), dict[str, float]()
    with torch.no_grad():
        x, y = (part[:number] for part in data())
        # the same batches, because a metric may count its updates
        answers = [task.evaluate(task.model, batch) for batch in zip(x.split(5), y.split(5), strict=True)]
    for name, metric in task.kept.items():
        for answer in answers:
            metric.update(*answer[name]) if isinstance(answer[name], tuple) else metric.update(answer[name])
        result = metric.compute()
        named = (
            {f"{name}.{key}": value for key, value in result.items()} if isinstance(result, dict) else {name: result}
        )
        whole |= {key: float(value) for key, value in named.items()}
    assert first == pytest.approx(whole, rel=PROMISED[torch.float32])
    assert all(other == first for other in others)


class MeanOfClasses(torchmetrics.classification.MulticlassAveragePrecision):
    """Computes a scalar and a vector, like the metric in test_detection_metrics.py, which needs torchvision."""

    def __init__(self) -> None:
        super().__init__(num_classes=2, average=None)

    def compute(self) -> Any:
        result = super().compute()
        return {"map": result.mean(), "map_per_class": result}


class SeveralNumbers(Points):
    """Metrics of torchmetrics that compute a vector, a matrix, or a mapping with a vector from texts."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {
            "confusion": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=2),
            "precision": torchmetrics.AveragePrecision(task="multiclass", num_classes=2, average=None),
            "bleu": torchmetrics.text.BLEUScore(n_gram=2),
            "map": MeanOfClasses(),
        }

    def metrics(self, split: str) -> Mapping[str, Any]:
        return self.kept

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        chance = model(x).sigmoid()
        both = torch.cat([1 - chance, chance], 1)
        args = [" ".join("abcdef"[int(3 + each)] for each in row.clamp(-3, 2).floor()) for row in x]
        target = [[" ".join("abcdef"[int(3 + each)] for each in row.clamp(-2, 2).floor())] for row in x]
        return {"confusion": (both, y), "precision": (both, y), "bleu": (args, target), "map": (both, y)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_number_of_a_metric_has_a_name(world_size: int) -> None:
    (first, *others) = run_ranks(lambda world: measured(world, SeveralNumbers(), 5), world_size)
    task = SeveralNumbers()
    with torch.no_grad():
        answers = task.evaluate(task.model, data())
    for name, metric in task.kept.items():
        metric.update(*answers[name])
    result = {name: metric.compute() for name, metric in task.kept.items()}
    whole = {f"confusion.{i}.{j}": result["confusion"][i, j] for i in range(2) for j in range(2)}
    whole |= {f"precision.{i}": result["precision"][i] for i in range(2)} | {"bleu": result["bleu"]}
    whole |= {"map.map": result["map"]["map"]} | {
        f"map.map_per_class.{i}": result["map"]["map_per_class"][i] for i in range(2)
    }
    whole = {name: float(value) for name, value in whole.items()}
    assert first == pytest.approx(whole, rel=PROMISED[torch.float32])
    assert all(other == first for other in others)


class Features(nn.Module):
    """Replaces the Inception network, whose weights would be downloaded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.float().flatten(1))  # type: ignore[no-any-return]


class Distance(FrechetInceptionDistance):
    """The Frechet distance of real and generated images of a batch."""

    def __init__(self) -> None:
        super().__init__(feature=Features(), input_img_size=(3, 2, 2))

    def update(self, real: Tensor, generated: Tensor) -> None:
        super().update(real, real=True)
        super().update(generated, real=False)


class Generated(Points):
    def metrics(self, split: str) -> Mapping[str, Any]:
        return {"fid": Distance()}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        images = torch.cat([batch[0], batch[0].flip(1)], 1).view(-1, 3, 2, 2)
        return {"fid": tuple((255 * each).to(torch.uint8) for each in (images.sigmoid(), images.cos().abs()))}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_and_ranks_do_not_change_a_frechet_distance(world_size: int) -> None:
    task, metric = Generated(), Distance()
    metric.update(*task.evaluate(task.model, data())["fid"])
    whole = float(metric.compute())
    assert whole > 1
    for result in run_ranks(lambda world: measured(world, Generated(), 5), world_size):
        assert result == {"fid": pytest.approx(whole, rel=PROMISED[torch.float32])}


class Words(torchmetrics.Metric):
    """A list of strings, which ranks cannot exchange as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.words.append("word")

    def compute(self) -> float:
        return float(len(self.words))


def test_only_several_ranks_reject_unmergeable_states() -> None:
    class Texts(Points):
        def metrics(self, split: str) -> Any:
            return {"words": Words()}

        def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {"words": batch[0]}

    def refused(world: World) -> bool:
        with pytest.raises(TaskFault):
            measured(world, Texts(), 8, number=16)
        return True

    assert measured(ALONE, Texts(), 8, number=16) == {"words": 2.0}
    assert run_ranks(refused, 2) == [True, True]


class Unreduced(torchmetrics.Metric):
    """A mean without `dist_reduce_fx`, for which torchmetrics would compute one mean per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()))
        self.add_state("count", torch.zeros(()))

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        self.count += len(x)

    def compute(self) -> Tensor:
        return self.total / self.count


def test_several_ranks_reject_states_without_reduction() -> None:
    class Means(Points):
        def metrics(self, split: str) -> Any:
            return {"mean": Unreduced()}

        def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {"mean": batch[0]}

    def refused(world: World) -> bool:
        with pytest.raises(TaskFault, match="total"):
            measured(world, Means(), 8, number=16)
        return True

    assert list(measured(ALONE, Means(), 8, number=16)) == ["mean"]
    assert run_ranks(refused, 2) == [True, True]


class Counted(torchmetrics.Metric):
    """A mean whose number of samples is not declared as a state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.num_samples = 0

    def update(self, x: Tensor) -> None:
        self.total = self.total + x.double().sum()
        self.num_samples += len(x)

    def compute(self) -> Tensor:
        return self.total / self.num_samples


class Buffered(Counted):
    """Keeps the number of samples in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_samples
        self.register_buffer("num_samples", torch.zeros(()))


class Maximum(Counted):
    """An extreme value in a dict, which a second batch may leave unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def update(self, x: Tensor) -> None:
        self.found["max"] = torch.maximum(self.found.get("max", x.max()), x.max())

    def compute(self) -> Tensor:
        return self.found["max"]


class Ids(Counted):
    """Labels in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[float] = set()

    def update(self, x: Tensor) -> None:
        self.ids |= set(x.flatten().tolist())

    def compute(self) -> Tensor:
        return torch.tensor(len(self.ids))


class Scores(nn.Module):
    """A custom metric without declared states."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.values: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        self.values.append(x)

    def compute(self) -> Tensor:
        return torch.cat(self.values).mean()


class Inferred(Total):
    """Has attributes, equal on all ranks, that the first batch sets or that are not numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.width: int | None = None
        self.row: Tensor | None = None
        self.function: Any = None

    def update(self, x: Tensor) -> None:
        self.width, self.row, self.function = x.shape[1], torch.ones(x.shape[1]), lambda: x
        super().update(x * self.row / self.width)


def with_metric(metric: nn.Module) -> Task:
    class Own(Points):
        def metrics(self, split: str) -> Any:
            return {"own": metric}

        def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {"own": batch[0]}

    return Own()


@pytest.mark.slow
@pytest.mark.parametrize("number", [16, 37], ids=["one batch per rank", "several"])
@pytest.mark.parametrize("kind", [Counted, Buffered, Maximum, Ids, Scores])
def test_only_several_ranks_reject_undeclared_states(kind: type[nn.Module], number: int) -> None:
    def refused(world: World) -> str:
        with pytest.raises(TaskFault) as caught:
            measured(world, with_metric(kind()), 8, number=number)
        return str(caught.value)

    measured(ALONE, with_metric(kind()), 8, number=number)
    if kind in (Counted, Buffered) and number == 16:
        return  # both ranks count 8, so only the check before training detects this
    assert all("own" in message for message in run_ranks(refused, 2))


class Last(Total):
    """Has attributes that do not affect the result: the last batch, all batches, and a flag set by one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.history: list[Tensor] = []
        self.has_warned = False

    def update(self, x: Tensor) -> None:
        self.last, self.has_warned = x, self.has_warned or bool((x == data()[0][20, 0]).any())
        self.history.append(x)
        super().update(x)


class Objects(Total):
    """Has attributes that cannot be hashed or copied, or that contain 2^60 references to one object."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = [np.float64, np.ndarray]
        self.array, self.library, self.function, self.meta = np.ndarray, np, len, torch.zeros(2, device="meta")
        self.scalar, self.sparse = np.array(None, dtype=object), torch.zeros(2).to_sparse()
        self.lock = threading.Lock()
        self.shared: list[Any] = []
        for _ in range(60):
            self.shared = [self.shared, self.shared]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Inferred, Last, Objects])
def test_attributes_without_effect_are_not_states(kind: type[nn.Module]) -> None:
    alone = measured(ALONE, with_metric(kind()), 8)
    for result in run_ranks(lambda world: measured(world, with_metric(kind()), 8), 2):
        assert result == pytest.approx(alone, rel=PROMISED[torch.float32])


class Images(Task):
    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def metrics(self, split: str) -> Any:
        return {"rmse": torchmetrics.image.RootMeanSquaredErrorUsingSlidingWindow()}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        images = batch[0].sum(1)[:, None, None, None] * torch.ones(1, 16, 16, dtype=torch.float64)
        return {"rmse": (images, images.cos())}


def test_a_metric_with_an_unused_map_is_merged() -> None:
    """RMSE over sliding windows also accumulates an error map, which `compute` does not return."""
    alone = measured(ALONE, Images(), 8)
    for result in run_ranks(lambda world: measured(world, Images(), 8), 2):
        assert result == pytest.approx(alone, rel=PROMISED[torch.float32])


class UnreducedLock(Unreduced):
    """A metric that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_unreduced_metrics_that_cannot_be_copied_are_computed() -> None:
    """Without a copy, they cannot be checked, so the result is that of torchmetrics: one value per rank."""
    for result in run_ranks(lambda world: measured(world, with_metric(UnreducedLock()), 8), 2):
        assert result.keys() == {"own.0", "own.1"}


class CountedUnderLock(torchmetrics.MeanMetric):
    """Counts in an attribute that `reset` does not clear, and has a different attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.seen = threading.Lock(), [0]

    def update(self, x: Tensor) -> None:
        self.seen[0] += len(x)
        super().update(x)

    def compute(self) -> Tensor:
        return super().compute() + self.seen[0]


@pytest.mark.parametrize("wrap", [lambda metric: metric, torchmetrics.MinMaxMetric], ids=["metric", "part"])
def test_a_reused_metric_with_a_lock_is_reset(wrap: Callable[[Any], Any]) -> None:
    task = with_metric(wrap(CountedUnderLock()))
    first = measured(ALONE, task, 8)
    assert measured(ALONE, task, 8) == first


def test_metrics_with_too_many_numbers_are_rejected() -> None:
    class Large(Points):
        def metrics(self, split: str) -> Any:
            return {"auroc": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=200)}

        def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {"auroc": (batch[1], batch[1])}

    with pytest.raises(TaskFault):
        measured(ALONE, Large(), 8)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_reused_metric_is_reset(world_size: int) -> None:
    def twice(world: World) -> list[dict[str, float]]:
        task = Measured()
        measured(world, task, 8, number=20)
        return [measured(world, task, 8), measured(world, Measured(), 8)]

    for second, fresh in run_ranks(twice, world_size):
        assert second == fresh


@pytest.mark.parametrize("kind", [Counted, Buffered, Maximum, Ids])
def test_reset_clears_undeclared_attributes(kind: type[nn.Module]) -> None:
    task = with_metric(kind())
    results = [measured(ALONE, task, 8) for _ in range(2)]
    assert results[0] == results[1]


def test_a_coupled_loss_of_nan_is_measured() -> None:
    class Diverged(Contrast):
        def couple(self, embeddings: Tensor) -> tuple[Tensor, int]:
            return embeddings.sum() * math.nan, len(embeddings)

    assert measured(ALONE, Diverged(), 8).keys() == {"loss"}
    assert not measured(ALONE, Diverged(), 8, number=0)
