"""The plan: all values derived from the configuration and the machine, each with its reason.

`make_plan` is pure: it queries no device and reads no user files, so it also plans for other machines.
It reports all problems at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.axes.memory import allocator_environment
from runner.base.configuration import (
    Choice,
    Configuration,
    PhaseSettings,
    function_of,
    own_profile,
    shipped_options,
)
from runner.base.division import Batch, divide
from runner.base.errors import ConfigError, DeviceMissing, Problem
from runner.base.phases import GROUPS as PHASE_GROUPS
from runner.base.schema import defaults
from runner.base.settings import DataSettings, EarlyStoppingSettings, EvaluateSettings, Settings
from runner.base.shares import lines, table
from runner.base.text import sized
from runner.plan.cuda_allocator import Allocator
from runner.plan.inventory import GIB, Device, Inventory, inventory_of_profile, read_cpu, take_inventory
from runner.plan.memory_fit import Needs, RankMemory, RankPart, biggest, passes_of, predicted
from runner.plan.rank_devices import RankDevice, gpus_of_ranks, shares_of
from runner.plan.strategy import choose


@dataclass(frozen=True)
class PhasePlan:
    """The plan of one phase.

    kind     train: gradients; fit: statistics in one pass
    needs    phases that must be finished before
    trains   names or prefixes of the parameters that are trained; None: all that want a gradient
    updates  optimizer steps, or None when they follow from `epochs` and the size of the data
    """

    name: str
    kind: str
    needs: tuple[str, ...]
    trains: list[str] | None
    updates: int | None
    epochs: float | None
    batch: Batch
    max_grad_norm: float | None
    evaluate: EvaluateSettings
    early_stopping: EarlyStoppingSettings
    optimizer: Choice
    scheduler: Choice

    def __str__(self) -> str:
        """Return a one-line summary of the phase."""
        words = [f"{self.name} ({self.kind})"]
        if self.kind == "train":
            length = f"{self.updates} updates" if self.updates is not None else f"{self.epochs:g} epochs"
            words += [length, f"{self.optimizer.name}, {self.scheduler.name}"]
        else:
            words.append("one pass over the training data")
        batch = self.batch
        product = f"{batch.micro_batch_size} x {batch.accumulation_steps} x {batch.world_size}"
        is_even = batch.micro_batch_size * batch.accumulation_steps * batch.world_size == batch.global_batch_size
        product = product if is_even else " + ".join(map(str, batch.shares))
        words.append(f"{batch.global_batch_size} samples per update ({product})")
        words += [f"trains {', '.join(self.trains)}"] if self.trains is not None else []
        words += [f"needs {', '.join(self.needs)}"] if self.needs else []
        return "; ".join(words)


@dataclass(frozen=True)
class Plan:
    """All values of a run; `auto` remains only where the option's own function resolves it.

    device     torch's name of the device of rank 0, such as cuda:0
    ranks      the device of each rank; one process is one rank
    choices    group -> choice; `task` among them
    reasons    key -> why it has the value it has
    notes      notes for the user: options that were replaced or have no effect
    updates    optimizer steps, or None when they follow from `epochs` and the size of the data
    phases     all phases of the task, in order; `selected` names those that run
    own_keys   keys of the phases where the task declares some, as in the configuration
    config_dir the user's folder of configuration, None where there is none
    memory     what is predicted for each rank in each phase that trains; empty where nothing was traced
    """

    device: str
    device_name: str
    device_uuid: str
    ranks: tuple[RankDevice, ...]
    choices: Mapping[str, Choice]
    task_file: str | None
    updates: int | None
    epochs: float | None
    batch: Batch
    settings: Settings
    inference: Mapping[str, Any]
    profile: str
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    phases: tuple[PhasePlan, ...]
    own_keys: Mapping[str, Any]
    config_dir: str | None = None
    memory: tuple[RankMemory, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def num_workers(self) -> int:
        """Return the number of worker processes of each rank that read data."""
        loader = self.choices["dataloader"]
        if loader.function == "thread":  # without a cache it is a worker: see runner/axes/dataloader.py
            return int(loader.options["cache"] == "none")
        return int(loader.options.get("num_workers", 0))

    @property
    def selected(self) -> tuple[PhasePlan, ...]:
        """Return the phases to run: those named in `phases`, or all; with epochs=0 only those without gradients."""
        wanted = self.settings.phases
        named = [phase for phase in self.phases if wanted is None or phase.name in wanted]
        return tuple(phase for phase in named if phase.kind != "train" or phase.epochs != 0)

    def phase(self, name: str) -> PhasePlan | None:
        """Return the phase of that name, None where the task has none."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def values(self) -> dict[str, Any]:
        """Return all keys with their values, in display order.

        Where the task declares phases, what these have of their own is theirs and not the run's.
        """
        found: dict[str, Any] = {"device": self.device}
        found |= {"updates": self.updates} if self.updates is not None else {"epochs": self.epochs}
        found |= {
            "global_batch_size": self.batch.global_batch_size,
            "micro_batch_size": self.batch.micro_batch_size,
            "accumulation_steps": self.batch.accumulation_steps,
        }
        found |= {"shares": list(self.batch.shares)} if len(self.batch.shares) > 1 else {}
        for group, choice in self.choices.items():
            found[group] = choice.name
            found |= {f"{group}.{key}": value for key, value in choice.options.items()}
        found |= self.own_keys
        plain = dataclasses.asdict(self.settings)
        nested = {key: value for key, value in plain.items() if isinstance(value, dict)}
        for key, value in plain.items():
            if key not in found and key not in nested and key not in ("updates", "epochs"):
                found[key] = value
        for name, inner in nested.items():
            found |= {f"{name}.{key}": value for key, value in inner.items()}
        of_phases = {key.split(".", 2)[2] for key in self.own_keys}
        groups = PHASE_GROUPS if self.own_keys else ()
        return {
            key: value for key, value in found.items() if key not in of_phases and key.partition(".")[0] not in groups
        }

    def reason(self, key: str) -> str:
        """Return why `key` has its value."""
        return self.reasons.get(key, "default")

    def to_json(self) -> str:
        """Return the plan as JSON, for the run directory."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan written by `to_json`."""
        tree = json.loads(text)
        settings = tree["settings"]
        settings["data"] = DataSettings(**settings["data"])
        settings["evaluate"] = EvaluateSettings(**settings["evaluate"])
        settings["early_stopping"] = EarlyStoppingSettings(**settings["early_stopping"])
        tree["settings"] = Settings(**settings)
        tree["phases"] = tuple(_phase_from(phase) for phase in tree["phases"])
        tree["choices"] = {group: Choice(**choice) for group, choice in tree["choices"].items()}
        tree["batch"] = _batch_from(tree["batch"])
        tree["ranks"] = tuple(RankDevice(**rank) for rank in tree["ranks"])
        tree["notes"] = tuple(tree["notes"])
        tree["memory"] = tuple(RankMemory.from_dict(each) for each in tree["memory"])
        return Plan(**tree)


