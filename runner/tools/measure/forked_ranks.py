"""Forked CPU ranks that communicate over gloo, to measure parallelism strategies on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import runner.engine.training  # noqa: F401 - imported once, before the fork
from runner.base.rank_env import RankInfo
from runner.distributed.join import join_process_group
from runner.distributed.world import World
from runner.launch.local import run_ranks, to_error


def run_on_forked_ranks(function: Callable[[World], Any], num_ranks: int) -> Any:
    """Run the function on forked ranks and return the result of rank 0, which must be JSON-serializable.

    Raises the AccelRunError that ended a rank.
    """

    def main(member: RankInfo) -> tuple[int, Any]:
        with join_process_group(member, torch.device("cpu"), timeout_s=COLLECTIVE_TIMEOUT_S) as world:
            return 0, function(world)

    ending = run_ranks(main, num_ranks, on_notice=lambda *_: None)
    if ending.cause is not None:
        raise to_error(ending)
    return ending.results[0]


COLLECTIVE_TIMEOUT_S = 86400.0  # ranks wait in a collective while their variant is paused, and must not time out
