"""What training takes, traced for the sizes that matter: the whole share of a rank, or what fits of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from runner.base.configuration import Configuration
from runner.base.errors import AccelRunError
from runner.engine.forecast import forecast
from runner.plan.corrections import corrections
from runner.plan.fits import Demand, Needs
from runner.plan.inventory import Inventory
from runner.plan.need import Traced
from runner.plan.plan import Plan, make_plan
from runner.plan.segments import Allocator

MOST_ROUNDS = 3  # of traces at what the ones before said would fit


def needs_of(configuration: Configuration, inventory: Inventory, beyond: bool = False) -> Needs:
    """Return what every phase that trains takes on the devices of the inventory.

    The whole share of a rank is traced. Where it fits no more is asked for; else a small pass too, and then what the
    two say would fit, until a trace has confirmed it.

    beyond  trace a second size in any case, so that it can be said what more would fit
    Raises what the task raises; belongs into a process of its own, as runner.launch.apart gives it.
    """
    known = corrections()
    try:
        plan = make_plan(configuration, inventory, needs=Needs({}, known))
        tracer = _Tracer(configuration, inventory, plan)
        tracer.trace(_sizes(plan))
        if beyond:
            tracer.trace({max(1, size // 4) for size in _sizes(plan)})
        for _ in range(MOST_ROUNDS):
            needs = Needs(tracer.demands(), known)
            wanted = _sizes(make_plan(configuration, inventory, needs=needs))
            if not tracer.trace(wanted):
                break
            tracer.trace({max(1, size // 4) for size in wanted})
    except AccelRunError:
        raise
    except Exception as error:
        return Needs({}, known, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return Needs(tracer.demands(), known)


class _Tracer:
    """The traces made so far, by phase and size."""

    def __init__(self, configuration: Configuration, inventory: Inventory, plan: Plan) -> None:
        self.configuration, self.inventory = configuration, inventory
        self.allocator = Allocator.of(plan.choices["memory"].options.get("allocator"))
        self.traces: dict[str, list[Traced]] = defaultdict(list)
        self.done: set[int] = set()

    def trace(self, sizes: Iterable[int]) -> bool:
        """Trace those that were not; tell whether there were any."""
        new = sorted(set(sizes) - self.done)
        self.done |= set(new)
        for traced in forecast(self.configuration, self.inventory, new) if new else ():
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
