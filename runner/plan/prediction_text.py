"""Format the prediction for a run: memory by part, the largest micro-batch, memory by layer, and update time."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from runner.base.division import Batch
from runner.base.text import format_bytes, format_table
from runner.plan.cuda_allocator import Allocator
from runner.plan.estimate import DevicePeaks, Seconds, peaks_of, update_seconds
from runner.plan.memory_fit import Demand, MemoryPrediction, Needs, RankMemory, biggest, passes_of
from runner.plan.run_plan import PhasePlan, Plan, part_of

WIDTH = 80  # columns
COLUMNS = 5  # kinds of ranks side by side
MOST = 1_000_000  # samples; upper limit of the search


@dataclass(frozen=True)
class FittingChange:
    """Settings with which a run would fit, their peak memory, and the estimated slow-down."""

    words: tuple[str, ...]
    bytes: int
    factor: float | None

    def __str__(self) -> str:
        time = "unknown" if self.factor is None else f"x {self.factor:.2f}"
        return f"{format_bytes(self.bytes):>9}  {time:>7}  {' '.join(self.words)}"


def peaks_of_ranks(plan: Plan, profiles: Sequence[Mapping[str, Any]]) -> dict[str, DevicePeaks]:
    """Return the peak rates of each device of the plan by name, in the plan's precision."""
    precision = plan.choices["precision"].name
    return {name: peaks_of(name, precision, profiles) for name in {rank.name for rank in plan.ranks}}


def sheet(
    plan: Plan,
    needs: Needs,
    peaks: Mapping[str, DevicePeaks],
    changes: Sequence[FittingChange] = (),
    untried: Sequence[tuple[str, ...]] = (),
) -> list[str]:
    """Return the lines about memory and time.

    peaks    device -> its peak rates
    changes  settings that would make the run fit; untried: settings for which there was no time
    """
    if not plan.memory:
        why = needs.why_not or "no phase trains"
        return _wrapped("memory", f"not predicted: {why}; accel-run plan --probe measures it here")
    lines: list[str] = []
    phases = [phase for phase in plan.selected if phase.name in needs.demands]
    for phase in phases:
        demand, of_ranks = needs.demands[phase.name], [each for each in plan.memory if each.phase == phase.name]
        lines += [""] if lines else []
        lines += [f"phase {phase.name}"] if len(phases) > 1 else []
        lines += _parts(plan, of_ranks)
        lines += _more(plan, phase, demand, of_ranks)
        lines += _layers(demand, of_ranks)
        lines += _time(plan, phase, demand, peaks)
    if changes:
        lines += ["", "settings that would fit, fastest first (peak memory and time are estimates):"]
        lines += [f"{'peak':>9}  {'time':>7}  overrides", *map(str, changes)]
    elif not all(each.prediction.fits for each in plan.memory):
        lines += ["", *_wrapped("advice", "no setting that was tried fits: use a smaller model or more memory")]
    if untried:
        lines += _wrapped("not tried", f"{', '.join(map(' '.join, untried))}: tracing them would take too long")
    lines += [""]
    lines += [line for said in _assumed(plan, needs) for line in _wrapped("", said)]
    return lines


def short(memory: Sequence[RankMemory]) -> list[str]:
    """Return a line per kind of rank for its most demanding phase: for the report at the start of a run."""
    worst: dict[int, RankMemory] = {}
    for each in memory:
        if each.rank not in worst or each.prediction.total > worst[each.rank].prediction.total:
            worst[each.rank] = each
    lines = []
    for of_ranks in _alike(list(worst.values())):
        parts = of_ranks[0].prediction.parts
        model = sum(parts[name] for name in ("parameters", "buffers", "gradients", "optimizer"))
        passing = sum(parts[name] for name in ("activations", "inputs", "temporary"))
        rest = parts["allocator"] + parts["libraries"]
        known = (
            f"model {format_bytes(model)}, pass {format_bytes(passing)}, allocator and libraries {format_bytes(rest)}"
        )
        lines.append(f"{_ranks(of_ranks)}: {_verdict(of_ranks[0])} ({known})")
    return lines


