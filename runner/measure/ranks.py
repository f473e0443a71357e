"""Ranks that are forked here, on the CPU over gloo, for measuring what several of them cost and bring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from runner.base.configuration import Request


def on_ranks(function: Callable[[Any], Any], num_ranks: int, threads: int = 1) -> Any:
    """Return what `function(world)` returned on rank 0 of so many forked ranks, each with its threads.

    The value must be JSON-able. Raises the AccelRunError that a rank ended with.
    """
    import torch

    import runner.engine.train  # noqa: F401 - imported once, before the fork
    from runner.base.ranks import Member
    from runner.distributed.join import joined
    from runner.launch.local import as_error, run_ranks

    def main(member: Member) -> tuple[int, Any]:
        torch.set_num_threads(threads)
        with joined(member, torch.device("cpu")) as world:
            return 0, function(world)

    ending = run_ranks(main, num_ranks, say=lambda _: None)
    if ending.cause is not None:
        raise as_error(ending)
    return ending.results[0]


def opened(world: Any, stack: ExitStack, request: Request) -> Any:
    """Open the first phase of a run on this rank, in silence."""
    from runner.engine.session import open_phase

    silence = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - the stack is the context
    stack.enter_context(redirect_stdout(silence))
    return stack.enter_context(open_phase(request, world))


def ms_per_update(updates: Iterator[Any], number: int) -> float:
    """Make some updates; return their mean milliseconds."""
    began = time.perf_counter()
    for _ in range(number):
        next(updates)
    return 1e3 * (time.perf_counter() - began) / number
