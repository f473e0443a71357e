"""Every strategy trains like one process on 2, 3, 4 and 8 ranks, and resumes from the checkpoints of all others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes.optimizer import adamw
from runner.axes.precision import fp32
from runner.axes.scheduler import constant
from runner.base.order import Order
from runner.distributed.parallel import Parallel
from runner.distributed.pipelined import Pipelined
from runner.distributed.replicated import Replicated
from runner.distributed.sharded import Sharded
from runner.distributed.world import World
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
from runner.durable.checkpoint_parts import CheckpointPart
from runner.engine.update.loop import Position, Training, train_updates
from runner.plan.planning_rules import why_no_fsdp
from runner.tensors.optimizer_state import export_state, import_state
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import ALONE, CLASSES, NUM_SAMPLES, WIDTH, batches_of, listed, token_loss
from tests.faults.tallies import IS_LONG, SEED
from tests.rounding import ADAPTIVE, PROMISED, distance, distance_of_each

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
HALF, UPDATES, BATCH = 1, 3, 32
NUM_LAYERS = 9  # at least one layer for each of 8 stages, and not the same number for all


@dataclass(frozen=True)
class Layout:
    """A strategy and its number of ranks. There are `copies` copies of the model, each with a share of every update."""

    name: str
    num_ranks: int
    copies: int
    strategy: Callable[[World], Parallel]


def layouts() -> Iterator[Layout]:
    yield Layout("one process", 1, 1, Parallel)
    for count in (2, 3, 4, 8):
        yield Layout(f"ddp-{count}", count, count, Replicated)
        yield Layout(f"fsdp-{count}", count, count, Sharded)
        yield Layout(f"fsdp-{count}-parts", count, count, partial(Sharded, saves_parts=True))
        yield Layout(f"pipeline-{count}", count, 1, Pipelined)
    for count, size in ((4, 2), (8, 2), (8, 4)):
        yield Layout(f"fsdp-{count}-groups-of-{size}", count, count, partial(Sharded, shard_size=size))
        yield Layout(
            f"fsdp-{count}-groups-of-{size}-parts", count, count, partial(Sharded, shard_size=size, saves_parts=True)
        )
        yield Layout(f"pipeline-{count}-stages-{size}", count, count // size, partial(Pipelined, stages=size))


LAYOUTS = {layout.name: layout for layout in layouts()}


class Run:
    """A model with its strategy and training loop on this rank."""

    def __init__(self, layout: Layout, world: World, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        widths = [WIDTH, *[7] * (NUM_LAYERS - 1), CLASSES]
        layers = [nn.Sequential(nn.Linear(*widths[n : n + 2]), nn.Tanh()) for n in range(NUM_LAYERS)]
        self.world, self.dtype, self.parallel = world, dtype, layout.strategy(world)
        self.model = self.parallel.wrap(nn.Sequential(*layers).to(dtype), lambda: layers, layers[::4])
        named = self.parallel.owned_parameters(dict(self.model.named_parameters()))
        self.owned, parameters = set(named), list(named.values())
        self.parallel.begin(parameters)
        count = layout.copies
        shares = tuple(BATCH // count + (number < BATCH % count) for number in range(count)) if count > 1 else ()
        rank = self.parallel.batch_rank if count > 1 else 0
        micro = 5 if count == 1 else -(-BATCH // (2 * count)) + 1  # two micro-batches of different sizes for each copy
        self.order = Order(
            NUM_SAMPLES, BATCH, micro if world.world_size > 1 else BATCH, seed=3, shares=shares, rank=rank,
            is_lockstep=self.parallel.is_lockstep,
        )  # fmt: skip
        self.training = Training(
            position=Position("train"),
            model=self.model,
            loss=token_loss,
            parameters=parameters,
            optimizer=adamw(list(named.items()), lr=0.01),
            schedule=constant(100),
            precision=fp32(world, self.model),
            parallel=self.parallel,
            per_item=1 / 128,
            max_grad_norm=0.5,
        )

    def advance(self, until: int) -> list[float]:
        """Train, and return the losses of the updates."""
        batches = batches_of(self.order, self.dtype, self.training.position.update)
        steps = train_updates(self.training, batches, until)
        return [float(step.loss_sum) / float(step.items) for step in steps if step.loss_sum is not None]

    def state(self, collect: Callable[[Any], dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        tensors = export_state(self.training.optimizer)[0]
        return {"model": collect(self.model.state_dict()), "optimizer": collect(tensors)}

    def result(self, losses: list[float]) -> dict[str, Any]:
        """Return the results to compare; weights and optimizer state only on rank 0."""
        return {"losses": losses} | {name: listed(each) for name, each in self.state(self.parallel.gather_full).items()}

    def save(self, folder: Path) -> None:
        numbers = export_state(self.training.optimizer)[1]
        files = self.state(self.parallel.checkpoint_tensors)
        num_parts = self.parallel.num_parts
        part = CheckpointPart(self.world.rank, num_parts, "0") if num_parts > 1 else None
        if self.world.rank < num_parts:
            (save_part if self.world.rank else save)(folder, Snapshot(HALF, files, {"numbers": numbers}, {}, part))

    def restore(self, folder: Path) -> None:
        checkpoint = load(checkpoint_path(folder, HALF))
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                if not tensor.is_meta:
                    tensor.zero_()
        self.parallel.load(self.model, checkpoint.stored("model"))
        stored = {
            name: tensor
            for name, tensor in checkpoint.stored("optimizer").items()
            if name.rpartition(".")[0] in self.owned  # a stage of a pipeline has no others
        }
        import_state(self.training.optimizer, stored, checkpoint.state["numbers"])
        self.training.position.update = HALF


def train(layout: Layout, folder: Path, world: World) -> dict[str, Any]:
    """Train in float64, writing a checkpoint halfway, and in float32."""
    run = Run(layout, world, torch.float64)
    losses = run.advance(HALF)
    run.save(folder)
    result = run.result(losses + run.advance(UPDATES))
    return result | {"float32": Run(layout, world, torch.float32).advance(HALF + 1)}


def resume_each(layout: Layout, folders: list[str], world: World) -> list[dict[str, Any]]:
    results = []
    for folder in folders:
        run = Run(layout, world, torch.float64)
        run.restore(Path(folder))
        results.append(run.result(run.advance(UPDATES)))
    return results


def run_on_ranks(layout: Layout, function: Callable[[World], Any]) -> list[Any]:
    return run_ranks(function, layout.num_ranks, limit_s=600.0) if layout.num_ranks > 1 else [function(ALONE)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[dict[str, Any]]]]:
    """Return a function from the name of a layout to the folder of its checkpoint and the results of its ranks."""
    known: dict[str, tuple[str, list[dict[str, Any]]]] = {}

    def run(name: str) -> tuple[str, list[dict[str, Any]]]:
        if name not in known:
            folder = tmp_path_factory.mktemp("layout")
            known[name] = str(folder), run_on_ranks(LAYOUTS[name], partial(train, LAYOUTS[name], folder))
        return known[name]

    return run


def assert_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare weights and Adam's state to 1e-9, because Adam amplifies rounding errors."""
    for name in ("model", "optimizer"):
        assert result[name].keys() == expected[name].keys()
        assert distance_of_each(expected[name], result[name]) <= ADAPTIVE, name


