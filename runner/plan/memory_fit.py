"""Whether a run fits a device, by parts; the most samples of a pass that do; what would make it fit.

The bytes come from a trace on the CPU (runner.plan.memory_trace). Here they become those of a device: its allocator
(runner.plan.cuda_allocator), its share of the work in each strategy, what its libraries hold (overhead.yaml), and what
was corrected by measurements on the same machine (runner.plan.corrections).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.base.partition import in_flight_of
from runner.base.text import sized
from runner.config.configuration import Choice
from runner.plan.corrections import Correction
from runner.plan.cuda_allocator import Allocator, replay
from runner.plan.memory_trace import Bytes, Layer, Traced
from runner.plan.rank_devices import RankDevice

GIB = 2**30
PARTS = tuple(part.name for part in dataclasses.fields(Bytes))
TOP_LAYERS = 5
SUMS = 1024  # bytes; losses and counts of the passes before
MANY = 64  # micro-batches; what a stage keeps of more is the same
ALLOCATOR = 0.2  # of the tensors: what the allocator adds, before it is known what it does


@dataclass(frozen=True)
class TracedPoint:
    """What was traced with one micro-batch.

    without      bytes at the moment of most of all but gradients
    is_whole     it is a whole update: no gradients of an earlier pass are there
    reserved     bytes that torch's allocator takes from a GPU's driver for peak.total
    flops        of the forward and backward pass of a micro-batch; moved_bytes are read and written by these, and
                 launches are the kernels that they launch
    recompute    numbers of the blocks that are computed again, as memory=budget has chosen them
    """

    micro_batch_size: int
    peak: Bytes
    reserved: int
    flops: int
    moved_bytes: int
    recompute: tuple[int, ...] = ()
    without: int = 0
    is_whole: bool = False
    launches: int = 0


@dataclass(frozen=True)
class Demand:
    """What a phase takes as a function of the micro-batch: as traced at some points, affine between and beyond them.

    A peak is the largest of several moments that are each affine in the samples, so what lies between two points is not
    above the line through them.

    largest      bytes of parameters of the largest block, which fsdp gathers at once
    outside      of those in no block, which fsdp gathers for the whole pass; rows of one row of each parameter
    trained      of all gradients; widest of the largest one
    num_layers   layers that a pipeline may split between; None where the task does not tell
    layers       those that keep most activations, the first the most, in the largest pass that was traced;
                 `blocks.*.mlp` is that of all blocks
    kept         bytes of activations of all layers there
    stages       what each rank of a pipeline takes, as traced with its layers; empty where that was not
    is_exact     the trace is equal to a run on a CPU
    why_not      what could not be traced; the figures are then too small
    """

    phase: str
    points: tuple[TracedPoint, ...]
    update_moved_bytes: int = 0
    update_launches: int = 0
    largest: int = 0
    outside: int = 0
    rows: int = 0
    trained: int = 0
    widest: int = 0
    num_layers: int | None = None
    layers: tuple[Layer, ...] = ()
    kept: int = 0
    stages: tuple[Demand, ...] = ()
    is_exact: bool = True
    why_not: str = ""

    @staticmethod
    def of(traces: Sequence[Traced], allocator: Allocator) -> Demand:
        """Return what traces of one phase with different micro-batches come to."""
        traces = sorted(traces, key=lambda traced: traced.micro_batch_size)
        widest = traces[-1]
        kept: dict[str, Layer] = {}
        for layer in widest.layers:
            name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.name)  # those of all blocks together
            before = kept.get(name, Layer(name, 0, 0))
            kept[name] = Layer(name, before.activations + layer.activations, before.flops + layer.flops)
        return Demand(
            widest.phase,
            tuple(
                TracedPoint(
                    traced.micro_batch_size,
                    traced.peak,
                    _reserved(traced, allocator),
                    traced.flops,
                    traced.moved_bytes,
                    traced.recompute,
                    traced.without_bytes,
                    traced.accumulation_steps == 1,
                    traced.launches,
                )
                for traced in traces
            ),
            widest.update_moved_bytes,
            widest.update_launches,
            widest.block_bytes,
            widest.outside_bytes,
            widest.row_bytes,
            widest.trained_bytes,
            widest.widest_bytes,
            widest.num_layers,
            tuple(sorted(kept.values(), key=lambda layer: -layer.activations)[:TOP_LAYERS]),
            sum(layer.activations for layer in widest.layers),
            is_exact=all(traced.is_exact for traced in traces),
            why_not=next((traced.why_not for traced in reversed(traces) if traced.why_not), ""),
        )

    @staticmethod
    def of_stages(stages: Sequence[Demand]) -> Demand:
        """Return what all stages of a pipeline take together."""
        layers = sorted((layer for stage in stages for layer in stage.layers), key=lambda layer: -layer.activations)
        return dataclasses.replace(
            stages[0],
            points=tuple(map(_together, zip(*(stage.points for stage in stages), strict=True))),
            update_moved_bytes=max(stage.update_moved_bytes for stage in stages),
            update_launches=max(stage.update_launches for stage in stages),
            layers=tuple(layers[:TOP_LAYERS]),
            kept=sum(stage.kept for stage in stages),
            stages=tuple(stages),
        )

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Demand:
        """Return what `dataclasses.asdict` made of one, also by way of JSON."""
        points = tuple(
            TracedPoint(**{**point, "peak": Bytes(**point["peak"]), "recompute": tuple(point["recompute"])})
            for point in tree["points"]
        )
        layers = tuple(Layer(**layer) for layer in tree["layers"])
        stages = tuple(map(Demand.from_dict, tree["stages"]))
        return Demand(**{**tree, "points": points, "layers": layers, "stages": stages})

    def at(self, samples: int, share: int = 0) -> TracedPoint:
        """Return what a pass of so many samples takes; from one trace alone an upper bound for fewer samples.

        What was not traced is taken to be one pass of several, so that gradients of others are there all the time.

        share  samples of an update: where they are more, what was traced as a whole update is one pass of several too
        """
        first, last = self._around(samples)
        if samples in (first.micro_batch_size, last.micro_batch_size):
            found = first if samples == first.micro_batch_size else last
            return self._of_several(found) if share > samples else found
        first, last = self._of_several(first), self._of_several(last)
        if first.micro_batch_size == last.micro_batch_size:
            return _scaled(first, samples)
        way = (samples - first.micro_batch_size) / (last.micro_batch_size - first.micro_batch_size)
        peak = {name: _between(vars(first.peak)[name], vars(last.peak)[name], way) for name in PARTS}
        return TracedPoint(
            samples,
            Bytes(**peak),
            max(Bytes(**peak).total, _between(first.reserved, last.reserved, way)),
            _between(first.flops, last.flops, way),
            _between(first.moved_bytes, last.moved_bytes, way),
            without=_between(first.without, last.without, way),
            launches=_between(first.launches, last.launches, way),
        )

    def _of_several(self, point: TracedPoint) -> TracedPoint:
        """Return the point as that of a pass after which others follow: all gradients are there, and a new one."""
        if not point.is_whole:
            return point
        peak = point.peak
        without = max(point.without, peak.total - peak.gradients)
        total = max(peak.total, without + self.trained + self.widest + SUMS)
        gradients = max(self.trained, peak.gradients)
        rest = peak.total - peak.gradients - peak.temporary
        peak = dataclasses.replace(peak, gradients=gradients, temporary=max(0, total - gradients - rest))
        reserved = round(point.reserved * peak.total / max(1, point.peak.total))
        return dataclasses.replace(point, peak=peak, reserved=reserved)

    def recompute_at(self, samples: int) -> tuple[int, ...]:
        """Return the blocks to compute again with so many samples: those of the next larger pass that was traced."""
        larger = [point for point in self.points if point.micro_batch_size >= samples]
        return (larger[0] if larger else self.points[-1]).recompute

    def is_traced_at(self, samples: int) -> bool:
        """Tell whether the figures for so many samples are those of a trace."""
        return any(point.micro_batch_size == samples for point in self.points)

    def _around(self, samples: int) -> tuple[TracedPoint, TracedPoint]:
        points = self.points
        for point in points:
            if point.micro_batch_size == samples or len(points) == 1:
                return point, point
        place = next((number for number, each in enumerate(points) if each.micro_batch_size > samples), len(points) - 1)
        return points[max(1, place) - 1], points[max(1, place)]

    def __str__(self) -> str:
        """Return in a line what does not depend on the samples, and what each of them adds."""
        most = self.points[-1].micro_batch_size
        one, two = self.at(most + 1), self.at(most + 2)
        fixed = f"weights {sized(one.peak.parameters + one.peak.buffers)}, gradients {sized(one.peak.gradients)}"
        each = max(0, two.peak.total - one.peak.total)
        return f"{fixed}, optimizer {sized(one.peak.optimizer)}, {sized(each)} a sample"


def _together(points: Sequence[TracedPoint]) -> TracedPoint:
    peak = {name: sum(vars(point.peak)[name] for point in points) for name in PARTS}
    numbers = {
        name: sum(vars(point)[name] for point in points)
        for name in ("reserved", "flops", "moved_bytes", "without", "launches")
    }
    return dataclasses.replace(points[0], peak=Bytes(**peak), **numbers)


def _reserved(traced: Traced, allocator: Allocator) -> int:
    """Return what the allocator takes for the peak, also where that is a multiple of what was traced."""
    held = replay(traced.events, allocator)
    return max(traced.peak.total, round(traced.peak.total * held.reserved / max(1, held.live)))


def _between(first: int, last: int, share: float) -> int:
    return max(0, round(first + (last - first) * share))


def _scaled(point: TracedPoint, samples: int) -> TracedPoint:
    """Return a bound by one trace: less takes no more, of more all grows that could depend on the samples.

    It is not told apart what of the activations does not, such as copies of weights in a half format.
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
    work = round(point.flops * factor), round(point.moved_bytes * factor)
    without = max(0, point.without + peak.total - point.peak.total)
    return TracedPoint(samples, peak, reserved, *work, without=without, launches=point.launches)


