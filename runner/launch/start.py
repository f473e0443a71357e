"""Train in one process, with ranks started here, or as a rank started by torchrun or srun."""

from __future__ import annotations

import dataclasses
import os
import sys

from runner.base.errors import ConfigError, Exit, Problem, SharedConfigError
from runner.base.rank_env import RankInfo, detect_rank
from runner.config.configuration import compose
from runner.config.phases import INFERENCE
from runner.config.request import Request, merge_overrides, override_key
from runner.durable.weight_source import check_start
from runner.engine.process.job import choose_run_name
from runner.host.other_load import OtherLoad, choose_wait_policy
from runner.host.output import nonblocking_streams
from runner.launch.launcher import submit
from runner.plan.planner import apply_allocator_settings
from runner.records.events import Console, terminal_log_level
from runner.trackers.tracker import require_installed


@nonblocking_streams()
def start_training(request: Request, *, then_infer: bool = False) -> Exit:
    """Run the requested phases, and inference if the phase `infer` is selected or `then_infer` is true.

    Raises AccelRunError, which is also written to error.json of the run directory, if there is one.
    """
    member = detect_rank(os.environ)
    if member is None or member.world_size == 1:
        return _train(request, None, then_infer=then_infer)
    try:
        return _train(request, member, then_infer=then_infer)
    except ConfigError as error:
        # Before the rendezvous ranks cannot communicate, so the first rank of each machine reports its error.
        if member.rank == 0 or (member.local_rank == 0 and not isinstance(error, SharedConfigError)):
            raise
        return Exit(error.exit_code)


def _train(request: Request, member: RankInfo | None, *, then_infer: bool) -> Exit:
    # Not for ranks of torchrun or srun: they start at the same time, and would count each other's load as foreign.
    load = OtherLoad() if "torch" not in sys.modules and member is None else None
    configuration = compose(request)
    terminal_log_level()  # reports an invalid level before a run directory exists
    phases = configuration.settings.phases
    runs_inference = then_infer or INFERENCE in (phases or ())
    launcher = configuration.choices["launcher"].name
    if runs_inference and launcher != "local":
        what = "cannot run inference, because the command does not wait for the job"
        fix = "use accel-run train, then accel-run inference when the job has finished"
        raise ConfigError(Problem(what, f"launcher={launcher}", fix))
    code = submit(configuration)
    if code is not None:  # submitted to a scheduler
        return Exit(code)
    console, wait_policy = Console(level=terminal_log_level()), choose_wait_policy(load) if load is not None else ""
    if phases is not None and set(phases) == {INFERENCE}:
        if wait_policy:
            console.info(wait_policy)
        return _infer(request, None)
    require_installed(configuration.choices["tracker"].function)
    name = choose_run_name(configuration)
    if member is None:  # several ranks check the weights together, and report errors once
        check_start(configuration.settings, name)
    if "torch" not in sys.modules and (member is None or member.rank == 0):  # importing takes seconds
        console.info(f"loading PyTorch for run {name}")
        if wait_policy:
            console.info(wait_policy)
    apply_allocator_settings(configuration)
    from runner.launch.training_ranks import train_as_member, train_here  # after the checks: it loads torch

    if member is not None:
        end, job = train_as_member(request, configuration, name, member, runs_inference=runs_inference)
        if member.rank:
            return end.code
    else:
        end, job = train_here(request, configuration, name, runs_inference=runs_inference)
    if end.code == Exit.DONE and runs_inference:
        if end.is_stop_requested:  # in the last update: the same command continues with inference
            return Exit.PREEMPTED
        return _infer(request, job.name, is_alone=member is not None)  # other ranks have returned above
    return end.code


def _infer(request: Request, name: str | None, *, is_alone: bool = False) -> Exit:
    from runner.launch.trained_ranks import start_inference

    overrides = request.overrides
    if name:  # predict with the trained weights, not with the initial ones
        weight_overrides = tuple(
            override for override in overrides if override_key(override).partition(".")[0] == "weights"
        )
        overrides = merge_overrides(
            (override for override in overrides if override not in weight_overrides), [f"run={name}"]
        )
    return start_inference(dataclasses.replace(request, overrides=overrides), is_alone=is_alone)
