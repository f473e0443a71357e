"""Run a function on every rank of a plan: in this process, in forked ranks, or as a rank of torchrun or srun."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from runner.base.errors import AccelRunError, Exit, Problem, SharedConfigError, rebuild_error
from runner.base.json_converter import decode_valid, encode
from runner.base.rank_env import RankInfo, detect_rank
from runner.config.chosen_option import make_chosen
from runner.config.configuration import Choice, Configuration, to_yaml
from runner.config.options import task_source
from runner.distributed.join import join_process_group
from runner.distributed.world import World
from runner.engine.process.watchdog import WATCHDOGS
from runner.forecast.demand import trace_memory_needs
from runner.host.resources import affinity
from runner.host.scratch import private_folder
from runner.launch.local import run_ranks, to_error
from runner.plan.inventory import Device, Inventory, take_inventory
from runner.plan.planner import apply_allocator_settings, make_plan, may_use_gpu, should_trace_memory
from runner.plan.rank_devices import RankDevice, number_machines
from runner.plan.run_plan import Plan
from runner.version import __version__

Result = TypeVar("Result")
RankFunction = Callable[[Plan, World], tuple[Exit, Any]]  # -> exit code and a JSON-serializable result


def run_on_ranks(configuration: Configuration, task_file: Path | None, function: RankFunction) -> tuple[Exit, Any]:
    """Call `function(plan, world)` on every rank of the plan; return the result of rank 0.

    A rank of torchrun or srun returns its own result. If ranks fail, the error of the one that failed first is raised.
    A stop signal kills the ranks, because `function` cannot save its state; KeyboardInterrupt is then raised.
    """
    member = detect_rank(os.environ)
    if member is not None and member.world_size > 1:
        with join_as_member(configuration, task_file, member) as (world, plan, _):
            return function(plan, world)
    inventory = prepare_inventory(configuration)
    needs = trace_memory_needs(configuration, inventory) if should_trace_memory(configuration, inventory) else None
    plan = make_plan(configuration, inventory, needs=needs)
    if plan.world_size > 1:
        import_before_fork(plan)
        ending = run_ranks(partial(_call_on_rank, plan, function), plan.world_size, saves=False)
        if ending.cause is not None:
            raise to_error(ending)
        if ending.code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        return Exit(ending.code), ending.results[0]
    with private_folder():
        return run_as_rank(plan, RankInfo(), partial(function, plan))


def prepare_inventory(configuration: Configuration) -> Inventory:
    """Return the hardware of this machine, with the configured allocator settings."""
    apply_allocator_settings(configuration)
    return take_inventory()


def import_before_fork(plan: Plan) -> None:
    """Import the module of the strategy once, before the ranks are forked."""
    strategy = {"fsdp": "sharded", "pipeline": "pipelined"}.get(plan.choices["parallelism"].function, "replicated")
    import_module(f"runner.distributed.{strategy}")


@contextmanager
def join_as_member(
    configuration: Configuration, task_file: Path | None, member: RankInfo
) -> Iterator[tuple[World, Plan, Inventory]]:
    """Join the other ranks of torchrun or srun; yield the world, the plan of all ranks, and this rank's hardware.

    Raises SharedConfigError if the ranks differ in anything that affects results.
    """
    inventory = prepare_inventory(configuration)
    devices = devices_of_local_ranks(configuration, inventory, member.num_local_ranks)
    local_ranks = [rank % member.num_local_ranks for rank in range(member.world_size)]
    # The other machines are not known yet, so they are assumed to be like this one.
    assumed = number_machines([devices[number] for number in local_ranks], local_ranks)
    needs, error, should_trace = None, None, False
    try:
        should_trace = should_trace_memory(configuration, inventory, assumed)
        if should_trace and member.rank == 0:
            # Before the ranks join, because a process that has initialized CUDA cannot be forked.
            needs = trace_memory_needs(configuration, inventory, assumed)
    except AccelRunError as raised:  # rank 0 shares it with the ranks that wait for it
        error = raised
    timeout_s = float(configuration.choices["parallelism"].options.get("timeout_s", 600.0))
    watchdog_s = _watchdog_s(configuration.choices["watchdog"])
    device, rendezvous_s = devices[member.local_rank], timeout_s if should_trace else None
    with (
        private_folder(),
        join_process_group(
            member,
            torch.device(device.device),
            timeout_s=timeout_s,
            rendezvous_s=rendezvous_s,
            watchdog_s=watchdog_s,
        ) as joined,
    ):
        source = task_source(configuration.choices["task"].name, task_file).read_bytes()
        check_agreement(
            joined.gather(
                {
                    "accel-run": __version__,
                    "torch": torch.__version__,
                    "task": configuration.choices["task"].name,
                    "the task's file": hashlib.sha256(source).hexdigest()[:12],
                    "settings": hashlib.sha256(to_yaml(configuration).encode()).hexdigest()[:12],
                }
            )
        )
        gathered = joined.gather([encode(device), member.local_rank, sorted(affinity())])
        ranks = number_machines(
            [decode_valid(RankDevice, fields) for fields, _, _ in gathered], [local for _, local, _ in gathered]
        )
        machines, cores = [rank.machine for rank in ranks], [set(row[-1]) for row in gathered]
        world = dataclasses.replace(joined, num_sharing=count_sharing(machines, cores, joined.rank))
        plan_here = partial(make_plan, configuration, inventory, ranks, needs, num_sharing=world.num_sharing)
        yield world, _plan_on_first(world, plan_here, error), inventory


def devices_of_local_ranks(configuration: Configuration, inventory: Inventory, num_ranks: int) -> list[RankDevice]:
    """Return the devices of the ranks of this machine: its GPUs in turn, first the one that `device` selects."""
    requested = configuration.settings.device
    gpus = [gpu for gpu in inventory.usable if gpu.kind == "cuda"] if may_use_gpu(configuration) else []
    ordered: list[Device | None] = [*sorted(gpus, key=lambda gpu: gpu.torch_name != requested)] or [None]
    return [RankDevice.of(ordered[number % len(ordered)], inventory) for number in range(num_ranks)]


def count_sharing(machines: Sequence[int], cores: Sequence[Set[int]], rank: int) -> int:
    """Return how many ranks of this rank's machine, including itself, may run on some of its cores.

    torchrun lets all ranks of a machine use all cores, whereas srun usually binds each rank to its own cores.

    machines  number of the machine of each rank
    cores     CPU threads on which each rank may run
    """
    own = cores[rank]
    return sum(
        machine == machines[rank] and not own.isdisjoint(others)
        for machine, others in zip(machines, cores, strict=True)
    )


def _plan_on_first(world: World, plan_here: Callable[[], Plan], error: AccelRunError | None) -> Plan:
    """Return the plan of rank 0 on every rank.

    error  what has failed on this rank so far
    If rank 0 has an error, it raises the error, and the other ranks raise SharedConfigError with its problems and exit
    code, which is not reported again. Errors of other ranks do not matter.
    """
    text = ""
    if world.is_first and error is None:
        try:
            text = plan_here().to_json()
        except AccelRunError as raised:
            error = raised
    problems, code = ([], 0) if error is None else (encode(error.problems), int(error.exit_code))
    text, problems, code = world.broadcast([text, problems, code])
    if text:
        return Plan.from_json(text)
    if world.is_first and error is not None:
        raise error
    raise rebuild_error(SharedConfigError, tuple(Problem(**problem) for problem in problems), Exit(code))


def check_agreement(descriptions: list[Mapping[str, str]]) -> None:
    """Raise SharedConfigError if ranks differ in anything that affects results."""
    problems = []
    for key, first in descriptions[0].items():
        others = [f"{other[key]} on rank {rank}" for rank, other in enumerate(descriptions) if other[key] != first]
        if others:
            what = f"must be the same on every rank, but is {first} on rank 0 and {', '.join(others[:3])}"
            problems.append(Problem(what, key, "install the same software everywhere, then start all ranks again"))
    if problems:
        raise SharedConfigError(problems)


def _call_on_rank(plan: Plan, function: RankFunction, member: RankInfo) -> tuple[int, Any]:
    code, result = run_as_rank(plan, member, partial(function, plan))
    return int(code), result


def run_as_rank(plan: Plan, member: RankInfo, function: Callable[[World], Result]) -> Result:
    """Join the other ranks, and call the function in this process."""
    timeout_s = float(plan.choices["parallelism"].options.get("timeout_s", 600.0))
    device, watchdog_s = torch.device(plan.ranks[member.rank].device), _watchdog_s(plan.choices["watchdog"])
    with join_process_group(member, device, timeout_s=timeout_s, watchdog_s=watchdog_s) as world:
        return function(world)


def _watchdog_s(choice: Choice) -> float:
    """Return the time within which the watchdog reports a hang; 0 if there is no watchdog."""
    limits = make_chosen(WATCHDOGS, choice)
    return 0.0 if limits is None else limits.total_s
