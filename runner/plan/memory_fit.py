"""Predict the memory of a run on a device by part, whether the run fits, and the largest micro-batch that fits.

The input is a trace on the CPU (runner.plan.memory_trace). For a device, it is combined with a model of the allocator
(runner.plan.cuda_allocator), the rank's part in each strategy, and the memory of libraries (overhead.yaml).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from runner.base.text import format_bytes
from runner.config.configuration import Choice
from runner.plan.cuda_allocator import AllocatorSettings, replay
from runner.plan.memory_trace import Bytes, ComputeCost, Layer, ModelSizes, Traced
from runner.plan.rank_devices import RankDevice
from runner.workload.partition import max_in_flight

GIB = 2**30
PART_NAMES = tuple(part.name for part in dataclasses.fields(Bytes))
TOP_LAYERS = 5
RUNNING_SUM_BYTES = 1024  # bytes; losses and counts of earlier micro-batches
MAX_TRACED_MICRO_BATCHES = 64  # more micro-batches need no more memory with 1f1b, and proportionally more with gpipe


@dataclass(frozen=True)
class TracedPoint:
    """Results of a trace with one micro-batch size.

    reserved           bytes that torch's allocator reserves on a GPU for peak.total
    work               cost of the forward and backward pass of a micro-batch
    recompute          indices of the blocks that memory=budget recomputes
    without_gradients  peak bytes without gradients
    is_whole           the micro-batch is the complete update: no gradients of an earlier one exist
    """

    micro_batch_size: int
    peak: Bytes
    reserved: int
    work: ComputeCost = field(default_factory=ComputeCost)
    recompute: tuple[int, ...] = ()
    without_gradients: int = 0
    is_whole: bool = False


@dataclass(frozen=True)
class Demand:
    """Memory of a phase as a function of the micro-batch size: traced at some points, linear between and beyond them.

    The memory at each moment is affine in the number of samples. The peak is the maximum over all moments, so it is
    convex: between two points, it lies on or below the line through them.

    step              cost of the optimizer step
    layers            layers that save the most activations, largest first, at the largest traced micro-batch;
                      `blocks.*.mlp` is the sum over all blocks
    activation_bytes  bytes of activations of all layers at the largest traced micro-batch
    stages            demand of each rank of a pipeline, traced with its layers; empty if not traced
    why_not           what could not be traced; the figures are then too small
    read_s            seconds to read a sample in one process of this machine; None if they were not measured
    """

    phase: str
    points: tuple[TracedPoint, ...]
    step: ComputeCost = field(default_factory=ComputeCost)
    model: ModelSizes = field(default_factory=ModelSizes)
    layers: tuple[Layer, ...] = ()
    activation_bytes: int = 0
    stages: tuple[Demand, ...] = ()
    why_not: str = ""
    read_s: float | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether the trace equals a run on a CPU."""
        return not self.why_not

    @staticmethod
    def from_traces(traces: Sequence[Traced], allocator: AllocatorSettings) -> Demand:
        """Combine traces of one phase with different micro-batch sizes."""
        traces = sorted(traces, key=lambda traced: traced.micro_batch_size)
        widest = traces[-1]
        by_name: dict[str, Layer] = {}
        for layer in widest.layers:
            name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.name)  # summed over all blocks
            before = by_name.get(name, Layer(name, 0, 0))
            by_name[name] = Layer(name, before.activations + layer.activations, before.flops + layer.flops)
        return Demand(
            widest.phase,
            tuple(
                TracedPoint(
                    traced.micro_batch_size,
                    traced.peak,
                    _estimate_reserved(traced, allocator),
                    traced.work,
                    traced.recompute,
                    traced.without_gradients_bytes,
                    traced.accumulation_steps == 1,
                )
                for traced in traces
            ),
            widest.step,
            widest.model,
            tuple(sorted(by_name.values(), key=lambda layer: -layer.activations)[:TOP_LAYERS]),
            sum(layer.activations for layer in widest.layers),
            why_not=next((traced.why_not for traced in reversed(traces) if traced.why_not), ""),
            read_s=widest.read_s,
        )

    @staticmethod
    def from_stages(stages: Sequence[Demand]) -> Demand:
        """Return the sum over all stages of a pipeline."""
        layers = sorted((layer for stage in stages for layer in stage.layers), key=lambda layer: -layer.activations)
        return dataclasses.replace(
            stages[0],
            points=tuple(map(_sum_points, zip(*(stage.points for stage in stages), strict=True))),
            step=reduce(lambda one, two: one.merge(two, max), (stage.step for stage in stages)),
            layers=tuple(layers[:TOP_LAYERS]),
            activation_bytes=sum(stage.activation_bytes for stage in stages),
            stages=tuple(stages),
        )

    def at(self, samples: int, share: int = 0) -> TracedPoint:
        """Return the demand of a micro-batch of this size; with a single trace, an upper bound for smaller ones.

        A size that was not traced is assumed to be one of several micro-batches, so that accumulated gradients exist.

        share  samples of an update: if they exceed `samples`, accumulated gradients are also added to a size that was
               traced as a complete update
        """
        first, last = self._neighbors(samples)
        if samples in (first.micro_batch_size, last.micro_batch_size):
            point = first if samples == first.micro_batch_size else last
            return self._add_accumulated(point) if share > samples else point
        first, last = self._add_accumulated(first), self._add_accumulated(last)
        if first.micro_batch_size == last.micro_batch_size:
            return _scale_point(first, samples)
        fraction = (samples - first.micro_batch_size) / (last.micro_batch_size - first.micro_batch_size)
        peak = {name: _interpolate(vars(first.peak)[name], vars(last.peak)[name], fraction) for name in PART_NAMES}
        return TracedPoint(
            samples,
            Bytes(**peak),
            max(Bytes(**peak).total, _interpolate(first.reserved, last.reserved, fraction)),
            first.work.merge(last.work, lambda one, two: _interpolate(one, two, fraction)),
            without_gradients=_interpolate(first.without_gradients, last.without_gradients, fraction),
        )

    def _add_accumulated(self, point: TracedPoint) -> TracedPoint:
        """Return the point if the micro-batch is one of several: with all accumulated gradients and a new one."""
        if not point.is_whole:
            return point
        peak = point.peak
        without_gradients = max(point.without_gradients, peak.total - peak.gradients)
        total = max(peak.total, without_gradients + self.model.trained + self.model.widest + RUNNING_SUM_BYTES)
        gradients = max(self.model.trained, peak.gradients)
        rest = peak.total - peak.gradients - peak.temporary
        peak = dataclasses.replace(peak, gradients=gradients, temporary=max(0, total - gradients - rest))
        reserved = round(point.reserved * peak.total / max(1, point.peak.total))
        return dataclasses.replace(point, peak=peak, reserved=reserved)

    def recompute_at(self, samples: int) -> tuple[int, ...]:
        """Return the blocks to recompute at this micro-batch size: those of the next larger traced size."""
        larger = [point for point in self.points if point.micro_batch_size >= samples]
        return (larger[0] if larger else self.points[-1]).recompute

    def is_traced_at(self, samples: int) -> bool:
        """Return whether this micro-batch size was traced."""
        return any(point.micro_batch_size == samples for point in self.points)

    def _neighbors(self, samples: int) -> tuple[TracedPoint, TracedPoint]:
        points = self.points
        for point in points:
            if point.micro_batch_size == samples or len(points) == 1:
                return point, point
        place = next(
            (number for number, point in enumerate(points) if point.micro_batch_size > samples), len(points) - 1
        )
        return points[max(1, place) - 1], points[max(1, place)]

    def __str__(self) -> str:
        """Return one line with the constant part and the memory per sample."""
        largest = self.points[-1].micro_batch_size
        one, two = self.at(largest + 1), self.at(largest + 2)
        weights = format_bytes(one.peak.parameters + one.peak.buffers)
        fixed = f"weights {weights}, gradients {format_bytes(one.peak.gradients)}"
        per_sample = max(0, two.peak.total - one.peak.total)
        return f"{fixed}, optimizer {format_bytes(one.peak.optimizer)}, {format_bytes(per_sample)} a sample"