def _parts(plan: Plan, of_ranks: Sequence[RankMemory]) -> list[str]:
    """Return the table of memory by part, with a column per kind of rank."""
    kinds = _alike(of_ranks)
    shown = kinds if len(kinds) <= COLUMNS else sorted(kinds, key=lambda kind: _room(kind[0]))[:COLUMNS]
    rows = [("memory".ljust(_NAME), *(_devices(plan, kind) for kind in shown))]
    rows += [
        (name, *(_part(kind[0].prediction, name) for kind in shown))
        for name in of_ranks[0].prediction.parts
        if any(kind[0].prediction.parts[name] for kind in kinds)
    ]
    rows.append(("predicted", *(format_bytes(kind[0].prediction.total) for kind in shown)))
    rows.append(("available", *(_sized(kind[0].prediction.capacity) for kind in shown)))
    rows.append(("", *(_fits(kind[0]) for kind in shown)))
    if len(shown) < len(kinds):
        rows.append((f"{'':<{_NAME}}  the ones with the least free memory, of {len(kinds)} kinds of ranks",))
    return format_table(rows, "<>")


def _more(plan: Plan, phase: PhasePlan, demand: Demand, of_ranks: Sequence[RankMemory]) -> list[str]:
    """Return the largest micro-batch that fits each kind of rank, and the recommended one if the share does not fit."""
    part = part_of(plan.choices["parallelism"], phase)
    found, fit = [], MOST
    for kind in _alike(of_ranks):
        if not kind[0].prediction.capacity:
            continue
        most = biggest(demand, plan.ranks[kind[0].rank], MOST, part.of_rank(kind[0].rank))
        fit = min(fit, most)
        about = "" if demand.is_traced_at(most) or not most else "about "
        beyond = "more than " if most == MOST else about
        found.append(f"{beyond}{most:,} on {_ranks(kind)} (this run: {kind[0].samples:,})")
    if not found:
        return []
    lines = _wrapped("micro-batch", "largest that fits: " + ", ".join(found))
    share = max(phase.batch.shares)
    advised = passes_of(share, fit)
    if 0 < fit < share and advised < fit:
        steps = -(-share // advised)
        even = "of equal size" if share % advised == 0 else "of about equal size"
        said = f"{advised:,}" if may_be_set(plan, phase.batch, advised) else "micro_batch_size=auto"
        lines += _wrapped(" ", f"recommended: {said} ({share:,} samples in {steps:,} micro-batches {even})")
    return lines


def may_be_set(plan: Plan, batch: Batch, micro_batch_size: int) -> bool:
    """Return whether the user may set this size: on one rank, only auto selects sizes that do not divide the batch."""
    is_alone = plan.choices["parallelism"].function == "single"
    return not is_alone or batch.global_batch_size % micro_batch_size == 0


def _layers(demand: Demand, of_ranks: Sequence[RankMemory]) -> list[str]:
    """Return which layers hold the activations."""
    if not demand.kept:
        return []
    named = [f"{layer.name or 'the model itself'} {layer.activations / demand.kept:.0%}" for layer in demand.layers]
    return _wrapped("activations", "held by " + ", ".join(named))


def _time(plan: Plan, phase: PhasePlan, demand: Demand, peaks: Mapping[str, DevicePeaks]) -> list[str]:
    """Return the estimated time of an update: that of its slowest rank."""
    found = seconds_of(plan, phase, demand, peaks)
    if found is None:
        unknown = next((rank.name for rank in plan.ranks if not _peaks(peaks, rank.name).is_known), "")
        return _wrapped(
            "update time", f"not estimated: no hardware profile lists {unknown}; accel-run plan --probe measures it"
        )
    rate = phase.batch.global_batch_size / found.middle
    return _wrapped("update time", f"about {found}, {rate:,.3g} samples/s (estimate: {found.how})")


def seconds_of(plan: Plan, phase: PhasePlan, demand: Demand, peaks: Mapping[str, DevicePeaks]) -> Seconds | None:
    """Return the estimated time of an update on the slowest rank; None if the peaks of a rank are unknown."""
    slowest: Seconds | None = None
    for number, rank in enumerate(plan.ranks):
        share = phase.batch.shares[number] if phase.batch.stages == 1 else phase.batch.global_batch_size
        whole, rest = divmod(share, max(1, min(share, phase.batch.micro_batch_size)))
        passes = [min(share, phase.batch.micro_batch_size)] * whole + ([rest] if rest else [])
        launches = rank.is_gpu and plan.choices["compile"].name == "off"
        found = update_seconds(demand, passes, _peaks(peaks, rank.name), launches=launches)
        if found is None:
            return None
        if phase.batch.stages > 1:  # each rank has some layers of every pass
            found = Seconds(found.low / phase.batch.stages, found.high / phase.batch.stages, found.how)
        slowest = found if slowest is None or found.middle > slowest.middle else slowest
    return slowest


def _assumed(plan: Plan, needs: Needs) -> list[str]:
    """Return the assumptions behind the figures."""
    said = []
    is_traced = all(demand.is_exact for demand in needs.demands.values())
    how = "Traced on fake tensors" if is_traced else "Not everything could be traced, see below"
    if any(rank.is_gpu for rank in plan.ranks):
        kernel = plan.choices["attention"].name
        scores = "stores its scores, as attention=math does" if kernel == "math" else "stores no scores"
        said.append(f"{how}; the CUDA caching allocator is modelled, library memory is estimated;")
        said[-1] += f" attention {scores}."
    else:
        said.append(f"{how}, with CPU allocation sizes; library memory is estimated.")
    if any(each.prediction.bounds for each in plan.memory):
        said[-1] += (
            " Parameters and gradients of fsdp are upper bounds: gathered parameters and reduced gradients do not peak"
            " at the same time."
        )
        if any(phase.batch.accumulation_steps > 1 for phase in plan.selected):
            said[-1] += (
                " Each rank holds unsharded gradients between the micro-batches of an update: they are reduced once,"
                " after the last. With one micro-batch per update and rank, gradients stay sharded."
            )
    said[-1] += " The time estimate ignores communication between ranks and data loading."
    if plan.choices["compile"].name != "off":
        name = plan.choices["compile"].name
        said.append(f"Traced without compile={name}, which usually needs less memory and launches fewer kernels.")
    why = [needs.why_not, *(demand.why_not for demand in needs.demands.values())]
    if not Allocator.of(plan.choices["memory"].options.get("allocator")).is_known:
        why.append("PyTorch's native allocator is modelled, not cudaMallocAsync")
    is_pipeline = plan.choices["parallelism"].function == "pipeline" and plan.world_size > 1
    if is_pipeline and not all(demand.stages for demand in needs.demands.values()):
        why.append("each rank of this pipeline is assumed to hold an equal part of the model, without send buffers")
    return said + [f"NOT EXACT: {each}" for each in dict.fromkeys(why) if each]


def _alike(of_ranks: Sequence[RankMemory]) -> list[list[RankMemory]]:
    """Group neighboring ranks with equal predictions."""
    return [list(kind) for _, kind in groupby(of_ranks, key=lambda each: (each.prediction, each.samples))]


def _ranks(kind: Sequence[RankMemory]) -> str:
    first, last = kind[0].rank, kind[-1].rank
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _devices(plan: Plan, kind: Sequence[RankMemory]) -> str:
    return plan.ranks[kind[0].rank].device if len(kind) == 1 else _ranks(kind)


def _room(each: RankMemory) -> int:
    return each.prediction.capacity - each.prediction.total


def _fits(each: RankMemory) -> str:
    return ("fits" if each.is_exact else "may fit, not exact") if each.prediction.fits else "DOES NOT FIT"


def _verdict(each: RankMemory) -> str:
    total, capacity = each.prediction.total, each.prediction.capacity
    of = f" of {format_bytes(capacity)}" if capacity else ""
    return f"{format_bytes(total)}{of} predicted" + ("" if each.prediction.fits else ": DOES NOT FIT")


def _part(prediction: MemoryPrediction, name: str) -> str:
    bound = "up to " if name in prediction.bounds and prediction.parts[name] else ""
    return bound + format_bytes(prediction.parts[name])


def _sized(size: int) -> str:
    return format_bytes(size) if size else "unknown"


def _peaks(peaks: Mapping[str, DevicePeaks], name: str) -> DevicePeaks:
    return peaks.get(name, DevicePeaks())


def _wrapped(name: str, text: str) -> list[str]:
    lead = f"{name:<{_NAME}}  " if name else ""
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False)


_NAME = 12  # letters of the name of a part of the memory
