"""Split layers into contiguous pipeline stages by memory or time, and simulate the pipeline schedule.

Pure arithmetic without torch, so that it also works for machines that are not present.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from runner.base.errors import Problem
from runner.base.text import format_table

Balance = Literal["memory", "time"]
Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True)
class StageDevice:
    """A device on which layers are placed.

    speed  relative to the device on which costs were measured: 2.0 takes half the time
    """

    memory_bytes: int
    speed: float = 1.0
    name: str = ""


class Bubble(NamedTuple):
    """Fractions of an update during which devices were idle (pipeline bubble).

    measured   by clocks, including waiting for messages
    ideal      for stages of equal speed: (S - 1) / (M + S - 1)
    simulated  for the measured seconds of the stages, without communication
    """

    measured: float
    ideal: float
    simulated: float


@dataclass(frozen=True)
class Split:
    """Contiguous layers for each stage, in order.

    sizes         number of layers of each stage, at least 1
    used_bytes    bytes used by each stage on its device
    memory_bytes  memory of each stage's device
    seconds       seconds per micro-batch of each stage, on its device
    """

    sizes: tuple[int, ...]
    used_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def ranges(self) -> tuple[range, ...]:
        """Return the layer indices of each stage."""
        stops = [sum(self.sizes[: stage + 1]) for stage in range(len(self.sizes))]
        return tuple(range(stop - size, stop) for stop, size in zip(stops, self.sizes, strict=True))

    def __str__(self) -> str:
        return " : ".join(map(str, self.sizes))


def split(
    costs: Sequence[float],
    memory_bytes: Sequence[int],
    devices: Sequence[StageDevice],
    *,
    balance: Balance = "memory",
    activation_bytes: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
) -> Split | Problem:
    """Return the optimal split of the layers over the devices in order, or a Problem if there is none.

    No device exceeds its memory.

    balance           memory: minimize the largest used fraction of a device's memory, then balance the fractions;
                      time: minimize the time of the slowest stage first
    costs             seconds per micro-batch of each layer on a device of speed 1
    memory_bytes      bytes of each layer independent of the batch: parameters, gradients, optimizer state
    activation_bytes  bytes that each layer saves for the backward pass of one micro-batch
    in_flight         number of micro-batches that each stage keeps simultaneously
    """
    layers = _Layers(costs, memory_bytes, devices, activation_bytes, in_flight)
    problem = _check_layer_count(layers)
    if problem is not None:
        return problem

    def share(stage: int, start: int, stop: int) -> float:
        return layers.used(stage, start, stop) / max(1, devices[stage].memory_bytes)

    def seconds(stage: int, start: int, stop: int) -> float:
        return layers.seconds[start][stop] / devices[stage].speed

    def fits(stage: int, start: int, stop: int) -> bool:
        return layers.used(stage, start, stop) <= devices[stage].memory_bytes

    allowed: Callable[[int, int, int], bool] = fits
    for worst in [seconds, share] if balance == "time" else [share]:
        stops = _optimize_stops(layers.count, len(devices), worst, max, allowed)
        if stops is None:
            return _does_not_fit(layers)
        allowed = _limit_cost(worst, max(worst(*part) for part in _stage_ranges(stops)), allowed)
    stops = _optimize_stops(
        layers.count, len(devices), lambda *part: share(*part) ** 2, lambda one, other: one + other, allowed
    )
    assert stops is not None, "the split found before is feasible"
    return _build_split(stops, layers)


def split_from_sizes(
    sizes: Sequence[int],
    costs: Sequence[float],
    memory_bytes: Sequence[int],
    devices: Sequence[StageDevice],
    *,
    activation_bytes: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
    where: str = "parallelism.split",
) -> Split | Problem:
    """Return the split with these sizes, regardless of memory, or a Problem if they are invalid."""
    layers = _Layers(costs, memory_bytes, devices, activation_bytes, in_flight)
    text = f"[{','.join(map(str, sizes))}]"
    if len(sizes) != len(devices):
        return Problem(f"must have one size for each of the {len(devices)} stages, but has {len(sizes)}: {text}", where)
    if min(sizes) < 1 or sum(sizes) != layers.count:
        what = f"must be integers of at least 1 that add up to the model's {layers.count} layers, but is {text}"
        return Problem(what, where, f"use {where}=null to choose it automatically")
    return _build_split([sum(sizes[: stage + 1]) for stage in range(len(sizes))], layers)


def max_in_flight(schedule: Schedule, num_stages: int, num_microbatches: int | None) -> tuple[int, ...]:
    """Return the maximum number of micro-batches in flight per stage; assumes many if `num_microbatches` is None."""
    many = num_microbatches or 4 * num_stages
    return tuple(many if schedule == "gpipe" else min(many, num_stages - stage) for stage in range(num_stages))


def format_split(
    split: Split, names: Sequence[str], places: Sequence[str], layer_bytes: Sequence[int], costs: Sequence[float]
) -> str:
    """Format the split by layer: name, place, MiB, fraction of the total time; with a sum per stage.

    names, layer_bytes, costs  per layer; `places` per stage, such as "rank 0 (cuda:0, 11.0 GiB)"
    """
    total = math.fsum(costs)

    def part(seconds: float) -> str:
        return f"{seconds / total:6.1%}" if total else ""

    rows = [("layer", "device", "bytes", "time")]
    for stage, (layers, place) in enumerate(zip(split.ranges, places, strict=True)):
        rows += [(names[layer], place, format_mib(layer_bytes[layer]), part(costs[layer])) for layer in layers]
        share = split.used_bytes[stage] / max(1, split.memory_bytes[stage])
        seconds = math.fsum(costs[layer] for layer in layers)
        used = format_mib(split.used_bytes[stage])
        rows.append((f"= {len(layers)} layers", f"{share:.1%} used", used, part(seconds)))
    return "\n".join(format_table(rows, "<<>>"))


def format_mib(size: int) -> str:
    """Format a size in MiB."""
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 or not size else f"{size / 2**20:.3f} MiB"


# ---------------------------------------------------------------- simulation


def ideal_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the idle fraction for S stages of equal speed: (S - 1) / (M + S - 1).

    It is the same for GPipe and 1F1B, which differ in memory.
    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 2.2.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def orders(schedule: Schedule, num_stages: int, num_microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return the operations of each stage: ("F" or "B", stage, micro-batch)."""
    rows: list[list[tuple[str, int, int]]] = []
    for stage, ahead in enumerate(max_in_flight(schedule, num_stages, num_microbatches)):
        row = [("F", stage, number) for number in range(ahead)]
        for number in range(num_microbatches):
            row.append(("B", stage, number))
            if ahead + number < num_microbatches:
                row.append(("F", stage, ahead + number))
        rows.append(row)
    return rows


def simulated_seconds(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], num_microbatches: int
) -> float:
    """Return the seconds of an update whose stages take `forward` and `backward` seconds per micro-batch.

    Communication takes no time.
    """
    num_stages = len(forward)
    queues = [deque(row) for row in orders(schedule, num_stages, num_microbatches)]
    ends: dict[tuple[str, int, int] | None, float] = {None: 0.0}  # end of each operation; None: no dependency
    free = [0.0] * num_stages  # when each stage has completed its operations so far
    while any(queues):
        num_done = len(ends)
        for stage, queue in enumerate(queues):
            while queue and (dependency := _dependency(*queue[0], num_stages)) in ends:
                work = queue.popleft()
                free[stage] = max(free[stage], ends[dependency]) + (forward if work[0] == "F" else backward)[stage]
                ends[work] = free[stage]
        assert len(ends) > num_done, "the schedules of the stages are in a deadlock"
    return max(free, default=0.0)


def _dependency(kind: str, stage: int, number: int, num_stages: int) -> tuple[str, int, int] | None:
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    return ("B", stage + 1, number) if stage < num_stages - 1 else ("F", stage, number)


# ---------------------------------------------------------------- optimization


class _Layers:
    """Sums over contiguous layers: bytes exactly, seconds rounded once, so that equal parts compare equal."""

    def __init__(
        self,
        costs: Sequence[float],
        memory_bytes: Sequence[int],
        devices: Sequence[StageDevice],
        activation_bytes: Sequence[int] | None,
        in_flight: Sequence[int] | None,
    ) -> None:
        self.count, self.devices = len(costs), devices
        activation_bytes = activation_bytes or [0] * self.count
        self.in_flight = in_flight or [1] * len(devices)
        assert len(memory_bytes) == len(activation_bytes) == self.count, "one number for each layer"
        assert len(self.in_flight) == len(devices), "one number for each stage"
        self.seconds = [[math.fsum(costs[i:j]) for j in range(self.count + 1)] for i in range(self.count + 1)]
        self._memory_sums, self._activation_sums = _prefix_sums(memory_bytes), _prefix_sums(activation_bytes)

    def used(self, stage: int, start: int, stop: int) -> int:
        activations = self._activation_sums[stop] - self._activation_sums[start]
        return self._memory_sums[stop] - self._memory_sums[start] + self.in_flight[stage] * activations