@pytest.mark.sampled(6)
@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if 1 < layout.num_ranks < 8])
def test_strategies_on_up_to_four_ranks_train_like_one_process(name: str, trained: Any) -> None:
    assert_trains_like_one_process(name, trained)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.num_ranks == 8])
def test_strategies_on_eight_ranks_train_like_one_process(name: str, trained: Any) -> None:
    assert_trains_like_one_process(name, trained)


def assert_trains_like_one_process(name: str, trained: Any) -> None:
    (alone,), results = trained("one process")[1], trained(name)[1]
    for result in results:
        assert distance(alone["losses"], result["losses"]) <= PROMISED[torch.float64]
        assert distance(alone["losses"][: HALF + 1], result["float32"]) <= PROMISED[torch.float32]
    assert_equal(results[0], alone)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_strategies_resume_from_checkpoints_of_all_others(name: str, trained: Any) -> None:
    """By default, each strategy resumes from the checkpoints of three others."""
    alone = trained("one process")[1][0]
    others = list(LAYOUTS) if IS_LONG else random.Random(f"{SEED} {name}").sample(list(LAYOUTS), 3)
    folders = [trained(other)[0] for other in others]
    per_rank = run_on_ranks(LAYOUTS[name], partial(resume_each, LAYOUTS[name], folders))
    for results in per_rank:
        for result in results:
            assert distance(alone["losses"][HALF:], result["losses"]) <= PROMISED[torch.float64]
    assert len(per_rank[0]) == len(others)
    for result in per_rank[0]:
        assert_equal(result, alone)
