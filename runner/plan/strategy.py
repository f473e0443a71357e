"""Choose the parallelism strategy for a model and its devices: the simplest that fits, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.text import format_bytes
from runner.plan.memory_fit import Demand, MemoryNeeds, RankPart, num_stages, predict_memory
from runner.plan.rank_devices import RankDevice, copy_sizes, ranks_per_machine

MAX_MEMORY_RATIO = 1.1  # devices whose memory differs by at most this factor are treated as equal


@dataclass(frozen=True)
class Strategy:
    """A parallelism option with its keys, the reason, and whether the model fits."""

    name: str
    options: dict[str, Any]
    reason: str
    fits: bool = True


def choose_strategy(
    needs: MemoryNeeds, ranks: Sequence[RankDevice], total: int, micro: int | None, *, can_shard: bool = True
) -> Strategy:
    """Return the simplest strategy with which an update of `total` samples fits on the devices; ddp if none does.

    1. ddp if each device can hold the whole model and at least one sample. On unequal devices, shares are chosen by
       speed, or by memory if an equal share does not fit as a single micro-batch.
    2. fsdp if the devices are equal and a shard fits.
    3. A pipeline if its stages fit. FSDP2 shards evenly (torch 2.13): the smallest device limits the size of shards.
    4. fsdp on unequal devices.

    micro      micro-batch size; None: the whole share
    can_shard  whether fsdp can be used
    """
    count, capacities = len(ranks), [rank.capacity_bytes for rank in ranks]
    if count == 1:
        return Strategy("single", {}, f"auto: one device ({ranks[0].name})")
    if not all(capacities):
        return Strategy("ddp", {}, "auto: the memory of the devices is unknown; each gets a replica")
    samples = micro or 1
    demand = needs.largest(samples)
    are_unequal = max(capacities) > MAX_MEMORY_RATIO * min(capacities)
    share = -(-total // count)
    min_bytes = max(predict_memory(demand, samples, rank, RankPart("ddp", count)).total for rank in ranks)
    smallest, device = format_bytes(min(capacities)), "the smallest device" if are_unequal else "each device"

    def fits_all(strategy: str, size: int = samples) -> bool:
        part = RankPart(strategy, count, share, gathers_model=False, shards_gradients=True)
        return needs.fits(ranks, [size] * count, part)

    hybrid = {"shard_size": "auto"} if len(ranks_per_machine(ranks)) > 1 else {}
    shards_fit = can_shard and (fits_all("fsdp") or fits_all("fsdp", micro or share))
    if fits_all("ddp"):
        model_fits = f"auto: the model fits on each of {count}"
        if not are_unequal:
            return Strategy("ddp", {}, f"{model_fits} devices ({demand}; {smallest} available on {device})")
        shares, why = "memory", "an equal share does not fit on each as a single micro-batch"
        if fits_all("ddp", micro or share):
            shares, why = "speed", "each can hold an equal share, so shares are chosen by speed"
        return Strategy("ddp", {"shares": shares}, f"{model_fits} unequal devices; {why} ({demand})")
    too_large = f"auto: a replica needs {format_bytes(min_bytes)}, but only {smallest} are available on {device}"
    if shards_fit and not are_unequal:
        return Strategy("fsdp", hybrid, f"{too_large}; a shard fits ({demand})")
    stages = [size for size in copy_sizes(count) if size <= (demand.model.num_layers or 0)]
    if stages and _fits_together(demand, samples, ranks, stages[-1]):
        why = "the equal shards of fsdp do not fit"
        if not can_shard:
            why = "this version of torch cannot shard over several ranks"
        elif are_unequal and shards_fit:
            why = "fsdp shards evenly, which would leave memory of the larger device unused"
        elif are_unequal:
            why = "fsdp shards evenly, and an equal shard does not fit on the smaller device"
        return Strategy("pipeline", {}, f"{too_large}; {why} ({demand})")
    if shards_fit:
        return Strategy("fsdp", hybrid, f"{too_large}; equal shards fit ({demand})")
    micro_batch = f"a micro-batch of {samples} sample{'s' * (samples > 1)}"
    memories = " + ".join(map(format_bytes, capacities))
    reason = f"{micro_batch} needs {format_bytes(min_bytes)} ({demand}), but the devices have {memories}"
    hint = (
        ""
        if demand.model.num_layers is not None
        else "; if the task defined layers(), the model could be split unevenly"
    )
    options = {"shares": "memory"} if are_unequal else {}
    return Strategy("ddp", options, f"auto: nothing fits: {reason}{hint}", fits=False)


def _fits_together(demand: Demand, samples: int, ranks: Sequence[RankDevice], stages: int) -> bool:
    """Return whether one copy of the model, split at layer boundaries, fits on each group of `stages` devices.

    The devices of a group share the tensors, but the overhead of libraries is counted on each device. If the stages
    were traced, each device must be able to hold its layers.
    """
    count = len(ranks)
    if demand.stages:
        samples = min(samples, demand.stages[0].points[-1].micro_batch_size)
        part = RankPart("pipeline", count, stages=num_stages({"stages": len(demand.stages)}, count))
        return all(
            predict_memory(demand, samples, rank, part.for_rank(number)).fits for number, rank in enumerate(ranks)
        )
    for group in (ranks[first : first + stages] for first in range(0, count, stages)):
        copy = predict_memory(demand, samples, group[0], RankPart("ddp" if stages < count else "single", count))
        overhead = sum(rank.overhead_bytes + rank.communication_bytes for rank in group)
        if copy.total - copy.parts["libraries"] + overhead > sum(rank.capacity_bytes for rank in group):
            return False
    return True
