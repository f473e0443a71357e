"""The plan: what follows from the configuration on this machine, each value with its reason.

`make_plan` is pure: it reads no device and no file, so it runs for machines that are not here. It returns every
problem at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.configuration import Choice, Configuration, function_of, shipped_options
from runner.base.division import Batch, divide
from runner.base.errors import ConfigError, DeviceMissing, Problem
from runner.base.settings import DataSettings, EvaluateSettings, Settings
from runner.plan.inventory import Cpu, Device, Inventory, inventory_of_profile, read_cpu, take_inventory


@dataclass(frozen=True)
class Plan:
    """Every value the run is made of, resolved: nothing is `auto` any more.

    device     torch's name of the device, such as cuda:0
    choices    group -> choice; `task` among them
    reasons    key -> why it has the value it has
    notes      what the user should know: what was asked for and could not be, what differs
    updates    optimizer steps, or None when they follow from `epochs` and the size of the data
    """

    device: str
    device_name: str
    device_uuid: str
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

    def values(self) -> dict[str, Any]:
        """Return every decided key with its value, in the order in which people read them."""
        found: dict[str, Any] = {"device": self.device}
        found |= {"updates": self.updates} if self.updates is not None else {"epochs": self.epochs}
        found |= {
            "global_batch_size": self.batch.global_batch_size,
            "micro_batch_size": self.batch.micro_batch_size,
            "accumulation_steps": self.batch.accumulation_steps,
        }
        for group, choice in self.choices.items():
            found[group] = choice.name
            found |= {f"{group}.{key}": value for key, value in choice.options.items()}
        plain = dataclasses.asdict(self.settings)
        nested = {key: value for key, value in plain.items() if isinstance(value, dict)}
        for key, value in plain.items():
            if key not in found and key not in nested and key not in ("updates", "epochs"):
                found[key] = value
        for name, inner in nested.items():
            found |= {f"{name}.{key}": value for key, value in inner.items()}
        return found

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
        tree["settings"] = Settings(**settings)
        tree["choices"] = {group: Choice(**choice) for group, choice in tree["choices"].items()}
        tree["batch"] = Batch(**tree["batch"])
        tree["notes"] = tuple(tree["notes"])
        return Plan(**tree)


def make_plan(configuration: Configuration, inventory: Inventory, world_size: int = 1) -> Plan:
    """Derive the mechanics of a run.

    Raises ConfigError with every problem, DeviceMissing if a device asked for by name is not in the inventory.
    """
    planner = _Planner(configuration, inventory, world_size)
    device = planner.device()
    planner.fit_profile(device)
    for rule in (_precision, _optimizer, _dataloader, _prefetch, _attention, _compile, _task):
        rule(planner, device)
    updates, epochs = planner.length()
    batch = planner.batch()
    if planner.problems:
        raise ConfigError(planner.problems)
    return Plan(
        device=device.torch_name if isinstance(device, Device) else "cpu",
        device_name=device.name if isinstance(device, Device) else f"CPU ({device.name}, {device.logical_cores} cores)",
        device_uuid=device.uuid if isinstance(device, Device) else "",
        choices=planner.choices,
        task_file=str(configuration.request.task_file) if configuration.request.task_file else None,
        updates=updates,
        epochs=epochs,
        batch=batch,
        settings=configuration.settings,
        inference=configuration.inference,
        profile=configuration.profile,
        reasons=planner.reasons,
        notes=(*configuration.notes, *inventory.notes, *planner.notes),
    )


def inventory_for(configuration: Configuration) -> tuple[Inventory, str]:
    """Return the machine to plan for without running, and whose it is: the profile's if it names one, else this one.

    Only for this machine's GPUs torch must be asked; a profile's machine costs no import.
    """
    if any(item.get("kind") != "cpu" for item in configuration.hardware.get("devices") or ()):
        cpu, notes = read_cpu()
        here = Inventory((), cpu, notes=notes)
        return inventory_of_profile(configuration.hardware, here), f"the machine of profile {configuration.profile}"
    return take_inventory(), "this machine"


class _Planner:
    def __init__(self, configuration: Configuration, inventory: Inventory, world_size: int) -> None:
        self.configuration = configuration
        self.inventory = inventory
        self.world_size = world_size
        self.choices = dict(configuration.choices)
        self.reasons: dict[str, str] = {
            key: source for key, source in configuration.sources.items() if key not in ("hardware",)
        }
        self.notes: list[str] = []
        self.problems: list[Problem] = []

    def device(self) -> Device | Cpu:
        """Choose the device, or raise DeviceMissing for one asked for by name."""
        wanted = self.configuration.settings.device
        usable = self.inventory.usable
        described = self.configuration.hardware.get("devices") or []
        if wanted == "auto" and described and all(item.get("kind") == "cpu" for item in described):
            self.reasons["device"] = f"profile {self.configuration.profile}"
            return self.inventory.cpu
        if wanted == "auto":
            gpus = [device for device in usable if device.kind in ("cuda", "mps")]
            if not gpus:
                seen = [f"{device.name}: {device.why_not}" for device in self.inventory.devices if not device.usable]
                self.reasons["device"] = "auto: no GPU here" + (f" that can be used ({'; '.join(seen)})" if seen else "")
                return self.inventory.cpu
            best = max(gpus, key=lambda device: device.free_bytes or device.memory_bytes)
            others = f", the one with most free memory of {len(gpus)}" if len(gpus) > 1 else ""
            self.reasons["device"] = f"auto: {best.name}{others}"
            return best
        if wanted == "cpu":
            return self.inventory.cpu
        kind, _, number = wanted.partition(":")
        for device in usable:
            if device.kind == kind and device.index == int(number or 0):
                return device
        known = ", ".join(device.torch_name for device in usable) or "no GPU"
        unusable = [f"{device.name}: {device.why_not}" for device in self.inventory.devices if not device.usable]
        raise DeviceMissing(
            f"{wanted} is not here; this machine has {', '.join([known, 'cpu'])}"
            + (f" ({'; '.join(unusable)})" if unusable else ""),
            where=f"device={wanted}",
            fix="say device=auto to take what is here",
        )

    def fit_profile(self, device: Device | Cpu) -> None:
        """Where the profile's GPU is not here, put back the shipped default of each group it selected."""
        described = [item for item in self.configuration.hardware.get("devices") or [] if item.get("kind") != "cpu"]
        if not described or isinstance(device, Device):
            wanted = [str(item.get("name", "")) for item in described]
            if isinstance(device, Device) and wanted and not any(_same_gpu(name, device.name) for name in wanted):
                self.notes.append(
                    f"profile {self.configuration.profile} describes {', '.join(wanted)}; this is {device.name}:"
                    " the profile's options are used, what they cannot do here is replaced"
                )
            return
        replaced = []
        defaults = shipped_options()
        for group, choice in self.configuration.choices.items():
            if self.configuration.sources.get(group) == f"profile {self.configuration.profile}":
                default = defaults[group]
                signature = function_of(group, default)
                options = {key.name: key.default for key in signature.keys.values()} if signature else {}
                self.choices[group] = Choice(default, default, options)
                self.reasons[group] = f"default: profile {self.configuration.profile} says {choice.name}, for its GPU"
                replaced.append(f"{group}={choice.name}")
        names = ", ".join(str(item.get("name", "?")) for item in described)
        self.notes.append(
            f"profile {self.configuration.profile} describes {names}; here the run is on the CPU"
            + (f", so {', '.join(replaced)} of the profile gave way to the defaults" if replaced else "")
        )

    def choose(self, group: str, name: str, reason: str) -> None:
        """Put an option in the place of `auto` or of one that cannot be, with the default keys."""
        signature = function_of(group, name)
        assert signature is not None
        self.choices[group] = Choice(name, name, {key.name: key.default for key in signature.keys.values()})
        self.reasons[group] = reason

    def set(self, group: str, key: str, value: Any, reason: str) -> None:
        """Resolve one key of a choice."""
        choice = self.choices[group]
        self.choices[group] = dataclasses.replace(choice, options={**choice.options, key: value})
        self.reasons[f"{group}.{key}"] = reason

    def refuse_or_replace(self, group: str, why: str, instead: str, reason: str) -> None:
        """An option that cannot work: refuse it if asked for by name, else replace it and say so."""
        name = self.choices[group].name
        if self.configuration.asked_by_name(group):
            self.problems.append(Problem(why, f"{group}={name}", f"say {group}={instead}, or {group}=auto"))
        else:
            self.notes.append(f"{group}={name}: {why}; using {instead}")
            self.choose(group, instead, reason)

    def length(self) -> tuple[int | None, float | None]:
        """Return updates or epochs, whichever was said last by the stronger voice."""
        settings, sources = self.configuration.settings, self.configuration.sources
        by_user = [key for key in ("updates", "epochs") if sources.get(key) == "command line"]
        if by_user == ["epochs"] and settings.epochs is not None:
            return None, float(settings.epochs)
        return (settings.updates, None) if settings.updates is not None else (None, settings.epochs)

    def batch(self) -> Batch:
        """Derive micro-batch and accumulation from the global batch."""
        settings = self.configuration.settings
        batch = divide(settings.global_batch_size, settings.micro_batch_size, self.world_size)
        if isinstance(batch, Problem):
            self.problems.append(batch)
            return Batch(0, 0, 0, 0)
        if settings.micro_batch_size == "auto":
            self.reasons["micro_batch_size"] = "auto: the whole share of an update in one pass"
        self.reasons["accumulation_steps"] = f"{batch.global_batch_size} / ({batch.micro_batch_size} x {self.world_size})"
        return batch


