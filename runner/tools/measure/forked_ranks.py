"""Forked CPU ranks over gloo, for measuring what several of them cost and gain."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

import runner.engine.training  # noqa: F401 - imported once, before the fork
from runner.base.errors import AccelRunError, Exit
from runner.base.rank_env import RankInfo
from runner.base.text import error_line
from runner.base.world import World
from runner.config.request import Request
from runner.distributed.join import join_process_group
from runner.engine.opening import open_phase
from runner.launch.local import run_ranks, to_error


class Executor(Protocol):
    """What executes orders on a rank."""

    def execute(self, order: Mapping[str, Any]) -> dict[str, Any]: ...


def serve_ranks(line: socket.socket, num_ranks: int, begin: Callable[[ExitStack, World], Executor]) -> int:
    """Execute the orders on the socket on so many forked ranks, until it is closed; return the exit code.

    The first answer has the PIDs of the ranks. Each order is executed on all ranks, and rank 0 answers. The error of a
    rank ends all of them.
    """

    def on_rank(world: World) -> None:
        with ExitStack() as stack:
            executor = begin(stack, world)
            ranks = world.gather(os.getpid())
            orders = stack.enter_context(line.makefile("r", encoding="utf-8")) if world.is_first else None
            if orders is not None:
                send(line, {"ready": True, "ranks": ranks})
            while True:
                order = world.broadcast(json.loads(next(orders, "null")) if orders is not None else None)
                if order is None:
                    return
                answer = executor.execute(order)
                if orders is not None:
                    send(line, answer)

    try:
        on_ranks(on_rank, num_ranks, threads=None)
    except BaseException as error:
        send(line, as_answer(error))
        return int(Exit.SOFTWARE)
    return int(Exit.DONE)


def send(line: socket.socket, answer: Mapping[str, Any]) -> None:
    """Send one line of JSON, if the other end is still there."""
    with suppress(OSError):
        line.sendall((json.dumps(answer) + "\n").encode())


def as_answer(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON-serializable problems and exit code."""
    if isinstance(error, AccelRunError):
        problems = [dataclasses.asdict(problem) for problem in error.problems]
        return {"error": problems, "exit_code": int(error.exit_code)}
    return {"error": [{"what": error_line(error)}], "exit_code": int(Exit.SOFTWARE)}


def on_ranks(function: Callable[[Any], Any], num_ranks: int, threads: int | None = 1) -> Any:
    """Return what `function(world)` returned on rank 0 of so many forked ranks.

    The value must be JSON-serializable. Raises the AccelRunError that a rank ended with.

    threads  of each rank; None: unchanged
    """

    def main(member: RankInfo) -> tuple[int, Any]:
        if threads is not None:
            torch.set_num_threads(threads)
        with join_process_group(member, torch.device("cpu"), timeout_s=TIMEOUT_S) as world:
            return 0, function(world)

    ending = run_ranks(main, num_ranks, on_notice=lambda _: None)
    if ending.cause is not None:
        raise to_error(ending)
    return ending.results[0]


def opened(world: Any, stack: ExitStack, request: Request) -> Any:
    """Open the first phase of a run on this rank, silently."""
    silence = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - the stack is the context
    stack.enter_context(redirect_stdout(silence))
    return stack.enter_context(open_phase(request, world))


def ms_per_update(updates: Iterator[Any], number: int) -> float:
    """Run some updates; return their mean milliseconds."""
    began = time.perf_counter()
    for _ in range(number):
        next(updates)
    return 1e3 * (time.perf_counter() - began) / number


TIMEOUT_S = 86400.0  # of collectives: ranks that are stopped wait for each other
