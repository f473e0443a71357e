"""Trace the memory demand of training at the micro-batch sizes that decide whether it fits.

These sizes are a rank's full share of the batch or, if that does not fit, the largest micro-batch that does.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, pairwise, starmap
from pathlib import Path

from runner.base.errors import AccelRunError, ConfigError, SystemLimit, TaskFault
from runner.base.text import first_line
from runner.config.configuration import Configuration
from runner.config.options import task_source
from runner.engine.contract.task_loading import task_errors
from runner.forecast.memory_forecast import Forecast, min_batch_size
from runner.host.subprocesses import Subprocess, run_in_subprocess
from runner.plan.cuda_allocator import AllocatorSettings
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import Demand, MemoryNeeds
from runner.plan.memory_trace import Traced
from runner.plan.planner import make_plan
from runner.plan.planning_rules import decide_stages
from runner.plan.rank_devices import RankDevice, copy_sizes
from runner.plan.run_plan import Plan

PhaseSize = tuple[str, int]  # name of a phase, and a micro-batch size
Part = tuple[int, tuple[str, ...]]  # micro-batch size, and names of phases that are traced with it
PlanWith = Callable[..., Plan]  # make_plan with the devices of the run
MAX_ROUNDS = 5  # rounds of traces at sizes that earlier traces predict to fit


def trace_memory_needs(
    configuration: Configuration,
    inventory: Inventory,
    ranks: Sequence[RankDevice] | None = None,
    *,
    alternatives: bool = False,
    on_wait: Callable[[], object] | None = None,
) -> MemoryNeeds:
    """Call `predict_needs` in a subprocess, so that a crash during tracing does not end this process.

    on_wait  called once if the subprocess takes longer than NOTIFY_AFTER_S of runner.host.subprocesses
    Raises the exceptions of the task.
    """
    try:
        cores = inventory.cpu.physical_cores
        return run_in_subprocess(predict_needs, configuration, inventory, alternatives, ranks, cores, on_wait=on_wait)
    except BrokenProcessPool:
        return MemoryNeeds({}, why_not="the tracing process crashed")


def predict_needs(
    configuration: Configuration,
    inventory: Inventory,
    alternatives: bool = False,
    ranks: Sequence[RankDevice] | None = None,
    num_processes: int = 1,
) -> MemoryNeeds:
    """Return the memory demand of every phase on the devices of the inventory.

    The full share of a rank is traced first. If it does not fit, a micro-batch of one sample is traced too, so that
    other sizes can be interpolated. Then sizes that are predicted to fit are traced, until a trace confirms one.

    alternatives  always trace a second size, so that larger ones can be suggested; if the run does not fit, also trace
                  sizes that do, because the memory that a GPU's allocator reserves is not linear in the size
    ranks         as in `make_plan`
    num_processes  number of traces that may run at the same time, in forks of this process
    Raises the exceptions of the task.
    """
    plan_with = partial(make_plan, inventory=inventory, ranks=ranks)
    plan = plan_with(configuration, needs=MemoryNeeds({}))
    file = plan.task_file
    try:
        with (
            task_errors(
                task_source(plan.choices["task"].name, Path(file) if file else None), "tracing the memory of the model"
            ),
            Forecast(_with_auto_sizes(configuration), inventory, ranks) as forecast,
        ):
            if _is_pipeline(plan) and not forecast.has_budget:
                staged = _trace_pipelines(configuration, plan_with, plan, MemoryNeeds({}), alternatives=alternatives)
                if staged.demands:
                    return staged
            allocator = AllocatorSettings.parse(plan.choices["memory"].options.get("allocator"))
            tracer = _Tracer(forecast, allocator, num_processes)
            forecast.build()
            least = {(phase.name, forecast.least) for phase in forecast.phases}
            tracer.trace(_deciding_sizes(plan) | least if alternatives else _deciding_sizes(plan))

            def next_sizes() -> set[PhaseSize]:
                needs = MemoryNeeds(tracer.demands())
                planned = plan_with(configuration, needs=needs)
                return sizes_to_trace(planned, configuration, plan_with, needs, alternatives=alternatives)

            if not next_sizes() <= tracer.traced:
                tracer.trace(least)
            for _ in range(MAX_ROUNDS):
                if not tracer.trace(next_sizes()):
                    break
            single = MemoryNeeds(tracer.demands())
            plan = plan_with(configuration, needs=single)
            return (
                _trace_pipelines(configuration, plan_with, plan, single, alternatives=alternatives)
                if _is_pipeline(plan)
                else single
            )
    except (ConfigError, TaskFault):
        raise
    except Exception as error:  # for example missing data, or an operation that fake tensors do not support
        why = error.problems[0].what if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
        return MemoryNeeds({}, first_line(why))


def _fits(plan: Plan) -> bool:
    return all(memory.prediction.fits for memory in plan.memory)


def _is_pipeline(plan: Plan) -> bool:
    return plan.choices["parallelism"].uses("pipeline") and plan.world_size > 1


def _trace_pipelines(
    configuration: Configuration, plan_with: PlanWith, plan: Plan, single: MemoryNeeds, *, alternatives: bool
) -> MemoryNeeds:
    """Return the result of `_trace_pipeline`; with stages=auto, the results for each possible number of stages.

    A number of stages that cannot be traced is omitted, because its memory is unknown, unless none can be traced. With
    stages=auto, the demand of the phases is that with the chosen number of stages.
    Raises the exceptions of `_trace_pipeline`, but ConfigError only if no number of stages is possible.
    """
    choice, for_auto = configuration.choices["parallelism"], configuration.for_auto
    requested = choice.options.get("stages", for_auto.get("parallelism.stages", "auto"))
    chosen = plan.choices["parallelism"]
    decided = decide_stages(chosen.options["split"], configuration.choices["memory"], plan.ranks)
    if requested != "auto" or decided is not None:
        return _trace_pipeline(configuration, plan_with, plan, single, alternatives=alternatives)
    by_stages: dict[int, MemoryNeeds] = {}
    untraced: dict[int, MemoryNeeds] = {}
    problem = None
    for stages in copy_sizes(plan.world_size):
        fixed = dataclasses.replace(chosen, options={**chosen.options, "stages": stages})
        settings = dataclasses.replace(configuration, choices={**configuration.choices, "parallelism": fixed})
        try:
            planned = plan_with(settings, needs=single)
            needs = _trace_pipeline(settings, plan_with, planned, single, alternatives=alternatives)
            (by_stages if needs.has_stages else untraced)[stages] = needs
        except ConfigError as error:  # more pipelines than samples, too few layers, or layers that do not fit
            problem = error
    if not by_stages and untraced:  # as if this number were requested
        by_stages[max(untraced)] = untraced[max(untraced)]
    if problem is not None and not by_stages:
        raise problem
    by_stages = _with_one_reading_time(by_stages)
    needs = dataclasses.replace(by_stages[max(by_stages)], by_stages=by_stages)
    used = by_stages.get(plan_with(configuration, needs=needs).batch.stages)
    return dataclasses.replace(used, by_stages=by_stages) if used else needs


def _with_one_reading_time(by_stages: Mapping[int, MemoryNeeds]) -> dict[int, MemoryNeeds]:
    """Return all needs with the reading times of the first, so that their predicted times can be compared."""
    measured = next(iter(by_stages.values())).demands
    return {
        stages: dataclasses.replace(
            needs,
            demands={
                name: dataclasses.replace(demand, read_s=measured[name].read_s)
                for name, demand in needs.demands.items()
            },
        )
        for stages, needs in by_stages.items()
    }


def _trace_pipeline(
    configuration: Configuration, plan_with: PlanWith, plan: Plan, single: MemoryNeeds, *, alternatives: bool
) -> MemoryNeeds:
    """Return `single` with the demand of each pipeline stage and the assignment of layers.

    The planned micro-batch size is halved until the layers can be split, and then traced, followed by sizes that are
    predicted to fit. If a stage cannot be traced, only the assignment is returned.
    Raises ConfigError if there is no split, and TaskFault if the task does not define its layers.
    """
    from runner.forecast.stage_memory import StagePrediction  # imports torch's pipelines, which is slow

    allocator = AllocatorSettings.parse(plan.choices["memory"].options.get("allocator"))
    traces: dict[str, list[list[Traced]]] = {}  # phase -> rank -> one trace per size
    done: set[PhaseSize] = set()
    why_not = ""

    def make_needs(layout: str) -> MemoryNeeds:
        demands = dict(single.demands)
        for name, rank_traces in traces.items():
            stages = tuple(Demand.from_traces(sizes, allocator) for sizes in rank_traces)
            demands[name] = (
                dataclasses.replace(demands[name], stages=stages) if name in demands else Demand.from_stages(stages)
            )
        if why_not:
            demands = {name: dataclasses.replace(demand, why_not=why_not) for name, demand in demands.items()}
        return dataclasses.replace(single, demands=demands, layout=tuple(layout.splitlines()))

    with StagePrediction(plan) as staged:
        phases = {phase.name: phase for phase in staged.phases}

        def trace(sizes: Iterable[PhaseSize]) -> bool:
            new = sorted((name, size) for name, size in set(sizes) - done if name in phases)
            done.update(new)
            for name, size in new:
                for rank, traced in enumerate(staged.trace(phases[name], size)):
                    traces.setdefault(name, [[] for _ in range(staged.count)])[rank].append(traced)
            return bool(new)

        size = _largest(plan)
        is_free = all(phase.micro_batch_size == "auto" for phase in configuration.phases)
        while True:
            try:
                layout = str(staged.plan_placement(size))
                break
            except ConfigError:
                if not is_free or size == 1:
                    raise
                size //= 2
        try:
            trace((name, size) for name in phases)
            if (is_free or alternatives) and not _fits(plan_with(configuration, needs=make_needs(layout))):
                trace((name, min_batch_size(staged.parts.bare)) for name in phases)
            for _ in range(MAX_ROUNDS):
                needs = make_needs(layout)
                planned = plan_with(configuration, needs=needs)
                size = _largest(planned)
                if not trace(sizes_to_trace(planned, configuration, plan_with, needs, alternatives=alternatives)):
                    break
        except ConfigError:
            raise
        except Exception as error:  # not traceable: the plan marks the numbers as estimates
            traces.clear()
            why_not = f"the stages could not be traced: {first_line(f'{type(error).__name__}: {error}')}"
        return make_needs(str(staged.plan_placement(size)))


def _with_auto_sizes(configuration: Configuration) -> Configuration:
    settings = dataclasses.replace(configuration.settings, micro_batch_size="auto")
    phases = tuple(dataclasses.replace(phase, micro_batch_size="auto") for phase in configuration.phases)
    return dataclasses.replace(configuration, settings=settings, phases=phases)


class _Tracer:
    """Traces each phase and size once, and keeps the traces by phase."""

    def __init__(self, forecast: Forecast, allocator: AllocatorSettings, num_processes: int) -> None:
        self.forecast, self.allocator, self.num_processes = forecast, allocator, num_processes
        self.traces: dict[str, list[Traced]] = defaultdict(list)
        self.traced: set[PhaseSize] = set()

    def trace(self, sizes: set[PhaseSize]) -> bool:
        """Trace the sizes that have not been traced yet, and return whether there were any."""
        new = {(name, max(size, self.forecast.least)) for name, size in sizes} - self.traced
        self.traced |= new | sizes
        for traced in self._trace(_parts(new, by_size=self.forecast.has_budget)):
            self.traces[traced.phase].append(traced)
            self.traced.add((traced.phase, traced.micro_batch_size))  # memory=budget traces more than requested
        return bool(new)

    def _trace(self, parts: Sequence[Part]) -> Iterator[Traced]:
        """Trace the first share of the parts in this process, and the others in forks of it."""
        num_shares = max(1, min(self.num_processes, len(parts))) if self.forecast.can_fork else 1
        limits = [len(parts) * number // num_shares for number in range(num_shares + 1)]
        first, *others = (parts[start:end] for start, end in pairwise(limits))
        with ExitStack() as stack:
            forks = [self._fork(share, stack) for share in others]
            yield from chain.from_iterable(starmap(self.forecast.trace, first))
            for fork, share in zip(forks, others, strict=True):
                traced = None
                if fork is not None:
                    with suppress(BrokenProcessPool):  # for example killed because memory ran out
                        traced = fork.result()
                yield from chain.from_iterable(starmap(self.forecast.trace, share) if traced is None else traced)

    def _fork(self, share: Sequence[Part], stack: ExitStack) -> Subprocess[list[list[Traced]] | None] | None:
        """Start tracing in a fork until the stack is closed; return None if a limit forbids another process."""
        try:
            return stack.enter_context(Subprocess(self.forecast.trace_in_fork, share))
        except SystemLimit:
            return None

    def demands(self) -> dict[str, Demand]:
        return {phase: Demand.from_traces(traces, self.allocator) for phase, traces in self.traces.items()}


def _parts(sizes: set[PhaseSize], *, by_size: bool) -> list[Part]:
    """Return arguments for `Forecast.trace`; those with the same size are adjacent: their traces share results."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, size in sorted(sizes):
        names[size].append(name)
    whole = [(size, tuple(names[size])) for size in sorted(names, reverse=True)]
    return whole if by_size else [(size, (name,)) for size, phases in whole for name in phases]