def _sum_points(points: Sequence[TracedPoint]) -> TracedPoint:
    peak = {name: sum(vars(point.peak)[name] for point in points) for name in PART_NAMES}
    return dataclasses.replace(
        points[0],
        peak=Bytes(**peak),
        reserved=sum(point.reserved for point in points),
        work=sum((point.work for point in points), ComputeCost()),
        without_gradients=sum(point.without_gradients for point in points),
    )


@functools.lru_cache(maxsize=16)  # all traces are combined again after each new one
def _estimate_reserved(traced: Traced, allocator: AllocatorSettings) -> int:
    """Return the reserved memory at the peak: the peak of the tensors times the ratio of reserved to live memory."""
    replayed = replay(traced.events, allocator)
    return max(traced.peak.total, round(traced.peak.total * replayed.reserved / max(1, replayed.live)))


def _interpolate(first: int, last: int, share: float) -> int:
    return max(0, round(first + (last - first) * share))


def _scale_point(point: TracedPoint, samples: int) -> TracedPoint:
    """Return an upper bound from one trace.

    Fewer samples need no more memory; with more samples, everything that may depend on their number grows.

    Activations that do not depend on the samples, such as weight copies in a 16-bit format, are scaled as well.
    """
    factor = samples / point.micro_batch_size
    more = max(1.0, factor)
    peak = dataclasses.replace(
        point.peak,
        activations=round(point.peak.activations * more),
        inputs=round(point.peak.inputs * more),
        temporary=round(point.peak.temporary * more),
    )
    reserved = round(point.reserved * peak.total / max(1, point.peak.total))
    work = point.work.scale(factor)
    return TracedPoint(
        samples, peak, reserved, work, without_gradients=max(0, point.without_gradients + peak.total - point.peak.total)
    )


