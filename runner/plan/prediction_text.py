"""Format the prediction for a run: memory by part, the largest micro-batch, memory by layer, and update time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from runner.base.text import format_bytes, format_rate, format_table
from runner.plan.cuda_allocator import AllocatorSettings
from runner.plan.memory_fit import (
    Demand,
    MemoryNeeds,
    MemoryPrediction,
    RankMemory,
    choose_micro_batch_size,
    largest_micro_batch,
)
from runner.plan.run_plan import PhasePlan, Plan, rank_part
from runner.plan.update_time import LOADING, DeviceRates, format_seconds, predict_phase_time
from runner.workload.division import Batch

MAX_COLUMNS = 5  # maximum number of groups of equal ranks side by side
MAX_SAMPLES = 1_000_000  # upper limit of the search for the largest micro-batch


@dataclass(frozen=True)
class FittingChange:
    """Settings with which a run would fit, their peak memory, and the estimated slow-down."""

    overrides: tuple[str, ...]
    bytes: int
    factor: float | None

    def __str__(self) -> str:
        time = "unknown" if self.factor is None else f"x {self.factor:.2f}"
        return f"{format_bytes(self.bytes):>9}  {time:>7}  {' '.join(self.overrides)}"


def format_prediction(
    plan: Plan,
    needs: MemoryNeeds,
    rates: Mapping[str, DeviceRates],
    changes: Sequence[FittingChange] = (),
    untried: Sequence[tuple[str, ...]] = (),
) -> list[str]:
    """Return the lines about memory and time.

    rates    device -> its rates
    changes  settings that would make the run fit; untried: settings for which there was no time
    """
    if not plan.memory:
        why = needs.why_not or "no phase trains"
        return [_format_row("memory", f"not predicted: {why}; the summary of a run shows the measured peak")]
    lines: list[str] = []
    phases = [phase for phase in plan.selected if phase.name in needs.demands]
    for phase in phases:
        demand, memories = needs.demands[phase.name], [memory for memory in plan.memory if memory.phase == phase.name]
        lines += [""] if lines else []
        lines += [f"phase {phase.name}"] if len(phases) > 1 else []
        lines += _format_parts(plan, memories)
        lines += _format_micro_batches(plan, phase, demand, memories)
        lines += _format_layers(demand, memories)
        lines += _format_time(plan, phase, demand, rates)
    if changes:
        lines += ["", "settings that would fit, fastest first (peak memory and time are estimates):"]
        lines += [f"{'peak':>9}  {'time':>7}  overrides", *map(str, changes)]
    elif not all(memory.prediction.fits for memory in plan.memory):
        lines += [
            "",
            _format_row("advice", "none of the settings that were tried is enough: use a smaller model or more memory"),
        ]
    if untried:
        lines += [_format_row("not tried", f"{', '.join(map(' '.join, untried))}: tracing them would take too long")]
    return [*lines, "", *_list_assumptions(plan, needs)]


def summarize_memory(memories: Sequence[RankMemory]) -> list[str]:
    """Return a line per group of equal ranks about its most demanding phase, for the report at the start of a run."""
    worst: dict[int, RankMemory] = {}
    for memory in memories:
        if memory.rank not in worst or memory.prediction.total > worst[memory.rank].prediction.total:
            worst[memory.rank] = memory
    lines = []
    for kind in _group_ranks(list(worst.values())):
        parts = kind[0].prediction.parts
        model = sum(parts[name] for name in ("parameters", "buffers", "gradients", "optimizer"))
        passing = sum(parts[name] for name in ("activations", "inputs", "temporary"))
        rest = parts["allocator"] + parts["libraries"]
        summary = (
            f"model {format_bytes(model)}, forward and backward pass {format_bytes(passing)}, allocator and libraries"
            f" {format_bytes(rest)}"
        )
        lines.append(f"{_format_ranks(kind)}: {_format_verdict(kind[0])} ({summary})")
    return lines


def _format_parts(plan: Plan, memories: Sequence[RankMemory]) -> list[str]:
    kinds = _group_ranks(memories)
    shown = kinds if len(kinds) <= MAX_COLUMNS else sorted(kinds, key=lambda kind: _free_bytes(kind[0]))[:MAX_COLUMNS]
    rows = [("memory".ljust(_NAME_WIDTH), *(_format_devices(plan, kind) for kind in shown))]
    rows += [
        (name, *(_format_part(kind[0].prediction, name) for kind in shown))
        for name in memories[0].prediction.parts
        if any(kind[0].prediction.parts[name] for kind in kinds)
    ]
    rows.append(("predicted", *(format_bytes(kind[0].prediction.total) for kind in shown)))
    rows.append(("available", *(_format_size(kind[0].prediction.capacity) for kind in shown)))
    rows.append(("", *(_format_fit(kind[0]) for kind in shown)))
    if len(shown) < len(kinds):
        rows.append(
            (f"{'':<{_NAME_WIDTH}}  the {len(shown)} of {len(kinds)} groups of ranks with the least free memory",)
        )
    return format_table(rows, "<>")


def _format_micro_batches(plan: Plan, phase: PhasePlan, demand: Demand, memories: Sequence[RankMemory]) -> list[str]:
    part = rank_part(plan.choices["parallelism"], phase)
    limits, fit = [], MAX_SAMPLES
    for kind in _group_ranks(memories):
        if not kind[0].prediction.capacity:
            continue
        most = largest_micro_batch(demand, plan.ranks[kind[0].rank], MAX_SAMPLES, part.for_rank(kind[0].rank))
        fit = min(fit, most)
        about = "" if demand.is_traced_at(most) or not most else "about "
        beyond = "more than " if most == MAX_SAMPLES else about
        limits.append(f"{beyond}{most:,} on {_format_ranks(kind)} (this run: {kind[0].samples:,})")
    if not limits:
        return []
    lines = [_format_row("micro-batch", "largest that fits: " + ", ".join(limits))]
    share = max(phase.batch.shares)
    size = choose_micro_batch_size(share, fit)
    if 0 < fit < share and size < fit:
        steps = -(-share // size)
        even = "of equal size" if share % size == 0 else "of about equal size"
        is_given = is_settable(plan, phase.batch, size)
        setting = f"{size:,}" if is_given else format_size_setting(plan, phase.batch, size)
        lines += [_format_row("", f"recommended: {setting} ({share:,} samples in {steps:,} micro-batches {even})")]
    return lines


def format_size_setting(plan: Plan, batch: Batch, micro_batch_size: int) -> str:
    """Return the setting with which the plan uses this micro-batch size."""
    if is_settable(plan, batch, micro_batch_size):
        return f"micro_batch_size={micro_batch_size}"
    return "micro_batch_size=auto" if plan.ranks[0].is_gpu else f"cpu_micro_batch_size={micro_batch_size}"


def is_settable(plan: Plan, batch: Batch, micro_batch_size: int) -> bool:
    """Return whether the user may set this size: on one rank, only auto may use one that does not divide the batch."""
    is_alone = plan.choices["parallelism"].uses("single")
    return not is_alone or batch.global_batch_size % micro_batch_size == 0


def _format_layers(demand: Demand, memories: Sequence[RankMemory]) -> list[str]:
    if not demand.activation_bytes:
        return []
    shares = [
        f"{layer.name or 'the model itself'} {layer.activations / demand.activation_bytes:.0%}"
        for layer in demand.layers
    ]
    return [_format_row("by layer", ", ".join(shares) + " of the activations")]


def _format_time(plan: Plan, phase: PhasePlan, demand: Demand, rates: Mapping[str, DeviceRates]) -> list[str]:
    if phase.kind == "fit":  # the dtypes of its operators, such as float64, have no known rates
        return []
    time = predict_phase_time(plan, phase, demand, rates)
    if time is None:
        unknown = (rank.name for rank in plan.ranks if not rates.get(rank.name, DeviceRates()).is_known)
        name = next(unknown, "")
        why = f"no hardware profile lists {name}" if name else "the operators are unknown"
        return [_format_row("update time", f"not predicted: {why}")]
    rate = (
        f"{format_rate(phase.batch.global_batch_size / time.seconds)} samples/s{'' if time.is_complete else ' at most'}"
    )
    lines = [_format_row("update time", f"{time}, {rate}")]
    for part in time.parts:
        seconds = "unknown" if part.seconds is None else format_seconds(part.seconds)
        lines += [_format_row(f"{seconds:>{_NAME_WIDTH}}", f"{part.name}: {part.how}")]
    without = "" if any(part.name == LOADING for part in time.parts) else "without data loading; "
    return [*lines, _format_row("", f"{without}sources and accuracy: docs/update-time.md")]


def _list_assumptions(plan: Plan, needs: MemoryNeeds) -> list[str]:
    assumptions = []
    is_traced = all(demand.is_exact for demand in needs.demands.values())
    how = "Traced on fake tensors;" if is_traced else "Not everything could be traced (see below);"
    if any(rank.is_gpu for rank in plan.ranks):
        kernel = plan.choices["attention"].name
        scores = "stores its scores, as attention=math does" if kernel == "math" else "stores no scores"
        assumptions.append(f"{how} the CUDA caching allocator is modeled, library memory is estimated;")
        assumptions[-1] += f" attention {scores}."
    else:
        assumptions.append(f"{how} allocation sizes are those of a CPU, library memory is estimated.")
    if any(memory.prediction.bounds for memory in plan.memory):
        assumptions[-1] += (
            " Parameters and gradients of fsdp are upper bounds: gathered parameters and reduced gradients do not peak"
            " at the same time."
        )
    if not plan.choices["compile"].uses("off"):
        name = plan.choices["compile"].name
        assumptions.append(
            f"Traced without compile={name}, which usually needs less memory and launches fewer kernels."
        )
    why = [needs.why_not, *(demand.why_not for demand in needs.demands.values())]
    if not AllocatorSettings.parse(plan.choices["memory"].options.get("allocator")).is_modelled:
        why.append("the prediction models PyTorch's native allocator, and ignores some settings of memory.allocator")
    is_pipeline = plan.choices["parallelism"].uses("pipeline") and plan.world_size > 1
    if is_pipeline and not all(demand.stages for demand in needs.demands.values()):
        why.append("each rank of this pipeline is assumed to hold an equal part of the model, without send buffers")
    return assumptions + [f"NOT EXACT: {reason}" for reason in dict.fromkeys(why) if reason]


def _group_ranks(memories: Sequence[RankMemory]) -> list[list[RankMemory]]:
    return [list(kind) for _, kind in groupby(memories, key=lambda memory: (memory.prediction, memory.samples))]


def _format_ranks(kind: Sequence[RankMemory]) -> str:
    first, last = kind[0].rank, kind[-1].rank
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _format_devices(plan: Plan, kind: Sequence[RankMemory]) -> str:
    return plan.ranks[kind[0].rank].device if len(kind) == 1 else _format_ranks(kind)


def _free_bytes(memory: RankMemory) -> int:
    return memory.prediction.capacity - memory.prediction.total


def _format_fit(memory: RankMemory) -> str:
    return ("fits" if memory.is_exact else "may fit, not exact") if memory.prediction.fits else "DOES NOT FIT"


def _format_verdict(memory: RankMemory) -> str:
    total, capacity = memory.prediction.total, memory.prediction.capacity
    of = f" of {format_bytes(capacity)}" if capacity else ""
    return f"{format_bytes(total)}{of} predicted" + ("" if memory.prediction.fits else ": DOES NOT FIT")


def _format_part(prediction: MemoryPrediction, name: str) -> str:
    bound = "up to " if name in prediction.bounds and prediction.parts[name] else ""
    return bound + format_bytes(prediction.parts[name])


def _format_size(size: int) -> str:
    return format_bytes(size) if size else "unknown"


def _format_row(name: str, text: str) -> str:
    return f"{name:<{_NAME_WIDTH}}  {text}"


_NAME_WIDTH = 12
