"""The mean average precision of torchmetrics does not depend on how images are divided into batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes.parallelism import ddp
from runner.axes.prefetch import Prefetch
from runner.base.task import Task
from runner.distributed.world import World
from runner.engine.evaluation.evaluate import BatchSizes, EvaluationResult, evaluate
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from tests.distributed.ranks import CPU, run_ranks
from tests.parts import parts_of

for package in ("torchvision", "pycocotools"):
    pytest.importorskip(package, reason=f"the package {package} is not installed", exc_type=ImportError)
detection = pytest.importorskip("torchmetrics.detection", reason="torchmetrics is not installed")

NUM_IMAGES = 11
HERE = Path(__file__)


def image(index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return predictions and targets of an image. Images have different numbers of boxes, some none."""
    generator = torch.Generator().manual_seed(index)
    count = index % 4
    corners = 100 * torch.rand(count, 2, generator=generator)
    boxes = torch.cat([corners, corners + 10 + 40 * torch.rand(count, 2, generator=generator)], 1)
    labels = torch.randint(0, 3, (count,), generator=generator)
    moved = boxes + 4 * torch.randn(count, 4, generator=generator)
    scores = torch.rand(count, generator=generator)
    return {"boxes": moved, "scores": scores, "labels": labels}, {"boxes": boxes, "labels": labels}


class Detector(Task):
    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def metrics(self, split: str) -> Mapping[str, Any]:
        return {"box": detection.MeanAveragePrecision(class_metrics=True)}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        found, wanted = zip(*batch, strict=True)
        return {"box": (list(found), list(wanted))}


def measured(world: World, size: int) -> dict[str, float]:
    task, parallel = Detector(), ddp(world)
    model = parallel.wrap(task.model, list, [])
    loader = Loader(Fetcher([image(index) for index in range(NUM_IMAGES)], list, bad_samples="stop"))
    parts = parts_of(task, HERE, world, model=model, parallel=parallel, prefetch=Prefetch(CPU))
    result = evaluate(parts, loader, list(range(NUM_IMAGES)), BatchSizes(size, coupled=16))
    assert isinstance(result, EvaluationResult)
    return result.measured()


@pytest.mark.parametrize("size", [11, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_and_ranks_do_not_change_mean_average_precision(size: int, world_size: int) -> None:
    metric = detection.MeanAveragePrecision(class_metrics=True)
    found, wanted = zip(*map(image, range(NUM_IMAGES)), strict=True)
    metric.update(list(found), list(wanted))
    whole = metric.compute()
    for result in run_ranks(lambda world: measured(world, size), world_size):
        assert result["box.map"] == float(whole["map"])
        assert 0 < result["box.map"] < 1
        per_class = [result[f"box.map_per_class.{index}"] for index in range(3)]
        assert per_class == whole["map_per_class"].tolist()