# ---------------------------------------------------------------- a rank's part


@dataclass(frozen=True)
class RankPart:
    """The part of the model and batch on a rank, by strategy and number of ranks.

    share       largest share of an update on any rank, which may consist of several micro-batches; 0: one micro-batch
    reshards    fsdp frees blocks after the forward pass
    gathers_model     fsdp gathers the whole model for evaluations
    shards_gradients  fsdp reduces gradients after each micro-batch instead of once per update
    gathered_size     bytes of a parameter that fsdp gathers, relative to its shards on all ranks; 0.5 in 16-bit formats
    shard_size  ranks that hold one copy of the model together with fsdp; 0: all
    in_flight   micro-batches whose activations a stage of a pipeline keeps at once, divided by the number of stages
    passes      micro-batches of an update, which a pipeline reads at once
    stages      ranks of each pipeline; 0: all
    rank        number of the rank
    """

    strategy: str = "single"
    count: int = 1
    share: int = 0
    reshards: bool = True
    gathers_model: bool = True
    shards_gradients: bool = False
    gathered_size: float = 1.0
    shard_size: int = 0
    in_flight: float = 1.0
    passes: int = 1
    stages: int = 0
    rank: int = 0

    @property
    def num_stages(self) -> int:
        """Return the number of ranks that hold a copy of the model together in a pipeline."""
        return self.stages or self.count

    def for_rank(self, rank: int) -> RankPart:
        return dataclasses.replace(self, rank=rank)

    @staticmethod
    def from_choice(choice: Choice, count: int, share: int = 0, passes: int = 1) -> RankPart:
        """Return the part of a rank with this choice of parallelism."""
        options, in_flight, stages = choice.options, 1.0, 0
        if choice.uses("pipeline") and count > 1:
            stages = num_stages(options, count)
            counts = max_in_flight(options["schedule"], stages, min(passes, MAX_TRACED_MICRO_BATCHES))
            in_flight = max(counts) / stages
            in_flight *= passes / min(passes, MAX_TRACED_MICRO_BATCHES) if options["schedule"] == "gpipe" else 1
        reshards = bool(options.get("reshard_after_forward", True))
        shard_size = options.get("shard_size")
        return RankPart(
            choice.function,
            count,
            share,
            reshards,
            gathers_model=options.get("evaluation") != "sharded",
            shards_gradients=options.get("gradients") == "sharded",
            gathered_size=1.0 if options.get("communicate", "float32") == "float32" else 0.5,
            shard_size=shard_size if isinstance(shard_size, int) else 0,
            in_flight=in_flight,
            passes=passes,
            stages=stages,
        )


def num_stages(options: Mapping[str, Any], count: int) -> int:
    """Return the number of stages of a pipeline on `count` ranks; `count` unless the requested number divides it."""
    stages = options.get("stages")
    return stages if isinstance(stages, int) and count % stages == 0 else count


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted peak memory of a rank's device, in bytes: the parts of `Bytes`, then `allocator` and `libraries`.

    capacity  available memory: free memory of a device that is present, else its total; 0: unknown
    bounds    names of the parts that are upper bounds: a run may need less
    """

    parts: Mapping[str, int]
    capacity: int
    bounds: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the sum of the parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Return whether the total does not exceed the capacity; an unknown capacity is assumed to suffice."""
        return not self.capacity or self.total <= self.capacity


