"""Forked CPU ranks that communicate over gloo, to measure parallelism strategies on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

import runner.engine.training  # noqa: F401 - imported once, before the fork
from runner.base.errors import AccelRunError, Exit, rebuild_error
from runner.base.rank_env import RankInfo
from runner.base.text import error_line
from runner.base.world import World
from runner.distributed.join import join_process_group
from runner.launch.local import run_ranks, to_error


class Executor(Protocol):
    """Executes commands on a rank."""

    def execute(self, command: Mapping[str, Any]) -> dict[str, Any]: ...


def serve_ranks(connection: Connection, num_ranks: int, begin: Callable[[ExitStack, World], Executor]) -> int:
    """Execute commands on `num_ranks` forked ranks until the peer closes the connection; return the exit code.

    The first message contains the PIDs of the ranks. Each command is executed on all ranks, and rank 0 replies. An
    error on any rank ends all of them.

    begin  returns the executor of a rank; the stack is closed when the rank ends
    """

    def on_rank(world: World) -> None:
        with ExitStack() as stack:
            executor = begin(stack, world)
            ranks = world.gather(os.getpid())
            if world.is_first:
                connection.send({"ready": True, "ranks": ranks})
            while True:
                command = world.broadcast(receive_command(connection) if world.is_first else None)
                if command is None:
                    return
                reply = executor.execute(command)
                if world.is_first:
                    connection.send(reply)

    try:
        run_on_ranks(on_rank, num_ranks, threads=None)
    except BaseException as error:
        connection.send(to_reported_error(error))
        return int(Exit.SOFTWARE)
    return int(Exit.DONE)


def receive_command(connection: Connection) -> dict[str, Any] | None:
    """Return the next command; None once the peer has closed the connection."""
    with suppress(EOFError, ConnectionError):
        return connection.recv()  # type: ignore[no-any-return]
    return None


def to_reported_error(error: BaseException) -> AccelRunError:
    """Return the error to send to the peer, which cannot load classes of errors that a task defines."""
    if isinstance(error, AccelRunError):
        return rebuild_error(AccelRunError, error.problems, error.exit_code)
    return AccelRunError(error_line(error))


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
