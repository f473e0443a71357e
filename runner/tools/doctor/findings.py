"""What a check finds, and what it is given to look at."""

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
    """One thing that was tried.

    state    ok; warn: it works, and costs speed or will fail some day; FAIL: it does not work; skip: it was not tried
    subject  which one, where a check tries several: "cuda:0 bf16"
    seen     what was seen; of a skip, why it was not tried
    fix      a line to paste, or what to do; empty where there is nothing to do
    why      why it matters; empty: as the table CHECKS says of the check
    figures  what was measured: name with its unit -> value
    check    name in CHECKS, and took_s the seconds that it took: set by who runs the check
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
        """Return it as what JSON can hold."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CheckResult:
        """Return the finding that `to_json` told."""
        return CheckResult(**values)


def ok(subject: str, seen: str, **figures: float) -> CheckResult:
    """Return that it works."""
    return CheckResult("ok", subject, seen, figures=figures)


def warn(subject: str, seen: str, fix: str, why: str = "", figures: Mapping[str, float] = _NONE) -> CheckResult:
    """Return that it works, at a price."""
    return CheckResult("warn", subject, seen, fix, why, figures)


def failed(subject: str, seen: str, fix: str, why: str = "", figures: Mapping[str, float] = _NONE) -> CheckResult:
    """Return that it does not work."""
    return CheckResult("FAIL", subject, seen, fix, why, figures)


def skip(subject: str, seen: str, fix: str = "") -> CheckResult:
    """Return why it was not tried."""
    return CheckResult("skip", subject, seen, fix)


class Answer(str):
    """What a check hands on to later ones; yielded among its findings."""

    __slots__ = ()


@dataclass(frozen=True)
class CheckContext:
    """What a check may look at.

    device     auto: all there are; else only this one, or these: cpu, cuda, cuda:1, mps
    root       where runs are written; need not be there
    scratch    a private folder for anything, gone at the end
    inventory  what torch and NVML see here; None for checks that do not need torch
    begin      tells that a subject is being tried from now on: a crash is laid to it
    begun      subjects that an earlier process of this check began: they are not tried again
    found      what was found of them, also that one crashed
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
        """What torch and NVML see; only for checks that need torch."""
        assert self.inventory is not None, "the check must say in CHECKS that it needs torch"
        return self.inventory

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs that are to be looked at: usable, and not left out by device=."""
        return tuple(device for device in self.here.usable if self._wants(device))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that are to be looked at, and then the CPU."""
        return (*self.gpus, *((self.here.cpu.device,) if self.device in ("auto", "cpu") else ()))

    def each(self, items: Iterable[Item], name: Callable[[Item], str]) -> Iterator[Item]:
        """Yield the items that are still to be tried, saying of each that it is begun.

        One that raises or crashes ends its process; another one goes on with those after it.
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

    function  tries it, yielding what it finds
    tries     what is tried, for people
    why       why it matters
    limit_s   after that its process is killed
    needs     another check, without whose answer this one cannot be made
    is_quick  made with --quick too
    """

    function: Callable[[CheckContext], Iterable[CheckResult | Answer]]
    tries: str
    why: str
    limit_s: float = 10.0
    needs: Literal["", "torch", "gpus"] = ""
    is_quick: bool = True
