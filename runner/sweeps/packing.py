"""Divide the devices and cores of this machine among the trials that run concurrently."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from runner.base.errors import ConfigError, Problem
from runner.config.configuration import Configuration
from runner.host.resources import affinity
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import take_inventory
from runner.plan.planner import make_plan
from runner.records.events import LEVEL_VARIABLE, OLD_LEVEL_VARIABLE
from runner.sweeps.pool import ALONE, LocalPool, Slot
from runner.sweeps.trials import Sweep


@dataclass(frozen=True)
class Packing:
    """Slots for concurrent trials, and their description; empty if only one was requested."""

    slots: tuple[Slot, ...] = ALONE
    why: str = ""

    def open_pool(self, sweep: Sweep, save: Callable[[], object]) -> LocalPool:
        """Return a pool of these slots, whose trials print warnings and errors only, unless another level is set."""
        return LocalPool(self.slots, {LEVEL_VARIABLE: os.environ.get(OLD_LEVEL_VARIABLE) or "warning"})


def assign_slots(configurations: Sequence[Configuration], together: int) -> Packing:
    """Return the slots for concurrent trials. Raises ConfigError if several cannot run concurrently."""
    if together == 1:
        return Packing()
    try:
        devices = run_in_subprocess(_devices, configurations)
    except BrokenProcessPool:
        devices = [""]
    if isinstance(devices, str):
        what = f"must be 1 because each trial uses several devices with parallelism={devices}"
        raise ConfigError(Problem(what, f"together={together}", "use together=1, or parallelism=single"))
    return divide_resources(devices, len(affinity()), min(together, len(configurations)))


def divide_resources(devices: Sequence[str], cores: int, count: int) -> Packing:
    """Return `count` slots, evenly distributed over the devices; trials derive workers and threads from their cores."""
    cores_per_trial = max(1, cores // count)
    core_numbers = itertools.cycle(sorted(affinity()))
    slots = []
    for device in itertools.islice(itertools.cycle(devices), count):
        environment = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        slots.append(
            Slot(
                {**environment, "OMP_NUM_THREADS": str(cores_per_trial)},
                frozenset(itertools.islice(core_numbers, cores_per_trial)),
            )
        )
    return Packing(tuple(slots), f"{count} trials at once, each with {cores_per_trial} of {cores} cores")


def _devices(configurations: Sequence[Configuration]) -> list[str] | str:
    """Return CUDA_VISIBLE_DEVICES for the trials, "" for no choice; or a strategy that uses several. Loads torch."""
    inventory = take_inventory()
    plans = [make_plan(configuration, inventory) for configuration in configurations]
    if strategies := {plan.choices["parallelism"].name for plan in plans} - {"single"}:
        return min(strategies)
    gpus = [device.uuid for device in inventory.usable if device.kind == "cuda" and device.uuid]
    is_free = {configuration.settings.device for configuration in configurations} <= {"auto", "cuda"}
    return gpus if len(gpus) > 1 and is_free and plans[0].ranks[0].is_gpu else [""]
