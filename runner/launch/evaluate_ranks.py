"""Evaluate a trained run on all devices that its plan uses."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from runner.base.errors import ConfigError, Exit, SharedConfigError
from runner.base.rank_env import detect_rank
from runner.config.request import Request
from runner.engine.trained_evaluation import evaluate_run
from runner.engine.trained_run import find_source
from runner.host.output import nonblocking_streams
from runner.launch.on_ranks import run_on_ranks
from runner.records.events import Console, Level


@nonblocking_streams()
def evaluate(
    request: Request, split: str, checkpoint: str | None = None, level: Level | None = None
) -> tuple[Exit, dict[str, Any] | None]:
    """Evaluate the run or the weights that the request names; return the exit code and the record of the metrics.

    checkpoint  best, last or an update; None: the best one if there is one, else the last one
    level       least important messages to print; None: that of $ACCEL_RUN_LOG_LEVEL
    The record is None after a signal, and on ranks of torchrun or srun that do not print.
    """
    member = detect_rank(os.environ)
    is_first = member is None or member.rank == 0
    try:
        source = find_source(request, Console(level=level or "info", is_enabled=is_first), checkpoint)
        task_file = source.configuration.request.task_file
        code, record = run_on_ranks(source.configuration, task_file, partial(evaluate_run, source, split, level))
    except ConfigError as error:
        if is_first or not isinstance(error, SharedConfigError):
            raise
        return Exit(error.exit_code), None
    return code, record if is_first else None
