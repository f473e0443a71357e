"""Trace the memory demand of training at the deciding sizes: the full share of a rank, or what fits of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from runner.base.errors import AccelRunError, ConfigError, TaskFault
from runner.base.text import first_line
from runner.config.configuration import Configuration
from runner.config.options import task_source
from runner.engine.task_loading import task_errors
from runner.forecast.memory_forecast import Forecast, least_samples
from runner.forecast.stage_memory import StagePrediction
from runner.plan.cuda_allocator import Allocator
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import Demand, Needs
from runner.plan.memory_trace import Traced
from runner.plan.planner import make_plan
from runner.plan.run_plan import Plan

MOST_ROUNDS = 5  # rounds of traces at sizes that earlier traces predict to fit


def needs_of(configuration: Configuration, inventory: Inventory, beyond: bool = False) -> Needs:
    """Return the memory demand of every training phase on the devices of the inventory.

    The full share of a rank is traced first. If it does not fit, a micro-batch of one sample is traced too, so that
    other sizes can be interpolated, and then the size that is predicted to fit, until a trace confirms it.

    beyond  always trace a second size, to suggest larger ones; if the run does not fit, also trace the sizes that do,
            because the memory of a GPU's allocator is not linear in the size
    Raises the exceptions of the task; call it in a subprocess (runner.launch.traced_demand).
    """
    plan = make_plan(configuration, inventory, needs=Needs({}))
    file = plan.task_file
    try:
        with (
            task_errors(
                task_source(plan.choices["task"].name, Path(file) if file else None), "tracing the memory of the model"
            ),
            Forecast(_free(configuration), inventory) as made,
        ):
            if _is_pipeline(plan) and not made.limit:
                staged = _of_pipeline(configuration, inventory, plan, Needs({}), beyond=beyond)
                if staged.demands:
                    return staged
            tracer = _Tracer(made, Allocator.of(plan.choices["memory"].options.get("allocator")))
            tracer.trace(_sizes(plan))

            def wanted() -> set[int]:
                needs = Needs(tracer.demands())
                planned = make_plan(configuration, inventory, needs=needs)
                return wanted_sizes(planned, configuration, inventory, needs, beyond=beyond)

            if beyond or not wanted() <= tracer.done:
                tracer.trace({made.least})
            for _ in range(MOST_ROUNDS):
                if not tracer.trace(wanted()):
                    break
            whole = Needs(tracer.demands())
            plan = make_plan(configuration, inventory, needs=whole)
            return _of_pipeline(configuration, inventory, plan, whole, beyond=beyond) if _is_pipeline(plan) else whole
    except (ConfigError, TaskFault):
        raise
    except Exception as error:  # for example missing data, or an operation that fake tensors do not support
        why = error.problems[0].what if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
        return Needs({}, first_line(why))


def _fits(plan: Plan) -> bool:
    return all(each.prediction.fits for each in plan.memory)


def _is_pipeline(plan: Plan) -> bool:
    return plan.choices["parallelism"].function == "pipeline" and plan.world_size > 1


def _of_pipeline(
    configuration: Configuration, inventory: Inventory, plan: Plan, whole: Needs, *, beyond: bool
) -> Needs:
    """Return `whole` with the demand of each pipeline stage and the assignment of layers.

    Micro-batches of the planned size are traced, halved until the layers can be split; then sizes that are predicted to
    fit. If a stage cannot be traced, only the assignment is returned.
    Raises ConfigError if there is no split, and TaskFault if the task does not define its layers.
    """
    allocator = Allocator.of(plan.choices["memory"].options.get("allocator"))
    traces: dict[str, list[list[Traced]]] = {}  # phase -> rank -> sizes
    done: set[int] = set()

    def found(layout: str) -> Needs:
        demands = dict(whole.demands)
        for name, of_ranks in traces.items():
            stages = tuple(Demand.of(sizes, allocator) for sizes in of_ranks)
            demands[name] = (
                dataclasses.replace(demands[name], stages=stages) if name in demands else Demand.of_stages(stages)
            )
        return dataclasses.replace(whole, demands=demands, layout=tuple(layout.splitlines()))

    with StagePrediction(plan) as staged:

        def trace(sizes: Iterable[int]) -> bool:
            new = sorted(set(sizes) - done)
            done.update(new)
            for size in new:
                for phase in staged.phases:
                    for rank, traced in enumerate(staged.of(phase, size)):
                        traces.setdefault(phase.name, [[] for _ in range(staged.count)])[rank].append(traced)
            return bool(new)

        size = max(_sizes(plan))
        is_free = all(phase.micro_batch_size == "auto" for phase in configuration.phases)
        while True:
            try:
                layout = str(staged.plan_placement(size))
                break
            except ConfigError:
                if not is_free or size == 1:
                    raise
                size //= 2
        if not staged.is_followed:
            return found(layout)
        try:
            trace({size})
            if (is_free or beyond) and not _fits(make_plan(configuration, inventory, needs=found(layout))):
                trace({least_samples(staged.parts.bare)})
            for _ in range(MOST_ROUNDS):
                needs = found(layout)
                planned = make_plan(configuration, inventory, needs=needs)
                size = max(_sizes(planned))
                if not trace(wanted_sizes(planned, configuration, inventory, needs, beyond=beyond)):
                    break
        except ConfigError:
            raise
        except Exception:  # not traceable: the output marks the numbers as estimates
            traces.clear()
        return found(str(staged.plan_placement(size)))


def _free(configuration: Configuration) -> Configuration:
    """Return the configuration with automatic micro-batch sizes, which are then traced one by one."""
    settings = dataclasses.replace(configuration.settings, micro_batch_size="auto")
    phases = tuple(dataclasses.replace(phase, micro_batch_size="auto") for phase in configuration.phases)
    return dataclasses.replace(configuration, settings=settings, phases=phases)


class _Tracer:
    """Completed traces, by phase."""

    def __init__(self, made: Forecast, allocator: Allocator) -> None:
        self.made, self.allocator = made, allocator
        self.traces: dict[str, list[Traced]] = defaultdict(list)
        self.done: set[int] = set()

    def trace(self, sizes: set[int]) -> bool:
        """Trace new sizes; return whether there were any."""
        new = {max(size, self.made.least) for size in sizes} - self.done
        self.done |= new.union(sizes)
        for size in sorted(new):
            for traced in self.made.of(size):
                self.traces[traced.phase].append(traced)
        return bool(new)

    def demands(self) -> dict[str, Demand]:
        """Return the demand per phase, from all traces."""
        return {phase: Demand.of(traces, self.allocator) for phase, traces in self.traces.items()}


def wanted_sizes(
    plan: Plan, configuration: Configuration, inventory: Inventory, needs: Needs, *, beyond: bool
) -> set[int]:
    """Return the planned micro-batch sizes; with `beyond`, if they do not fit, also those that would."""
    if not beyond or _fits(plan):
        return _sizes(plan)
    return _sizes(plan) | _sizes(make_plan(_free(configuration), inventory, needs=needs))


def is_traced(plan: Plan, needs: Needs) -> bool:
    """Return whether the deciding sizes were traced, not interpolated."""
    demands = [each for demand in needs.demands.values() for each in demand.stages or (demand,)]
    return all(demand.is_traced_at(size) for demand in demands for size in _sizes(plan))


def _sizes(plan: Plan) -> set[int]:
    """Return the deciding sizes: the largest micro-batch per training phase and kind of device."""
    found: dict[tuple[str, str], int] = {}
    for phase in plan.selected:
        shares = phase.batch.shares if phase.batch.stages == 1 else phase.batch.shares * plan.world_size
        for rank, share in zip(plan.ranks if phase.kind == "train" else (), shares, strict=False):
            kind = (phase.name, rank.name)
            found[kind] = max(1, found.get(kind, 0), min(phase.batch.micro_batch_size, share))
    return set(found.values())
