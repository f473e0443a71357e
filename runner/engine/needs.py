"""What training takes, traced for the sizes that matter: the whole share of a rank, or what fits of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from runner.base.configuration import Configuration, task_source
from runner.base.errors import AccelRunError, ConfigError, TaskFault
from runner.base.words import first_line
from runner.engine.forecast import Forecast
from runner.engine.tasks import explained
from runner.plan.corrections import corrections
from runner.plan.fits import Demand, Needs
from runner.plan.inventory import Inventory
from runner.plan.need import Traced
from runner.plan.plan import Plan, make_plan
from runner.plan.segments import Allocator

MOST_ROUNDS = 3  # of traces at what the ones before said would fit


def needs_of(configuration: Configuration, inventory: Inventory, beyond: bool = False) -> Needs:
    """Return what every phase that trains takes on the devices of the inventory.

    The whole share of a rank is traced. Where it fits no more is asked for; else a pass of one sample too, so that all
    others lie between two that are known, and then what these say would fit, until a trace has confirmed it.

    beyond  trace a second size in any case, so that it can be said what more would fit
    Raises what the task raises; belongs into a process of its own, as runner.launch.apart gives it.
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
            tracer = _Tracer(made, Allocator.of(plan.choices["memory"].options.get("allocator")))
            tracer.trace(_sizes(plan))

            def wanted() -> set[int]:
                return _sizes(make_plan(configuration, inventory, needs=Needs(tracer.demands(), known)))

            if beyond or not wanted() <= tracer.done:
                tracer.trace({1})
            for _ in range(MOST_ROUNDS):
                if not tracer.trace(wanted()):
                    break
    except (ConfigError, TaskFault):
        raise
    except Exception as error:  # data that is not there yet; or of torch's fake tensors, which lack something
        why = error.problems[0].what if isinstance(error, AccelRunError) else f"{type(error).__name__}: {error}"
        return Needs({}, known, first_line(why))
    return Needs(tracer.demands(), known)


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

    def trace(self, sizes: Iterable[int]) -> bool:
        """Trace those that were not; tell whether there were any."""
        new = sorted(set(sizes) - self.done)
        self.done |= set(new)
        for size in new:
            for traced in self.made.of(size):
                self.traces[traced.phase].append(traced)
        return bool(new)

    def demands(self) -> dict[str, Demand]:
        """Return what the traces come to."""
        return {phase: Demand.of(traces, self.allocator) for phase, traces in self.traces.items()}


def _sizes(plan: Plan) -> set[int]:
    """Return the largest passes of the phases that train: those that decide."""
    return {
        max(1, min(phase.batch.micro_batch_size, max(phase.batch.shares, default=1)))
        for phase in plan.selected
        if phase.kind == "train"
    }
