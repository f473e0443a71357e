"""Ranks that are forked here, on the CPU over gloo, for measuring what several of them cost and bring."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, Exit, Problem, remake
from runner.base.text import error_line
from runner.config.request import Request
from runner.host.parent_death import die_with_parent
from runner.host.process_tree import LAST_S
from runner.tools.measure.fork_server import JsonSocket

Answers = Callable[[Mapping[str, Any]], Any]
Begin = Callable[[Any, ExitStack], Answers]


def on_ranks(function: Callable[[Any], Any], num_ranks: int, threads: int = 1) -> Any:
    """Return what `function(world)` returned on rank 0 of so many forked ranks, each with its threads.

    The value must be JSON-able. Raises the AccelRunError that a rank ended with.
    """
    import torch

    import runner.engine.training  # noqa: F401 - imported once, before the fork
    from runner.base.rank_env import RankInfo
    from runner.distributed.join import joined
    from runner.launch.local import as_error, run_ranks

    def main(member: RankInfo) -> tuple[int, Any]:
        torch.set_num_threads(threads)
        with joined(member, torch.device("cpu"), timeout_s=STANDS_S) as world:
            return 0, function(world)

    ending = run_ranks(main, num_ranks, say=lambda _: None)
    if ending.cause is not None:
        raise as_error(ending)
    return ending.results[0]


class StandingRanks:
    """Ranks that stay until the `with` block is left: asked in turns, and stopped in between.

    begin  on each rank, with its world: returns what answers an order there; the answers of rank 0 are told
    Raises the AccelRunError that a rank ended with, also from `ask`.
    """

    def __init__(self, begin: Begin, num_ranks: int, threads: int, patience_s: float) -> None:
        ours, theirs = socket.socketpair()
        self._line, us = JsonSocket(ours), os.getpid()
        self._groups = [os.fork()]
        if not self._groups[0]:
            ours.close()
            os._exit(_stand(theirs, begin, num_ranks, threads, us))
        theirs.close()
        try:
            self._groups += self._answer(patience_s)["ranks"]
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> StandingRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, patience_s: float, **order: Any) -> Any:
        """Return what rank 0 answered to the order, which every rank gets."""
        self.signal(signal.SIGCONT)
        with suppress(OSError):  # they are gone: hear why
            self._line.line.sendall((json.dumps(order) + "\n").encode())
        return self._answer(patience_s)["value"]

    def pause(self) -> None:
        """Nothing of them runs until they are asked."""
        self.signal(signal.SIGSTOP)

    def end(self) -> None:
        """They are gone: by themselves, so that they leave nothing behind, or killed where that takes too long."""
        if not self._groups:
            return
        self.signal(signal.SIGCONT)
        with suppress(OSError):
            self._line.line.sendall(b"null\n")
        descriptor = os.pidfd_open(self._groups[0])
        if not select.select([descriptor], [], [], LAST_S)[0]:
            self.signal(signal.SIGKILL)  # ranks and their workers lead groups of their own
        os.close(descriptor)
        os.waitpid(self._groups[0], 0)
        self._groups = []
        self._line.line.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for group in self._groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _answer(self, patience_s: float) -> dict[str, Any]:
        answer = self._line.receive(patience_s)
        if answer is None:
            raise AccelRunError("the process that starts the ranks was killed")
        if "error" in answer:
            problems = tuple(Problem(**problem) for problem in answer["error"])
            raise remake(AccelRunError, problems, Exit(answer["exit_code"]))
        return answer


def _stand(line: socket.socket, begin: Begin, num_ranks: int, threads: int, parent: int) -> int:
    """Start the ranks and wait for their end, in a process of its own; tell how they ended if not well."""

    def tell(answer: Mapping[str, Any]) -> None:
        with suppress(OSError):  # nobody asks any more
            line.sendall((json.dumps(answer) + "\n").encode())

    def main(world: Any) -> None:
        with ExitStack() as stack:
            answers = begin(world, stack)
            ranks = world.gather(os.getpid())
            orders = stack.enter_context(line.makefile("r", encoding="utf-8")) if world.is_first else None
            if orders is not None:
                tell({"ranks": ranks})
            while True:
                order = world.broadcast(json.loads(next(orders, "null")) if orders is not None else None)
                if order is None:
                    return
                value = answers(order)
                if orders is not None:
                    tell({"value": value})

    os.setsid()
    die_with_parent(parent)
    try:
        on_ranks(main, num_ranks, threads)
    except AccelRunError as error:
        problems = [dataclasses.asdict(problem) for problem in error.problems]
        tell({"error": problems, "exit_code": int(error.exit_code)})
    except BaseException as error:  # the interpreter would go on where it was forked
        tell({"error": [{"what": error_line(error)}], "exit_code": int(Exit.SOFTWARE)})
    return int(Exit.DONE)


def opened(world: Any, stack: ExitStack, request: Request) -> Any:
    """Open the first phase of a run on this rank, in silence."""
    from runner.engine.opening import open_phase

    silence = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - the stack is the context
    stack.enter_context(redirect_stdout(silence))
    return stack.enter_context(open_phase(request, world))


def ms_per_update(updates: Iterator[Any], number: int) -> float:
    """Make some updates; return their mean milliseconds."""
    began = time.perf_counter()
    for _ in range(number):
        next(updates)
    return 1e3 * (time.perf_counter() - began) / number


STANDS_S = 86400.0  # for which ranks that are stopped wait for each other