def _precision(planner: _Planner, device: Device | Cpu) -> None:
    name = planner.choices["precision"].function
    is_gpu = isinstance(device, Device)
    capability = device.capability if isinstance(device, Device) else None
    shown = f"capability {capability[0]}.{capability[1]}" if capability else "no capability"
    native_bf16 = isinstance(device, Device) and (device.native_bf16 or device.kind == "mps")
    if name == "auto":
        if isinstance(device, Device) and device.kind == "cuda" and device.native_bf16:
            planner.choose("precision", "bf16", f"auto: {device.name} ({shown}) computes bfloat16 natively")
        elif isinstance(device, Device) and device.kind == "cuda" and device.fp16_tensor_cores:
            planner.choose(
                "precision", "fp16", f"auto: {device.name} ({shown}) has float16 tensor cores and bfloat16 only by emulation"
            )
        else:
            where = "a CPU gains from bfloat16 only with large models; measure before choosing it" if not is_gpu else f"{device.name} has no tensor cores"
            planner.choose("precision", "fp32", f"auto: {where}")
    elif name == "bf16" and is_gpu and not native_bf16:
        planner.refuse_or_replace(
            "precision", f"needs a GPU of capability 8.0 or above; {device.name} has {shown} and only emulates bfloat16",
            "fp16" if isinstance(device, Device) and device.fp16_tensor_cores else "fp32", "bfloat16 is not native here",
        )  # fmt: skip
    elif name == "tf32" and not (isinstance(device, Device) and device.native_tf32):
        planner.refuse_or_replace(
            "precision", f"needs a GPU of capability 8.0 or above; {device.name} has {shown if is_gpu else 'none'}",
            "fp32", "TF32 is not there",
        )  # fmt: skip
    elif name == "fp16" and not is_gpu:
        planner.notes.append("precision=fp16 on a CPU is emulated and slow (about 1 GFLOP/s a core): good for tests only")


