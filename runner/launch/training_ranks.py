"""Train in this process, with ranks started here, or as a rank of torchrun or srun; this module imports torch."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from runner.axes.compile import nothing_was_compiled
from runner.base.accelerator import get_accelerator
from runner.base.errors import DeviceMemoryError, Exit, HostMemoryError, SharedConfigError
from runner.base.loaded_torch import cuda_is_initialized
from runner.base.rank_env import RankInfo, launcher_id
from runner.config.configuration import Configuration
from runner.config.request import Request
from runner.durable.checkpoint import newest_name, newest_valid
from runner.durable.directory import RunDirectory
from runner.durable.record_files import read_record
from runner.durable.weight_source import find_weights
from runner.engine.checkpoints.oom_history import num_restarts
from runner.engine.checkpoints.resumption import find_finished
from runner.engine.parts.weights import check_names
from runner.engine.process.attempt import record_early_end, record_failure
from runner.engine.process.job import Job, SessionEnd
from runner.engine.session import run_rank
from runner.forecast.demand import trace_memory_needs
from runner.host.scratch import private_folder
from runner.launch.local import Failure, run_ranks, to_error
from runner.launch.on_ranks import import_before_fork, join_as_member, prepare_inventory, run_as_rank
from runner.plan.planner import make_plan, should_trace_memory
from runner.plan.rank_devices import find_wrong_world_size
from runner.plan.run_plan import Plan
from runner.records.events import Console, terminal_log_level

# ---------------------------------------------------------------- ranks that are started here


def train_here(
    request: Request, configuration: Configuration, name: str, *, runs_inference: bool
) -> tuple[SessionEnd, Job]:
    """Train in this process, or start and supervise the ranks of the plan."""
    weights = configuration.settings.weights
    if weights.source and not (configuration.settings.root / name).exists():
        check_names(find_weights(str(weights.source), configuration.settings.root), weights)
    inventory = prepare_inventory(configuration)
    needs = trace_memory_needs(configuration, inventory) if should_trace_memory(configuration, inventory) else None
    job = Job(
        request, configuration, make_plan(configuration, inventory, needs=needs), inventory, name, needs, runs_inference
    )
    if _is_finished(job):
        return SessionEnd(Exit.DONE), job
    if job.plan.world_size > 1:
        return _train_on_ranks(job)
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, RuntimeError, AttributeError):  # standard error is closed
            faulthandler.enable(all_threads=True)
    while True:
        restarts_before, start_time = num_restarts(job.folder), time.time()
        try:
            with private_folder():
                return run_as_rank(job.plan, RankInfo(), partial(run_rank, job)), job
        except (DeviceMemoryError, HostMemoryError) as error:
            if num_restarts(job.folder) <= restarts_before:
                raise
            Console().warning(str(error.problems[0]))
        # Release the memory of a failed run, including objects that `gc.freeze` has exempted from collection.
        gc.unfreeze()
        gc.collect()
        if not nothing_was_compiled():
            torch.compiler.reset()
        if cuda_is_initialized():
            get_accelerator(torch.device("cuda")).empty_cache()
        job = _resume_with_smaller_micro_batches(job, start_time)


def _is_finished(job: Job) -> bool:
    """Return whether the run has no work left; if so, print how to train longer."""
    directory = RunDirectory.join(job.folder)
    finished = find_finished(job.plan, directory)
    if finished is not None:
        run = directory.argument(job.plan.settings.output_root)
        length = "updates" if job.plan.settings.updates is not None else "epochs"
        Console(level=terminal_log_level()).info(
            f"{job.name} is finished: {finished.state['phase_update']} updates of {finished.state['phase']} are done;"
            f" to train longer: accel-run resume {run} {length}=N resume_allow=[{length}]"
        )
    return finished is not None


def _resume_with_smaller_micro_batches(job: Job, start_time: float) -> Job:
    """Return the job that resumes after the run has reduced its micro-batch size."""
    settings = job.plan.settings
    # With resume=fresh, the first start has already renamed the earlier run; a second one would rename this run.
    if settings.resume == "fresh" or _has_checkpoint_since(job, start_time):
        settings = dataclasses.replace(settings, resume="auto")
    Console().info("resuming from the last checkpoint with smaller micro-batches")
    configuration = dataclasses.replace(job.configuration, settings=settings)
    return dataclasses.replace(job, configuration=configuration, plan=dataclasses.replace(job.plan, settings=settings))


def _train_on_ranks(job: Job) -> tuple[SessionEnd, Job]:
    """Start the ranks; if one is killed, restart from the last checkpoint without it."""
    import_before_fork(job.plan)
    restarts = int(job.plan.choices["parallelism"].options.get("restarts", 0))
    attempt, start_time = 0, time.time()
    while True:
        restarts_before = num_restarts(job.folder)
        result = run_ranks(partial(_train_on_rank, job), job.plan.world_size, attempt=attempt, on_notice=_report_exit)
        attempt += 1
        if result.cause is None:
            code = Exit(result.code)
            if code == Exit.PREEMPTED and newest_name(job.folder / "checkpoints") is None:
                code = Exit.INTERRUPTED  # ended before its first update
            record_early_end(job, code, start_time)
            # The result of a killed rank is None.
            return SessionEnd(code, bool(result.stop) or any(result.results)), job
        error = to_error(result)
        # No restart after a hang: it would recur, and its cause needs an investigation.
        has_stacks = error.exit_code == Exit.HANG or result.cause.signal is not None
        record_failure(job, error, start_time, result.cause.traceback if has_stacks else "", result.num_updates)
        if result.stop is None and num_restarts(job.folder) > restarts_before:
            Console().warning(str(error.problems[0]))
            job = _resume_with_smaller_micro_batches(job, start_time)
            continue
        was_killed = result.stop is None and result.cause.signal == "SIGKILL"
        if not restarts or not was_killed:  # an error would recur
            raise error
        restarts -= 1
        job = _drop_rank(job, result.cause.rank, start_time)


def _report_exit(text: str, failure: Failure | None) -> None:
    """Report a killed or exited rank at once; errors raised by a rank are reported when all have ended."""
    if failure is None or failure.exited_early:
        Console().warning(text)


def _train_on_rank(job: Job, member: RankInfo) -> tuple[int, bool]:
    """Run as a rank; return its exit code, and whether a stop was requested."""
    end = run_as_rank(job.plan, member, partial(run_rank, job))
    return int(end.code), end.is_stop_requested


def _drop_rank(job: Job, lost: int, start_time: float) -> Job:
    """Return the job without rank `lost`; it resumes if this start has written a checkpoint."""
    kept = ranks_to_keep(job.plan.choices["parallelism"].options, lost, job.plan.world_size)
    left = [job.plan.ranks[rank] for rank in kept]
    configuration = configuration_for_ranks(job.configuration, job.plan, kept)
    if _has_checkpoint_since(job, start_time):
        configuration = dataclasses.replace(
            configuration, settings=dataclasses.replace(configuration.settings, resume="auto")
        )
    plan = make_plan(configuration, job.inventory, left, job.needs)
    Console().info(f"resuming from the last checkpoint with {len(left)} rank{'s' * (len(left) > 1)}: {plan.batch}")
    return dataclasses.replace(job, configuration=configuration, plan=plan)


def ranks_to_keep(options: Mapping[str, Any], lost: int, world_size: int) -> list[int]:
    """Return the ranks that continue after the loss of one: those of complete pipelines, if there are any."""
    others = [rank for rank in range(world_size) if rank != lost]
    stages = options.get("stages")
    if not isinstance(stages, int):
        return others
    return [rank for rank in others if rank // stages != lost // stages] or others


def configuration_for_ranks(configuration: Configuration, plan: Plan, kept: Sequence[int]) -> Configuration:
    """Adapt the configuration of a plan to the ranks that are kept.

    The precision stays that of the plan: the lost rank may have been the least capable one, for which `auto` was
    resolved, and a run cannot resume in another number format.
    """
    parallelism = configuration.choices["parallelism"]
    options = options_for_ranks(parallelism.options, kept, plan.world_size)
    replaced = {
        "parallelism": dataclasses.replace(parallelism, options=options),
        "precision": plan.choices["precision"],
    }
    return dataclasses.replace(configuration, choices={**configuration.choices, **replaced})


def options_for_ranks(options: Mapping[str, Any], kept: Sequence[int], world_size: int) -> dict[str, Any]:
    """Adapt the options of a strategy from `world_size` ranks to the ranks that are kept."""
    adapted = dict(options)
    if isinstance(adapted.get("shares"), list) and len(adapted["shares"]) == world_size:
        adapted["shares"] = [adapted["shares"][rank] for rank in kept]
    for key in ("shard_size", "stages"):  # number of ranks that hold one replica of the model
        size = adapted.get(key)
        if isinstance(size, int) and len(kept) % size and len(kept) > 1:
            adapted[key] = "all"
    split, stages = adapted.get("split"), adapted.get("stages")
    if split and not isinstance(stages, int) and (stages != "auto" or len(kept) % len(split)):
        adapted["split"] = None  # applies to another number of stages
    return adapted


def _has_checkpoint_since(job: Job, start_time: float) -> bool:
    """Return whether this start of the run has written a checkpoint, whatever `resume` requested."""
    return (
        read_record(job.folder).process.started_since(start_time)
        and newest_valid(job.folder / "checkpoints") is not None
    )


# ---------------------------------------------------------------- ranks started by torchrun or srun


def train_as_member(
    request: Request, configuration: Configuration, name: str, member: RankInfo, *, runs_inference: bool
) -> tuple[SessionEnd, Job]:
    """Train as a rank started by torchrun or srun; rank 0 decides which run is used."""
    if problem := find_wrong_world_size(configuration.choices["parallelism"], member.world_size):
        raise SharedConfigError(problem)
    with join_as_member(configuration, request.task_file, member) as (world, planned, inventory):
        plan = planned
        if world.broadcast(world.is_first and member.attempt > 0 and _has_earlier_checkpoint(configuration, name)):
            plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, resume="auto"))
        job = Job(request, configuration, plan, inventory, world.broadcast(name), runs_inference=runs_inference)
        if world.broadcast(world.is_first and _is_finished(job)):
            return SessionEnd(Exit.DONE), job
        return run_rank(job, world), job


def _has_earlier_checkpoint(configuration: Configuration, name: str) -> bool:
    folder = configuration.settings.root / name
    is_ours = read_record(folder).process.started_by == launcher_id()
    return is_ours and newest_valid(folder / "checkpoints") is not None
