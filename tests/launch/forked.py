"""Run ranks as forks of the test process, each with its own environment, output and optional network namespace."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import AccelRunError
from tests.waiting import wait_until

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class CompletedFork:
    """The result of a rank: its return value, or its exit code and error, and its output."""

    value: Any
    code: int
    error: str
    out: str
    err: str


def run_forks(functions: Sequence[Callable[[], Any]], folder: Path, spaces: Sequence[str] = ()) -> list[CompletedFork]:
    """Run each function in a fork of this process, and return their results when all have ended.

    spaces  names of the network namespaces, one per function; if empty, the namespace of this process
    """
    torch.set_num_threads(1)
    pids = [
        _fork_function(function, folder / str(number), spaces[number] if spaces else None)
        for number, function in enumerate(functions)
    ]
    living = set(pids)

    def all_ended() -> bool:
        living.difference_update([pid for pid in living if os.waitpid(pid, os.WNOHANG)[0]])
        return not living

    try:
        wait_until(all_ended, "the end of every rank")
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [_read_result(folder / str(number)) for number in range(len(pids))]


def _read_result(place: Path) -> CompletedFork:
    out, err = (place.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
    return CompletedFork(**json.loads(place.with_suffix(".json").read_text()), out=out, err=err)


def _fork_function(function: Callable[[], Any], place: Path, space: str | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    result: dict[str, Any] = {"value": None, "code": 1, "error": ""}
    try:
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(place.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if space is not None:
            enter(space)
        result |= {"value": function(), "code": 0}
    except AccelRunError as error:
        result |= {"code": int(error.exit_code), "error": str(error)}
    except BaseException as error:
        traceback.print_exc()
        result["error"] = repr(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        place.with_suffix(".json").write_text(json.dumps(result))
        os._exit(0)  # without the exit handlers of pytest


def enter(space: str) -> None:
    """Move this process to the given network namespace."""
    with Path(f"/run/netns/{space}").open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def rank_function(
    args: Sequence[str], folder: Path, rank: int, num_ranks: int, address: str, num_local_ranks: int = 1
) -> Callable[[], int]:
    """Return a function that runs accel-run in the folder of its machine, as a rank that torchrun or SLURM has started.

    address  host:port of rank 0
    """

    def run() -> int:
        from runner.cli import main

        host, _, port = address.partition(":")
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank % num_local_ranks), "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_local_ranks), "MASTER_ADDR": host, "MASTER_PORT": port,
        }  # fmt: skip
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        sys.argv = ["accel-run", *args]
        return main(list(args))

    return run
