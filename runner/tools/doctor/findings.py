"""The result of a check, and its context."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from runner.plan.inventory import Device, Inventory

State = Literal["ok", "warn", "FAIL", "skip"]
Item = TypeVar("Item")
_NONE: Mapping[str, float] = {}


@dataclass(frozen=True)
class CheckResult:
    """One thing that was checked.

    state    ok; warn: it works, but slowly or unreliably; FAIL: it does not work; skip: it was not checked
    subject  which one, if a check has several: "cuda:0 bf16"
    seen     the result; of a skip, the reason
    fix      a command to paste, or what to do; may be empty
    why      why it matters; empty: `why` of the check in CHECKS
    figures  measured value by name, which includes the unit
    check    name in CHECKS; like took_s, in seconds, set by the caller of the check
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
        """Return it for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CheckResult:
        """Return the result that `to_json` returned."""
        return CheckResult(**values)


def ok(subject: str, seen: str, **figures: float) -> CheckResult:
    """Return that it works."""
    return CheckResult("ok", subject, seen, figures=figures)


def warn(subject: str, seen: str, fix: str, why: str = "", figures: Mapping[str, float] = _NONE) -> CheckResult:
    """Return that it works, but slowly or unreliably."""
    return CheckResult("warn", subject, seen, fix, why, figures)


def failed(subject: str, seen: str, fix: str, why: str = "", figures: Mapping[str, float] = _NONE) -> CheckResult:
    """Return that it does not work."""
    return CheckResult("FAIL", subject, seen, fix, why, figures)


def skip(subject: str, seen: str, fix: str = "") -> CheckResult:
    """Return why it was not checked."""
    return CheckResult("skip", subject, seen, fix)


class Answer(str):
    """A result for later checks, yielded among the findings."""

    __slots__ = ()


@dataclass(frozen=True)
class CheckContext:
    """The context of a check.

    device     auto: all devices; otherwise only these: cpu, cuda, cuda:1, mps
    root       folder of the runs; may not exist yet
    scratch    private temporary folder
    inventory  the devices of torch and NVML; None for checks that do not need torch
    begin      call it with each subject before checking it, so that a crash is attributed to it
    begun      subjects that an earlier process of this check has begun: skip them
    found      findings of that process
    clock      monotonic seconds, for the limits and durations of checks
    """

    root: Path
    scratch: Path
    device: str = "auto"
    inventory: Inventory | None = None
    begin: Callable[[str], None] = lambda subject: None
    begun: frozenset[str] = frozenset()
    found: tuple[CheckResult, ...] = ()
    clock: Callable[[], float] = time.monotonic

    @property
    def here(self) -> Inventory:
        """The devices of torch and NVML; only for checks that need torch."""
        assert self.inventory is not None, "the check must say in CHECKS that it needs torch"
        return self.inventory

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The usable GPUs that device= selects."""
        return tuple(device for device in self.here.usable if self._wants(device))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs to check, and then the CPU."""
        return (*self.gpus, *((self.here.cpu.device,) if self.device in ("auto", "cpu") else ()))

    def each(self, items: Iterable[Item], name: Callable[[Item], str]) -> Iterator[Item]:
        """Yield the items that no earlier process has begun, and report each as begun.

        An item that raises or crashes ends the process; a new process continues after it.
        """
        for item in items:
            subject = name(item)
            if subject not in self.begun:
                self.begin(subject)
                yield item

    def _wants(self, device: Device) -> bool:
        return self.device in ("auto", device.kind, device.torch_name)


@dataclass(frozen=True)
class DoctorCheck:
    """A row of CHECKS.

    function  yields the findings; the first line of its docstring says what it checks
    why       why it matters
    limit_s   seconds after which its process is killed
    needs     another check whose answer this one requires
    """

    function: Callable[[CheckContext], Iterable[CheckResult | Answer]]
    why: str
    limit_s: float = 10.0
    needs: Literal["", "torch", "gpus"] = ""

    @property
    def tries(self) -> str:
        """What is checked."""
        return (self.function.__doc__ or "").partition("\n")[0].removesuffix(".")
