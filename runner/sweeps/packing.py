"""How many trials run concurrently: as requested, or as many as are predicted to fit on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.text import sized
from runner.config.configuration import Configuration
from runner.host.resources import affinity, free_memory_bytes
from runner.host.subprocesses import in_subprocess
from runner.plan.memory_fit import MemoryPrediction
from runner.sweeps.pool import ALONE, Slot

MOST_TRACED = 8  # models; tracing one may take seconds
SPARE = 0.9  # usable fraction of the memory: other processes and fragmentation take the rest


@dataclass(frozen=True)
class Packing:
    """Slots for concurrent trials, and the reason for their number; empty if only one was requested."""

    slots: tuple[Slot, ...] = ALONE
    why: str = ""


@dataclass(frozen=True)
class DeviceCapacity:
    """Memory of one device for trials, and the demand of a trial.

    device  value of CUDA_VISIBLE_DEVICES for a trial; "" if there is no choice
    name    product name, for messages
    takes   bytes of the largest trial; 0: unknown
    """

    device: str
    name: str
    capacity: int
    takes: int

    @property
    def count(self) -> int:
        """Return how many trials fit in its memory, at least one."""
        return max(1, int(self.capacity * SPARE) // self.takes) if self.takes and self.capacity else 1


@dataclass(frozen=True)
class TrialDemand:
    """Result of the subprocess that traces the trials.

    why_not  why the demand is unknown, if it is
    several  parallelism of trials that use several devices each; "" if none does
    """

    rooms: tuple[DeviceCapacity, ...] = ()
    cores: int = 1
    why_not: str = ""
    several: str = ""


def packed(configurations: Sequence[Configuration], together: int | Literal["auto"]) -> Packing:
    """Return the slots for concurrent trials. Raises ConfigError if several cannot run concurrently."""
    if together == 1:
        return Packing()
    if together == "auto" and len({each.settings.device for each in configurations}) > 1:
        return Packing(why="together=auto: one at a time, because the trials use different devices; use together=N")
    try:
        seen = in_subprocess(_foresee, distinct(configurations), together == "auto")
    except BrokenProcessPool:
        seen = TrialDemand(why_not="the tracing process crashed")
    if seen.several and together == "auto":
        return Packing(why=f"together=auto: one at a time, because parallelism={seen.several} uses all devices")
    if seen.several:
        what = f"must be 1 because each trial uses several devices with parallelism={seen.several}"
        raise ConfigError(Problem(what, f"together={together}", "use together=1, or parallelism=single"))
    return packing_of(seen, together, len(configurations))


def packing_of(seen: TrialDemand, together: int | Literal["auto"], num_trials: int) -> Packing:
    """Return slots that are evenly distributed over the devices."""
    threads = "each with {} of {} cores"
    if together != "auto":
        count = min(together, num_trials)
        each = max(1, seen.cores // count)
        why = f"together={together}: {count} trials at once, as requested, {threads.format(each, seen.cores)}"
        devices = [room.device for room in seen.rooms] or [""]
        return Packing(_slots([devices[at % len(devices)] for at in range(count)], each), why)
    if seen.why_not or not seen.rooms:
        return Packing(why=f"together=auto: one at a time, because the memory of a trial is unknown: {seen.why_not}")
    places = [
        room.device for at in range(max(room.count for room in seen.rooms)) for room in seen.rooms if at < room.count
    ]
    count = min(len(places), seen.cores, num_trials)
    each = max(1, seen.cores // count)
    room = seen.rooms[0]
    memory = f"{sized(room.takes)} predicted for each, {sized(room.capacity)} on {room.name}"
    memory += f" and {len(seen.rooms) - 1} more" if len(seen.rooms) > 1 else ""
    least = "memory" if count == len(places) else "cores" if count == seen.cores else "the number of trials"
    why = f"together=auto: {count} at once by {least}: {memory}, {threads.format(each, seen.cores)}"
    return Packing(_slots(places[:count], each), why)


def _slots(devices: Sequence[str], each: int) -> tuple[Slot, ...]:
    """Return slots on these devices with `each` cores, from which trials derive their workers and threads."""
    numbers = itertools.cycle(sorted(affinity()))
    return tuple(
        Slot(
            {**({"CUDA_VISIBLE_DEVICES": device} if device else {}), "OMP_NUM_THREADS": str(each)},
            frozenset(itertools.islice(numbers, each)),
        )
        for device in devices
    )


def distinct(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Return one configuration per memory demand: settings in NUMBERS_ONLY do not change it."""
    found: dict[tuple[tuple[str, str], ...], Configuration] = {}
    for configuration in configurations:
        values = {key: str(value) for key, value in configuration.flat().items() if key not in NUMBERS_ONLY}
        found.setdefault(tuple(sorted(values.items())), configuration)
    return list(found.values())


def _foresee(configurations: Sequence[Configuration], traces: bool) -> TrialDemand:
    """Return the memory of the devices and the demand of the largest trial; loads torch."""
    from runner.forecast.demand import needs_of
    from runner.plan.inventory import take_inventory
    from runner.plan.planner import allow_for, make_plan

    allow_for(configurations[0])
    inventory = take_inventory()
    cores = inventory.cpu.logical_cores
    gpus = [device for device in inventory.usable if device.kind == "cuda"]
    plans = [make_plan(configuration, inventory) for configuration in configurations]
    if several := {each.choices["parallelism"].name for each in plans} - {"single"}:
        return TrialDemand(cores=cores, several=min(several))
    plan = plans[0]
    on_gpu = bool(gpus) and plan.ranks[0].is_gpu
    is_free = {each.settings.device for each in configurations} <= {"auto", "cuda"}
    names = {gpu.uuid: gpu.name for gpu in gpus if gpu.uuid} if on_gpu and is_free and len(gpus) > 1 else {"": ""}
    bare = TrialDemand(tuple(DeviceCapacity(device, name, 0, 0) for device, name in names.items()), cores)
    if not traces:
        return bare
    if len(configurations) > MOST_TRACED:
        return TrialDemand(cores=cores, why_not=f"more than {MOST_TRACED} models to trace; use together=N")
    largest: MemoryPrediction | None = None
    for configuration in configurations:
        try:
            needs = needs_of(configuration, inventory)
            memory = make_plan(configuration, inventory, needs=needs).memory
        except AccelRunError as error:
            return TrialDemand(cores=cores, why_not=error.problems[0].what)
        if not memory:
            return TrialDemand(cores=cores, why_not=needs.why_not or "no phase could be traced")
        most = max((each.prediction for each in memory), key=lambda prediction: prediction.total)
        largest = most if largest is None or most.total > largest.total else largest
    assert largest is not None
    if not on_gpu:
        free = min(largest.capacity or 2**63, free_memory_bytes())
        return TrialDemand((DeviceCapacity("", "this machine", free, largest.total),), cores)
    free_of = {gpu.uuid: gpu.free_bytes if gpu.free_bytes is not None else gpu.memory_bytes for gpu in gpus}
    rooms = [
        DeviceCapacity(device, name or plan.device_name, free_of[device] if device else largest.capacity, largest.total)
        for device, name in names.items()
    ]
    return TrialDemand(tuple(rooms), cores)


# Settings that do not change the memory demand.
NUMBERS_ONLY = frozenset({
    "run", "output_root", "resume", "weights.source", "weights.strict", "weights.only",
    "seed", "updates", "epochs", "max_grad_norm", "log_every",
    "optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.eps", "scheduler.warmup",
    "early_stopping.patience", "early_stopping.metric", "early_stopping.best_is",
    "early_stopping.min_delta", "evaluate.every",
})  # fmt: skip
