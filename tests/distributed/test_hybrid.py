"""With hybrid sharding, groups of ranks with a copy of the model each give the results and checkpoints of one process.

The tests share one run of four ranks in two groups, because starting ranks is expensive.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.distributed.parallel import Parallel
from runner.distributed.shard_init import DeferredModel
from runner.distributed.sharded import Sharded
from runner.distributed.world import World
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
from runner.durable.checkpoint_parts import CheckpointPart
from runner.engine.update.loop import StepInfo
from runner.plan.planning_rules import why_no_fsdp
from runner.tensors.optimizer_state import export_state, import_state
from tests.distributed.ranks import run_ranks
from tests.distributed.test_deferred_init import Tied, build, build_deferred
from tests.distributed.test_sharded import ALONE, Run, listed, sharded
from tests.rounding import PROMISED, allowed, distance, distance_of_each

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
RANKS, SHARES, MICRO, HALF, UPDATES = 4, (11, 8, 9, 4), 6, 1, 3
in_pairs = partial(sharded, shard_size=2)


def run_of(world: World, **options: Any) -> Run:
    """Return a run in this world, with a different share of the update on each rank."""
    count = world.world_size
    shares = SHARES if count == RANKS else tuple(32 // count for _ in range(count))
    return Run(world, shares=shares, micro=MICRO if count == RANKS else 32, **options)


def save_parts(folder: Path, run: Run) -> int:
    """Save a sharded checkpoint; return the bytes that this rank contributes."""
    tensors, numbers = export_state(run.training.optimizer)
    parallel, rank = run.parallel, run.world.rank
    files = {
        "model": parallel.checkpoint_tensors(run.model.state_dict()),
        "optimizer": parallel.checkpoint_tensors(tensors),
    }
    snapshot = Snapshot(HALF, files, {"numbers": numbers}, {}, CheckpointPart(rank, parallel.num_parts, "0"))
    if rank < parallel.num_parts:
        (save_part if rank else save)(folder, snapshot)
    num_bytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    held = [*run.model.state_dict().values(), *tensors.values()]
    assert parallel.checkpoint_bytes(held) == num_bytes
    return num_bytes


def resume(folder: str, strategy: Any, world: World) -> dict[str, Any]:
    """Resume from the sharded checkpoint, and train to the end."""
    run = run_of(world, strategy=strategy)
    checkpoint = load(checkpoint_path(Path(folder), HALF))
    with torch.no_grad():
        for tensor in run.model.state_dict().values():
            tensor.zero_()
    run.parallel.load(run.model, checkpoint.stored("model"))
    import_state(run.training.optimizer, checkpoint.stored("optimizer"), checkpoint.state["numbers"])
    run.training.position.update = HALF
    run.advance(UPDATES)
    return run.saved()


def begin_on_meta(world: World) -> Any:
    model, recording = build_deferred(Tied)
    parallel = Sharded(world, shard_size=2)
    parallel.deferred = DeferredModel(recording)
    parallel.wrap(model, list, list(model.blocks))  # type: ignore[arg-type]
    return listed(parallel.gather_full(model.state_dict()))


def summary(run: Run, steps: list[StepInfo]) -> dict[str, Any]:
    return {
        "losses": [float(step.loss_sum) / float(step.items) for step in steps if step.loss_sum is not None],
        "items": [float(step.items) for step in steps],
        "norms": [float(step.grad_norm) for step in steps if step.grad_norm is not None],
        **run.saved(),
    }


def local_values(run: Run) -> list[Any]:
    tensors: dict[str, Tensor] = dict(run.model.state_dict())
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).tolist() for tensor in tensors.values()]


def run_all(folder: str, world: World) -> dict[str, Any]:
    """Return this rank's results: of a run that writes a checkpoint halfway, and of the runs resumed from it."""
    run = run_of(world, strategy=partial(in_pairs, saves_parts=True))
    steps = run.advance(HALF)
    result = {"meta": begin_on_meta(world), "half": run.saved(), "bytes": save_parts(Path(folder), run)}
    steps += run.advance(UPDATES)
    result |= summary(run, steps) | {"local": local_values(run)}
    result["continued"] = resume(folder, in_pairs, world)
    result["continued by all"] = resume(folder, sharded, world)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def results(folder: str) -> list[dict[str, Any]]:
    return run_ranks(partial(run_all, folder), RANKS)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    run = run_of(ALONE)
    return summary(run, run.advance(UPDATES))


def test_groups_of_ranks_do_not_change_the_updates(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """The shares are unequal, and ranks accumulate different numbers of micro-batches."""
    tolerance = allowed(torch.float64, terms=sum(alone["items"]))
    for each in results:
        assert each["items"] == alone["items"]
        for key in ("losses", "norms"):
            assert distance(alone[key], each[key]) <= tolerance, key
    assert distance_of_each(alone["model"], results[0]["model"]) <= tolerance


def test_all_groups_have_bitwise_equal_weights(results: list[dict[str, Any]]) -> None:
    assert results[0]["local"] == results[2]["local"]
    assert results[1]["local"] == results[3]["local"]
    assert results[0]["local"] != results[1]["local"], "ranks of a group must have different shards"


def test_rows_are_saved_once_and_equal_the_gathered_checkpoint(results: list[dict[str, Any]], folder: str) -> None:
    checkpoint = load(checkpoint_path(Path(folder), HALF))
    for stem in ("model", "optimizer"):
        assert listed(checkpoint.tensors(stem)) == results[0]["half"][stem]
    total = sum(tensor.nbytes for stem in checkpoint.stems for tensor in checkpoint.tensors(stem).values())
    written = [each["bytes"] for each in results]
    assert sum(written) == total
    assert written[2:] == [0, 0], "only the first group writes"


@pytest.mark.parametrize("key", ["continued", "continued by all"])
def test_a_run_resumes_with_a_different_group_size(
    key: str, results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert distance_of_each(alone["model"], results[0][key]["model"]) <= PROMISED[torch.float64]
    assert distance_of_each(alone["optimizer"], results[0][key]["optimizer"]) <= PROMISED[torch.float64]


def single(world: World) -> Parallel:
    return Parallel(world)


def test_a_run_resumes_on_another_number_of_ranks(
    results: list[dict[str, Any]], alone: dict[str, Any], folder: str
) -> None:
    assert results, "the checkpoint is missing"
    on_two = run_ranks(partial(resume, folder, sharded), 2)[0]
    for resumed in (resume(folder, single, ALONE), on_two):
        assert distance_of_each(alone["model"], resumed["model"]) <= PROMISED[torch.float64]


def test_hybrid_ranks_start_from_weights_of_one_process(results: list[dict[str, Any]]) -> None:
    assert results[0]["meta"] == listed(build(Tied).state_dict())


def reduce_after_each_micro_batch(world: World) -> Any:
    run = run_of(world, strategy=partial(in_pairs, shards_gradients=True))
    run.advance(2)
    return run.saved()["model"]


def test_groups_can_reduce_after_each_micro_batch() -> None:
    alone = run_of(ALONE)
    alone.advance(2)
    found = run_ranks(reduce_after_each_micro_batch, RANKS)[0]
    assert distance_of_each(alone.saved()["model"], found) <= PROMISED[torch.float64]
