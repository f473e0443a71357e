"""What training needs, traced in a subprocess."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from runner.base.subprocesses import in_subprocess

if TYPE_CHECKING:
    from runner.base.configuration import Configuration
    from runner.plan.inventory import Inventory
    from runner.plan.memory_fit import Needs


def needs_in_subprocess(
    configuration: Configuration,
    inventory: Inventory,
    *,
    beyond: bool = False,
    long: Callable[[], object] | None = None,
) -> Needs:
    """Return what training takes, traced where fake tensors and what may abort a process do no harm.

    beyond  trace what is needed to say what more would fit
    long    called once if it takes longer than PATIENCE_S of runner.base.subprocesses
    Raises what the task raises.
    """
    import runner.engine.demand  # once, before the fork
    from runner.plan.memory_fit import Needs

    try:
        return in_subprocess(runner.engine.demand.needs_of, configuration, inventory, beyond, long=long)
    except BrokenProcessPool:
        return Needs({}, why_not="the tracing process crashed")
