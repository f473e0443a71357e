"""Derive the plan from the configuration and the machine.

`make_plan` queries no devices and reads no files except hardware profiles, so it can also plan for another machine.
It reports all problems together.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from runner.base.errors import ConfigError, DeviceMissing, Problem
from runner.base.shares import equal_shares
from runner.base.text import format_bytes
from runner.config.allocator_settings import allocator_environment
from runner.config.config_files import profile_facts, shipped_options, user_profile_file
from runner.config.configuration import Configuration, PhaseSettings
from runner.config.custom_tables import ENABLED
from runner.plan.cuda_allocator import AllocatorSettings
from runner.plan.decisions import Decisions
from runner.plan.inventory import GIB, Device, Inventory, inventory_from_profile, read_cpu, take_inventory
from runner.plan.memory_fit import (
    MemoryNeeds,
    RankMemory,
    RankPart,
    choose_micro_batch_size,
    largest_micro_batch,
    num_stages,
    predict_memory,
)
from runner.plan.planning_rules import RULES, best_metric, decide_stages, optimizer_kernel, why_no_fsdp
from runner.plan.rank_devices import RankDevice, assign_gpus, several_on_one, split_shares
from runner.plan.run_plan import PhasePlan, Plan, rank_part
from runner.plan.strategy import choose_strategy
from runner.plan.update_time import DeviceRates, find_rank_rates, format_seconds, predict_training_time
from runner.workload.division import Batch, divide


def make_plan(
    configuration: Configuration,
    inventory: Inventory,
    ranks: Sequence[RankDevice] | None = None,
    needs: MemoryNeeds | None = None,
    *,
    num_sharing: int | None = None,
) -> Plan:
    """Return the plan of a run: its devices, parallelism, batch division, kernels and predicted memory.

    ranks  devices of ranks that another launcher started; None: derived from the configuration and the inventory
    needs  traced memory needs of training; required if `should_trace_memory` returns True
    num_sharing  number of ranks that share the cores of the inventory; None: the ranks whose GPUs it contains

    Raises ConfigError with every problem, DeviceMissing if a device requested by name is not in the inventory.
    """
    planner = _Planner(configuration, inventory, needs)
    planner.num_sharing = num_sharing
    plan = _decide(planner, ranks)
    if planner.needs is None or len(planner.copy_sizes) < 2:
        return plan
    candidates = [(plan, planner.needs)]
    for size in planner.copy_sizes[1:]:
        other = _Planner(configuration, inventory, needs)
        other.num_sharing, other.copy_size = num_sharing, size
        plan = _decide(other, ranks)
        candidates.append((plan, other.needs or planner.needs))
    profiles = [configuration.hardware, *profile_facts(configuration.request.config_dir).values()]
    return _choose_copy_size(candidates, find_rank_rates(plan, profiles))


def _choose_copy_size(candidates: Sequence[tuple[Plan, MemoryNeeds]], rates: Mapping[str, DeviceRates]) -> Plan:
    """Return the fastest plan that fits, the first one that fits if a time is unknown, or the last one if none fits.

    candidates  plans with different numbers of ranks per copy of the model, in ascending order, and their needs
    """
    key = "stages" if candidates[0][0].choices["parallelism"].uses("pipeline") else "shard_size"
    candidates = [each for each in candidates if each[0].memory] or candidates  # only those with known memory
    fitting, too_large = [], []
    for plan, needs in candidates:
        size = str(plan.choices["parallelism"].options[key])
        if all(memory.prediction.fits for memory in plan.memory):
            fitting.append((plan, predict_training_time(plan, needs, rates), size))
        else:
            too_large.append(size)
    unfit = f"an update does not fit with {', '.join(too_large)}"
    known = [(time.seconds, plan, size) for plan, time, size in fitting if time and time.is_complete]
    if not fitting:
        chosen, reason = candidates[-1][0], unfit
    elif len(known) == len(fitting) > 1:
        described = [f"{format_seconds(seconds)} with {size}" for seconds, _, size in known]
        fastest = min(range(len(known)), key=lambda number: known[number][0])
        chosen, first = known[fastest][1], described.pop(fastest)
        reason = f"the predicted update time is {first}, and {', '.join(described)}"
        reason += f"; {unfit}" if too_large else ""
    elif too_large:
        chosen, reason = fitting[0][0], unfit
    else:
        return fitting[0][0]
    return dataclasses.replace(chosen, reasons={**chosen.reasons, f"parallelism.{key}": f"auto: {reason}"})


def _decide(planner: _Planner, ranks: Sequence[RankDevice] | None) -> Plan:
    configuration, inventory = planner.configuration, planner.inventory
    # Each step uses the earlier ones: the strategy decides how many devices there are, the weakest device limits the
    # options, and both limit the batch. Steps add to planner.problems and continue, so that all problems are reported.
    chosen = planner.choose_gpu()
    planner.choose_strategy(chosen, ranks)
    gpu = planner.assign_devices(chosen, ranks)
    planner.device = gpu
    planner.check_profile(gpu)
    for rule in RULES:
        rule(planner, gpu)
    batch = planner.divide_batch()
    phases = tuple(planner.plan_phase(phase) for phase in configuration.phases)
    if planner.problems:
        raise ConfigError(planner.problems)
    planner.choose_recomputed_blocks(phases)
    memory = planner.predict_memory(phases)
    return Plan(
        ranks=planner.ranks,
        choices=planner.choices,
        task_file=str(configuration.request.task_file) if configuration.request.task_file else None,
        batch=batch,
        settings=configuration.settings,
        inference=configuration.inference,
        profile=configuration.profile,
        reasons=planner.reasons,
        notes=(*configuration.notes, *inventory.notes, *planner.notes),
        phases=phases,
        phase_keys=planner.phase_keys,
        config_dir=str(configuration.request.config_dir) if configuration.request.config_dir else None,
        memory=memory,
        hooks=tuple(hook for hook in configuration.hooks if hook.options[ENABLED]),
    )


def plan_this_process(configuration: Configuration) -> tuple[Plan, Inventory]:
    """Plan for this process alone, as rank 0 of the configured ranks; return the plan and the inventory."""
    apply_allocator_settings(configuration)
    inventory = take_inventory()
    planned = make_plan(configuration, inventory)
    return (planned if planned.world_size == 1 else make_plan(configuration, inventory, planned.ranks[:1])), inventory


def plan_one_rank(configuration: Configuration, inventory: Inventory, plan: Plan, rank: int) -> Plan:
    """Return the plan of a run on only one rank of `plan`, with the number format that all ranks use."""
    choices = {**configuration.choices, "precision": plan.choices["precision"]}
    return make_plan(dataclasses.replace(configuration, choices=choices), inventory, [plan.ranks[rank]])


def apply_allocator_settings(configuration: Configuration) -> None:
    """Set the environment variables of the CUDA allocator; call it before torch queries devices."""
    allocator = configuration.choices["memory"].options.get("allocator")
    if allocator:
        os.environ.update(allocator_environment(allocator))


def should_trace_memory(
    configuration: Configuration, inventory: Inventory, ranks: Sequence[RankDevice] | None = None
) -> bool:
    """Return whether the plan needs a memory trace; `ranks` as in `make_plan`.

    A trace is needed to choose the blocks to recompute and, on a GPU, a strategy, the ranks per copy of the model, a
    micro-batch size or a backend.
    Otherwise nothing is traced, so that the run starts sooner. Raises the exceptions of `make_plan`.
    """
    parallelism, memory = configuration.choices["parallelism"], configuration.choices["memory"]
    values = (parallelism.function, parallelism.options.get("shard_size"), configuration.choices["backend"].function)
    is_auto = "auto" in values or any(phase.micro_batch_size == "auto" for phase in configuration.phases)
    if parallelism.options.get("stages") == "auto" and not is_auto:
        planned = make_plan(configuration, inventory, ranks)
        is_auto = decide_stages(parallelism.options["split"], memory, planned.ranks) is None
    if memory.uses("budget") and memory.options["recompute"] == "auto":
        # On a CPU, the plan replaces what the profile of a GPU selects.
        return make_plan(configuration, inventory, ranks).choices["memory"].uses("budget")
    has_gpu = any(device.kind == "cuda" for device in inventory.usable)
    return is_auto and has_gpu and may_use_gpu(configuration)


def may_use_gpu(configuration: Configuration) -> bool:
    """Return whether the configuration allows ranks on CUDA GPUs: not with device=cpu or a profile of a CPU."""
    device = configuration.settings.device
    is_for_cpu = {item.get("kind", "cuda") for item in configuration.hardware.get("devices") or ()} == {"cpu"}
    return device.partition(":")[0] == "cuda" or (device == "auto" and not is_for_cpu)


def _available_devices(
    chosen: Device | None, inventory: Inventory, world_size: int | Literal["auto"] = "auto"
) -> list[RankDevice]:
    """Return the devices that ranks could use: all usable CUDA GPUs, or else one other device, such as the CPU.

    world_size  number of ranks that the user requests
    Raises DeviceMissing if there are not enough GPUs.
    """
    if world_size == "auto" and (chosen is None or chosen.kind != "cuda"):
        return [RankDevice.of(chosen, inventory)]
    gpus, _ = assign_gpus(chosen, world_size, inventory)
    return [RankDevice.of(gpu, inventory) for gpu in gpus]


def planning_inventory(configuration: Configuration) -> tuple[Inventory, str]:
    """Return the machine to plan for, with its name: that of the profile if it describes GPUs, else this machine.

    Used for planning without training. torch is imported only to query the GPUs of this machine.
    """
    if any(item.get("kind") != "cpu" for item in configuration.hardware.get("devices") or ()):
        cpu, notes = read_cpu()
        here = Inventory((), cpu, notes=notes)
        file = user_profile_file(configuration.profile, configuration.request.config_dir)
        planned = inventory_from_profile(configuration.hardware, here, file)
        planned = _replicate_gpus(planned, *_describe_cluster(configuration))
        return planned, f"the machine of profile {configuration.profile}"
    return take_inventory(), "this machine"


def _describe_cluster(configuration: Configuration) -> tuple[object, int | None]:
    """Return the numbers of ranks and of GPUs per machine (None: unknown), from the launcher if there is one."""
    launcher = configuration.choices["launcher"].options
    if gpus := launcher.get("gpus_per_node", 0):
        return gpus * launcher.get("nodes", 1), gpus
    per_machine = configuration.hardware["devices"][0].get("gpus_per_machine")
    return configuration.choices["parallelism"].options.get("world_size"), per_machine


def _replicate_gpus(planned: Inventory, world_size: object, per_machine: int | None) -> Inventory:
    """Replicate the GPU of a profile until there is one per rank; a profile with different GPUs is not changed.

    per_machine  GPUs of a machine; None: all are in one
    """
    gpus = planned.devices
    if not isinstance(world_size, int) or world_size <= len(gpus) or len({gpu.name for gpu in gpus}) != 1:
        return planned
    devices = tuple(
        dataclasses.replace(gpus[0], index=index, machine=index // (per_machine or world_size))
        for index in range(world_size)
    )
    note = f"planned for {world_size} x {gpus[0].name}: the profile describes {len(gpus)}"
    return dataclasses.replace(planned, devices=devices, notes=(*planned.notes, note))


class _Planner(Decisions):
    """The decisions about devices, batches and memory, which depend on each other."""

    def __init__(self, configuration: Configuration, inventory: Inventory, needs: MemoryNeeds | None) -> None:
        super().__init__(configuration, inventory, needs)
        self.phase_keys = dict(configuration.phase_keys)
        self.device: Device | None = None
        self.allocator = AllocatorSettings.parse(self.choices["memory"].options.get("allocator"))

    def choose_gpu(self) -> Device | None:
        """Return the GPU of rank 0, None for the CPU. Raises DeviceMissing if a GPU requested by name is missing."""
        requested, usable = self.configuration.settings.device, self.inventory.usable
        if requested == "cpu":
            return None
        if requested == "auto":
            if not may_use_gpu(self.configuration):
                self.reasons["device"] = f"profile {self.configuration.profile}"
                return None
            if not usable:
                self.reasons["device"] = f"auto: no GPU found{self._describe_unusable(' that can be used')}"
                return None
            best = max(usable, key=lambda gpu: gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes)
            if best.free_bytes is None:
                others = f", the largest of {len(usable)} GPUs ({format_bytes(best.memory_bytes)})"
            else:
                others = f", which has the most free memory of {len(usable)} GPUs ({format_bytes(best.free_bytes)})"
            self.reasons["device"] = f"auto: {best.name}{others if len(usable) > 1 else ''}"
            return best
        kind, _, number = requested.partition(":")
        for device in usable:
            if device.kind == kind and device.index == int(number or 0):
                return device
        available = ", ".join([*(device.torch_name for device in usable), "cpu"])
        raise DeviceMissing(
            f"is not available{self._describe_missing(kind)}; this machine has {available}",
            where=f"device={requested}",
            fix="use device=auto to select an available device",
        )

    def choose_strategy(self, chosen: Device | None, ranks: Sequence[RankDevice] | None) -> None:
        if not self.choices["parallelism"].uses("auto"):
            return
        device = self.configuration.settings.device
        if ranks is None and device.startswith("cuda:"):
            self.choose("parallelism", "single", f"auto: device={device} selects one device")
            return
        world_size = self.choices["parallelism"].options.get("world_size", "auto")
        devices = self._limit_memory(ranks or _available_devices(chosen, self.inventory, world_size))
        if self.needs is None or len(devices) == 1:
            name = "single" if len(devices) == 1 else "ddp"
            reason = f"auto: one device ({devices[0].name})" if len(devices) == 1 else "auto: several devices"
            self.choose("parallelism", name, reason)
            return
        settings = self.configuration.settings
        micro = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else None
        can_shard = not why_no_fsdp(self.inventory.torch_version)
        strategy = choose_strategy(self.needs, devices, settings.global_batch_size, micro, can_shard=can_shard)
        if not strategy.fits:
            self.notes.append(f"parallelism={strategy.reason}{SEE_PLAN}")
        self.choose("parallelism", strategy.name, strategy.reason)
        for key, value in strategy.options.items():
            self.set("parallelism", key, value, strategy.reason)

    def assign_devices(self, chosen: Device | None, ranks: Sequence[RankDevice] | None) -> Device | None:
        """Assign a device to each rank; return the least capable GPU, which limits precision, or None for the CPU."""
        parallelism = self.choices["parallelism"]
        if ranks is not None and len(ranks) > 1 and parallelism.uses("single"):
            what = f"cannot be used with the {len(ranks)} ranks that were started"
            self.problems.append(Problem(what, "parallelism=single", "use parallelism=ddp, or start one process"))
        requested = self.configuration.settings.device
        if ranks is not None and len(ranks) > 1 and requested.partition(":")[0] in ("xpu", "mps"):
            self.problems.append(several_on_one(requested, f"device={requested}"))
        if ranks is not None or parallelism.uses("single"):
            self.ranks = self._limit_memory(ranks or [RankDevice.of(chosen, self.inventory)])
            num_gpus = len(_available_devices(chosen, self.inventory))
            if ranks is None and num_gpus > 1 and not self.configuration.is_set_by_user("parallelism"):
                self.notes.append(
                    f"only 1 of {num_gpus} GPUs is used; parallelism=auto divides updates among all of them"
                )
            if ranks is None:
                return chosen
            if self.configuration.settings.device == "auto" and ranks[0].device != (
                chosen.torch_name if chosen else "cpu"
            ):
                self.reasons["device"] = f"auto: {ranks[0].name}"
            return self._find_weakest([rank.gpu for rank in ranks])
        gpus, why = assign_gpus(chosen, parallelism.options.get("world_size", "auto"), self.inventory)
        self.ranks = self._limit_memory([RankDevice.of(gpu, self.inventory) for gpu in gpus])
        self.set("parallelism", "world_size", len(gpus), why or self.reasons.get("parallelism.world_size", "as given"))
        return self._find_weakest(gpus)

    def _find_weakest(self, gpus: Sequence[Device | None]) -> Device | None:
        """Return the least capable GPU, None if there is none, and add a note if the GPUs differ in their formats.

        All ranks must use one number format, because their gradients are summed.
        """
        used = [gpu for gpu in gpus if gpu is not None]
        weakest = min(used, key=lambda gpu: (gpu.capability or (0, 0), gpu.native_bf16, gpu.formats.fp16), default=None)
        if weakest is not None and len({(gpu.capability, gpu.architecture) for gpu in used}) > 1:
            self.notes.append(f"all ranks use the same precision, chosen for the least capable GPU, {weakest.name}")
        return weakest

    def _limit_memory(self, ranks: Sequence[RankDevice]) -> tuple[RankDevice, ...]:
        options = self.choices["memory"].options
        fractions, limit_gib = (options.get("fraction") or 1.0, self.allocator.fraction), options.get("limit_gib")
        limited = []
        for rank in ranks:
            limits = [int(min(fractions) * rank.memory_bytes)] if min(fractions) < 1 and rank.is_gpu else []
            limits += [int(limit_gib * GIB)] if limit_gib else []
            free_bytes = min(*limits, rank.capacity_bytes or limits[0]) if limits else rank.free_bytes
            limited.append(dataclasses.replace(rank, free_bytes=free_bytes))
        return tuple(limited)

    def _describe_unusable(self, prefix: str) -> str:
        reasons = [f"{device.name}: {device.why_not}" for device in self.inventory.devices if not device.usable]
        return f"{prefix} ({'; '.join(reasons)})" if reasons else ""

    def _describe_missing(self, kind: str) -> str:
        no_gpu = self.inventory.no_gpu
        if kind != "cuda":  # all reasons are about CUDA GPUs
            return ""
        return f": {no_gpu}" if no_gpu else self._describe_unusable("")

    def check_profile(self, gpu: Device | None) -> None:
        """Add a note if the GPU that the profile describes is not present.

        On a CPU, groups that the profile set are reset to their defaults, except those set to auto.
        """
        profile = self.configuration.profile
        gpu_facts = [item for item in self.configuration.hardware.get("devices") or () if item.get("kind") != "cpu"]
        names = [str(item.get("name", "?")) for item in gpu_facts]
        if not names or (gpu and any(_same_gpu(name, gpu.name) for name in names)):
            return
        if gpu:
            self.notes.append(
                f"profile {profile} describes {', '.join(names)}; this is {gpu.name}:"
                " the profile's options are used, and options that do not work here are replaced"
            )
            return
        replaced = []
        for group, choice in self.configuration.choices.items():
            if self.configuration.sources.get(group) == f"profile {profile}" and choice.name != "auto":
                self.choose(
                    group, shipped_options()[group], f"default: profile {profile} sets {choice.name} for its GPU"
                )
                replaced.append(f"{group}={choice.name}")
        self.notes.append(
            f"profile {profile} describes {', '.join(names)}; this run is on the CPU"
            + (f", so {', '.join(replaced)} from the profile fell back to the defaults" if replaced else "")
        )

    def divide_batch(self) -> Batch:
        settings = self.configuration.settings
        return self._divide(settings.global_batch_size, settings.micro_batch_size, "")

    def plan_phase(self, phase: PhaseSettings) -> PhasePlan:
        lead = f"phase.{phase.name}." if self.phase_keys else ""
        batch = self._divide(phase.global_batch_size, phase.micro_batch_size, lead, phase.name)
        optimizer = phase.optimizer
        if optimizer.options.get("kernel") == "auto":
            kernel, why = optimizer_kernel(self.device, self.choices["parallelism"].function, optimizer.function)
            if kernel != "fused":  # the optimizer itself replaces a fused kernel that complex parameters lack
                optimizer = dataclasses.replace(optimizer, options={**optimizer.options, "kernel": kernel})
            if lead:
                self.phase_keys[f"{lead}optimizer.kernel"], self.reasons[f"{lead}optimizer.kernel"] = kernel, why
        return PhasePlan(
            **{**vars(phase), "optimizer": optimizer},
            batch=batch,
            best=best_metric(self.configuration, phase.early_stopping),
            objectives=self.configuration.objectives,
        )

    def choose_recomputed_blocks(self, phases: Sequence[PhasePlan]) -> None:
        """Replace memory.recompute=auto by the blocks to recompute; all phases use those of the phase with the most."""
        memory = self.choices["memory"]
        if not memory.uses("budget") or memory.options["recompute"] != "auto" or self.needs is None:
            return
        blocks = [
            demand.recompute_at(phase.batch.micro_batch_size)
            for phase in phases
            if (demand := self.needs.demands.get(phase.name))
        ]
        if blocks:
            chosen = max(blocks, key=len)
            self.set("memory", "recompute", list(chosen), "auto")
            fits = all(rank.prediction.fits for rank in self.predict_memory(phases))
            if chosen:
                recomputed = f"{len(chosen)} block{'s' * (len(chosen) > 1)} recomputed"
                reason = f"{recomputed} so that the run fits" if fits else f"{recomputed}, but it still does not fit"
            elif fits:
                reason = "the run fits without recomputation"
            else:
                reason = "the run does not fit, and recomputing blocks would not change that"
            self.set("memory", "recompute", list(chosen), f"auto: {reason}")

    def predict_memory(self, phases: Sequence[PhasePlan]) -> tuple[RankMemory, ...]:
        if self.needs is None:
            return ()
        predictions = []
        for phase in phases:
            part = rank_part(self.choices["parallelism"], phase)
            demand = self.needs.demands.get(phase.name)
            for number, rank in enumerate(self.ranks if demand else ()):
                assert demand is not None
                samples = max(1, min(phase.batch.share_of(number), phase.batch.micro_batch_size))
                prediction = predict_memory(demand, samples, rank, part.for_rank(number))
                is_exact = demand.is_exact and phase.batch.stages in (1, len(demand.stages))
                is_exact = is_exact and (self.allocator.is_modelled or not rank.is_gpu)
                predictions.append(RankMemory(phase.name, number, samples, prediction, is_exact))
        return tuple(predictions)

    def _divide(
        self, global_batch_size: int, micro_batch_size: int | Literal["auto"], lead: str, phase: str | None = None
    ) -> Batch:
        batch, why = self._split_update(global_batch_size, micro_batch_size, phase)
        if isinstance(batch, Problem) and not self.configuration.has_updates:
            batch, why = self._equal_batches(global_batch_size, micro_batch_size, phase), "equal: there are no updates"
        if isinstance(batch, Problem):
            where = f"{lead}{batch.where}" if lead else batch.where
            problem = dataclasses.replace(batch, where=where)
            if problem.what not in [other.what for other in self.problems]:  # phases usually have the batch of the run
                self.problems.append(problem)
            return Batch(0, 0, ())  # a placeholder: make_plan raises the problem
        if lead:
            self.phase_keys[f"{lead}micro_batch_size"] = batch.micro_batch_size
            self.phase_keys[f"{lead}accumulation_steps"] = batch.accumulation_steps
        if micro_batch_size == "auto":
            reason = f"auto: {MICRO_BATCHES_PER_STAGE} micro-batches for each of {batch.stages} stages"
            if batch.accumulation_steps > MICRO_BATCHES_PER_STAGE * batch.stages:
                reason = "auto: the largest that fits every stage"
            share_reason = "auto: the whole share of an update as one micro-batch"
            if not batch.in_one_pass:
                share_reason = (
                    "auto: the largest that fits the smallest device, so that shares can be rebalanced by speed"
                )
                if self.choices["parallelism"].options.get("shares") != "speed":
                    share_reason = f"auto: the largest that fits; the whole share of {max(batch.shares)} would not"
                if not any(rank.is_gpu for rank in self.ranks):
                    share_reason = "auto: cpu_micro_batch_size"
            self.reasons[f"{lead}micro_batch_size"] = reason if batch.stages > 1 else share_reason
        self.reasons[f"{lead}shares"] = why
        is_even = len(set(batch.shares)) == 1
        per_rank = f"({batch.micro_batch_size} x {batch.num_shares})" if is_even else f"{batch.micro_batch_size}"
        samples = batch.global_batch_size if is_even else max(batch.shares)
        self.reasons[f"{lead}accumulation_steps"] = f"{samples} / {per_rank}"
        return batch

    def _equal_batches(self, total: int, micro: int | Literal["auto"], phase: str | None) -> Batch:
        """Return equal shares with at least one sample for each copy of the model.

        Used by commands without updates, such as `evaluate`, which need not divide an update.
        """
        choice, count = self.choices["parallelism"], len(self.ranks)
        stages = num_stages(choice.options, count) if choice.uses("pipeline") and count > 1 else 1
        copies = count // stages
        batch, _ = self._split_update(max(total, copies), micro, phase, rule="equal")
        if isinstance(batch, Batch):
            return batch
        size = -(-total // copies) if micro == "auto" else micro
        return Batch(size * copies, size, (size,) * copies, stages=stages)

    def _split_update(
        self, total: int, micro: int | Literal["auto"], phase: str | None, rule: str | None = None
    ) -> tuple[Batch | Problem, str]:
        function, count = self.choices["parallelism"].function, len(self.ranks)
        if function == "pipeline" and count > 1:
            stages = num_stages(self.choices["parallelism"].options, count)
            shares = equal_shares(count // stages, total)
            if isinstance(shares, Problem):
                what = f"must be at least the number of pipelines ({count // stages}), but is {total}"
                fix = f"use global_batch_size={count // stages}, or parallelism.stages=all"
                return Problem(what, f"global_batch_size={total}", fix), ""
            micro = self._stage_micro_batch_size(max(shares), stages, phase) if micro == "auto" else micro
            batch = divide(total, micro, shares, ragged=True)
            why = "every rank processes all samples with some of the layers"
            if len(shares) > 1:
                why = f"each {stages} consecutive ranks process an equal share, each with some of the layers"
            return (batch if isinstance(batch, Problem) else dataclasses.replace(batch, stages=stages)), why
        rule = rule or self.choices["parallelism"].options.get("shares", "equal")
        shares, why = split_shares(rule, total, self.ranks)
        if isinstance(shares, Problem):
            return shares, why
        is_free = micro == "auto"
        if micro == "auto" and self.needs is not None and all(rank.is_gpu for rank in self.ranks):
            micro = self._fitting_micro_batch_size(
                self.needs, shares, phase, follows_speed=rule == "speed" and count > 1
            )
        cpu_limit = self.configuration.settings.cpu_micro_batch_size
        if (
            micro == "auto"
            and cpu_limit is not None
            and cpu_limit < max(shares)
            and not any(rank.is_gpu for rank in self.ranks)
        ):
            micro = cpu_limit
        return divide(total, micro, shares, ragged=function != "single" or is_free), why

    def _stage_micro_batch_size(self, share: int, stages: int, phase: str | None) -> int:
        """Return the micro-batch size of a pipeline, small enough to keep all stages busy and to fit in memory."""
        micro = max(1, -(-share // (MICRO_BATCHES_PER_STAGE * stages)))
        part = RankPart.from_choice(self.choices["parallelism"], len(self.ranks))
        for demand in self.needs.select(phase) if self.needs is not None else ():
            if len(demand.stages) == stages:
                micro = min(micro, demand.stages[0].points[-1].micro_batch_size)
                fitting = (
                    largest_micro_batch(demand, rank, micro, part.for_rank(number))
                    for number, rank in enumerate(self.ranks)
                )
                micro = max(1, min(fitting))
        return micro

    def _fitting_micro_batch_size(
        self, needs: MemoryNeeds, shares: Sequence[int], phase: str | None, *, follows_speed: bool
    ) -> int | Literal["auto"]:
        """Return the micro-batch size that fits every device; auto if every share fits as one micro-batch."""
        largest = max(shares)
        part = RankPart.from_choice(self.choices["parallelism"], len(self.ranks), largest)
        max_samples = needs.max_samples(phase, self.ranks, largest, part)
        if follows_speed:
            return max(1, max_samples)
        if all(
            predict_memory(demand, max(1, share), rank, part).fits
            for demand in needs.select(phase)
            for rank, share in zip(self.ranks, shares, strict=True)
        ):
            return "auto"
        if not max_samples:
            rank, demand = min(self.ranks, key=lambda rank: rank.capacity_bytes), needs.largest(1)
            prediction_of_one = predict_memory(demand, 1, rank, part)
            text = f"a micro-batch of one sample is predicted to need {format_bytes(prediction_of_one.total)}"
            note = f"{text}, but {rank.device} has {format_bytes(prediction_of_one.capacity)}{SEE_PLAN}"
            self.notes += [note] if note not in self.notes else []
        return choose_micro_batch_size(largest, max_samples)


SEE_PLAN = ": accel-run plan lists settings that would fit"
MICRO_BATCHES_PER_STAGE = 4  # micro-batches per pipeline stage; with 2 stages, each is idle for 1/9 of the time


def _same_gpu(described: str, found: str) -> bool:
    name_parts = [part for part in described.lower().split() if part not in ("nvidia", "geforce", "tesla")]
    return all(part in found.lower() for part in name_parts)
