"""Evaluations, checkpoints and resumes at any time change neither weights nor buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.base.errors import Exit, TaskFault
from runner.distributed.buffer_sync import BufferSync
from runner.distributed.world import World
from runner.durable.checkpoint import load, newest_valid
from tests.distributed.ranks import run_ranks
from tests.forkserver import ForkServer

TASK = Path(__file__).parent / "task_of_buffers.py"
TWO = "parallelism.world_size=2"
STRATEGIES = {
    "one process": "parallelism=single",
    "ddp": f"parallelism=ddp {TWO}",
    "ddp, one rank without samples": f"parallelism=ddp {TWO} parallelism.shares=[7,1] task.norm=false",
    "ddp, norms over all ranks": f"parallelism=ddp {TWO} parallelism.batch_norm=sync",
    "ddp with a cache that grows": f"parallelism=ddp {TWO} parallelism.shares=[7,1] task.norm=false task.grows=true",
    "one process, frozen parameter": "parallelism=single task.frozen=true",
    "ddp, frozen parameter": f"parallelism=ddp {TWO} task.frozen=true",
    "fsdp": f"parallelism=fsdp {TWO}",
    "fsdp, groups": "parallelism=fsdp parallelism.world_size=4 parallelism.shard_size=2 task.norm=false",
    "pipeline": f"parallelism=pipeline {TWO}",
    "pipeline, copies": "parallelism=pipeline parallelism.world_size=4 parallelism.stages=2",
}
FAILS = {"at": "update", "number": 6, "by": "raise"}
STOPS = {"at": "update", "number": 2, "by": "SIGTERM"}


def trained(server: ForkServer, folder: Path, args: str, fault: dict[str, Any] | None = None) -> None:
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault or {})}
    line = f"train --task {TASK} run=mine device=cpu monitor=off updates=20 dataloader.num_workers=0 {args}"
    completed = server.run(line, folder, env)
    codes = {None: [Exit.DONE], "raise": [Exit.SOFTWARE], "SIGTERM": [Exit.PREEMPTED]}
    if "world_size" in args:  # ranks agree on when to stop; after the last update, the run is done
        codes["SIGTERM"].append(Exit.DONE)
    assert completed.code in codes[fault and fault["by"]], completed.err


def result(folder: Path) -> tuple[dict[str, Tensor], list[tuple[int, float]]]:
    """Return the final weights and buffers, and the loss of each update."""
    path = newest_valid(folder / "outputs/mine/checkpoints")
    assert path is not None
    rows = [json.loads(line) for line in (folder / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    return load(path).tensors("model"), [(row["update"], row["train/loss"]) for row in rows if "train/loss" in row]


ENDS = {"never": [None], "fails": [FAILS, None], "is stopped": [STOPS, None]}


@pytest.fixture(scope="module")
def references(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that returns (and caches) the result of a strategy without evaluations and checkpoints."""

    @cache
    def reference(strategy: str) -> Any:
        folder = tmp_path_factory.mktemp("reference")
        trained(server, folder, f"{STRATEGIES[strategy]} evaluate.every=0 checkpoint=off")
        return result(folder)

    return reference


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fails", ENDS)
def test_evaluations_saves_and_failures_change_nothing(
    fails: str, strategy: str, references: Callable[[str], Any], server: ForkServer, tmp_path: Path
) -> None:
    weights, losses = references(strategy)
    for fault in ENDS[fails]:
        trained(server, tmp_path, f"{STRATEGIES[strategy]} evaluate.every=2 checkpoint.every=3", fault)
    found_weights, found_losses = result(tmp_path)
    assert found_losses == losses
    assert found_weights.keys() == weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, found_weights[name])] == []


# ---------------------------------------------------------------- synchronization of ranks


