"""Training by one process, by ranks that are started here, or as a rank that somebody else has started."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from runner.base.configuration import Configuration, Request, compose, merge_overrides
from runner.base.errors import ConfigError, Exit, Problem
from runner.base.phases import INFERENCE
from runner.base.ranks import Member, member_of
from runner.engine.session import Ended, Job, name_of, record_failure, take_part
from runner.launch.launcher import launched
from runner.plan.inventory import Inventory, take_inventory
from runner.plan.plan import Plan, allow_for, make_plan, wants_footprint
from runner.plan.ranks import RankDevice
from runner.plan.strategy import Footprint

if TYPE_CHECKING:
    from runner.launch.local import Ending

Answer = TypeVar("Answer")


def train(request: Request, *, then_infer: bool = False) -> Exit:
    """Run the phases that the request asks for, `infer` among them or with `then_infer`; return how it ended.

    Raises AccelRunError; the same is then in error.json of the run directory, if there is one.
    """
    member = member_of(os.environ)
    if member is None or member.world_size == 1:
        return _train(request, None, then_infer=then_infer)
    try:
        return _train(request, member, then_infer=then_infer)
    except ConfigError as error:
        if member.rank == 0:
            raise
        return Exit(error.exit_code)  # rank 0 has the same problems, and says them


def _train(request: Request, member: Member | None, *, then_infer: bool) -> Exit:
    configuration = compose(request)
    wanted = configuration.settings.phases
    predicts = then_infer or INFERENCE in (wanted or ())
    launcher = configuration.choices["launcher"].name
    if predicts and launcher != "local":
        what = "trains only, and the prediction would not wait for the job"
        raise ConfigError(Problem(what, f"launcher={launcher}", "say accel-run train, and when it is done: inference"))
    code = launched(configuration)
    if code is not None:  # handed to a scheduler
        return Exit(code)
    if wanted is not None and set(wanted) == {INFERENCE}:
        return _infer(request, None)
    name = name_of(configuration)
    if member is not None:
        ended, job = _as_member(request, configuration, name, member)
        if member.rank:
            return ended.code
    else:
        ended, job = _from_here(request, configuration, name)
    if ended.code == Exit.DONE and predicts:
        if ended.asked_to_stop:  # with the last update: the same command predicts
            return Exit.PREEMPTED
        return _infer(request, job.name)
    return ended.code


def _infer(request: Request, name: str | None) -> Exit:
    from runner.engine.infer import infer

    overrides = merge_overrides(request.overrides, [f"run={name}"]) if name else request.overrides
    return infer(dataclasses.replace(request, overrides=overrides))


# ---------------------------------------------------------------- ranks that are started here


def _from_here(request: Request, configuration: Configuration, name: str) -> tuple[Ended, Job]:
    """Train in this process, or start the ranks that the plan wants and watch over them."""
    alone = configuration.choices["parallelism"].function == "single"
    inventory = _inventory(configuration, apart=not alone)
    need = _footprint(configuration, inventory) if wants_footprint(configuration, inventory) else None
    job = Job(request, configuration, make_plan(configuration, inventory, footprint=need), inventory, name)
    if job.plan.world_size == 1:
        return _taken_part(job, Member()), job
    return _launched(job)


def _inventory(configuration: Configuration, *, apart: bool) -> Inventory:
    """Take the inventory; `apart`: in a process of its own, so that this one can be forked without CUDA in it."""
    allow_for(configuration)
    if not apart:
        return take_inventory()
    import torch  # noqa: F401 - once, before the forks

    return _apart(take_inventory)


def _footprint(configuration: Configuration, inventory: Inventory) -> Footprint:
    import runner.engine.footprint  # once, before the forks

    return _apart(runner.engine.footprint.footprint, configuration, inventory)


def _apart(function: Callable[..., Answer], *given: Any) -> Answer:
    """Call a function in a process of its own, which leaves neither CUDA nor threads in this one."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    ignoring = (signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to both, and one answer is enough
    with ProcessPoolExecutor(1, get_context("fork"), initializer=signal.signal, initargs=ignoring) as process:
        return process.submit(function, *given).result()


def _taken_part(job: Job, member: Member) -> Ended:
    import torch

    from runner.distributed.join import joined

    device = torch.device(job.plan.ranks[member.rank].device)
    timeout_s = float(job.plan.choices["parallelism"].options.get("timeout_s", 600.0))
    with joined(member, device, timeout_s=timeout_s) as world:
        return take_part(job, world)


