"""Run a function on several ranks: forked processes with a gloo process group. Two ranks take about 0.1 s.

With RANKS_OVER=nccl, in a process with the stand-in for GPUs (tests/stand_ins), each rank has a simulated GPU and uses
the NCCL of the stand-in.

The parent must not have started OpenMP threads before it forks: tests call `run_ranks` before any heavy computation,
with OMP_NUM_THREADS=1 or torch.set_num_threads(1).
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from runner.base.rank_env import RankInfo
from runner.distributed.join import join_process_group
from runner.distributed.world import World
from tests.waiting import wait_until

CPU = torch.device("cpu")
IS_OVER_NCCL = os.environ.get("RANKS_OVER") == "nccl"


def run_ranks(function: Callable[[World], Any], world_size: int, *, limit_s: float = 120.0) -> list[Any]:
    """Return the JSON result of `function(world)` of each rank.

    Raises AssertionError with the tracebacks of ranks that failed, and the stacks of ranks that did not end.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pids = {_fork_rank(function, rank, world_size, Path(folder)): rank for rank in range(world_size)}
        codes = _wait_for_ranks(pids, Path(folder), limit_s)
        late = [rank for rank in range(world_size) if rank not in codes]
        results: list[Any] = []
        messages = [
            path.read_text()
            for kind in ("error", "stack")
            for path in sorted(Path(folder).glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime)
        ]
        why = f"exit codes by rank {codes}" + (f", ranks {late} did not end" if late else "")
        assert not late, "\n".join([why, *messages])
        assert not any(codes.values()), "\n".join([why, *messages])
        for rank in range(world_size):
            results.append(json.loads((Path(folder) / f"result-{rank}").read_text()))
        return results


def _fork_rank(function: Callable[[World], Any], rank: int, world_size: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    # like the ranks of a run: finalizers of inherited garbage may wait for threads that a fork does not have
    gc.freeze()
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stack-{rank}").open("w"))
    try:
        member = RankInfo(rank, rank, world_size, world_size, f"file://{folder}/store")
        with join_process_group(member, torch.device("cuda", rank) if IS_OVER_NCCL else CPU, timeout_s=60.0) as world:
            result = function(world)
        (folder / f"result-{rank}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(code)  # without the exit handlers of pytest


def _wait_for_ranks(pids: dict[int, int], folder: Path, limit_s: float) -> dict[int, int]:
    """Return the exit codes by rank. Ranks that do not end in time write their stacks, and are left out."""
    codes: dict[int, int] = {}

    def all_ended() -> bool:
        for pid, rank in pids.items():
            if rank not in codes:
                result, status = os.waitpid(pid, os.WNOHANG)
                if result:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(pids)

    with suppress(AssertionError):
        wait_until(all_ended, timeout_s=limit_s)
    for pid, rank in pids.items():
        if rank not in codes:
            os.kill(pid, signal.SIGUSR2)
            stack = folder / f"stack-{rank}"
            with suppress(AssertionError):
                wait_until(lambda stack=stack: "most recent call first" in stack.read_text(), timeout_s=30.0)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes
