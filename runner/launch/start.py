"""Train in one process, with ranks started here, or as a rank started by torchrun or srun."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import hashlib
import os
import sys
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.accelerator import accelerator_of, cuda_is_initialized
from runner.base.configuration import Configuration, Request, compose, merge_overrides, task_source, to_yaml
from runner.base.errors import ConfigError, DeviceMemoryError, Exit, HostMemoryError, Problem
from runner.base.output import never_waiting
from runner.base.phases import INFERENCE
from runner.base.rank_env import RankInfo, member_of, starter
from runner.base.scratch import private_folder
from runner.durable.files import read_object
from runner.engine.oom_history import num_restarts
from runner.engine.session import Job, SessionEnd, name_of, record_failure, take_part
from runner.launch.launcher import launched
from runner.launch.traced_demand import needs_in_subprocess
from runner.observe.events import Console, level_said
from runner.observe.trackers import must_be_installed
from runner.plan.inventory import Inventory, take_inventory
from runner.plan.memory_fit import Needs
from runner.plan.planner import Plan, allow_for, make_plan, wants_needs
from runner.plan.rank_devices import RankDevice

if TYPE_CHECKING:
    from runner.launch.local import Ending


@never_waiting()
def train(request: Request, *, then_infer: bool = False) -> tuple[Exit, Job | None]:
    """Run the phases that the request asks for, `infer` among them or with `then_infer`.

    Return how it ended, and what was trained: None where that was nothing, and where another process tells of it.
    Raises AccelRunError; the same is then in error.json of the run directory, if there is one.
    """
    member = member_of(os.environ)
    if member is None or member.world_size == 1:
        return _train(request, None, then_infer=then_infer)
    try:
        return _train(request, member, then_infer=then_infer)
    except ConfigError as error:
        # Before they have met, ranks know nothing of each other: the first of each machine says what it found there.
        if member.rank == 0 or (member.local_rank == 0 and not isinstance(error, _OfAll)):
            raise
        return Exit(error.exit_code), None


def _train(request: Request, member: RankInfo | None, *, then_infer: bool) -> tuple[Exit, Job | None]:
    configuration = compose(request)
    level_said()  # a slip there is answered before there is a folder
    wanted = configuration.settings.phases
    predicts = then_infer or INFERENCE in (wanted or ())
    launcher = configuration.choices["launcher"].name
    if predicts and launcher != "local":
        what = "only trains; the prediction would not wait for the job"
        fix = "use accel-run train; when the job has finished, accel-run inference"
        raise ConfigError(Problem(what, f"launcher={launcher}", fix))
    code = launched(configuration)
    if code is not None:  # handed to a scheduler
        return Exit(code), None
    if wanted is not None and set(wanted) == {INFERENCE}:
        return _infer(request, None), None
    must_be_installed(configuration.choices["tracker"].function)
    name = name_of(configuration)
    if "torch" not in sys.modules and (member is None or member.rank == 0):  # seconds, in which nothing else is printed
        Console(level=level_said()).info(f"starting run {name}: loading PyTorch")
    if member is None and configuration.settings.weights and not (configuration.settings.root / name).exists():
        from runner.engine.weights import require_weights

        require_weights(Path(configuration.settings.weights).expanduser())
    if member is not None:
        ended, job = _as_member(request, configuration, name, member, predicts=predicts)
        if member.rank:
            return ended.code, None
    else:
        ended, job = _from_here(request, configuration, name, predicts=predicts)
    if ended.code == Exit.DONE and predicts:
        if ended.asked_to_stop:  # with the last update: the same command predicts
            return Exit.PREEMPTED, job
        return _infer(request, job.name), job
    return ended.code, job


def _infer(request: Request, name: str | None) -> Exit:
    from runner.engine.infer import infer

    overrides = request.overrides
    if name:  # what was just trained predicts, not what it began with
        began_with = tuple(word for word in overrides if word.partition("=")[0] == "weights")
        overrides = merge_overrides((word for word in overrides if word not in began_with), [f"run={name}"])
    return infer(dataclasses.replace(request, overrides=overrides))


# ---------------------------------------------------------------- ranks that are started here


def _from_here(request: Request, configuration: Configuration, name: str, *, predicts: bool) -> tuple[SessionEnd, Job]:
    """Train in this process, or start and supervise the ranks of the plan."""
    inventory = _inventory(configuration)
    needs = needs_in_subprocess(configuration, inventory) if wants_needs(configuration, inventory) else None
    job = Job(
        request, configuration, make_plan(configuration, inventory, needs=needs), inventory, name, needs, predicts
    )
    if job.plan.world_size > 1:
        return _launched(job)
    _tell_of_crashes()
    while True:
        known, began = num_restarts(job.folder), time.time()
        try:
            with private_folder():
                return _taken_part(job, RankInfo()), job
        except (DeviceMemoryError, HostMemoryError) as error:
            if num_restarts(job.folder) <= known:
                raise
            Console().warning(str(error.problems[0]))
        _let_go()
        job = _in_smaller_passes(job, began)


def _let_go() -> None:
    """What a run held that has failed is given back; part of it was taken for what lives as long as the process."""
    import torch

    gc.unfreeze()
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if cuda_is_initialized():
        accelerator_of(torch.device("cuda")).empty_cache()


def _in_smaller_passes(job: Job, began: float) -> Job:
    """Return the job to resume after the run has reduced its micro-batch size."""
    settings = job.plan.settings
    if settings.resume == "fresh" or _has_begun(job, began):  # what was there before is put aside already
        settings = dataclasses.replace(settings, resume="auto")
    Console().info("resuming from the last checkpoint with smaller micro-batches")
    configuration = dataclasses.replace(job.configuration, settings=settings)
    return dataclasses.replace(job, configuration=configuration, plan=dataclasses.replace(job.plan, settings=settings))


def _tell_of_crashes() -> None:
    """A crash in C writes the lines that were being run to standard error, for it leaves no time for more."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, RuntimeError, AttributeError):  # there is no standard error
            faulthandler.enable(all_threads=True)


