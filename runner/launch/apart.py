"""A question answered in a process of its own, which leaves neither CUDA nor threads in the one that asks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

from runner.base.parent import die_with_parent

if TYPE_CHECKING:
    from runner.base.configuration import Configuration
    from runner.plan.fits import Needs
    from runner.plan.inventory import Inventory

Answer = TypeVar("Answer")
PATIENCE_S = 3.0  # people wait so long without asking


def apart(function: Callable[..., Answer], *given: Any, long: Callable[[], object] | None = None) -> Answer:
    """Return what the function returns in a forked process.

    long  called once where it takes longer than people wait without asking
    Raises what it raises, and BrokenProcessPool where the process dies.
    """
    with ProcessPoolExecutor(1, get_context("fork"), initializer=_settle_in, initargs=(os.getpid(),)) as process:
        asked = process.submit(function, *given)
        if long is not None and not wait([asked], PATIENCE_S).done:
            long()
        return asked.result()


def needs_apart(
    configuration: Configuration,
    inventory: Inventory,
    *,
    beyond: bool = False,
    long: Callable[[], object] | None = None,
) -> Needs:
    """Return what training takes, traced where fake tensors and what may abort a process do no harm.

    beyond  trace what is needed to say what more would fit
    long    called once where it takes longer than people wait without asking
    Raises what the task raises.
    """
    import runner.engine.needs  # once, before the fork
    from runner.plan.fits import Needs

    try:
        return apart(runner.engine.needs.needs_of, configuration, inventory, beyond, long=long)
    except BrokenProcessPool:
        return Needs({}, why_not="the process that traced the model died")


def _settle_in(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to both, and one answer is enough