def _launched(job: Job) -> tuple[Ended, Job]:
    """Start the ranks; go on without those that were killed or cost more than they bring, from the last checkpoint."""
    import runner.engine.train  # noqa: F401 - what every rank needs is imported once, before they are forked
    from runner.launch.local import as_error, run_ranks

    restarts = int(job.plan.choices["parallelism"].options.get("restarts", 0))
    attempt, began = 0, time.time()
    while True:
        ending = run_ranks(partial(_main, job), job.plan.world_size, attempt=attempt)
        attempt += 1
        if ending.cause is None:
            ended = Ended(Exit(ending.code), bool(ending.stop) or any(stopped for stopped, _ in ending.results))
            dropped = tuple(ending.results[0][1])
            if not dropped or ending.stop:
                return ended, job
            job = _without(job, dropped)
        elif restarts and _can_go_on(ending):
            restarts -= 1
            job = _without(job, (ending.cause.rank,))
        else:
            error = as_error(ending)
            record_failure(job, error, began)
            raise error


def _main(job: Job, member: Member) -> tuple[int, Any]:
    """Be a rank; return its exit code, whether somebody asked to stop, and the ranks to go on without."""
    ended = _taken_part(job, member)
    return int(ended.code), (ended.asked_to_stop, ended.dropped)


def _can_go_on(ending: Ending) -> bool:
    """Tell whether a rank was killed from outside, which another start may be spared; a fault would come again."""
    return ending.stop is None and ending.cause is not None and ending.cause.signal == "SIGKILL"


def _without(job: Job, lost: tuple[int, ...]) -> Job:
    """Return the job without these ranks; the last rank is started again as it was."""
    from runner.observe.events import Console

    kept = [rank for rank in range(job.plan.world_size) if rank not in lost] or [0]
    left = [job.plan.ranks[rank] for rank in kept]
    choices = dict(job.configuration.choices)
    shares = choices["parallelism"].options.get("shares")
    if isinstance(shares, list) and len(shares) == job.plan.world_size:
        fewer = {**choices["parallelism"].options, "shares": [shares[rank] for rank in kept]}
        choices["parallelism"] = dataclasses.replace(choices["parallelism"], options=fewer)
    configuration = dataclasses.replace(job.configuration, choices=choices)
    plan = make_plan(configuration, job.inventory, left)
    Console().info(f"goes on from the last checkpoint with {len(left)} rank{'s' * (len(left) > 1)}: {plan.batch}")
    return dataclasses.replace(job, configuration=configuration, plan=plan)


# ---------------------------------------------------------------- a rank that somebody else has started


def _as_member(request: Request, configuration: Configuration, name: str, member: Member) -> tuple[Ended, Job]:
    """Train as the rank that torchrun or srun made of this process; rank 0 decides for all what is run."""
    import torch

    from runner import __version__
    from runner.distributed.join import joined

    allow_for(configuration)
    inventory = take_inventory()
    gpus = [gpu for gpu in inventory.usable if gpu.kind == "cuda"]
    wants_gpu = gpus and configuration.settings.device != "cpu"
    mine = RankDevice.of(gpus[member.local_rank % len(gpus)] if wants_gpu else None, inventory)
    with joined(member, torch.device(mine.device)) as world:
        facts = {"accel-run": __version__, "torch": torch.__version__, "task": configuration.choices["task"].name}
        _must_agree(world.gather(facts))
        ranks = [RankDevice(**fields) for fields in world.gather(dataclasses.asdict(mine))]
        plan = make_plan(configuration, inventory, ranks)
        plan = Plan.from_json(world.from_first(plan.to_json()))
        job = Job(request, configuration, plan, inventory, world.from_first(name))
        return take_part(job, world), job


def _must_agree(facts: list[dict[str, str]]) -> None:
    """Raise ConfigError, on every rank alike, where ranks differ in what decides the numbers."""
    problems = []
    for key, first in facts[0].items():
        others = [f"{there[key]} on rank {rank}" for rank, there in enumerate(facts) if there[key] != first]
        if others:
            what = f"must be the same on every rank, but is {first} on rank 0 and {', '.join(others[:3])}"
            problems.append(Problem(what, key, "install the same software everywhere, then start all ranks again"))
    if problems:
        raise ConfigError(problems)