def sizes_to_trace(
    plan: Plan, configuration: Configuration, plan_with: PlanWith, needs: MemoryNeeds, *, alternatives: bool
) -> set[PhaseSize]:
    """Return the planned sizes of each phase; with `alternatives`, also sizes that fit if the planned ones do not.

    plan_with  makes the plan of a configuration with the memory needs
    """
    if not alternatives or _fits(plan):
        return _deciding_sizes(plan)
    return _deciding_sizes(plan) | _deciding_sizes(plan_with(_with_auto_sizes(configuration), needs=needs))


def is_traced(plan: Plan, needs: MemoryNeeds) -> bool:
    """Return whether the deciding sizes were traced, not interpolated."""
    return all(
        part.is_traced_at(size)
        for name, size in _deciding_sizes(plan)
        if (demand := needs.demands.get(name)) is not None
        for part in demand.stages or (demand,)
    )


def _largest(plan: Plan) -> int:
    return max(size for _, size in _deciding_sizes(plan))


def _deciding_sizes(plan: Plan) -> set[PhaseSize]:
    """Return the sizes that decide whether a plan fits: the largest micro-batch per phase and kind of device."""
    sizes: dict[tuple[str, str], int] = {}
    for phase in plan.selected:
        for number, rank in enumerate(plan.ranks):
            kind, samples = (phase.name, rank.name), min(phase.batch.micro_batch_size, phase.batch.share_of(number))
            sizes[kind] = max(1, sizes.get(kind, 0), samples)
    return {(name, size) for (name, _), size in sizes.items()}
