"""Forked CPU ranks that communicate over gloo, to measure parallelism strategies on one machine."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch

import runner.engine.training  # noqa: F401 - imported once, before the fork
from runner.base.errors import AccelRunError, Exit
from runner.base.rank_env import RankInfo
from runner.base.text import error_line
from runner.base.world import World
from runner.distributed.join import join_process_group
from runner.launch.local import run_ranks, to_error


class Executor(Protocol):
    """Executes commands on a rank."""

    def execute(self, command: Mapping[str, Any]) -> dict[str, Any]: ...


def serve_ranks(sock: socket.socket, num_ranks: int, begin: Callable[[ExitStack, World], Executor]) -> int:
    """Execute commands from the socket on `num_ranks` forked ranks until the peer closes it; return the exit code.

    The first message contains the PIDs of the ranks. Each command is executed on all ranks, and rank 0 replies. An
    error on any rank ends all of them.

    begin  returns the executor of a rank; the stack is closed when the rank ends
    """

    def on_rank(world: World) -> None:
        with ExitStack() as stack:
            executor = begin(stack, world)
            ranks = world.gather(os.getpid())
            commands = stack.enter_context(sock.makefile("r", encoding="utf-8")) if world.is_first else None
            if commands is not None:
                send_reply(sock, {"ready": True, "ranks": ranks})
            while True:
                command = world.broadcast(json.loads(next(commands, "null")) if commands is not None else None)
                if command is None:
                    return
                reply = executor.execute(command)
                if commands is not None:
                    send_reply(sock, reply)

    try:
        run_on_ranks(on_rank, num_ranks, threads=None)
    except BaseException as error:
        send_reply(sock, error_reply(error))
        return int(Exit.SOFTWARE)
    return int(Exit.DONE)


def send_reply(sock: socket.socket, reply: Mapping[str, Any]) -> None:
    """Send one line of JSON; do nothing if the peer has closed the connection."""
    with suppress(OSError):
        sock.sendall((json.dumps(reply) + "\n").encode())


def error_reply(error: BaseException) -> dict[str, Any]:
    """Return the reply that reports an error: its problems and exit code."""
    if isinstance(error, AccelRunError):
        problems = [dataclasses.asdict(problem) for problem in error.problems]
        return {"error": problems, "exit_code": int(error.exit_code)}
    return {"error": [{"what": error_line(error)}], "exit_code": int(Exit.SOFTWARE)}


def run_on_ranks(function: Callable[[Any], Any], num_ranks: int, threads: int | None = 1) -> Any:
    """Run `function(world)` on forked ranks and return the result of rank 0, which must be JSON-serializable.

    threads  number of torch threads of each rank; None: unchanged
    Raises the AccelRunError that ended a rank.
    """

    def main(member: RankInfo) -> tuple[int, Any]:
        if threads is not None:
            torch.set_num_threads(threads)
        with join_process_group(member, torch.device("cpu"), timeout_s=COLLECTIVE_TIMEOUT_S) as world:
            return 0, function(world)

    ending = run_ranks(main, num_ranks, on_notice=lambda _: None)
    if ending.cause is not None:
        raise to_error(ending)
    return ending.results[0]


COLLECTIVE_TIMEOUT_S = 86400.0  # ranks wait in a collective while their variant is paused, and must not time out