# ---------------------------------------------------------------- a rank's part


@dataclass(frozen=True)
class RankPart:
    """How much of the whole a rank has: the strategy and the number of ranks.

    share      samples of an update of the rank that has most; smaller passes accumulate. 0: all are passed at once
    reshards   fsdp frees blocks after the forward pass
    in_flight  passes of which a stage of a pipeline keeps its part of the activations at once, for each stage
    passes     micro-batches of an update, which a pipeline reads at once
    rank       whose stages they are, in a pipeline
    """

    strategy: str = "single"
    count: int = 1
    share: int = 0
    reshards: bool = True
    in_flight: float = 1.0
    passes: int = 1
    rank: int = 0

    def of_rank(self, rank: int) -> RankPart:
        """Return that of another rank."""
        return dataclasses.replace(self, rank=rank)

    @staticmethod
    def of(choice: Choice, count: int, share: int = 0, passes: int = 1) -> RankPart:
        """Return the part of a rank with this choice of parallelism."""
        options, in_flight = choice.options, 1.0
        if choice.function == "pipeline" and count > 1:
            chunks = int(options["chunks"]) if options["schedule"] == "interleaved" else 1
            kept = in_flight_of(options["schedule"], count, min(passes, MANY), chunks)
            in_flight = max(sum(kept[rank::count]) for rank in range(count)) / len(kept)
            in_flight *= passes / min(passes, MANY) if options["schedule"] == "gpipe" else 1
        reshards = bool(options.get("reshard_after_forward", True))
        return RankPart(choice.function, count, share, reshards, in_flight, passes)


