"""Which strategy suits a model and its devices: the simplest that fits, with the reason in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.errors import Problem
from runner.plan.ranks import RankDevice

GIB = 2**30
HEADROOM = 0.9  # of a device's memory: the rest is for context, workspaces and fragmentation
UNEQUAL = 1.1  # memories that differ by more are unequal


@dataclass(frozen=True)
class Footprint:
    """What training takes, in bytes, whatever the device.

    weights      parameters and buffers
    gradients    of the parameters that are trained
    state        of their optimizer
    activations  kept for the backward pass, for one sample
    largest      parameters of the largest block, which fsdp gathers at once
    num_layers   layers that a pipeline may split between; None where the task does not tell
    """

    weights: int
    gradients: int
    state: int
    activations: int
    largest: int = 0
    num_layers: int | None = None

    @property
    def model(self) -> int:
        """Return what does not depend on the number of samples."""
        return self.weights + self.gradients + self.state

    def samples_on(self, memory_bytes: int) -> int:
        """Return how many samples a device passes at once beside the whole model; at least 1."""
        return max(1, int((memory_bytes * HEADROOM - self.model) / max(1, self.activations)))

    def __str__(self) -> str:
        parts = f"weights {_gib(self.weights)}, gradients {_gib(self.gradients)}, optimizer {_gib(self.state)}"
        return f"{parts}, activations {_gib(self.activations)} a sample"


@dataclass(frozen=True)
class Strategy:
    """A choice of parallelism, keys that go with it, and why."""

    name: str
    options: dict[str, Any]
    reason: str


def choose(need: Footprint, ranks: Sequence[RankDevice], total: int, micro: int | None) -> Strategy | Problem:
    """Return the simplest strategy by which an update of `total` samples fits the devices, or what is missing.

    ddp where each device holds the whole model and at least one sample: with unequal devices its shares follow speed,
    or memory where equal ones would not fit. fsdp where the devices are alike and a part fits; a pipeline where they
    are not, for fsdp cuts evenly and the smallest bounds the part.

    micro  samples of a pass; None: the whole share
    """
    count, memories = len(ranks), [rank.memory_bytes * HEADROOM for rank in ranks]
    if count == 1:
        return Strategy("single", {}, f"auto: one device ({ranks[0].name})")
    if not all(memories):
        return Strategy("ddp", {}, "auto: several devices of unknown memory; a copy of the model on each")
    are_unequal = max(memories) > UNEQUAL * min(memories)
    least = need.model + (micro or 1) * need.activations
    room = f"{_gib(min(memories))} of the {'smaller' if are_unequal else 'same'} device"
    if least <= min(memories):
        if not are_unequal:
            return Strategy("ddp", {}, f"auto: the model fits each of {count} devices ({need}; room {room})")
        fits = need.model + (micro or -(-total // count)) * need.activations <= min(memories)
        shares, why = ("speed", "even shares fit, so speed decides") if fits else ("memory", "even shares do not fit")
        return Strategy(
            "ddp", {"shares": shares}, f"auto: the model fits each of {count} unequal devices; {why} ({need})"
        )
    shard = least - need.model + need.model / count + 2 * need.largest
    if shard <= min(memories) and not are_unequal:
        return Strategy("fsdp", {}, f"auto: a copy takes {_gib(least)}, above {room}; a part of it fits ({need})")
    if need.num_layers is not None and need.num_layers >= count and least <= sum(memories):
        why = "fsdp cuts evenly and the smaller device is too small for that" if are_unequal else "too large for fsdp"
        return Strategy("pipeline", {}, f"auto: a copy takes {_gib(least)}, above {room}; {why} ({need})")
    if shard <= min(memories):
        return Strategy("fsdp", {}, f"auto: a copy takes {_gib(least)}, above {room}; even parts of it fit ({need})")
    hint = "" if need.num_layers is not None else "; a task with layers() can be split unevenly"
    return Problem(
        f"needs {_gib(least)} for a pass of {micro or 1} ({need}), but the devices have"
        f" {' + '.join(_gib(rank.memory_bytes) for rank in ranks)}",
        "parallelism=auto",
        f"say memory=checkpoint, optimizer=adamw8bit or a smaller model{hint}",
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.3g} MiB"
