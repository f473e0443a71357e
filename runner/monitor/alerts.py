"""Report each change of the machine during a run once: GPUs that are throttled, shared or lost, or have errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.monitor.machine_sample import GpuUser
from runner.monitor.nvml import NORMAL_THROTTLING, THROTTLE_MEANINGS, Gpu, GpuEvent, Nvml, decode_throttle_reasons
from runner.monitor.samples import Readings

MIN_THROTTLED_SAMPLES = 3  # consecutive samples before an alert
MAX_PROCESSES = 3  # processes that one alert lists


@dataclass(frozen=True)
class Alert:
    """A message that is reported once.

    kind   `unseen` (not monitored, with the reason), `slowed`, `shared`, `lost`, `denied`, `xid`, `ecc`
    level  `debug` if it was already reported at the start of the run
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
        self._slowed: dict[tuple[int, str], int] = {}  # (GPU, reason) -> consecutive samples
        self._errors: dict[str, float] = {}

    def check(
        self, readings: Readings, users: Mapping[int, Sequence[GpuUser]], events: Iterable[GpuEvent]
    ) -> list[Alert]:
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
            text = f"{_gpu_label(index, gpu)}: no permission to read {names}; {_CONTAINER_HINT}"
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
    advice = "" if reason in NORMAL_THROTTLING else THROTTLE_MEANINGS[reason]
    text = f"{_gpu_label(index, gpu)} is throttled by its {reason}" + (f" ({measured})" if measured else "")
    facts = {**_facts(index, gpu), "reason": reason, **shown}
    return Alert("slowed", text + (f"; {advice}" if advice else ""), "warning" if advice else "info", facts)


def _ecc(index: int, gpu: Gpu, kind: str, number: float | None) -> Alert:
    is_bad = kind == "uncorrected"
    count = "memory errors" if number is None or number > 1 else "a memory error"
    what = (
        f"{count} that could not be corrected (ECC): results may be wrong; reset the GPU"
        if is_bad
        else f"{count} that the driver corrected (ECC): results are not affected; check the GPU if they are frequent"
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


@dataclass(frozen=True)
class Xid:
    """The meaning of an XID, and the advice for it."""

    meaning: str
    advice: str


def explain_xid(number: int) -> Xid:
    """Return the meaning of an XID, even if the number is not in the table."""
    return XIDS.get(number, Xid("an error that is not in accel-run's table", _LOOK_IT_UP))


_LOOK_IT_UP = "look it up at docs.nvidia.com/deploy/xid-errors; the kernel log (dmesg) has details"
_OWN_CODE = "run again with CUDA_LAUNCH_BLOCKING=1, then under compute-sanitizer; suspect hardware if another GPU works"
_RESET = (
    "stop all processes on it and reset it (nvidia-smi --gpu-reset) or restart the machine; replace it if it recurs"
)
_SOON = "the run may continue; reset the GPU when it ends, so that the faulty memory is retired"
_NVLINK = "restart the machine; if it recurs, have the bridge or the NVLink connection checked"
_RESEAT = "restart the machine; check seating, power cables and temperature, and try another GPU in the slot"
_DRIVER = "restart the machine; if it recurs, install a newer driver, then have the GPU checked"

XIDS: Mapping[int, Xid] = {
    8: Xid("the GPU stopped processing a program", "start the program again"),
    11: Xid("commands for the GPU were corrupted (push buffer)", _DRIVER),
    13: Xid("a kernel raised an exception, such as an out-of-bounds access", _OWN_CODE),
    31: Xid("a kernel accessed an invalid memory address (page fault)", _OWN_CODE),
    32: Xid("commands for the GPU were corrupted (push buffer)", _RESEAT),
    38: Xid("driver firmware error", _DRIVER),
    43: Xid("a program caused a fault and was stopped on the GPU; the GPU is healthy", _OWN_CODE),
    44: Xid("the GPU failed during a context switch", _RESET),
    45: Xid("a program's work was stopped, on request or after another error", "see the previous error"),
    46: Xid("the GPU stopped processing", _RESET),
    48: Xid("uncorrectable (double-bit) ECC error in GPU memory", _RESET),
    54: Xid("auxiliary power is not connected", "connect the power cable"),
    61: Xid("the GPU's microcontroller stopped with a warning", _RESET),
    62: Xid("the GPU's microcontroller halted", _RESET),
    63: Xid("a faulty row or page of GPU memory was recorded for remapping or retirement", _SOON),
    64: Xid("remapping or retirement of faulty GPU memory failed", _RESET),
    68: Xid("video decoder exception", _DRIVER),
    69: Xid("a kernel used an unsupported operation (graphics engine class error)", _OWN_CODE),
    74: Xid("error on an NVLink connection", _NVLINK),
    79: Xid("the GPU has fallen off the bus: the machine no longer detects it", _RESEAT),
    92: Xid("high rate of corrected (single-bit) ECC errors", "have the GPU checked when the run ends"),
    94: Xid("contained memory error: only the program that accessed the memory is stopped", _SOON),
    95: Xid("uncontained memory error: all programs on the GPU are affected", _RESET),
    109: Xid("context switch timeout", _RESET),
    110: Xid("the GPU reported a security fault", _DRIVER),
    119: Xid("the GPU system processor (GSP) did not answer the driver in time", _RESET),
    120: Xid("the GPU system processor (GSP) failed", _RESET),
    121: Xid("corrected error on the link between CPU and GPU (C2C)", "reset the GPU when the run ends"),
    122: Xid("the driver could not read the GPU's configuration memory (SPI)", _DRIVER),
    123: Xid("the driver could not communicate with the GPU's power management", _DRIVER),
    140: Xid("unrecovered ECC error", _RESET),
    143: Xid("GPU initialization failed", _DRIVER),
    **dict.fromkeys(range(144, 151), Xid("error on an NVLink connection", _NVLINK)),
    154: Xid("the recommended recovery action changed", "nvidia-smi -q shows it as GPU Recovery Action"),
    160: Xid("a faulty location of GPU memory was marked for repair", _SOON),
    171: Xid("uncorrectable error in the GPU's DRAM", _RESET),
    172: Xid("uncorrectable error in the GPU's SRAM", _RESET),
}  # fmt: skip