def _prefix_sums(numbers: Sequence[int]) -> list[int]:
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return sums


Measure = Callable[[int, int, int], float]
"""(stage, first layer, layer after the last) -> cost."""


def _optimize_stops(
    num_layers: int,
    num_stages: int,
    cost: Measure,
    combine: Callable[[float, float], float],
    allowed: Callable[[int, int, int], bool],
) -> list[int] | None:
    """Return the stage boundaries with the lowest combined cost, by dynamic programming; None if infeasible.

    Ties give more layers to later stages.
    """
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # for each stage: stop -> (cost up to it, start)
    for stage in range(num_stages):
        row: dict[int, tuple[float, int]] = {}
        for stop in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            for start, (before, _) in best[-1].items():
                if start < stop and allowed(stage, start, stop):
                    total = combine(before, cost(stage, start, stop))
                    if stop not in row or total < row[stop][0]:
                        row[stop] = (total, start)
        best.append(row)
    if num_layers not in best[-1]:
        return None
    stops = [num_layers]
    for row in reversed(best[2:]):
        stops.append(row[stops[-1]][1])
    return stops[::-1]


def _stage_ranges(stops: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    yield from ((stage, start, stop) for stage, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)))


def _limit_cost(
    cost: Measure, limit: float, allowed: Callable[[int, int, int], bool]
) -> Callable[[int, int, int], bool]:
    return lambda stage, start, stop: allowed(stage, start, stop) and cost(stage, start, stop) <= limit


def _build_split(stops: Sequence[int], layers: _Layers) -> Split:
    parts = list(_stage_ranges(stops))
    return Split(
        tuple(stop - start for _, start, stop in parts),
        tuple(layers.used(*part) for part in parts),
        tuple(device.memory_bytes for device in layers.devices),
        tuple(layers.seconds[start][stop] / layers.devices[stage].speed for stage, start, stop in parts),
    )


def _check_layer_count(layers: _Layers) -> Problem | None:
    if layers.count < len(layers.devices):
        return Problem(
            f"must have at least as many layers as stages ({len(layers.devices)}), but the model has {layers.count}",
            "parallelism=pipeline",
            f"start at most {layers.count} ranks, or let Task.layers() return smaller layers",
        )
    return None


def _does_not_fit(layers: _Layers) -> Problem:
    """Return a Problem with the missing memory: of a layer that fits on no device, or of all layers."""
    devices = [device.memory_bytes for device in layers.devices]
    least = [
        (min(layers.used(stage, layer, layer + 1) for stage in range(len(devices))), layer)
        for layer in range(layers.count)
    ]
    largest, layer = max(least)
    capacities = " + ".join(format_mib(size) for size in devices)
    if largest > max(devices):
        what = (
            f"layer {layer} alone needs {format_mib(largest)}, but no device has more than {format_mib(max(devices))}"
        )
    else:
        total = format_mib(sum(size for size, _ in least))
        what = f"the layers, which cannot be divided or reordered, need at least {total}; the devices have {capacities}"
    return Problem(what, "parallelism=pipeline", "use more devices, a smaller micro_batch_size, or memory=checkpoint")
