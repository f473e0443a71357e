"""Report changes of the machine during a run, each once: GPUs that are throttled, shared, lost or have errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.monitor.machine_sample import GpuUser
from runner.monitor.nvml import Gpu, GpuEvent, Nvml, decode_throttle_reasons
from runner.monitor.samples import Readings
from runner.monitor.xid import explain_xid

MIN_THROTTLED_SAMPLES = 3  # in a row, before an alert
MAX_PROCESSES = 3  # in one line


@dataclass(frozen=True)
class Alert:
    """A message that is reported once.

    kind   `unseen` (not monitored, with the reason), `slowed`, `shared`, `lost`, `denied`, `xid`, `ecc`
    level  `debug` if the start of a run has already reported it
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

    def check(
        self, readings: Readings, users: Mapping[int, Sequence[GpuUser]], events: Iterable[GpuEvent]
    ) -> list[Alert]:
        """Return the new alerts of this sample."""
        alerts: list[_Keyed] = []
        for index, gpu in enumerate(self._gpus):
            alerts += self._check_access(index, gpu)
            alerts += self._check_readings(index, gpu, readings)
            alerts += self._check_users(index, gpu, users.get(index, ()))
        for event in events:
            alerts += [
                self._check_event(index, gpu, event) for index, gpu in enumerate(self._gpus) if event.concerns(gpu)
            ]
        new = []
        for key, alert in alerts:
            if key not in self._reported:
                self._reported.add(key)
                new.append(alert)
        return new

    def _check_access(self, index: int, gpu: Gpu) -> list[_Keyed]:
        alerts: list[_Keyed] = []
        if gpu in self._nvml.lost:
            text = f"{_gpu_label(index, gpu)} is lost: {self._nvml.lost[gpu]}"
            alerts.append((("lost", index), Alert("lost", text, "warning", _facts(index, gpu))))
        if gpu in self._nvml.denied:
            names = ", ".join(sorted(self._nvml.denied[gpu]))
            text = f"{_gpu_label(index, gpu)}: this user may not read {names}; {_CONTAINER_HINT}"
            alerts.append((("denied", index), Alert("denied", text, "info", _facts(index, gpu))))
        return alerts

    def _check_readings(self, index: int, gpu: Gpu, readings: Readings) -> list[_Keyed]:
        alerts: list[_Keyed] = []
        bits = readings.get(f"gpu{index}/throttle_reasons")
        reasons = decode_throttle_reasons(bits)
        for reason in {reason for which, reason in self._slowed if which == index} | set(reasons):
            num_samples = self._slowed[index, reason] = (
                self._slowed.get((index, reason), 0) + 1 if reason in reasons else 0
            )
            if num_samples >= MIN_THROTTLED_SAMPLES:
                alerts.append((("slowed", index, reason), _slowed(index, gpu, reason, readings)))
        for kind in ("corrected", "uncorrected"):
            name = f"gpu{index}/ecc_{kind}"
            count = readings.get(name)
            if count is None:
                continue
            increase = count - self._errors.setdefault(name, count)
            if increase > 0:
                alerts.append((("ecc", index, kind), _ecc(index, gpu, kind, increase)))
        return alerts

    def _check_users(self, index: int, gpu: Gpu, users: Sequence[GpuUser]) -> list[_Keyed]:
        others = sorted((user for user in users if user.is_ours is False), key=lambda user: -(user.memory_gib or 0.0))
        if not others:
            return []
        shown = [_format_process(user) for user in others[:MAX_PROCESSES]]
        omitted = [f"{len(others) - MAX_PROCESSES} more"] if len(others) > MAX_PROCESSES else []
        what = "another process" if len(others) == 1 else f"{len(others)} other processes"
        text = f"{_gpu_label(index, gpu)} is also used by {what}: {', '.join([*shown, *omitted])}"
        facts = {**_facts(index, gpu), "pids": [user.pid for user in others]}
        return [(("shared", index), Alert("shared", text, "warning", facts))]

    def _check_event(self, index: int, gpu: Gpu, event: GpuEvent) -> _Keyed:
        if event.kind == "xid":
            xid = explain_xid(event.code)
            text = f"{_gpu_label(index, gpu)}: XID {event.code}, {xid.meaning}; {xid.advice}"
            facts = {**_facts(index, gpu), "xid": event.code}
            return ("xid", index, event.code), Alert("xid", text, "warning", facts)
        kind = event.kind.removeprefix("ecc ")
        return ("ecc", index, kind), _ecc(index, gpu, kind, None)


def _slowed(index: int, gpu: Gpu, reason: str, readings: Readings) -> Alert:
    shown = {name: readings[f"gpu{index}/{name}"] for name in _THROTTLE_METRICS if f"gpu{index}/{name}" in readings}
    measured = ", ".join(f"{value:.0f} {_THROTTLE_METRICS[name]}" for name, value in shown.items())
    advice = THROTTLE_ADVICE.get(reason, "")
    text = f"{_gpu_label(index, gpu)} is throttled by its {reason}" + (f" ({measured})" if measured else "")
    facts = {**_facts(index, gpu), "reason": reason, **shown}
    return Alert("slowed", text + (f"; {advice}" if advice else ""), "warning" if advice else "info", facts)


def _ecc(index: int, gpu: Gpu, kind: str, number: float | None) -> Alert:
    is_bad = kind == "uncorrected"
    count = "memory errors" if number is None or number > 1 else "a memory error"
    what = (
        f"{count} that could not be corrected (ECC): results may be wrong; reset the GPU"
        if is_bad
        else f"{count} that the driver corrected (ECC): results are not affected; check it if they are frequent"
    )
    facts = {**_facts(index, gpu), "ecc": kind, **({} if number is None else {"number": number})}
    return Alert("ecc", f"{_gpu_label(index, gpu)} had {what}", "warning" if is_bad else "info", facts)


def _gpu_label(index: int, gpu: Gpu) -> str:
    return f"gpu{index} ({gpu.name})"


def _facts(index: int, gpu: Gpu) -> dict[str, Any]:
    return {"device": f"gpu{index}", "uuid": gpu.uuid}


def _format_process(user: GpuUser) -> str:
    parts = [f"pid {user.pid}", user.user, "" if user.memory_gib is None else f"{user.memory_gib:.1f} GiB"]
    return f"{user.name or 'unknown'} ({', '.join(filter(None, parts))})"


_THROTTLE_METRICS: Mapping[str, str] = {"power_w": "W", "temperature_c": "degC", "clock_mhz": "MHz"}

_CONTAINER_HINT = "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"

# Reasons without advice are normal: a busy GPU runs at its power limit.
THROTTLE_ADVICE: Mapping[str, str] = {
    "hardware slowdown": "check its cooling and its power supply",
    "software temperature limit": "check its cooling and the temperature in the case",
    "hardware temperature limit": "check its cooling: fans, dust, air flow",
    "power brake": "the power supply requests lower power: check it and its cables",
    "reliability": "its voltage is at the limit: remove overclocking",
}
