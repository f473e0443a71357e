"""Trace the memory demand of training at the deciding sizes: the full share of a rank, or what fits of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from runner.base.configuration import Configuration, task_source
from runner.base.errors import AccelRunError, ConfigError, TaskFault
from runner.base.text import first_line
from runner.engine.forecast import Forecast, least_samples
from runner.engine.stage_memory import StagePrediction
from runner.engine.task_loading import explained
from runner.plan.corrections import corrections
from runner.plan.cuda_allocator import Allocator
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import Demand, Needs
from runner.plan.memory_trace import Traced
from runner.plan.planner import Plan, make_plan

MOST_ROUNDS = 5  # of traces at what the ones before said would fit


def needs_of(configuration: Configuration, inventory: Inventory, beyond: bool = False) -> Needs:
    """Return what every phase that trains takes on the devices of the inventory.

    The whole share of a rank is traced. Where it fits no more is asked for; else a pass of one sample too, so that all
    others lie between two that are known, and then what these say would fit, until a trace has confirmed it.

    beyond  trace a second size in any case, so that it can be said what more would fit, and where the run does not fit
            the passes that do: what a GPU's allocator takes is not on the line between two traces
    Raises what the task raises; call it in a subprocess (runner.launch.traced_demand).
    """
    known = corrections()
    plan = make_plan(configuration, inventory, needs=Needs({}, known))
    file = plan.task_file
    try:
        with (
            explained(
                task_source(plan.choices["task"].name, Path(file) if file else None), "finding out what the model takes"
            ),
            Forecast(_free(configuration), inventory) as made,
        ):
            if _is_pipeline(plan) and not made.limit:
                staged = _of_pipeline(configuration, inventory, plan, Needs({}, known), beyond=beyond)
                if staged.demands:
                    return staged
            tracer = _Tracer(made, Allocator.of(plan.choices["memory"].options.get("allocator")))
            tracer.trace(_sizes(plan))

            def wanted() -> set[int]:
                needs = Needs(tracer.demands(), known)
                planned = make_plan(configuration, inventory, needs=needs)
                return wanted_sizes(planned, configuration, inventory, needs, beyond=beyond)

            if beyond or not wanted() <= tracer.done:
                tracer.trace({made.least})
            for _ in range(MOST_ROUNDS):
                if not tracer.trace(wanted()):
                    break
            whole = Needs(tracer.demands(), known)
            plan = make_plan(configuration, inventory, needs=whole)
            return _of_pipeline(configuration, inventory, plan, whole, beyond=beyond) if _is_pipeline(plan) else whole
    except (ConfigError, TaskFault):
        raise
    except Exception as error:  # data that is not there yet; or of torch's fake tensors, which lack something
        why = error.problems[0].what if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
        return Needs({}, known, first_line(why))


def _fits(plan: Plan) -> bool:
    return all(each.prediction.fits for each in plan.memory)


def _is_pipeline(plan: Plan) -> bool:
    return plan.choices["parallelism"].function == "pipeline" and plan.world_size > 1


def _of_pipeline(
    configuration: Configuration, inventory: Inventory, plan: Plan, whole: Needs, *, beyond: bool
) -> Needs:
    """Return what the stages of a pipeline take, beside what is known of the whole model, and which layers they have.

    Passes as large as planned are traced, or halves of them where the layers cannot be split by these; then what the
    traces say would fit. Where a stage cannot be followed, only the layers are known.
    Raises ConfigError where there is no split, TaskFault where the task does not tell its layers.
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
                layout = str(staged.placement(size))
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
        except Exception:  # what cannot be followed; that the figures are then not exact is said where they are
            traces.clear()
        return found(str(staged.placement(size)))


def _free(configuration: Configuration) -> Configuration:
    """Return the configuration without the sizes of passes: those that are wanted are named one by one."""
    settings = dataclasses.replace(configuration.settings, micro_batch_size="auto")
    phases = tuple(dataclasses.replace(phase, micro_batch_size="auto") for phase in configuration.phases)
    return dataclasses.replace(configuration, settings=settings, phases=phases)


class _Tracer:
    """The traces made so far, by phase and size."""

    def __init__(self, made: Forecast, allocator: Allocator) -> None:
        self.made, self.allocator = made, allocator
        self.traces: dict[str, list[Traced]] = defaultdict(list)
        self.done: set[int] = set()

    def trace(self, sizes: set[int]) -> bool:
        """Trace those that were not; tell whether there were any."""
        new = {max(size, self.made.least) for size in sizes} - self.done
        self.done |= new.union(sizes)
        for size in sorted(new):
            for traced in self.made.of(size):
                self.traces[traced.phase].append(traced)
        return bool(new)

    def demands(self) -> dict[str, Demand]:
        """Return what the traces come to."""
        return {phase: Demand.of(traces, self.allocator) for phase, traces in self.traces.items()}


def wanted_sizes(
    plan: Plan, configuration: Configuration, inventory: Inventory, needs: Needs, *, beyond: bool
) -> set[int]:
    """Return the passes that are planned; where they do not fit and more is asked for, those that would too."""
    if not beyond or _fits(plan):
        return _sizes(plan)
    return _sizes(plan) | _sizes(make_plan(_free(configuration), inventory, needs=needs))


def is_traced(plan: Plan, needs: Needs) -> bool:
    """Tell whether the passes that decide were traced as they are, and do not lie between two that were."""
    demands = [each for demand in needs.demands.values() for each in demand.stages or (demand,)]
    return all(demand.is_traced_at(size) for demand in demands for size in _sizes(plan))


def _sizes(plan: Plan) -> set[int]:
    """Return the largest passes of each kind of device in the phases that train: those that decide."""
    found: dict[tuple[str, str], int] = {}
    for phase in plan.selected:
        shares = phase.batch.shares if phase.batch.stages == 1 else phase.batch.shares * plan.world_size
        for rank, share in zip(plan.ranks if phase.kind == "train" else (), shares, strict=False):
            kind = (phase.name, rank.name)
            found[kind] = max(1, found.get(kind, 0), min(phase.batch.micro_batch_size, share))
    return set(found.values())
