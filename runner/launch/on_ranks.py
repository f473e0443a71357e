"""Run a function on every rank of a plan: in this process, in forked ranks, or as a rank of torchrun or srun."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from runner.base.errors import ConfigError, Exit, Problem, SharedConfigError
from runner.base.json_converter import decode_valid, encode
from runner.base.rank_env import RankInfo, detect_rank
from runner.config.configuration import Configuration, to_yaml
from runner.config.options import task_source
from runner.distributed.join import join_process_group
from runner.distributed.world import World
from runner.forecast.demand import trace_memory_needs
from runner.host.scratch import private_folder
from runner.launch.local import run_ranks, to_error
from runner.plan.inventory import Inventory, take_inventory
from runner.plan.memory_fit import MemoryNeeds
from runner.plan.planner import apply_allocator_settings, make_plan, should_trace_memory
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
    gpus = [gpu for gpu in inventory.usable if gpu.kind == "cuda"]
    wants_gpu = gpus and configuration.settings.device != "cpu"
    rank_device = RankDevice.of(gpus[member.local_rank % len(gpus)] if wants_gpu else None, inventory)
    should_trace = member.rank == 0 and should_trace_memory(configuration, inventory)
    needs = trace_memory_needs(configuration, inventory) if should_trace else None
    timeout_s = float(configuration.choices["parallelism"].options.get("timeout_s", 600.0))
    with private_folder(), join_process_group(member, torch.device(rank_device.device), timeout_s=timeout_s) as world:
        source = task_source(configuration.choices["task"].name, task_file).read_bytes()
        check_agreement(
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
        gathered = world.gather([dataclasses.asdict(rank_device), member.local_rank])
        ranks = number_machines([RankDevice(**fields) for fields, _ in gathered], [local for _, local in gathered])
        traced = world.broadcast(encode(needs) if needs else None)
        try:
            plan = make_plan(configuration, inventory, ranks, decode_valid(MemoryNeeds, traced) if traced else None)
        except ConfigError as error:
            raise SharedConfigError(error.problems) from error
        yield world, Plan.from_json(world.broadcast(plan.to_json())), inventory


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
    with join_process_group(member, torch.device(plan.ranks[member.rank].device), timeout_s=timeout_s) as world:
        return function(world)