def _optimizer(planner: _Planner, device: Device | Cpu) -> None:
    choice = planner.choices["optimizer"]
    if choice.options.get("kernel") == "auto":
        if isinstance(device, Device) and device.kind == "mps":
            planner.set("optimizer", "kernel", "foreach", "auto: one launch for many tensors")
        else:
            planner.set("optimizer", "kernel", "fused", "auto: one kernel for the whole update, same numbers")


def _dataloader(planner: _Planner, device: Device | Cpu) -> None:
    options = planner.choices["dataloader"].options
    is_gpu = isinstance(device, Device) and device.kind == "cuda"
    cores = planner.inventory.cpu.logical_cores
    if options.get("num_workers") == "auto":
        if options["cache"] != "none":
            planner.set("dataloader", "num_workers", 0, f"auto: nothing to read, the samples are kept in {options['cache']}")
        elif is_gpu:
            workers = max(0, min(8, cores - 1))
            planner.set("dataloader", "num_workers", workers, f"auto: {cores} cores, one of them for this process, at most 8")
        else:
            planner.set("dataloader", "num_workers", 0, "auto: on a CPU workers take cores from the model")
    elif options.get("cache") == "device" and options.get("num_workers"):
        planner.problems.append(
            Problem("worker processes cannot read from the device", "dataloader.cache=device", "say dataloader.num_workers=0")
        )
    elif isinstance(options.get("num_workers"), int) and options["num_workers"] > cores:
        planner.notes.append(f"dataloader.num_workers={options['num_workers']} is more than the {cores} cores of this machine")
    if options.get("pin_memory") == "auto":
        planner.set("dataloader", "pin_memory", is_gpu, f"auto: {'copies from it can overlap' if is_gpu else 'no GPU to copy to'}")
    elif options.get("pin_memory") and not is_gpu:
        planner.set("dataloader", "pin_memory", False, "there is no GPU to copy to")
        planner.notes.append("dataloader.pin_memory=true has no effect without a GPU and is off")


