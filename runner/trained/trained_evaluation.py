"""Evaluate a trained model on a split, as the evaluation during its training does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from runner.base.errors import ConfigError, Exit, Problem, TaskFault
from runner.base.json_values import replace_nonfinite
from runner.base.oom_errors import find_oom_cause, halve
from runner.base.order import spread_evenly
from runner.base.task import Task
from runner.base.text import format_metric
from runner.config.schema import did_you_mean
from runner.distributed.world import World
from runner.engine.checkpoints import oom_history
from runner.engine.contract.task_loading import task_errors
from runner.engine.evaluation.evaluate import BatchSizes, EvaluationResult, evaluate
from runner.engine.parts.assemble import Parts
from runner.engine.process.watchdog import EVALUATION, SUMMARY, HangTraces, run_watchdog
from runner.loading.fetcher import Fetcher
from runner.plan.run_plan import PhasePlan, Plan
from runner.records.events import Console, Level, terminal_log_level
from runner.trained.trained_run import ModelSource, TrainedModel, broadcast_name, open_source

FOLDER = "evaluations"
SPLITS = ("train", "val", "test")


def evaluate_run(source: ModelSource, split: str, level: Level | None, plan: Plan, world: World) -> tuple[Exit, Any]:
    """Evaluate as one rank; rank 0 prints the metrics and writes them to evaluations/ of the run directory.

    Model, batch size, precision and seed are those of the run, so the metrics of split val equal those that training
    reported for this checkpoint.

    level  lowest level of the messages to print; None: the level in $ACCEL_RUN_LOG_LEVEL
    Returns the exit code and the content of the file.
    Raises ConfigError if the task has no such split.
    """
    console = Console(level=level or terminal_log_level(), is_enabled=world.is_first)
    with ExitStack() as stack:
        trained = open_source(broadcast_name(source, world), plan, console, stack, world)
        directory, parts = trained.directory, trained.parts
        stacks = f"{FOLDER}/stacks{'' if world.is_first else f'-rank{world.rank}'}.txt"
        progress_mark = stack.enter_context(
            run_watchdog(plan, world, HangTraces(lambda text: directory.write(stacks, text), file=stacks))
        )
        phase = trained.phase_plan
        fetcher = open_split(parts, split)
        samples = spread_evenly(len(fetcher), phase.evaluate.samples)
        sizes = _make_sizes(trained, phase, console.warning)
        began = time.perf_counter()
        loader = parts.splits.evaluation_loader(fetcher)
        with task_errors(
            parts.source, f"the evaluation of split {split}", micro_batch_size=phase.batch.micro_batch_size
        ):
            result = evaluate(
                parts,
                loader,
                samples,
                sizes,
                on_batch=lambda: progress_mark.advance_batch(EVALUATION, trained.update),
                on_last_batch=lambda: progress_mark.advance(SUMMARY, trained.update),
                split=split,
            )
        seconds = time.perf_counter() - began
        assert result is not None, "nothing stops it"
        record = _make_record(trained, source, split, result, len(samples), seconds)
        if world.is_first:
            checkpoint = source.checkpoint.name if source.checkpoint else "weights"
            file = directory.write(f"{FOLDER}/{split}-{checkpoint}.json", json.dumps(record, indent=2) + "\n")
            metrics = (f"{name} {format_metric(value, 6)}" for name, value in result.metrics.items())
            console.info(f"{split}, {len(samples):,} of {len(fetcher):,} samples: {'  '.join(metrics)}")
            console.info(f"written to {directory.shown / FOLDER / file.name}")
        return Exit.DONE, record


def open_split(parts: Parts, split: str, key: str = "split") -> Fetcher:
    """Return the samples of a split. Raises ConfigError about the setting `key` if the task has no such split."""
    known, what = (*SPLITS, *_declared_splits(parts.task)), f"the task has no split {split}"
    if split not in known:  # `dataset` would often return the samples of its last branch
        declare = f'if it has one, write in class {type(parts.task).__name__}:\nsplits = ("{split}",)'
        raise ConfigError(Problem(what, f"{key}={split}", did_you_mean(split, known) or declare))
    problem = Problem(what, f"{key}={split}", "use a split for which dataset(split) of the task returns samples")
    try:
        return parts.splits.fetcher(split, evaluates=True)
    except NotImplementedError as error:
        raise ConfigError(problem) from error
    except TaskFault as fault:
        cause = fault.__cause__
        if isinstance(cause, KeyError) and cause.args == (split,):  # {"train": ..., "val": ...}[split]
            raise ConfigError(problem) from fault
        raise


def _declared_splits(task: Task) -> tuple[str, ...]:
    """Return the names in `splits`; none if the task uses this attribute for something else, such as its datasets."""
    names = task.splits
    is_declared = isinstance(names, tuple | list | frozenset | set) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_declared else ()


def _make_sizes(trained: TrainedModel, phase: PhasePlan, warn: Callable[[str], None]) -> BatchSizes:
    """Return the batch size of the run, with its recorded reductions after an out-of-memory error."""
    plan, world, batch = trained.plan, trained.parts.world, phase.batch

    def reduce(error: Exception, size: int) -> int:
        less = halve(size)
        if find_oom_cause(error) is None or less is None:
            raise error
        warn(f"out of memory: the batches of this evaluation now have {less} samples instead of {size}")
        return less

    failed = reduce if plan.settings.on_oom == "retry" else None
    sizes = BatchSizes(batch.micro_batch_size, batch.global_batch_size, failed)
    current = ("evaluation", phase.name, world.world_size, batch.micro_batch_size)
    for row in oom_history.read_reductions(trained.directory.path):
        is_same = (row.use, row.phase, row.world_size, row.asked) == current
        if is_same and (trained.parts.parallel.is_lockstep or row.applies_to(world.rank)):
            sizes.current = min(sizes.current, row.size)
    return sizes


def _make_record(
    trained: TrainedModel, source: ModelSource, split: str, result: EvaluationResult, num_samples: int, seconds: float
) -> dict[str, Any]:
    plan = trained.plan
    return {
        "run": source.name,
        "split": split,
        "checkpoint": source.checkpoint.name if source.checkpoint else None,
        "marks": list(source.labels),
        "weights": None if source.checkpoint else plan.settings.weights.source,
        "update": trained.update,
        "phase": trained.phase,
        "samples": num_samples,
        "metrics": replace_nonfinite({f"{split}/{name}": value for name, value in result.metrics.items()}),
        "empty": [f"{split}/{name}" for name in result.empty],
        "precision": plan.choices["precision"].name,
        "world_size": plan.world_size,
        "seconds": seconds,
    }
