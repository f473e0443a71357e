"""Trace the memory demand of training in a subprocess."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

import runner.forecast.demand  # before the fork, so that subprocesses share it
from runner.config.configuration import Configuration
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import MemoryNeeds


def trace_memory_needs(
    configuration: Configuration,
    inventory: Inventory,
    *,
    alternatives: bool = False,
    on_wait: Callable[[], object] | None = None,
) -> MemoryNeeds:
    """Return the demand of training; a crash during tracing ends only the subprocess.

    alternatives  also trace what is needed to suggest larger sizes
    on_wait       called once if it takes longer than NOTIFY_AFTER_S of runner.host.subprocesses
    Raises the exceptions of the task.
    """
    try:
        return run_in_subprocess(
            runner.forecast.demand.predict_needs, configuration, inventory, alternatives, on_wait=on_wait
        )
    except BrokenProcessPool:
        return MemoryNeeds({}, why_not="the tracing process crashed")