@dataclass(frozen=True)
class MemoryPrediction:
    """What a rank's device holds at most, in bytes by part: those of `Bytes`, then `allocator` and `libraries`.

    capacity  what there is: free now where the device is here, else all of it; 0: unknown
    bounds    names of the parts that are upper bounds: a run may take less
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
        """Tell whether it is not more than there is; what is not known is taken to be enough."""
        return not self.capacity or self.total <= self.capacity


def predicted(demand: Demand, samples: int, rank: RankDevice, part: RankPart | None = None) -> MemoryPrediction:
    """Return what the rank's device holds at most with passes of so many samples.

    ddp adds a bucket for every gradient, which is there all the time. A rank of a pipeline was traced with its layers;
    where it was not, it is taken to have an even part of all. Of fsdp see `_of_shards`.
    Source: Rajbhandari et al., ZeRO, 2020, section 5; Narayanan et al., PipeDream-2BW, 2021 (1F1B); both as written in
    runner/distributed/.
    """
    part = part or RankPart()
    is_pipeline = part.count > 1 and part.strategy == "pipeline"
    of_stage = is_pipeline and bool(demand.stages)
    demand = demand.stages[part.rank] if of_stage else demand
    point = demand.at(samples, part.share)
    sizes = {name: int(vars(point.peak)[name]) for name in PARTS}
    over = max(0, point.reserved - point.peak.total) / max(1, point.peak.total) if rank.is_gpu else 0.0
    if part.count > 1 and part.strategy == "ddp":
        sizes["gradients"] += max(demand.trained, point.peak.gradients)
    elif part.count > 1 and part.strategy == "fsdp":
        sizes |= _of_shards(demand, point, part)
    elif is_pipeline and not of_stage:
        for name in ("parameters", "gradients", "optimizer"):
            sizes[name] = -(-sizes[name] // part.count)
        sizes["activations"] = round(sizes["activations"] * part.in_flight)
        sizes["inputs"] *= part.passes
    tensors = sum(sizes.values())
    return MemoryPrediction(
        {
            **sizes,
            "allocator": round(tensors * ((1 + over) * (1 + rank.unseen) - 1)),
            "libraries": rank.overhead_bytes + (rank.communication_bytes if part.count > 1 else 0),
        },
        rank.capacity_bytes if rank.is_gpu else rank.capacity_bytes // part.count,
        # what is gathered, and gradients before they are cut, are not all there at the same moment
        ("parameters", "gradients") if part.count > 1 and part.strategy == "fsdp" else (),
    )


def _of_shards(demand: Demand, point: TracedPoint, part: RankPart) -> dict[str, int]:
    """Return parameters, gradients and state of a rank whose parts are cut by rows.

    Gathered are what lies outside of blocks, for the whole pass, and of a block itself and what travels; with
    reshards=False all blocks. Before gradients are cut they are there as a whole, for a block or what lies outside, and
    once more to travel; between the passes of an update all of them. Evaluation gathers all parameters and has neither
    gradients nor what a forward pass leaves for the backward pass.

    The most of gradients g(t) / count beside the rest is not above the line between what it is for 0 and for 1.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py, torch 2.13.
    """
    peak, count = point.peak, part.count
    fixed = peak.parameters + peak.optimizer
    rest = peak.total - fixed  # of all at once: with whole gradients, and without
    without = max(point.without, peak.total - peak.gradients) - fixed
    trained = max(demand.trained, peak.gradients)
    if 0 < point.micro_batch_size < part.share:
        most = max(rest, without + trained)
    else:
        most = without + -(-(rest - without) // count)
    gradients = max(-(-trained // count), most - (rest - peak.gradients))
    outside = demand.outside if demand.outside or demand.largest else peak.parameters
    gathered = outside + 2 * demand.largest if part.reshards else peak.parameters + demand.largest
    training = gathered + gradients + outside + 2 * demand.largest
    evaluation = peak.parameters + max(outside, demand.largest)
    gathered += max(0, evaluation - training)
    uneven = demand.rows * (count - 1) // count
    states = -(-peak.optimizer // max(1, peak.parameters))  # tensors like the parameters
    return {
        "parameters": -(-peak.parameters // count) + uneven + gathered,
        "gradients": gradients + uneven + outside + 2 * demand.largest,
        "optimizer": -(-peak.optimizer // count) + states * uneven,
    }


def may_fit(prediction: MemoryPrediction, words: Sequence[str]) -> bool:
    """Tell whether settings could make it fit at their best, before that is traced: what they touch, all gone.

    A half format leaves at least half of what a pass makes, an 8-bit state a quarter of it.
    """
    parts, saved = prediction.parts, 0
    passing = parts["activations"] + parts["inputs"] + parts["temporary"]
    for word in words:
        key = word.partition("=")[0]
        if key == "parallelism":
            return True
        saved += {
            "micro_batch_size": passing,
            "memory": parts["activations"] + parts["temporary"],
            "precision": passing // 2,
            "optimizer": parts["optimizer"] * 3 // 4 + parts["temporary"],
        }.get(key, prediction.total)
    tensors = prediction.total - parts["libraries"] - parts["allocator"]
    return not prediction.capacity or max(0, tensors - saved) + parts["libraries"] <= prediction.capacity


def tensors_within(rank: RankDevice) -> int:
    """Return about how many bytes of tensors the device holds beside libraries and what its allocator adds."""
    share = (1 + rank.unseen) * (1 + ALLOCATOR) if rank.is_gpu else 1.0
    return max(1, int((rank.capacity_bytes - rank.overhead_bytes) / share))


def biggest(demand: Demand, rank: RankDevice, at_most: int, part: RankPart | None = None) -> int:
    """Return the most samples of a pass that fit the device, at most `at_most`; 0 where not even one does."""
    low, high = 0, at_most
    if part is not None and 0 < part.share <= at_most and predicted(demand, part.share, rank, part).fits:
        low = part.share  # all at once take less than a few less in several passes
    while low < high:
        middle = (low + high + 1) // 2
        if predicted(demand, middle, rank, part).fits:
            low = middle
        else:
            high = middle - 1
    return low


def passes_of(share: int, held: int) -> int:
    """Return the micro-batch for a share of which `held` samples fit at once: as few passes as can be, about equal.

    One that divides the share is taken where it costs at most a third more passes: then all have one shape.
    """
    held = max(1, min(held, share))
    steps = -(-share // held)
    divisor = next(size for size in range(held, 0, -1) if share % size == 0)
    return divisor if share // divisor * 3 <= steps * 4 else -(-share // steps)


@dataclass(frozen=True)
class Needs:
    """What the phases of a task take, and what is known of the devices of this machine.

    demands      phase that trains -> what it takes
    corrections  device -> what a probe has measured on it
    why_not      why nothing, or not all, is known; empty where it is
    layout       lines that tell which layers a pipeline puts on which device
    """

    demands: Mapping[str, Demand]
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    why_not: str = ""
    layout: tuple[str, ...] = ()

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Needs:
        """Return what `dataclasses.asdict` made of one, also by way of JSON."""
        return Needs(
            {name: Demand.from_dict(fields) for name, fields in tree["demands"].items()},
            {name: Correction(**fields) for name, fields in tree["corrections"].items()},
            tree["why_not"],
            tuple(tree["layout"]),
        )

    def corrected(self, rank: RankDevice) -> RankDevice:
        """Return the device with what was measured on it."""
        correction = self.corrections.get(rank.name)
        return correction.of(rank) if correction else rank

    def of(self, phase: str | None) -> tuple[Demand, ...]:
        """Return what the phase takes; for None, or a phase that was not traced, what each of them takes."""
        known = self.demands.get(phase or "")
        return (known,) if known else tuple(self.demands.values())

    def held(self, phase: str | None, ranks: Sequence[RankDevice], at_most: int, part: RankPart) -> int:
        """Return the most samples of a pass that every rank's device holds; 0 where one holds not even one."""
        return min(
            biggest(demand, rank, at_most, part.of_rank(number))
            for demand in self.of(phase)
            for number, rank in enumerate(ranks)
        )

    def fits(self, ranks: Sequence[RankDevice], samples: Sequence[int], part: RankPart) -> bool:
        """Tell whether each rank's device holds a pass of so many samples in every phase."""
        return all(
            predicted(demand, size, rank, part.of_rank(number)).fits
            for demand in self.demands.values()
            for number, (rank, size) in enumerate(zip(ranks, samples, strict=True))
        )

    def worst(self, samples: int) -> Demand:
        """Return that of the phase that takes most."""
        return max(self.demands.values(), key=lambda demand: demand.at(samples).peak.total)


@dataclass(frozen=True)
class RankMemory:
    """What is predicted for a rank in a phase, with passes of so many samples.

    is_exact  the trace it rests on is equal to a run on a CPU
    """

    phase: str
    rank: int
    samples: int
    prediction: MemoryPrediction
    is_exact: bool = True

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> RankMemory:
        """Return what `dataclasses.asdict` made of one, also by way of JSON."""
        told = tree["prediction"]
        return RankMemory(**{**tree, "prediction": MemoryPrediction(**{**told, "bounds": tuple(told["bounds"])})})