def _batch_from(tree: Mapping[str, Any]) -> Batch:
    return Batch(**{**tree, "shares": tuple(tree["shares"])})


def _phase_from(tree: Mapping[str, Any]) -> PhasePlan:
    return PhasePlan(
        **{
            **tree,
            "needs": tuple(tree["needs"]),
            "batch": _batch_from(tree["batch"]),
            "evaluate": EvaluateSettings(**tree["evaluate"]),
            "early_stopping": EarlyStoppingSettings(**tree["early_stopping"]),
            "optimizer": Choice(**tree["optimizer"]),
            "scheduler": Choice(**tree["scheduler"]),
        }
    )


def make_plan(
    configuration: Configuration,
    inventory: Inventory,
    ranks: Sequence[RankDevice] | None = None,
    needs: Needs | None = None,
) -> Plan:
    """Derive the mechanics of a run.

    ranks  devices of ranks started by another launcher; None: as configured, on this machine
    needs  what training takes, where `wants_needs` says that it matters

    Raises ConfigError with every problem, DeviceMissing if a device asked for by name is not in the inventory.
    """
    planner = _Planner(configuration, inventory, needs)
    chosen = planner.gpu()
    planner.choose_strategy(chosen, ranks)
    gpu = planner.gather(chosen, ranks)
    planner.device = gpu
    planner.fit_profile(gpu)
    for rule in RULES:
        rule(planner, gpu)
    batch = planner.batch()
    phases = tuple(planner.phase(phase) for phase in configuration.phases)
    if planner.problems:
        raise ConfigError(planner.problems)
    planner.choose_blocks(phases)
    memory = planner.memory(phases)
    first = planner.ranks[0]
    return Plan(
        device=first.device,
        device_name=first.name,
        device_uuid=first.uuid,
        ranks=planner.ranks,
        choices=planner.choices,
        task_file=str(configuration.request.task_file) if configuration.request.task_file else None,
        updates=configuration.settings.updates,
        epochs=configuration.settings.epochs,
        batch=batch,
        settings=configuration.settings,
        inference=configuration.inference,
        profile=configuration.profile,
        reasons=planner.reasons,
        notes=(*configuration.notes, *inventory.notes, *planner.notes),
        phases=phases,
        own_keys=planner.own_keys,
        config_dir=str(configuration.request.config_dir) if configuration.request.config_dir else None,
        memory=memory,
    )


