"""Additional training metrics do not depend on how an update is divided, and are null without items."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes.optimizer import sgd
from runner.axes.parallelism import ddp
from runner.axes.precision import fp32
from runner.axes.scheduler import constant
from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.base.order import Order
from runner.distributed.replicated import Replicated
from runner.distributed.world import World
from runner.engine.contract.task_loading import CheckedLoss
from runner.engine.update.extra_metrics import ExtraMetrics
from runner.engine.update.loop import Position, Training, train_updates
from tests.distributed.ranks import run_ranks
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

HERE = Path(__file__)
NUM_SAMPLES, UPDATES = 45, 3


def loss(model: nn.Module, batch: Tensor) -> Any:
    errors = model(batch).flatten().square()
    large = batch[:, 0] > 0.5
    return errors.sum(), len(batch), {"large": ((errors * large).sum(), large.sum()), "first": (1.0, 1)}


def batches_of(order: Order) -> Iterator[MicroBatch]:
    x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for key in order.from_update(0):
        yield MicroBatch(x[key.indices] if key.indices else None, key.last, is_counted=key.is_counted)


def measured(
    world: World, shares: tuple[int, ...], micro: int, kind: Any = loss, *, is_lockstep: bool = False
) -> list[list[float]]:
    """Return the metric of each update."""
    torch.manual_seed(0)
    model, extra = nn.Linear(4, 1).double(), ExtraMetrics()
    parallel = Replicated(world, is_lockstep=True) if is_lockstep else ddp(world)
    parallel.wrap(model, list, [])
    named = list(model.named_parameters())
    parallel.begin([weight for _, weight in named])
    checked = CheckedLoss(kind, HERE, records_operations=False)
    checked.observe = extra.add
    run = Training(
        position=Position("train"), model=model, loss=checked, parameters=[weight for _, weight in named],
        optimizer=sgd(named, lr=0.01), schedule=constant(10), precision=fp32(world, model), parallel=parallel,
        per_item=1 / 32, max_grad_norm=None, extra=extra,
    )  # fmt: skip
    order = Order(
        NUM_SAMPLES, 32, micro, seed=3, shares=shares if world.world_size > 1 else (), rank=world.rank,
        is_lockstep=is_lockstep,
    )  # fmt: skip
    steps = train_updates(run, batches_of(order), UPDATES)
    return [[float(total) / max(float(count), 1) for total, count in (step.extra["large"],)] for step in steps]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shares", "micro"), [((32,), 8), ((32,), 5), ((19, 13), 4), ((31, 1), 8), ((11, 8, 13), 5)])
def test_micro_batches_and_ranks_do_not_change_a_training_metric(shares: tuple[int, ...], micro: int) -> None:
    result = run_ranks(lambda world: measured(world, shares, micro), len(shares))
    whole = measured(World(torch.device("cpu")), (32,), 32)
    assert all(value > 0 for (value,) in whole)
    for one in result:
        assert distance(whole, one) <= PROMISED[torch.float64]


def test_a_rank_may_lack_a_metric() -> None:
    """After the first update, a rank may have no items of a metric."""

    def reduced(world: World) -> list[list[float]]:
        parallel, metrics = Replicated(world), ExtraMetrics()
        result = []
        for names in (("both", "one"), ("both",)):
            list(metrics.track(iter([MicroBatch(None, last=True)])))
            metrics.add({name: (2.0 + world.rank, 1) for name in names if name == "both" or world.rank == 0})
            sums = metrics.reduce(parallel)
            result += [[*map(float, sums[name])] for name in ("both", "one")]
        return result

    expected = [[5.0, 2.0], [2.0, 1.0], [5.0, 2.0], [0.0, 0.0]]
    assert run_ranks(reduced, 2) == [expected] * 2


def test_dummy_passes_do_not_count() -> None:
    whole = measured(World(torch.device("cpu")), (32,), 32)
    for one in run_ranks(lambda world: measured(world, (31, 1), 8, is_lockstep=True), 2):
        assert distance(whole, one) <= PROMISED[torch.float64]


@pytest.mark.parametrize(
    "third", [3.0, {"x": 1.0}, {"x": (torch.zeros(2), 1)}, {1: (1.0, 1)}, {"loss": (1.0, 1)}, None], ids=repr
)
def test_an_invalid_third_value_is_rejected(third: Any) -> None:
    def wrong(model: nn.Module, batch: Tensor) -> Any:
        return model(batch).sum(), len(batch), third

    with pytest.raises(TaskFault):
        measured(World(torch.device("cpu")), (32,), 32, wrong)


FILE = """
import torch
from torch import nn
from runner import Task

SETTINGS = {"updates": 6, "global_batch_size": 8, "micro_batch_size": 4, "log_every": 3, "checkpoint.every": 2}


def build() -> Task:
    return Points()


class Points(Task):
    def __init__(self):
        self.model = nn.Linear(4, 1)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(128.0).view(32, 4) / 128)

    def begin_update(self, progress):
        from tests.faults.ending import reached

        reached("update", progress.update + 1)

    def loss(self, model, batch):
        (x,) = batch
        more = {"mean": (x.sum(), x.numel()), "never": (0.0, 0)}
        return model(x).square().sum(), len(x), more
"""


def test_rows_contain_means_over_their_updates(server: ForkServer, tmp_path: Path) -> None:
    rows = []
    for name, faults in (("whole", (None,)), ("cut", ({"at": "update", "number": 6, "by": "raise"}, None))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(FILE)
        for fault in faults:
            env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault or {})}
            result = server.run("train --task mine.py run=mine device=cpu monitor=off", tmp_path / name, env)
            assert result.code == (70 if fault else 0), result.err
        lines = (tmp_path / name / "outputs/mine/metrics.jsonl").read_text().splitlines()
        actual = [json.loads(line) for line in lines]
        rows.append({row["update"]: [row["train/mean"], row["train/never"]] for row in actual if "train/loss" in row})
        assert {row["val/never"] for row in actual if "val/never" in row} == {None}
    whole, cut = rows
    assert whole == cut
    assert [*whole] == [3, 6]
    assert all(never is None and math.isfinite(mean) for mean, never in whole.values())


@pytest.mark.parametrize(("pair", "code"), [("(x.mean(), len(x))", 70), ("(x.mean(), 1)", 0)])
def test_an_extra_metric_must_not_be_a_mean(pair: str, code: int, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE.replace("(x.sum(), x.numel())", pair))
    result = server.run("train --task mine.py run=mine device=cpu monitor=off updates=1", tmp_path)
    assert result.code == code, result.err
    assert ("third value" in result.err) == bool(code)