def predict_memory(demand: Demand, samples: int, rank: RankDevice, part: RankPart | None = None) -> MemoryPrediction:
    """Return the predicted peak memory of the rank's device at this micro-batch size.

    ddp and several pipelines add a permanent bucket for every gradient. A pipeline rank was traced with its layers;
    otherwise, it is assumed to hold an equal part of the model. For fsdp, see `_shard_sizes`.
    Source: Rajbhandari et al., ZeRO, 2020, section 5; Narayanan et al., PipeDream-2BW, 2021 (1F1B); both as implemented
    in runner/distributed/.
    """
    part = part or RankPart()
    is_pipeline = part.count > 1 and part.strategy == "pipeline"
    has_stages = is_pipeline and len(demand.stages) == part.num_stages  # false after a restart with fewer ranks
    demand = demand.stages[part.rank % part.num_stages] if has_stages else demand
    point = demand.at(samples, part.share)
    sizes = {name: int(vars(point.peak)[name]) for name in PART_NAMES}
    overhead = max(0, point.reserved - point.peak.total) / max(1, point.peak.total) if rank.is_gpu else 0.0
    if part.count > 1 and (part.strategy == "ddp" or (is_pipeline and part.num_stages < part.count)):
        sizes["gradients"] += max(demand.model.trained, point.peak.gradients)
    if part.count > 1 and part.strategy == "fsdp":
        sizes |= _shard_sizes(demand, point, part)
    elif is_pipeline and not has_stages:
        for name in ("parameters", "gradients", "optimizer"):
            sizes[name] = -(-sizes[name] // part.num_stages)
        sizes["activations"] = round(sizes["activations"] * part.in_flight)
        sizes["inputs"] *= part.passes
    tensors = sum(sizes.values())
    return MemoryPrediction(
        {
            **sizes,
            "allocator": round(tensors * ((1 + overhead) * (1 + rank.unseen) - 1)),
            "libraries": rank.overhead_bytes + (rank.communication_bytes if part.count > 1 else 0),
        },
        rank.capacity_bytes if rank.is_gpu else rank.capacity_bytes // part.count,
        # gathered parameters and unsharded gradients do not peak at the same moment
        ("parameters", "gradients") if part.count > 1 and part.strategy == "fsdp" else (),
    )


def _shard_sizes(demand: Demand, point: TracedPoint, part: RankPart) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state of a rank whose tensors are sharded by rows.

    Gathered parameters are those outside of blocks, during the whole pass, and one block with its communication buffer;
    with reshards=False, all blocks. Unsharded gradients exist for one block, or for the parameters outside of blocks,
    and once more in the communication buffer. Between the micro-batches of an update, they exist for all parameters,
    unless they are reduced after each micro-batch. An evaluation has neither gradients nor saved activations; it
    gathers all parameters, or as many as a training pass.

    The peak with gradients g(t) / count is convex in 1 / count. It is therefore on or below the line between the peak
    without gradients (1 / count = 0) and the peak with unsharded ones (1 / count = 1).
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py, torch 2.13.
    """
    peak, count = point.peak, part.shard_size or part.count
    fixed = peak.parameters + peak.optimizer
    rest = peak.total - fixed  # peak of everything but parameters and optimizer, with unsharded gradients
    without_gradients = max(point.without_gradients, peak.total - peak.gradients) - fixed
    trained = max(demand.model.trained, peak.gradients)
    if 0 < point.micro_batch_size < part.share and part.shards_gradients:
        bound = without_gradients + -(-trained // count)
    elif 0 < point.micro_batch_size < part.share:
        bound = max(rest, without_gradients + trained)
    else:
        bound = without_gradients + -(-(rest - without_gradients) // count)
    gradients = max(-(-trained // count), bound - (rest - peak.gradients))
    block = demand.model.block
    outside = demand.model.outside if demand.model.outside or block else peak.parameters
    gathered = round(part.gathered_size * (outside + 2 * block if part.reshards else peak.parameters + block))
    training = gathered + gradients + outside + 2 * block + peak.activations
    evaluation = round(part.gathered_size * (peak.parameters + max(outside, block))) if part.gathers_model else 0
    gathered += max(0, evaluation - training)
    uneven = demand.model.row * (count - 1) // count
    states = -(-peak.optimizer // max(1, peak.parameters))  # number of state tensors of a parameter's shape
    return {
        "parameters": -(-peak.parameters // count) + uneven + gathered,
        "gradients": gradients + uneven + outside + 2 * block,
        "optimizer": -(-peak.optimizer // count) + states * uneven,
    }


def may_fit(prediction: MemoryPrediction, overrides: Sequence[str]) -> bool:
    """Return whether the run could fit with these settings in the best case, without tracing it.

    Memory that the settings may reduce is not counted.

    With a 16-bit format, at least half of the activations remain; with an 8-bit optimizer, a quarter of its state.
    """
    parts, saved = prediction.parts, 0
    pass_bytes = parts["activations"] + parts["inputs"] + parts["temporary"]
    for override in overrides:
        key = override.partition("=")[0]
        if key == "parallelism":
            return True
        saved += {
            "micro_batch_size": pass_bytes,
            "memory": parts["activations"] + parts["temporary"],
            "precision": pass_bytes // 2,
            "optimizer": parts["optimizer"] * 3 // 4 + parts["temporary"],
        }.get(key, prediction.total)
    tensors = prediction.total - parts["libraries"] - parts["allocator"]
    return not prediction.capacity or max(0, tensors - saved) + parts["libraries"] <= prediction.capacity


def largest_micro_batch(demand: Demand, rank: RankDevice, at_most: int, part: RankPart | None = None) -> int:
    """Return the largest micro-batch that fits on the device, at most `at_most`; 0 if not even one sample fits."""
    low, high = 0, at_most
    if part is not None and 0 < part.share <= at_most and predict_memory(demand, part.share, rank, part).fits:
        low = part.share  # the whole share at once may need less than several smaller micro-batches
    while low < high:
        middle = (low + high + 1) // 2
        if predict_memory(demand, middle, rank, part).fits:
            low = middle
        else:
            high = middle - 1
    return low


def choose_micro_batch_size(share: int, max_samples: int) -> int:
    """Return the micro-batch size for a share if `max_samples` fit at once: the fewest micro-batches of similar size.

    A size that divides the share is preferred if it needs at most a third more micro-batches, because all of them then
    have the same shape.
    """
    limit = max(1, min(max_samples, share))
    steps = -(-share // limit)
    divisor = next(size for size in range(limit, 0, -1) if share % size == 0)
    return divisor if share // divisor * 3 <= steps * 4 else -(-share // steps)


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory demand of the phases of a task.

    demands  phase -> its demand
    why_not  why the demand is unknown or incomplete; empty otherwise
    layout   lines with the layers that a pipeline puts on each device
    by_stages  for parallelism.stages=auto: number of stages whose layers fit -> the needs with these stages
    """

    demands: Mapping[str, Demand]
    why_not: str = ""
    layout: tuple[str, ...] = ()
    by_stages: Mapping[int, MemoryNeeds] = field(default_factory=dict)

    @property
    def has_stages(self) -> bool:
        """Return whether the stages of a pipeline were traced."""
        return any(demand.stages for demand in self.demands.values())

    def select(self, phase: str | None) -> tuple[Demand, ...]:
        """Return the demand of the phase; for None, or a phase that was not traced, those of all phases."""
        demand = self.demands.get(phase or "")
        return (demand,) if demand else tuple(self.demands.values())

    def max_samples(self, phase: str | None, ranks: Sequence[RankDevice], at_most: int, part: RankPart) -> int:
        """Return the largest micro-batch that fits every rank's device; 0 if some device cannot hold one sample."""
        return min(
            largest_micro_batch(demand, rank, at_most, part.for_rank(number))
            for demand in self.select(phase)
            for number, rank in enumerate(ranks)
        )

    def fits(self, ranks: Sequence[RankDevice], samples: Sequence[int], part: RankPart) -> bool:
        """Return whether a micro-batch of `samples[rank]` samples fits on the device of each rank in every phase."""
        return all(
            predict_memory(demand, size, rank, part.for_rank(number)).fits
            for demand in self.demands.values()
            for number, (rank, size) in enumerate(zip(ranks, samples, strict=True))
        )

    def largest(self, samples: int) -> Demand:
        """Return the demand of the phase that needs the most memory."""
        return max(self.demands.values(), key=lambda demand: demand.at(samples).peak.total)


@dataclass(frozen=True)
class RankMemory:
    """Predicted memory of a rank in a phase, at this micro-batch size.

    is_exact  the underlying trace equals a run on a CPU
    """

    phase: str
    rank: int
    samples: int
    prediction: MemoryPrediction
    is_exact: bool = True