def _prefetch(planner: _Planner, device: Device | Cpu) -> None:
    name = planner.choices["prefetch"].function
    is_gpu = isinstance(device, Device) and device.kind == "cuda"
    if name == "auto":
        planner.choose("prefetch", "stream" if is_gpu else "none", "auto: " + ("copies overlap with compute" if is_gpu else "nothing to copy"))
    elif name == "stream" and not is_gpu:
        planner.choose("prefetch", "none", "there is no GPU to copy to")
        planner.notes.append("prefetch=stream has no effect without a GPU and is off")


def _attention(planner: _Planner, device: Device | Cpu) -> None:
    name = planner.choices["attention"].function
    if name == "flash" and isinstance(device, Device) and device.kind == "cuda" and not device.flash_attention:
        planner.refuse_or_replace("attention", f"flash needs capability 8.0; {device.name} is below", "efficient", "flash is not there")
    elif name in ("efficient", "cudnn") and not isinstance(device, Device):
        planner.refuse_or_replace("attention", "has kernels for GPUs only", "auto", "no such kernel on a CPU")


def _compile(planner: _Planner, device: Device | Cpu) -> None:
    if planner.choices["compile"].name != "off" and not isinstance(device, Device):
        planner.notes.append("compile on a CPU was slower than eager in every measurement made so far; measure before keeping it")


def _task(planner: _Planner, device: Device | Cpu) -> None:
    if planner.choices["task"].options.get("size") == "auto":
        is_gpu = isinstance(device, Device)
        planner.set("task", "size", "full" if is_gpu else "tiny", "auto: " + ("a GPU is here" if is_gpu else "sized for a CPU"))


def _same_gpu(described: str, found: str) -> bool:
    words = [word for word in described.lower().split() if word not in ("nvidia", "geforce", "tesla")]
    return all(word in found.lower() for word in words)