def plan_here(configuration: Configuration) -> tuple[Plan, Inventory]:
    """Plan for this process on this machine."""
    allow_for(configuration)
    inventory = take_inventory()
    planned = make_plan(configuration, inventory)
    return (planned if planned.world_size == 1 else make_plan(configuration, inventory, planned.ranks[:1])), inventory


def allow_for(configuration: Configuration) -> None:
    """Set the environment of the CUDA allocator, before torch queries devices."""
    allocator = configuration.choices["memory"].options.get("allocator")
    if allocator:
        os.environ.update(allocator_environment(allocator))


def wants_needs(configuration: Configuration, inventory: Inventory) -> bool:
    """Tell whether the plan depends on what the model takes: blocks to choose, or on a GPU a strategy or micro-batch.

    Elsewhere nothing is traced before a run, so that it starts as fast as it can.
    """
    parallelism, settings = configuration.choices["parallelism"], configuration.settings
    is_open = parallelism.function == "auto" or any(phase.micro_batch_size == "auto" for phase in configuration.phases)
    memory = configuration.choices["memory"]
    if memory.function == "budget" and memory.options["recompute"] == "auto":
        return True
    has_gpu = any(device.kind == "cuda" for device in inventory.usable)
    return is_open and has_gpu and settings.device.partition(":")[0] in ("auto", "cuda")


def _devices_here(chosen: Device | None, inventory: Inventory) -> list[RankDevice]:
    """Return the devices that ranks could have; a CPU is one."""
    if chosen is None or chosen.kind != "cuda":
        return [RankDevice.of(chosen, inventory)]
    gpus, _ = gpus_of_ranks(chosen, "auto", inventory)
    return [RankDevice.of(gpu, inventory) for gpu in gpus]


def rank_table(plan: Plan) -> list[str]:
    """Return the ranks as lines of text: device, memory, share of an update, and how it is passed."""
    if plan.batch.stages > 1:
        sizes = [f", {rank.memory_bytes / 2**30:.1f} GiB" if rank.memory_bytes else "" for rank in plan.ranks]
        return [
            f"rank {number}: {rank.device}: {rank.name}{size}"
            for number, (rank, size) in enumerate(zip(plan.ranks, sizes, strict=True))
        ]
    return lines(
        table(
            plan.batch.shares,
            [f"{rank.device}: {rank.name}" for rank in plan.ranks],
            [rank.memory_bytes or None for rank in plan.ranks],
            [plan.batch.largest_pass] * plan.world_size,
        )
    )


def inventory_for(configuration: Configuration) -> tuple[Inventory, str]:
    """Return the machine to plan for without running, and whose it is: the profile's if it names one, else this one.

    Only for this machine's GPUs torch must be asked; a profile's machine costs no import.
    """
    if any(item.get("kind") != "cpu" for item in configuration.hardware.get("devices") or ()):
        cpu, notes = read_cpu()
        here = Inventory((), cpu, notes=notes)
        file = own_profile(configuration.profile, configuration.request.config_dir)
        planned = inventory_of_profile(configuration.hardware, here, file)
        return planned, f"the machine of profile {configuration.profile}"
    return take_inventory(), "this machine"


def part_of(parallelism: Choice, phase: PhasePlan) -> RankPart:
    """Return the fraction of the model and batch on each rank in this phase."""
    batch = phase.batch
    return RankPart.of(parallelism, len(batch.shares) * batch.stages, max(batch.shares), batch.accumulation_steps)


