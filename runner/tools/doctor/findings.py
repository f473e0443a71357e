"""Results of checks, their context, and the declaration of a check."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

from runner.plan.inventory import Device, Inventory

State = Literal["ok", "warn", "FAIL", "skip"]
Item = TypeVar("Item")
_NONE: Mapping[str, float] = {}


@dataclass(frozen=True)
class CheckResult:
    """The result of a check for one subject.

    state    ok; warn: works, but slowly or unreliably; FAIL: does not work; skip: not checked
    subject  name of the subject if the check has several, such as "cuda:0 bf16"
    seen     the result; for skip, the reason
    fix      command to paste, or instruction; may be empty
    why      why it matters; empty: `why` of the check in CHECKS
    figures  measured values by name, which includes the unit
    check    name in CHECKS; set by the caller of the check
    took_s   duration in seconds; set by the caller of the check
    """

    state: State
    subject: str
    seen: str
    fix: str = ""
    why: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    check: str = ""
    took_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def ok(subject: str, seen: str, **figures: float) -> CheckResult:
    """Return the result for a subject that works."""
    return CheckResult("ok", subject, seen, figures=figures)


def warn(subject: str, seen: str, fix: str, why: str = "", figures: Mapping[str, float] = _NONE) -> CheckResult:
    """Return the result for a subject that works, but slowly or unreliably."""
    return CheckResult("warn", subject, seen, fix, why, figures)


def failed(subject: str, seen: str, fix: str, why: str = "", figures: Mapping[str, float] = _NONE) -> CheckResult:
    """Return the result for a subject that does not work."""
    return CheckResult("FAIL", subject, seen, fix, why, figures)


def skip(subject: str, seen: str, fix: str = "") -> CheckResult:
    """Return the result for a subject that was not checked, with the reason."""
    return CheckResult("skip", subject, seen, fix)


NOT_TIMED = "the GPU is simulated on the CPU, so times are not compared"


def compare(subject: str, unit: str, pair: tuple[float, float], seen: str, difference: str = "") -> CheckResult:
    """Return the result of comparing a prediction with a measurement.

    unit        unit of both values, which becomes part of their names in `figures`
    pair        predicted and measured value
    difference  consequence of the difference; empty: they agree
    """
    figures = {f"predicted_{unit}": pair[0], f"measured_{unit}": pair[1]}
    if not difference:
        return dataclasses.replace(ok(subject, seen), figures=figures)
    return warn(subject, f"{seen}: {difference}", "send first_contact.json", figures=figures)


class SharedResult(str):
    """A value that a check yields among its findings, for later checks."""

    __slots__ = ()


@dataclass(frozen=True)
class CheckContext:
    """The context of a check.

    device     devices to check: `auto` (all), or a device or a type of device, such as cpu, cuda, cuda:1 or mps
    root       folder of the runs; may not exist yet
    scratch    private temporary folder
    inventory  devices that torch and NVML report; None for checks that do not need torch
    begin      function to call with each subject before it is checked, so that a crash is attributed to the subject
    clock      monotonic seconds, for the limits and durations of checks
    """

    root: Path
    scratch: Path
    device: str = "auto"
    inventory: Inventory | None = None
    begin: Callable[[str], None] = lambda subject: None
    clock: Callable[[], float] = time.monotonic

    @property
    def required_inventory(self) -> Inventory:
        """The devices that torch and NVML report; only for checks that need torch."""
        assert self.inventory is not None, "the check must have needs='gpus' in CHECKS"
        return self.inventory

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The usable GPUs that device= selects."""
        usable = self.required_inventory.usable
        return tuple(each for each in usable if self.device in ("auto", each.kind, each.torch_name))

    @property
    def cuda_gpus(self) -> tuple[Device, ...]:
        """The usable GPUs of device type `cuda` that device= selects."""
        return tuple(device for device in self.gpus if device.kind == "cuda")

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices to check, the CPU last."""
        return (*self.gpus, *((self.required_inventory.cpu.device,) if self.device in ("auto", "cpu") else ()))

    def each(self, items: Iterable[Item], name: Callable[[Item], str]) -> Iterator[Item]:
        """Yield the items, and report each as the subject before it is checked."""
        for item in items:
            self.begin(name(item))
            yield item


@dataclass(frozen=True)
class DoctorCheck:
    """A row of CHECKS.

    function  yields the findings; the first line of its docstring is the summary
    why       why the check matters
    limit_s   seconds after which the process of the check is killed
    needs     check whose shared result is required
    """

    function: Callable[[CheckContext], Iterable[CheckResult | SharedResult]]
    why: str
    limit_s: float = 10.0
    needs: Literal["", "torch", "gpus"] = ""

    @property
    def summary(self) -> str:
        """Summary of what is checked."""
        return (self.function.__doc__ or "").partition("\n")[0].removesuffix(".")


def late_check(module: str, name: str, summary: str) -> Callable[[CheckContext], Iterator[CheckResult]]:
    """Return a check that imports its module when it runs, because torch itself may be what is broken."""

    def check(context: CheckContext) -> Iterator[CheckResult]:
        yield from getattr(import_module(f"runner.tools.doctor.{module}"), name)(context)

    check.__doc__ = summary
    return check
