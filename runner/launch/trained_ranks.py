"""Evaluate a trained run, or run inference with it, on the devices that its plan uses."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from runner.base.errors import ConfigError, Exit, Problem, SharedConfigError
from runner.base.rank_env import detect_rank
from runner.config.configuration import Configuration
from runner.config.request import Request
from runner.distributed.world import World
from runner.host.output import nonblocking_streams
from runner.launch.on_ranks import run_on_ranks
from runner.plan.inventory import take_inventory
from runner.plan.planner import plan_one_rank, plan_this_process
from runner.plan.run_plan import Plan
from runner.records.events import Console, Level, terminal_log_level
from runner.trained.infer import infer
from runner.trained.trained_evaluation import evaluate_run
from runner.trained.trained_run import ModelSource, find_source


@nonblocking_streams()
def start_inference(request: Request, checkpoint: str | None = None, *, is_alone: bool = False) -> Exit:
    """Predict with the run or the weights that the request names, and write predictions/ and plots/.

    With `parallelism=ddp`, each rank computes one shard of the predictions if the task's `predict` has the parameters
    `shard` and `num_shards`. Otherwise, one process computes all predictions: rank 0, if torchrun or srun started
    several. If the settings name a shard, each process computes that shard.

    checkpoint  best, last or the number of an update; None: best if there is one, otherwise last
    is_alone    this process computes all predictions, because other ranks do not call this function
    Raises InputMissing if there is no such run or checkpoint, DataError if it is damaged.
    """
    member = None if is_alone else detect_rank(os.environ)
    is_first = member is None or member.rank == 0
    try:
        source = find_source(request, Console(level=terminal_log_level(), is_enabled=is_first), checkpoint)
        configuration = source.configuration
        _check_shard(configuration)
        if not is_alone and _splits_into_shards(configuration):
            return run_on_ranks(configuration, configuration.request.task_file, partial(_infer_shard, source))[0]
        if member and not is_first and _shard(configuration) in ((0, 1), (None, None)):  # no shard is requested
            text = f"rank {member.rank} predicts nothing: rank 0 computes all predictions"
            Console(level=terminal_log_level()).info(text)
            return Exit.DONE
        plan, _ = plan_this_process(configuration)
        return infer(source, plan, World(torch.device(plan.device)))[0]
    except ConfigError as error:
        return _report_once(error, is_first=is_first)


def _report_once(error: ConfigError, *, is_first: bool) -> Exit:
    """Raise the error, or return its exit code if every rank raises it and this is not the first rank."""
    if is_first or not isinstance(error, SharedConfigError):
        raise error
    return Exit(error.exit_code)


def _check_shard(configuration: Configuration) -> None:
    """Raise ConfigError if the settings name a shard that does not exist."""
    shard, num_shards = _shard(configuration)
    if isinstance(shard, int) and isinstance(num_shards, int) and shard >= num_shards:
        what = f"there is no such shard with inference.num_shards={num_shards}; shards are counted from 0"
        raise ConfigError(Problem(what, f"inference.shard={shard}", "use a number below inference.num_shards"))


def _splits_into_shards(configuration: Configuration) -> bool:
    """Return whether the ranks split the predictions: `predict` supports shards, and no single shard is requested."""
    return _shard(configuration) == (0, 1) and configuration.choices["parallelism"].uses("ddp")


def _shard(configuration: Configuration) -> tuple[Any, Any]:
    """Return the shard that the settings name and the number of shards; (None, None) if the task has none."""
    return configuration.inference.get("shard"), configuration.inference.get("num_shards")


def _infer_shard(source: ModelSource, plan: Plan, world: World) -> tuple[Exit, Any]:
    return infer(source, plan_one_rank(source.configuration, take_inventory(), plan, world.rank), world)


@nonblocking_streams()
def start_evaluation(
    request: Request, split: str, checkpoint: str | None = None, level: Level | None = None
) -> tuple[Exit, dict[str, Any] | None]:
    """Evaluate the run or the weights that the request names; return the exit code and the record of the metrics.

    checkpoint  best, last or the number of an update; None: best if there is one, otherwise last
    level       minimum level of printed messages; None: $ACCEL_RUN_LOG_LEVEL
    The record is None on every rank except 0 if torchrun or srun started the ranks.
    """
    member = detect_rank(os.environ)
    is_first = member is None or member.rank == 0
    try:
        source = find_source(request, Console(level=level or terminal_log_level(), is_enabled=is_first), checkpoint)
        task_file = source.configuration.request.task_file
        code, record = run_on_ranks(source.configuration, task_file, partial(evaluate_run, source, split, level))
    except ConfigError as error:
        return _report_once(error, is_first=is_first), None
    return code, record if is_first else None
