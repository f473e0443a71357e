"""Report changes of the machine during a run, each once: GPUs that are throttled, shared, lost or have errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.monitor.machine_sample import GpuUser
from runner.monitor.nvml import Gpu, GpuEvent, Nvml, slowed_by
from runner.monitor.samples import Readings
from runner.monitor.xid import explain

IN_A_ROW = 3  # throttled samples before an alert
SHOWN = 3  # maximum of processes in one line


@dataclass(frozen=True)
class Alert:
    """A message that is reported once.

    kind   `unseen` (what is not monitored, and why), `slowed`, `shared`, `lost`, `denied`, `xid`, `ecc`
    level  `debug` for what the start of a run has reported already
    facts  device, uuid and the values in the text, for programs
    """

    kind: str
    text: str
    level: Literal["debug", "info", "warning"] = "info"
    facts: Mapping[str, Any] = field(default_factory=dict)


_Keyed = tuple[tuple[object, ...], Alert]  # identity, alert


class AlertMonitor:
    """Compares each sample with earlier ones, and returns new alerts."""

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu]) -> None:
        self._nvml, self._gpus = nvml, tuple(gpus)
        self._reported: set[tuple[object, ...]] = set()
        self._slowed: dict[tuple[int, str], int] = {}  # samples in a row
        self._errors: dict[str, float] = {}

    def look(
        self, readings: Readings, users: Mapping[int, Sequence[GpuUser]], events: Iterable[GpuEvent]
    ) -> list[Alert]:
        """Return the new alerts of this sample."""
        found: list[_Keyed] = []
        for index, gpu in enumerate(self._gpus):
            found += self._lost(index, gpu)
            found += self._of_readings(index, gpu, readings)
            found += self._of_users(index, gpu, users.get(index, ()))
        for event in events:
            found += [self._of_event(index, gpu, event) for index, gpu in enumerate(self._gpus) if event.concerns(gpu)]
        new = []
        for key, notice in found:
            if key not in self._reported:
                self._reported.add(key)
                new.append(notice)
        return new

    def _lost(self, index: int, gpu: Gpu) -> list[_Keyed]:
        found: list[_Keyed] = []
        if gpu in self._nvml.lost:
            text = f"{_who(index, gpu)} is lost: {self._nvml.lost[gpu]}"
            found.append((("lost", index), Alert("lost", text, "warning", _facts(index, gpu))))
        if gpu in self._nvml.denied:
            names = ", ".join(sorted(self._nvml.denied[gpu]))
            text = f"{_who(index, gpu)}: this user may not read {names}; in a container, give it the driver's utilities"
            found.append((("denied", index), Alert("denied", text, "info", _facts(index, gpu))))
        return found

    def _of_readings(self, index: int, gpu: Gpu, readings: Readings) -> list[_Keyed]:
        found: list[_Keyed] = []
        bits = readings.get(f"gpu{index}/throttle_reasons")
        reasons = slowed_by(bits)
        for reason in {reason for which, reason in self._slowed if which == index} | set(reasons):
            row = self._slowed[index, reason] = self._slowed.get((index, reason), 0) + 1 if reason in reasons else 0
            if row >= IN_A_ROW:
                found.append((("slowed", index, reason), _slowed(index, gpu, reason, readings)))
        for kind in ("corrected", "uncorrected"):
            name = f"gpu{index}/ecc_{kind}"
            count = readings.get(name)
            if count is None:
                continue
            more = count - self._errors.setdefault(name, count)
            if more > 0:
                found.append((("ecc", index, kind), _ecc(index, gpu, kind, more)))
        return found

    def _of_users(self, index: int, gpu: Gpu, users: Sequence[GpuUser]) -> list[_Keyed]:
        others = sorted((user for user in users if user.is_ours is False), key=lambda user: -(user.memory_gib or 0.0))
        if not others:
            return []
        shown = [_process(user) for user in others[:SHOWN]]
        more = [f"{len(others) - SHOWN} more"] if len(others) > SHOWN else []
        what = "another process" if len(others) == 1 else f"{len(others)} other processes"
        text = f"{_who(index, gpu)} is also used by {what}: {', '.join([*shown, *more])}"
        facts = {**_facts(index, gpu), "pids": [user.pid for user in others]}
        return [(("shared", index), Alert("shared", text, "warning", facts))]

    def _of_event(self, index: int, gpu: Gpu, event: GpuEvent) -> _Keyed:
        if event.kind == "xid":
            known = explain(event.code)
            text = f"{_who(index, gpu)}: XID {event.code}, {known.meaning}; {known.advice}"
            facts = {**_facts(index, gpu), "xid": event.code}
            return ("xid", index, event.code), Alert("xid", text, "warning", facts)
        kind = event.kind.removeprefix("ecc ")
        return ("ecc", index, kind), _ecc(index, gpu, kind, None)


def _slowed(index: int, gpu: Gpu, reason: str, readings: Readings) -> Alert:
    shown = {name: readings[f"gpu{index}/{name}"] for name in _MEASURED if f"gpu{index}/{name}" in readings}
    measured = ", ".join(f"{value:.0f} {_MEASURED[name]}" for name, value in shown.items())
    advice = SLOWED_ADVICE.get(reason, "")
    text = f"{_who(index, gpu)} is slowed down by its {reason}" + (f" ({measured})" if measured else "")
    facts = {**_facts(index, gpu), "reason": reason, **shown}
    return Alert("slowed", text + (f"; {advice}" if advice else ""), "warning" if advice else "info", facts)


def _ecc(index: int, gpu: Gpu, kind: str, number: float | None) -> Alert:
    is_bad = kind == "uncorrected"
    count = "memory errors" if number is None or number > 1 else "a memory error"
    what = (
        f"{count} that could not be corrected (ECC): what was computed may be wrong; reset the GPU"
        if is_bad
        else f"{count} that the driver corrected (ECC): nothing is lost; have it checked where they become many"
    )
    facts = {**_facts(index, gpu), "ecc": kind, **({} if number is None else {"number": number})}
    return Alert("ecc", f"{_who(index, gpu)} had {what}", "warning" if is_bad else "info", facts)


def _who(index: int, gpu: Gpu) -> str:
    return f"gpu{index} ({gpu.name})"


def _facts(index: int, gpu: Gpu) -> dict[str, Any]:
    return {"device": f"gpu{index}", "uuid": gpu.uuid}


def _process(user: GpuUser) -> str:
    words = [f"pid {user.pid}", user.user, "" if user.memory_gib is None else f"{user.memory_gib:.1f} GiB"]
    return f"{user.name or 'unknown'} ({', '.join(filter(None, words))})"


_MEASURED: Mapping[str, str] = {"power_w": "W", "temperature_c": "degC", "clock_mhz": "MHz"}

# What to do. Reasons without advice are normal: a busy GPU works at its power limit.
SLOWED_ADVICE: Mapping[str, str] = {
    "hardware slowdown": "check its cooling and its power supply",
    "software temperature limit": "check its cooling and what else is in the case",
    "hardware temperature limit": "check its cooling: fans, dust, the air around it",
    "power brake": "the power supply asks for less: check it and its cables",
    "reliability": "its voltage is at the limit: undo an overclocking",
}