def _inventory(configuration: Configuration) -> Inventory:
    allow_for(configuration)
    return take_inventory()


def _taken_part(job: Job, member: RankInfo) -> SessionEnd:
    import torch

    from runner.distributed.join import joined

    device = torch.device(job.plan.ranks[member.rank].device)
    timeout_s = float(job.plan.choices["parallelism"].options.get("timeout_s", 600.0))
    with joined(member, device, timeout_s=timeout_s) as world:
        return take_part(job, world)


def _launched(job: Job) -> tuple[SessionEnd, Job]:
    """Start the ranks; restart from the last checkpoint without ranks that were killed or slow the run down."""
    import runner.engine.training  # noqa: F401 - what every rank needs is imported once, before they are forked
    from runner.launch.local import as_error, run_ranks

    strategy = {"fsdp": "sharded", "pipeline": "pipelined"}.get(job.plan.choices["parallelism"].function, "replicated")
    import_module(f"runner.distributed.{strategy}")
    restarts = int(job.plan.choices["parallelism"].options.get("restarts", 0))
    attempt, began = 0, time.time()
    while True:
        known = num_restarts(job.folder)
        ending = run_ranks(partial(_main, job), job.plan.world_size, attempt=attempt, say=_say_of_signals)
        attempt += 1
        if ending.cause is None:
            told = [result for result in ending.results if result is not None]  # none of ranks that were killed
            dropped = tuple(told[0][1]) if told else ()
            if not dropped or ending.stop or ending.code != Exit.PREEMPTED:
                return SessionEnd(Exit(ending.code), bool(ending.stop) or any(stopped for stopped, _ in told)), job
            job = _without(job, dropped, began)
            continue
        error = as_error(ending)
        # A hang is not tried again: it would come again, and somebody wants to look.
        has_stacks = error.exit_code == Exit.HANG or ending.cause.signal is not None
        record_failure(job, error, began, ending.cause.traceback if has_stacks else "", ending.made)
        if ending.stop is None and num_restarts(job.folder) > known:
            Console().warning(str(error.problems[0]))
            job = _in_smaller_passes(job, began)
            continue
        if not restarts or not _can_go_on(ending):
            raise error
        restarts -= 1
        job = _without(job, (ending.cause.rank,), began)


def _say_of_signals(text: str) -> None:
    """Report a killed or exited rank at once; errors raised by a rank are reported when all have ended."""
    if " was ended by " in text or " exited early" in text or "does not die" in text:
        Console().warning(text)


def _main(job: Job, member: RankInfo) -> tuple[int, Any]:
    """Run as a rank; return its exit code, whether a stop was requested, and the ranks to drop."""
    ended = _taken_part(job, member)
    return int(ended.code), (ended.asked_to_stop, ended.dropped)


def _can_go_on(ending: Ending) -> bool:
    """Return whether a rank was killed by SIGKILL, which a restart may avoid; an error would recur."""
    return ending.stop is None and ending.cause is not None and ending.cause.signal == "SIGKILL"


