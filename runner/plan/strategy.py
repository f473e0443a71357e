"""Choose the parallelism strategy for a model and its devices: the simplest that fits, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.text import format_bytes
from runner.plan.memory_fit import Demand, Needs, RankPart, predicted
from runner.plan.rank_devices import RankDevice

UNEQUAL = 1.1  # devices whose memory differs by more are unequal


@dataclass(frozen=True)
class Strategy:
    """A parallelism option with its keys, the reason, and whether the model fits."""

    name: str
    options: dict[str, Any]
    reason: str
    fits: bool = True


def choose(needs: Needs, ranks: Sequence[RankDevice], total: int, micro: int | None) -> Strategy:
    """Return the simplest strategy with which an update of `total` samples fits the devices; ddp if none does.

    ddp if each device can hold the whole model and at least one sample. On unequal devices its shares follow speed,
    or memory if equal shares would not fit in one micro-batch. Otherwise fsdp if the devices are alike and a shard
    fits, and a pipeline if they are not: fsdp shards evenly, so the smallest device limits the shard.

    micro  micro-batch size; None: the whole share
    """
    count, rooms = len(ranks), [rank.capacity_bytes for rank in ranks]
    if count == 1:
        return Strategy("single", {}, f"auto: one device ({ranks[0].name})")
    if not all(rooms):
        return Strategy("ddp", {}, "auto: several devices of unknown memory; a replica on each")
    samples = micro or 1
    need = needs.worst(samples)
    are_unequal = max(rooms) > UNEQUAL * min(rooms)
    share = -(-total // count)
    least = max(predicted(need, samples, rank, RankPart("ddp", count)).total for rank in ranks)
    room = f"{format_bytes(min(rooms))} of the {'smaller' if are_unequal else 'same'} device"

    def hold(strategy: str, size: int = samples) -> bool:
        return needs.fits(ranks, [size] * count, RankPart(strategy, count, share))

    holds_shards = hold("fsdp") or hold(
        "fsdp", micro or share
    )  # with one micro-batch, no unsharded gradients are accumulated
    if hold("ddp"):
        if not are_unequal:
            return Strategy("ddp", {}, f"auto: the model fits each of {count} devices ({need}; available {room})")
        fits = hold("ddp", micro or share)
        shares, why = (
            ("speed", "even shares fit, so speed decides") if fits else ("memory", "even shares do not fit at once")
        )
        return Strategy(
            "ddp", {"shares": shares}, f"auto: the model fits each of {count} unequal devices; {why} ({need})"
        )
    if holds_shards and not are_unequal:
        return Strategy("fsdp", {}, f"auto: a replica needs {format_bytes(least)}, above {room}; a shard fits ({need})")
    if need.model.num_layers is not None and need.model.num_layers >= count and _fits_together(need, samples, ranks):
        why = "fsdp shards evenly and the smaller device is too small for that" if are_unequal else "too large for fsdp"
        return Strategy("pipeline", {}, f"auto: a replica needs {format_bytes(least)}, above {room}; {why} ({need})")
    if holds_shards:
        return Strategy(
            "fsdp", {}, f"auto: a replica needs {format_bytes(least)}, above {room}; even shards fit ({need})"
        )
    passes = f"a micro-batch of {samples} sample{'s' * (samples > 1)}"
    found = f"{passes} needs {format_bytes(least)} ({need}), the devices have {' + '.join(map(format_bytes, rooms))}"
    hint = "" if need.model.num_layers is not None else "; a task with layers() could be split unevenly"
    options = {"shares": "memory"} if are_unequal else {}
    return Strategy("ddp", options, f"auto: nothing fits: {found}{hint}", fits=False)


def _fits_together(need: Demand, samples: int, ranks: Sequence[RankDevice]) -> bool:
    """Return whether the devices together can hold one copy, split between layers, besides the libraries on each.

    If the stages were traced: whether each device can hold its layers.
    """
    if need.stages:
        samples = min(samples, need.stages[0].points[-1].micro_batch_size)
        part = RankPart("pipeline", len(ranks))
        return all(predicted(need, samples, rank, part.of_rank(number)).fits for number, rank in enumerate(ranks))
    whole = predicted(need, samples, ranks[0])
    held = sum(rank.overhead_bytes + rank.communication_bytes for rank in ranks)
    return whole.total - whole.parts["libraries"] + held <= sum(rank.capacity_bytes for rank in ranks)