class _Planner:
    def __init__(self, configuration: Configuration, inventory: Inventory, needs: Needs | None) -> None:
        self.configuration = configuration
        self.inventory = inventory
        self.needs = needs if needs is not None and needs.demands else None
        self.ranks: tuple[RankDevice, ...] = ()
        self.choices = dict(configuration.choices)
        self.reasons = {key: source for key, source in configuration.sources.items() if key != "hardware"}
        self.notes = [f"memory is not predicted: {needs.why_not}"] if needs is not None and needs.why_not else []
        self.problems: list[Problem] = []
        self.own_keys = dict(configuration.own_keys)
        self.device: Device | None = None
        self.allocator = Allocator.of(self.choices["memory"].options.get("allocator"))

    def gpu(self) -> Device | None:
        """Choose the GPU, None for the CPU. Raises DeviceMissing for one asked for by name that is not here."""
        wanted, usable = self.configuration.settings.device, self.inventory.usable
        if wanted == "cpu":
            return None
        if wanted == "auto":
            return self._best_gpu(usable)
        kind, _, number = wanted.partition(":")
        for device in usable:
            if device.kind == kind and device.index == int(number or 0):
                return device
        known = ", ".join([*(device.torch_name for device in usable), "cpu"])
        raise DeviceMissing(
            f"{wanted} does not exist; this machine has {known}{self._unusable('')}",
            where=f"device={wanted}",
            fix="use device=auto to select an available device",
        )

    def choose_strategy(self, chosen: Device | None, ranks: Sequence[RankDevice] | None) -> None:
        """Resolve parallelism=auto."""
        if self.choices["parallelism"].function != "auto":
            return
        named = self.configuration.settings.device
        if ranks is None and named.startswith("cuda:"):
            self.choose("parallelism", "single", f"auto: device={named} selects one device")
            return
        there = self._corrected(ranks or _devices_here(chosen, self.inventory))
        if self.needs is None or len(there) == 1:
            name = "single" if len(there) == 1 else "ddp"
            reason = f"auto: one device ({there[0].name})" if len(there) == 1 else "auto: several devices"
            self.choose("parallelism", name, reason)
            return
        settings = self.configuration.settings
        micro = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else None
        strategy = choose(self.needs, there, settings.global_batch_size, micro)
        if not strategy.fits:
            self.notes.append(f"parallelism={strategy.reason}{LISTED}")
        self.choose("parallelism", strategy.name, strategy.reason)
        for key, value in strategy.options.items():
            self.set("parallelism", key, value, strategy.reason)

    def gather(self, chosen: Device | None, ranks: Sequence[RankDevice] | None) -> Device | None:
        """Assign a device to each rank; return the one that limits the common format, None for the CPU."""
        parallelism = self.choices["parallelism"]
        if ranks is not None and len(ranks) > 1 and parallelism.function == "single":
            what = f"cannot be one of the {len(ranks)} ranks that were started"
            self.problems.append(Problem(what, "parallelism=single", "use parallelism=ddp, or start one process"))
        if ranks is not None or parallelism.function == "single":
            self.ranks = self._corrected(ranks or [RankDevice.of(chosen, self.inventory)])
            there = len(_devices_here(chosen, self.inventory))
            if ranks is None and there > 1 and not self.configuration.asked_by_name("parallelism"):
                self.notes.append(f"1 of {there} GPUs is used: use parallelism=auto to share updates among all of them")
            return chosen
        wanted = parallelism.options.get("world_size", "auto")
        gpus, why = gpus_of_ranks(chosen, wanted, self.inventory)
        self.ranks = self._corrected([RankDevice.of(gpu, self.inventory) for gpu in gpus])
        self.set("parallelism", "world_size", len(gpus), why or self.reasons.get("parallelism.world_size", "as given"))
        used = [gpu for gpu in gpus if gpu is not None]
        weakest = min(
            used, key=lambda gpu: (gpu.capability or (0, 0), gpu.native_bf16, gpu.fp16_tensor_cores), default=None
        )
        if weakest is not None and len({(gpu.capability, gpu.architecture) for gpu in used}) > 1:
            self.notes.append(f"all ranks compute in one format, chosen for {weakest.name}")
        return weakest

    def _corrected(self, ranks: Sequence[RankDevice]) -> tuple[RankDevice, ...]:
        """Return the devices with what was measured on them, and with no more memory than this process may take."""
        options = self.choices["memory"].options
        fractions, limit_gib = (options.get("fraction") or 1.0, self.allocator.fraction), options.get("limit_gib")
        found = []
        for rank in ranks:
            known = self.needs.corrected(rank) if self.needs else rank
            limits = [int(min(fractions) * rank.memory_bytes)] if min(fractions) < 1 and rank.is_gpu else []
            limits += [int(limit_gib * GIB)] if limit_gib else []
            if limits:
                known = dataclasses.replace(known, free_bytes=min(*limits, rank.capacity_bytes or limits[0]))
            found.append(known)
        return tuple(found)

    def _best_gpu(self, usable: tuple[Device, ...]) -> Device | None:
        kinds = {item.get("kind", "cuda") for item in self.configuration.hardware.get("devices") or ()}
        if kinds == {"cpu"}:
            self.reasons["device"] = f"profile {self.configuration.profile}"
            return None
        if not usable:
            self.reasons["device"] = f"auto: no GPU found{self._unusable(' that can be used')}"
            return None
        best = max(usable, key=lambda gpu: gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes)
        others = f", which has the most free memory of {len(usable)} GPUs" if len(usable) > 1 else ""
        self.reasons["device"] = f"auto: {best.name}{others}"
        return best

    def _unusable(self, words: str) -> str:
        """Return `words` and the unusable GPUs with reasons; empty if there are none."""
        seen = [f"{device.name}: {device.why_not}" for device in self.inventory.devices if not device.usable]
        return f"{words} ({'; '.join(seen)})" if seen else ""

    def fit_profile(self, gpu: Device | None) -> None:
        """Add a note if the profile's GPU is not present; on a CPU, reset the groups it selected to their defaults.

        Options set to auto are kept.
        """
        profile = self.configuration.profile
        described = [item for item in self.configuration.hardware.get("devices") or () if item.get("kind") != "cpu"]
        names = [str(item.get("name", "?")) for item in described]
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

    def choose(self, group: str, name: str, reason: str) -> None:
        """Replace `auto` or an unsupported option; keys set by the user are kept."""
        signature = function_of(group, name)
        options = defaults(signature.keys) if signature else {}
        for_auto = self.configuration.for_auto
        options |= {key: for_auto[f"{group}.{key}"] for key in options if f"{group}.{key}" in for_auto}
        for key, value in self.choices[group].options.items():
            if f"{group}.{key}" not in self.configuration.sources:
                continue
            if key in options:
                options[key] = value
            else:
                self.notes.append(f"{group}.{key}={value} has no effect with {group}={name}")
        self.choices[group] = Choice(name, name, options)
        self.reasons[group] = reason

    def set(self, group: str, key: str, value: Any, reason: str) -> None:
        """Resolve one key of a choice."""
        choice = self.choices[group]
        self.choices[group] = dataclasses.replace(choice, options={**choice.options, key: value})
        self.reasons[f"{group}.{key}"] = reason

    def refuse_or_replace(self, group: str, why: str, instead: str, reason: str) -> None:
        """Refuse an unsupported option if requested by name, else replace it with a note."""
        name = self.choices[group].name
        if self.configuration.asked_by_name(group):
            others = dict.fromkeys((instead, "auto"))
            fix = "use " + ", or ".join(f"{group}={other}" for other in others)
            self.problems.append(Problem(why, f"{group}={name}", fix))
        else:
            self.notes.append(f"{group}={name}: {why}; using {instead}")
            self.choose(group, instead, reason)

    def batch(self) -> Batch:
        """Derive micro-batch and accumulation of the run."""
        settings = self.configuration.settings
        return self._divided(settings.global_batch_size, settings.micro_batch_size, "")

    def phase(self, phase: PhaseSettings) -> PhasePlan:
        """Return a phase with its batch divided and the kernel of its optimizer chosen as for that of the run."""
        lead = f"phase.{phase.name}." if self.own_keys else ""
        batch = self._divided(phase.global_batch_size, phase.micro_batch_size, lead, phase.name)
        optimizer = phase.optimizer
        if optimizer.options.get("kernel") == "auto":
            kernel, why = _kernel(self.device, self.choices["parallelism"].function, optimizer.function)
            optimizer = dataclasses.replace(optimizer, options={**optimizer.options, "kernel": kernel})
            if lead:
                self.own_keys[f"{lead}optimizer.kernel"], self.reasons[f"{lead}optimizer.kernel"] = kernel, why
        return PhasePlan(
            name=phase.name,
            kind=phase.kind,
            needs=phase.needs,
            trains=phase.trains,
            updates=phase.updates,
            epochs=phase.epochs,
            batch=batch,
            max_grad_norm=phase.max_grad_norm,
            evaluate=phase.evaluate,
            early_stopping=phase.early_stopping,
            optimizer=optimizer,
            scheduler=phase.scheduler,
        )

    def choose_blocks(self, phases: Sequence[PhasePlan]) -> None:
        """Put the blocks to compute again in the place of `auto`: those of the phase that needs most of them."""
        memory = self.choices["memory"]
        if memory.function != "budget" or memory.options["recompute"] != "auto" or self.needs is None:
            return
        found = [
            demand.recompute_at(phase.batch.micro_batch_size)
            for phase in phases
            if (demand := self.needs.demands.get(phase.name))
        ]
        if found:
            chosen = max(found, key=len)
            self.set("memory", "recompute", list(chosen), "auto")
            fits = all(each.prediction.fits for each in self.memory(phases))
            what = "are recomputed so that the run fits" if fits else "are recomputed, but it still does not fit"
            self.set("memory", "recompute", list(chosen), f"auto: {len(chosen)} blocks {what}")

    def memory(self, phases: Sequence[PhasePlan]) -> tuple[RankMemory, ...]:
        """Return what is predicted for every rank in every phase that was traced."""
        if self.needs is None:
            return ()
        found = []
        for phase in phases:
            part = part_of(self.choices["parallelism"], phase)
            demand = self.needs.demands.get(phase.name)
            for number, rank in enumerate(self.ranks if demand else ()):
                assert demand is not None
                share = phase.batch.shares[number] if phase.batch.stages == 1 else phase.batch.global_batch_size
                samples = max(1, min(share, phase.batch.micro_batch_size))
                prediction = predicted(demand, samples, rank, part.of_rank(number))
                is_exact = demand.is_exact and (phase.batch.stages == 1 or bool(demand.stages))
                is_exact = is_exact and (self.allocator.is_known or not rank.is_gpu)
                found.append(RankMemory(phase.name, number, samples, prediction, is_exact))
        return tuple(found)

    def _divided(
        self, global_batch_size: int, micro_batch_size: int | Literal["auto"], lead: str, phase: str | None = None
    ) -> Batch:
        batch, why = self._shared(global_batch_size, micro_batch_size, phase)
        if isinstance(batch, Problem):
            where = f"{lead}{batch.where}" if lead else batch.where
            problem = dataclasses.replace(batch, where=where)
            if problem.what not in [other.what for other in self.problems]:  # a phase's batch is most often the run's
                self.problems.append(problem)
            return Batch(0, 0, ())
        if lead:
            self.own_keys[f"{lead}micro_batch_size"] = batch.micro_batch_size
            self.own_keys[f"{lead}accumulation_steps"] = batch.accumulation_steps
        if micro_batch_size == "auto":
            reason = f"auto: {PASSES_PER_STAGE} micro-batches for each of {batch.stages} stages"
            if batch.accumulation_steps > PASSES_PER_STAGE * batch.stages:
                reason = "auto: the largest that fits every stage"
            whole = "auto: the whole share of an update as one micro-batch"
            if not batch.in_one_pass:
                whole = "auto: the largest that fits the smallest device, so that shares can follow speed"
                if self.choices["parallelism"].options.get("shares") != "speed":
                    whole = f"auto: the largest that fits; the whole share of {max(batch.shares)} would not"
            self.reasons[f"{lead}micro_batch_size"] = reason if batch.stages > 1 else whole
        self.reasons[f"{lead}shares"] = why
        is_even = len(set(batch.shares)) == 1
        of_rank = f"({batch.micro_batch_size} x {batch.world_size})" if is_even else f"{batch.micro_batch_size}"
        samples = batch.global_batch_size if is_even else max(batch.shares)
        self.reasons[f"{lead}accumulation_steps"] = f"{samples} / {of_rank}"
        return batch

    def _shared(self, total: int, micro: int | Literal["auto"], phase: str | None) -> tuple[Batch | Problem, str]:
        """Return the samples of an update split over ranks and micro-batches, with the reason."""
        function, count = self.choices["parallelism"].function, len(self.ranks)
        if function == "pipeline" and count > 1:
            micro = self._of_stages(total, phase) if micro == "auto" else micro
            batch = divide(total, micro, (total,), ragged=True)
            why = "every rank processes all samples with some of the layers"
            return (batch if isinstance(batch, Problem) else dataclasses.replace(batch, stages=count)), why
        wanted = self.choices["parallelism"].options.get("shares", "equal")
        shares, why = shares_of(wanted, total, self.ranks)
        if isinstance(shares, Problem):
            return shares, why
        is_free = micro == "auto"
        if micro == "auto" and self.needs is not None and all(rank.is_gpu for rank in self.ranks):
            micro = self._held(self.needs, shares, phase, follows_speed=wanted == "speed" and count > 1)
        return divide(total, micro, shares, ragged=function != "single" or is_free), why

    def _of_stages(self, total: int, phase: str | None) -> int:
        """Return the micro-batch size of a pipeline: small enough to keep all stages busy and to fit."""
        micro = max(1, -(-total // (PASSES_PER_STAGE * len(self.ranks))))
        part = RankPart.of(self.choices["parallelism"], len(self.ranks))
        for demand in self.needs.of(phase) if self.needs is not None else ():
            if demand.stages:
                micro = min(micro, demand.stages[0].points[-1].micro_batch_size)
                held = (biggest(demand, rank, micro, part.of_rank(number)) for number, rank in enumerate(self.ranks))
                micro = max(1, min(held))
        return micro

    def _held(
        self, needs: Needs, shares: Sequence[int], phase: str | None, *, follows_speed: bool
    ) -> int | Literal["auto"]:
        """Return the micro-batch size that fits every device; auto if each fits the whole share of its rank."""
        largest = max(shares)
        part = RankPart.of(self.choices["parallelism"], len(self.ranks), largest)
        held = needs.held(phase, self.ranks, largest, part)
        if follows_speed:
            return max(1, held)
        if all(
            predicted(demand, max(1, share), rank, part).fits
            for demand in needs.of(phase)
            for rank, share in zip(self.ranks, shares, strict=True)
        ):
            return "auto"
        if not held:
            rank, demand = min(self.ranks, key=lambda rank: rank.capacity_bytes), needs.worst(1)
            least = predicted(demand, 1, rank, part)
            text = f"a micro-batch of one sample is predicted to need {sized(least.total)}"
            note = f"{text}, but {rank.device} has {sized(least.capacity)}{LISTED}"
            self.notes += [note] if note not in self.notes else []
        return passes_of(largest, held)


LISTED = ": accel-run plan lists settings that would fit"
PASSES_PER_STAGE = 4  # micro-batches for each stage of a pipeline: with 2 stages 1 / 9 of the time is idle


# ---------------------------------------------------------------- rules: one group each; gpu is None on a CPU


def _precision(planner: _Planner, gpu: Device | None) -> None:
    name = planner.choices["precision"].function
    if name == "auto":
        planner.choose("precision", *_native_precision(gpu))
    elif name == "bf16" and gpu and not gpu.native_bf16 and gpu.kind != "mps":
        needed = "CDNA 2 or RDNA 3" if gpu.architecture else "capability 8.0"
        why = f"needs a GPU of {needed} or above; {gpu.name} has {gpu.generation} and only emulates bfloat16"
        instead = "fp16" if gpu.fp16_tensor_cores else "fp32"
        planner.refuse_or_replace("precision", why, instead, "no native bfloat16")
    elif name == "tf32" and not (gpu and gpu.native_tf32):
        here = f"{gpu.name} has {gpu.generation}" if gpu else "this is a CPU"
        why = f"needs a GPU of capability 8.0 or above; {here}"
        planner.refuse_or_replace("precision", why, "fp32", "no TF32 support")
    elif name == "fp16" and not gpu:
        planner.notes.append(
            "precision=fp16 on a CPU is emulated and slow (about 1 GFLOP/s a core): good for tests only"
        )


def _native_precision(gpu: Device | None) -> tuple[str, str]:
    """Return the best native format of the device, with the reason."""
    if gpu is None:
        return "fp32", "auto: on a CPU bfloat16 helps only large models; measure before using it"
    if gpu.native_bf16:
        return "bf16", f"auto: {gpu.name} ({gpu.generation}) supports bfloat16 natively"
    if gpu.fp16_tensor_cores:
        why = "has float16 tensor cores but only emulates bfloat16"
        return "fp16", f"auto: {gpu.name} ({gpu.generation}) {why}"
    return "fp32", f"auto: {gpu.name} has no tensor cores"


def _optimizer(planner: _Planner, gpu: Device | None) -> None:
    optimizer = planner.choices["optimizer"]
    if optimizer.options.get("kernel") == "auto":
        functions = planner.choices["parallelism"].function, optimizer.function
        planner.set("optimizer", "kernel", *_kernel(gpu, *functions))
    kernel = planner.choices["optimizer"].options.get("kernel")
    if _is_cuda(gpu) and planner.choices["precision"].function == "fp16" and kernel != "fused":
        # torch.amp.GradScaler.step reads found_inf on the host, unless the optimizer takes it as a tensor
        which = f"optimizer.kernel={kernel}" if kernel else f"optimizer={optimizer.name}"
        planner.notes.append(f"precision=fp16 with {which} waits for the GPU at every update; fused kernels do not")


def _kernel(gpu: Device | None, parallelism: str, optimizer: str) -> tuple[str, str]:
    if parallelism == "fsdp" and optimizer == "sgd":
        return "foreach", "auto: torch has no fused SGD for sharded parameters"
    if gpu and gpu.kind == "mps":
        return "foreach", "auto: one launch updates many tensors"
    return "fused", "auto: one kernel for the whole optimizer step, same results"


def _workers(planner: _Planner, gpu: Device | None) -> None:
    options = planner.choices["dataloader"].options
    cores = planner.inventory.cpu.logical_cores
    here = {device.uuid for device in planner.inventory.usable}  # ranks of other machines have cores of their own
    num_ranks = max(1, sum(rank.uuid in here for rank in planner.ranks))
    workers = options.get("num_workers", 0)  # dataloader=thread has at most one
    if workers == "auto":
        if options["cache"] != "none":
            workers, why = 0, f"auto: nothing to read, samples are cached in {options['cache']}"
        elif _is_cuda(gpu):
            mine = cores // num_ranks
            whose = f"{mine} of {cores} cores for each rank" if num_ranks > 1 else f"{cores} cores"
            workers, why = min(8, max(0, mine - 1)), f"auto: {whose}, one of them for the main process, at most 8"
        else:
            workers, why = 0, "auto: on a CPU, workers would compete with the model for cores"
        planner.set("dataloader", "num_workers", workers, why)
    elif workers and options["cache"] == "device":
        what = "worker processes cannot access a device cache"
        planner.problems.append(Problem(what, "dataloader.cache=device", "use dataloader.num_workers=0"))
    elif workers > cores:
        planner.notes.append(f"dataloader.num_workers={workers} is more than the {cores} cores of this machine")


def _pin_memory(planner: _Planner, gpu: Device | None) -> None:
    pin_memory = planner.choices["dataloader"].options["pin_memory"]
    if pin_memory == "auto":
        why = "auto: copies from pinned memory can overlap with computation" if _is_cuda(gpu) else "auto: no GPU"
        planner.set("dataloader", "pin_memory", _is_cuda(gpu), why)
    elif pin_memory and not _is_cuda(gpu):
        planner.set("dataloader", "pin_memory", False, "no GPU")
        planner.notes.append("dataloader.pin_memory=true has no effect without a GPU and is disabled")


def _prefetch(planner: _Planner, gpu: Device | None) -> None:
    name = planner.choices["prefetch"].function
    if name == "auto" and _is_cuda(gpu):
        planner.choose("prefetch", "stream", "auto: copies overlap with computation")
    elif name == "auto":
        planner.choose("prefetch", "none", "auto: no GPU")
    elif name == "stream" and not _is_cuda(gpu):
        planner.choose("prefetch", "none", "no GPU")
        planner.notes.append("prefetch=stream has no effect without a GPU and is disabled")


def _attention(planner: _Planner, gpu: Device | None) -> None:
    name = planner.choices["attention"].function
    if name == "flash" and gpu and gpu.kind == "cuda" and not gpu.flash_attention:
        why = f"flash needs capability 8.0; {gpu.name} is below"
        if gpu.architecture:
            why = f"torch has no flash kernels for {gpu.architecture} ({gpu.name})"
        planner.refuse_or_replace("attention", why, "efficient", "no flash kernel")
    elif name in ("efficient", "cudnn") and not gpu:
        planner.refuse_or_replace("attention", "has kernels for GPUs only", "auto", "no CPU kernel")


def _compile(planner: _Planner, gpu: Device | None) -> None:
    if planner.choices["compile"].function != "off" and not gpu:
        slow = "compile on a CPU has been slower than eager mode in every measurement so far"
        planner.notes.append(f"{slow}; measure before using it")


def _parallelism(planner: _Planner, gpu: Device | None) -> None:
    choice, compiled = planner.choices["parallelism"], planner.choices["compile"]
    if choice.function == "pipeline" and compiled.function not in ("off", "regional"):
        what = "compiles the whole model, but a pipeline rank holds only some of its layers"
        planner.problems.append(Problem(what, f"compile={compiled.name}", "use compile=regional, or compile=off"))
    if choice.function != "fsdp":
        return
    travels = {"bfloat16": "bf16", "float16": "fp16"}.get(str(choice.options["communicate"]))
    precision = planner.choices["precision"].name
    if travels and travels != precision:
        what = f"parameters can be communicated only in the format of precision, which is {precision}"
        fix = f"use precision={travels}, or parallelism.communicate=float32"
        planner.problems.append(Problem(what, f"parallelism.communicate={choice.options['communicate']}", fix))
    if planner.choices["memory"].options.get("channels_last") == "auto":
        planner.set("memory", "channels_last", False, "fsdp shards parameters in memory order, row by row")
    if planner.choices["optimizer"].function == "sgd" and planner.choices["optimizer"].options["kernel"] == "fused":
        what = "torch has no fused SGD for sharded parameters"
        planner.problems.append(Problem(what, "optimizer.kernel=fused", "use optimizer.kernel=foreach"))


RULES = (_precision, _optimizer, _workers, _pin_memory, _prefetch, _attention, _compile, _parallelism)


def _is_cuda(gpu: Device | None) -> bool:
    return gpu is not None and gpu.kind == "cuda"


def _same_gpu(described: str, found: str) -> bool:
    words = [word for word in described.lower().split() if word not in ("nvidia", "geforce", "tesla")]
    return all(word in found.lower() for word in words)