def _without(job: Job, lost: tuple[int, ...], began: float) -> Job:
    """Return the job without these ranks; the last rank is started again as it was. What was begun anew goes on."""
    kept = [rank for rank in range(job.plan.world_size) if rank not in lost] or [0]
    left = [job.plan.ranks[rank] for rank in kept]
    parallelism = job.configuration.choices["parallelism"]
    options = dict(parallelism.options)
    if isinstance(options.get("shares"), list) and len(options["shares"]) == job.plan.world_size:
        options["shares"] = [options["shares"][rank] for rank in kept]
    if options.get("split"):
        options["split"] = None  # of another number of stages
    choices = {**job.configuration.choices, "parallelism": dataclasses.replace(parallelism, options=options)}
    settings = job.configuration.settings
    if _has_begun(job, began):
        settings = dataclasses.replace(settings, resume="auto")
    configuration = dataclasses.replace(job.configuration, choices=choices, settings=settings)
    plan = make_plan(configuration, job.inventory, left, job.needs)
    Console().info(f"resuming from the last checkpoint with {len(left)} rank{'s' * (len(left) > 1)}: {plan.batch}")
    return dataclasses.replace(job, configuration=configuration, plan=plan)


def _has_begun(job: Job, began: float) -> bool:
    """Tell whether the run has a checkpoint of this start, also where it was told to start anew or from another one."""
    from runner.durable.checkpoint import newest_valid

    started = read_object(job.folder / "run.json").get("started")
    is_ours = started is not None and datetime.fromisoformat(started).timestamp() >= began - 0.001  # to milliseconds
    return is_ours and newest_valid(job.folder / "checkpoints") is not None


# ---------------------------------------------------------------- a rank that somebody else has started


def _as_member(
    request: Request, configuration: Configuration, name: str, member: RankInfo, *, predicts: bool
) -> tuple[SessionEnd, Job]:
    """Train as a rank started by torchrun or srun; rank 0 decides which run is used."""
    import torch

    from runner import __version__
    from runner.distributed.join import joined

    inventory = _inventory(configuration)
    gpus = [gpu for gpu in inventory.usable if gpu.kind == "cuda"]
    wants_gpu = gpus and configuration.settings.device != "cpu"
    mine = RankDevice.of(gpus[member.local_rank % len(gpus)] if wants_gpu else None, inventory)
    timeout_s = float(configuration.choices["parallelism"].options.get("timeout_s", 600.0))
    wanted = member.rank == 0 and wants_needs(configuration, inventory)
    needs = needs_in_subprocess(configuration, inventory) if wanted else None
    with private_folder(), joined(member, torch.device(mine.device), timeout_s=timeout_s) as world:
        source = task_source(configuration.choices["task"].name, request.task_file).read_bytes()
        must_agree(
            world.gather(
                {
                    "accel-run": __version__,
                    "torch": torch.__version__,
                    "task": configuration.choices["task"].name,
                    "the task's file": hashlib.sha256(source).hexdigest()[:12],
                    "settings": hashlib.sha256(to_yaml(configuration).encode()).hexdigest()[:12],
                }
            )
        )
        ranks = [RankDevice(**fields) for fields in world.gather(dataclasses.asdict(mine))]
        told = world.from_first(dataclasses.asdict(needs) if needs else None)
        try:
            plan = make_plan(configuration, inventory, ranks, Needs.from_dict(told) if told else None)
        except ConfigError as error:
            raise _OfAll(error.problems) from error
        plan = Plan.from_json(world.from_first(plan.to_json()))
        if world.from_first(member.attempt > 0 and _is_started_again(configuration, name)):
            plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, resume="auto"))
        job = Job(request, configuration, plan, inventory, world.from_first(name), predicts=predicts)
        return take_part(job, world), job


class _OfAll(ConfigError):
    """Problems found by every rank, reported once."""


def _is_started_again(configuration: Configuration, name: str) -> bool:
    """Return whether an earlier attempt of the same launcher wrote a checkpoint."""
    from runner.durable.checkpoint import newest_valid

    folder = configuration.settings.root / name
    is_ours = read_object(folder / "run.json").get("started_by") == starter()
    return is_ours and newest_valid(folder / "checkpoints") is not None


def must_agree(facts: list[dict[str, str]]) -> None:
    """Raise ConfigError on every rank if ranks differ in anything that affects results."""
    problems = []
    for key, first in facts[0].items():
        others = [f"{there[key]} on rank {rank}" for rank, there in enumerate(facts) if there[key] != first]
        if others:
            what = f"must be the same on every rank, but is {first} on rank 0 and {', '.join(others[:3])}"
            problems.append(Problem(what, key, "install the same software everywhere, then start all ranks again"))
    if problems:
        raise _OfAll(problems)
