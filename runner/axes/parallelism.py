"""Parallelism strategies. A single process is a world of size 1 with the same interface.

Keys that several options share:

world_size  number of ranks; auto: one per GPU
batch_norm  per_rank: each rank normalizes over its own micro-batch; sync: over the micro-batches of all ranks
restarts    maximum number of restarts from the last checkpoint, with the remaining ranks, after a rank is killed
timeout_s   seconds after which a rank that does not respond is considered lost; on GPUs, the sum of the watchdog's
            limits is used if it is larger
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from runner.base.values import Auto, Count, Positive, PositiveInt
from runner.distributed.parallel import Parallel
from runner.distributed.replicated import Replicated
from runner.distributed.world import World


def single(world: World) -> Parallel:
    """Train in this process on one device."""
    return Parallel(world)


def ddp(
    world: World,
    *,
    world_size: PositiveInt | Auto = "auto",
    shares: Literal["equal", "memory", "speed"] | list[int] = "equal",
    batch_norm: Literal["per_rank", "sync"] = "per_rank",
    restarts: Count = 3,
    timeout_s: Positive = 600.0,
) -> Parallel:
    """Data parallel: each rank has a replica of the model and processes a share of each update.

    Gradients are summed over the ranks and divided by the total number of items.

    shares      how an update is divided among the ranks: equally, by memory, by measured speed, or in a ratio such as
                [19,13]
    """
    return Replicated(world, is_lockstep=batch_norm == "sync") if world.world_size > 1 else Parallel(world)


def fsdp(
    world: World,
    *,
    world_size: PositiveInt | Auto = "auto",
    shares: Literal["equal"] | list[int] = "equal",
    shard_size: PositiveInt | Literal["all", "auto"] = "all",
    batch_norm: Literal["per_rank", "sync"] = "per_rank",
    reshard_after_forward: bool = True,
    communicate: Literal["float32", "bfloat16", "float16"] = "float32",
    gradients: Literal["auto", "full", "sharded"] = "auto",
    evaluation: Literal["auto", "whole", "sharded"] = "auto",
    checkpoint: Literal["whole", "parts"] = "whole",
    init: Literal["auto", "full", "meta"] = "auto",
    restarts: Count = 3,
    timeout_s: Positive = 600.0,
) -> Parallel:
    """Fully sharded data parallel: each rank holds a shard of parameters, gradients and optimizer state.

    world_size             number of ranks; auto: one per GPU; more than one rank needs torch 2.13
    shares                 how an update is divided among the ranks: equally, or in a ratio such as [19,13]; parameters
                           are always sharded evenly
    shard_size             number of ranks that together hold one copy of the model: all; a number that divides
                           world_size; auto: the ranks of one machine if all machines have equally many ranks, the
                           shards fit, and an update is not predicted to be slower than with all; otherwise all
    reshard_after_forward  free gathered parameters after each block's forward pass: less memory, more communication
    communicate            dtype in which parameters are communicated; a 16-bit dtype must match precision
    gradients              full: keep unsharded gradients, and reduce them after the last micro-batch of an update;
                           sharded: reduce them after each micro-batch, which needs less memory and more communication;
                           auto: full if it fits
    evaluation             whole: each rank gathers the whole model for an evaluation; sharded: each call of the model
                           gathers one block after another, and no other method of the model can be called; auto: whole
                           if it fits
    checkpoint             whole: rank 0 gathers and writes checkpoints; parts: each rank writes its shards
    init                   full: each rank builds the whole model, then shards it; meta: large tensors are built on the
                           meta device, and each rank initializes its shards to the same values; auto: meta if the
                           task allows it
    Source: torch.distributed.fsdp.fully_shard; Zhao et al., PyTorch FSDP, VLDB 2023 (hybrid sharding: section 3.2.2).
    """
    if world.world_size == 1:
        return Parallel(world)
    from runner.distributed.sharded import Sharded  # imports torch's compiler, which is slow

    return Sharded(
        world,
        reshard_after_forward=reshard_after_forward,
        communicate=communicate,
        shards_gradients=gradients == "sharded",
        saves_parts=checkpoint == "parts",
        gathers_model=evaluation != "sharded",
        init=init,
        shard_size=shard_size if isinstance(shard_size, int) else None,
    )


def pipeline(
    world: World,
    *,
    world_size: PositiveInt | Auto = "auto",
    stages: PositiveInt | Literal["all", "auto"] = "auto",
    schedule: Literal["1f1b", "gpipe"] = "1f1b",
    split: list[PositiveInt] | None = None,
    balance: Literal["memory", "time"] = "memory",
    init: Literal["auto", "full", "meta"] = "auto",
    restarts: Count = 3,
    timeout_s: Positive = 600.0,
) -> Parallel:
    """Pipeline parallelism: each rank holds some of the layers, for models that do not fit on a single device.

    stages      number of ranks that together hold one copy of the model: all; a number that divides world_size; auto:
                the number with the shortest predicted update among those that fit; on a CPU or with memory=budget, all.
                With several copies, each processes its share of an update, and gradients are summed over the copies
    schedule    1f1b: run each backward pass as early as possible; gpipe: run all forward passes first
    split       number of layers of each stage, such as [8,6]; null: determined by balance
    balance     memory: equal fraction of each device's memory; time: minimize the time of the slowest stage
    init        full: each rank builds the whole model, then frees the layers of other ranks; meta: large tensors are
                built on the meta device, and each rank initializes its layers to the same values; auto: meta if the
                task allows it
    Source: torch.distributed.pipelining; Narayanan et al., Efficient Large-Scale Language Model Training, SC 2021.
    """
    if world.world_size == 1:
        return Parallel(world)
    from runner.distributed.pipelined import Pipelined  # imports torch's compiler, which is slow

    return Pipelined(
        world,
        stages=stages if isinstance(stages, int) else None,
        schedule=schedule,
        split=split,
        balance=balance,
        init=init,
    )


def auto(world: World, *, world_size: PositiveInt | Auto = "auto") -> Parallel:
    """Let the plan choose: single on one device; else ddp, fsdp or pipeline, depending on what fits into memory."""
    raise AssertionError("the plan must replace parallelism=auto before it is used")


PARALLELISMS: Mapping[str, Callable[..., Parallel]] = {
    "single": single,
    "ddp": ddp,
    "fsdp": fsdp,
    "pipeline": pipeline,
    "auto": auto,
}