class Kept(nn.Module):
    """Buffers for a test to change."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.norm = nn.BatchNorm1d(2)


def after(world_size: int, change: Callable[[Kept, int, int], None], updates: int = 2) -> list[Any]:
    """Return the buffers of each rank after some updates, with `change(model, rank, update)` as the forward pass.

    If a rank raises TaskFault, return its message instead.
    """

    def rank(world: World) -> Any:
        model = Kept(
            mean=torch.zeros(3), seen=torch.zeros((), dtype=torch.int64), is_set=torch.zeros(3, dtype=torch.bool),
            low=torch.zeros(3, dtype=torch.bfloat16), constant=torch.arange(3.0).expand(2, -1),
        )  # fmt: skip
        sync = BufferSync(model, world)
        try:
            for update in range(updates):
                with sync.update():
                    change(model, world.rank, update)
            sync.check()
        except TaskFault as fault:
            return str(fault)
        return {name: buffer.double().tolist() for name, buffer in model.named_buffers()}

    return run_ranks(rank, world_size)


def test_ranks_receive_the_buffers_of_rank_0() -> None:
    def change(model: Kept, rank: int, update: int) -> None:
        model.mean += rank + 1.5
        model.seen += 10 * rank + 1
        model.is_set[rank] = True
        model.low = model.low + rank + 1
        if rank == 1:
            model.constant = model.constant + 1

    for actual in after(3, change, updates=3):
        assert actual["mean"] == [4.5] * 3
        assert actual["seen"] == 3
        assert actual["is_set"] == [1, 0, 0]
        assert actual["low"] == [3] * 3
        assert actual["constant"] == [[0, 1, 2]] * 2


def test_new_buffers_are_taken_from_rank_0() -> None:
    def rank(world: World) -> Any:
        model = Kept()
        model.register_buffer("late", None)
        sync = BufferSync(model, world)
        for update in range(3):
            with sync.update():
                model.late = (torch.zeros(2) if model.late is None else model.late) + world.rank + update
        return model.late.tolist()

    assert run_ranks(rank, 2) == [[3.0, 3.0]] * 2


def test_all_ranks_reject_a_buffer_of_one_rank() -> None:
    def rank(world: World) -> Any:
        model = Kept()
        model.register_buffer("late", None)
        sync = BufferSync(model, world)
        try:
            with sync.update():
                model.late = torch.zeros(2) if world.is_first else None
        except TaskFault as fault:
            return "late" in str(fault)

    assert run_ranks(rank, 2) == [True, True]


def test_batch_norm_statistics_are_averaged() -> None:
    def change(model: Kept, rank: int, update: int) -> None:
        if rank < 2:  # the third rank has no samples
            model.norm(torch.tensor([[1.0, 2.0], [3.0, 6.0]]) * (1 + rank))

    actual = after(3, change, updates=1)
    assert actual[0] == actual[1] == actual[2]
    assert actual[0]["norm.running_mean"] == pytest.approx([0.1 * (2 + 4 + 0) / 3, 0.1 * (4 + 8 + 0) / 3])
    assert actual[0]["norm.num_batches_tracked"] == 1


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("is_seen_at_once", [True, False])
def test_unversioned_changes_are_synchronized_or_rejected(is_seen_at_once: bool) -> None:
    """Only the first update compares bits. Later, such a change is an error, because buffers would differ."""

    def change(model: Kept, rank: int, update: int) -> None:
        if is_seen_at_once or update:
            model.mean.data.add_(rank + 1.0)

    actual = after(2, change)
    if is_seen_at_once:
        assert actual[0]["mean"] == actual[1]["mean"] == [2.0] * 3
    else:
        assert all("mean" in message for message in actual)
        assert all(isinstance(message, str) for message in actual)


def test_all_ranks_reject_unequally_growing_buffers() -> None:
    def change(model: Kept, rank: int, update: int) -> None:
        model.mean = torch.zeros(3 + rank * update)

    assert all(isinstance(message, str) and "mean" in message for message in after(2, change))


def test_equally_growing_buffers_are_taken_from_rank_0() -> None:
    def change(model: Kept, rank: int, update: int) -> None:
        model.mean = torch.full((3 + update,), rank + 5.0)

    assert [actual["mean"] for actual in after(2, change, updates=3)] == [[5.0] * 5] * 2


def test_unchanged_buffers_are_not_sent() -> None:
    """Only flags are sent, in a message that ranks exchange in any case."""

    def rank(world: World) -> list[int]:
        calls = [0]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                calls[0] += 1
                return real(*given, **named)

            return call

        dist.broadcast, dist.all_reduce = counted(dist.broadcast), counted(dist.all_reduce)
        model = Kept(table=torch.arange(4.0), mean=torch.zeros(2))
        sync = BufferSync(model, world)
        sent = []
        for update in range(4):
            before = calls[0]
            with sync.update():
                if update == 2:
                    model.mean += 1
            sent.append(calls[0] - before)
        return sent

    assert run_ranks(rank, 2) == [[1, 1, 2, 1]] * 2
