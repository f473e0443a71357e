"""Define the columns of gpu.csv, read the file and compute time-weighted means.

What was not read is an empty cell, NaN in an array, and absent from a mapping; it never counts as 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from runner.monitor.nvml import slowed_by

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Readings = Mapping[str, float]

_NOTHING: Mapping[str, float] = MappingProxyType({})
_RISING = frozenset({"ecc_corrected", "ecc_uncorrected"})
NEAR_S = 0.05  # by so much, and half its own span, a sample may be late before it counts as a gap


@dataclass(frozen=True)
class Column:
    """A column of gpu.csv: the metric it holds, of a GPU without its `gpu0/`, and the unit."""

    name: str
    metric: str
    unit: str


@dataclass(frozen=True)
class SampledGpu:
    """A watched GPU."""

    name: str
    uuid: str


@dataclass(frozen=True)
class MachineSamples:
    """What was seen, oldest first.

    times_s  (N,) seconds since 1970
    spans_s  (N,) seconds that each sample stands for: those before it, back to the sample before
    phases   (N) names; empty before the first phase
    values   metric such as `gpu0/util` or `cpu/percent` -> (N,), NaN where it was not read
    devices  `gpu0` -> what it is; empty on a machine without a GPU
    notes    what the file did not tell
    """

    times_s: Floats
    spans_s: Floats
    phases: tuple[str, ...]
    values: Mapping[str, Floats]
    devices: Mapping[str, SampledGpu] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.phases)

    def gaps(self) -> NDArray[np.bool_]:
        """Return (N,) True where nobody watched right before a sample: a curve must not be drawn across."""
        import numpy as np

        apart = np.diff(self.times_s, prepend=self.times_s[:1])
        return (apart < 0) | (apart > 1.5 * self.spans_s + NEAR_S)

    def readings(self) -> Iterator[tuple[str, float, bool, Readings]]:
        """Yield of each sample (phase, seconds it stands for, gap before it, readings)."""
        columns = {name: column.tolist() for name, column in self.values.items()}
        spans, gaps = self.spans_s.tolist(), self.gaps().tolist()
        for row, (phase, span, gap) in enumerate(zip(self.phases, spans, gaps, strict=True)):
            values = {name: column[row] for name, column in columns.items()}
            yield phase, span, gap, {name: value for name, value in values.items() if not math.isnan(value)}


@dataclass(frozen=True)
class Stat:
    """A metric over some time: mean weighted by time, extremes, and the seconds in which it was read."""

    mean: float
    min: float
    max: float
    seconds: float


@dataclass(frozen=True)
class SummaryPart:
    """A phase, or the whole: what its samples say together.

    metrics      metric -> Stat; without the counters and bits, of which a mean says nothing
                 ECC errors are those since the watch began: what a counter held before is not the run's
    energy_j     device -> joules that it took; of its counter where it has one, else power x time
    slowed       device -> what held its clocks down -> share of the time in which it told
    told_s       device -> seconds in which it told what holds its clocks down
    """

    seconds: float = 0.0
    samples: int = 0
    metrics: Mapping[str, Stat] = field(default_factory=dict)
    energy_j: Mapping[str, float] = field(default_factory=dict)
    slowed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    told_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Covered:
    """The rows of a gpu.csv that a summary sums up: its first `bytes`, and the time in its first row."""

    first: str
    bytes: int


@dataclass(frozen=True)
class Summary:
    """A run as the monitor saw it, whole and by phase.

    covered  the rows that are in it, so that whoever goes on need not read them again; None: unknown
    """

    whole: SummaryPart = SummaryPart()
    phases: Mapping[str, SummaryPart] = field(default_factory=dict)
    devices: Mapping[str, SampledGpu] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    covered: Covered | None = None

    @staticmethod
    def of(samples: MachineSamples, notes: Sequence[str] = ()) -> Summary:
        """Return what these samples say together."""
        tally = SampleTally()
        tally.take(samples)
        return tally.summary(samples.devices, (*samples.notes, *notes))

    def to_json(self) -> dict[str, Any]:
        """Return it as monitor.json holds it, its numbers with six digits."""
        content: dict[str, Any] = _six_digits(asdict(self))
        return content


class SampleTally:
    """Adds samples up as they come, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._parts: dict[str, _Sums] = {}
        self._counters: dict[str, float] = {}  # their last values since the last gap
        self._risen: dict[str, float] = {}  # ECC counter -> by how much it rose while somebody watched

    def add(self, phase: str, span_s: float, readings: Readings, *, after_gap: bool = False) -> None:
        """Count a sample that stands for `span_s` seconds; after a gap, counters begin anew."""
        part = self._parts.setdefault(phase, _Sums())
        part.seconds += span_s
        part.samples += 1
        if after_gap:
            self._counters.clear()
        for name, value in readings.items():
            device, _, metric = name.partition("/")
            if metric == "energy_j":
                if (joules := self._rise(name, value)) is not None:
                    part.add_joules(device, joules)
            elif metric in _RISING:
                self._risen[name] = self._risen.get(name, 0.0) + (self._rise(name, value) or 0.0)
                part.add_value(name, self._risen[name], span_s)
            elif metric == "throttle_reasons":
                part.add_bits(device, value, span_s)
            else:
                part.add_value(name, value, span_s)
                if metric == "power_w" and not self._has_counter(device, readings):
                    part.add_joules(device, value * span_s)

    def take(self, samples: MachineSamples, *, after_s: float | None = None) -> None:
        """Count these samples; `after_s` is the time of the one before them."""
        far = after_s is not None and len(samples) > 0 and _is_far(after_s, samples)
        for phase, span_s, gap, readings in samples.readings():
            self.add(phase, span_s, readings, after_gap=gap or far)
            far = False

    def absorb(self, earlier: SampleTally, names: Mapping[str, str]) -> None:
        """Count what an earlier one counted as well, whose devices are called so here; counters begin anew after it.

        To be called before anything is added here that came later.
        """
        for phase, part in earlier._parts.items():
            self._parts.setdefault(phase, _Sums()).merge(part.renamed(names), self._risen)
        for name, risen in earlier._risen.items():
            new = renamed(name, names)
            self._risen[new] = self._risen.get(new, 0.0) + risen
        self._counters.clear()

    def summary(
        self, devices: Mapping[str, SampledGpu], notes: Sequence[str] = (), covered: Covered | None = None
    ) -> Summary:
        """Return what was added so far."""
        whole = _Sums()
        for part in self._parts.values():
            whole.merge(part)
        phases = {name: part.settled() for name, part in self._parts.items()}
        return Summary(whole.settled(), phases, dict(devices), tuple(notes), covered)

    def _has_counter(self, device: str, readings: Readings) -> bool:
        """Tell whether a counter of the energy was read since the last gap: what one reading lacks, the next tells."""
        name = f"{device}/energy_j"
        return name in readings or name in self._counters

    def _rise(self, name: str, value: float) -> float | None:
        """Return what a counter gained since it was last read, None where that is not known."""
        before = self._counters.get(name)
        self._counters[name] = value
        return value - before if before is not None and value >= before else None  # one that falls began anew


class _Sums:
    """The sums of a Part: of each metric [seconds, seconds x value, least, most]."""

    def __init__(self) -> None:
        self.seconds, self.samples = 0.0, 0
        self.values: dict[str, list[float]] = {}
        self.joules: dict[str, float] = {}
        self.slowed: dict[str, dict[str, float]] = {}
        self.asked: dict[str, float] = {}  # device -> seconds in which it told what slows it down

    def add_value(self, name: str, value: float, span_s: float) -> None:
        sums = self.values.get(name)
        if sums is None:
            self.values[name] = [span_s, span_s * value, value, value]
            return
        sums[0] += span_s
        sums[1] += span_s * value
        sums[2] = min(sums[2], value)
        sums[3] = max(sums[3], value)

    def add_joules(self, device: str, joules: float) -> None:
        self.joules[device] = self.joules.get(device, 0.0) + joules

    def add_bits(self, device: str, bits: float, span_s: float) -> None:
        self.asked[device] = self.asked.get(device, 0.0) + span_s
        if bits:
            reasons = self.slowed.setdefault(device, {})
            for reason in slowed_by(bits):
                reasons[reason] = reasons.get(reason, 0.0) + span_s

    def merge(self, other: _Sums, above: Mapping[str, float] = _NOTHING) -> None:
        """Add another's; the metrics named in `above` are counted from there on."""
        self.seconds += other.seconds
        self.samples += other.samples
        for name, (seconds, total, least, most) in other.values.items():
            base = above.get(name, 0.0)
            mine = self.values.setdefault(name, [0.0, 0.0, least + base, most + base])
            self.values[name] = [
                mine[0] + seconds,
                mine[1] + total + seconds * base,
                min(mine[2], least + base),
                max(mine[3], most + base),
            ]
        _add(self.joules, other.joules)
        _add(self.asked, other.asked)
        for device, reasons in other.slowed.items():
            _add(self.slowed.setdefault(device, {}), reasons)

    def renamed(self, names: Mapping[str, str]) -> _Sums:
        """Return the same sums with other names of the devices."""
        found = _Sums()
        found.seconds, found.samples = self.seconds, self.samples
        found.values = {renamed(name, names): sums for name, sums in self.values.items()}
        found.joules = {names.get(device, device): joules for device, joules in self.joules.items()}
        found.slowed = {names.get(device, device): reasons for device, reasons in self.slowed.items()}
        found.asked = {names.get(device, device): seconds for device, seconds in self.asked.items()}
        return found

    def settled(self) -> SummaryPart:
        metrics = {
            name: Stat(total / seconds if seconds > 0 else (least + most) / 2, least, most, seconds)
            for name, (seconds, total, least, most) in self.values.items()
        }
        slowed = {
            device: {reason: seconds / self.asked[device] for reason, seconds in reasons.items()}
            for device, reasons in self.slowed.items()
            if self.asked[device] > 0
        }
        return SummaryPart(self.seconds, self.samples, metrics, dict(self.joules), slowed, dict(self.asked))

    @staticmethod
    def from_json(part: Mapping[str, Any]) -> _Sums:
        """Return the sums of a Part that was written. Raises KeyError, TypeError, ValueError, AttributeError."""
        found = _Sums()
        found.seconds, found.samples = float(part["seconds"]), int(part["samples"])
        for name, stat in part["metrics"].items():
            mean, least, most, seconds = (float(stat[key]) for key in ("mean", "min", "max", "seconds"))
            found.values[name] = [seconds, seconds * mean, least, most]
        found.joules = {device: float(joules) for device, joules in part["energy_j"].items()}
        found.asked = {device: float(seconds) for device, seconds in part["told_s"].items()}
        found.slowed = {
            device: {reason: float(share) * found.asked[device] for reason, share in reasons.items()}
            for device, reasons in part["slowed"].items()
        }
        return found


@dataclass
class EarlierSamples:
    """What earlier runs wrote into a gpu.csv, summed up.

    tally    of all of them
    devices  the names that its GPUs have in it
    covered  the rows that are in it
    """

    tally: SampleTally = field(default_factory=SampleTally)
    devices: Mapping[str, SampledGpu] = field(default_factory=dict)
    covered: Covered | None = None

    def before(
        self, tally: SampleTally, devices: Mapping[str, SampledGpu]
    ) -> tuple[SampleTally, dict[str, SampledGpu], list[str]]:
        """Return both together, the GPUs under the numbers that they have now, and what that changed in words."""
        names = rename(self.devices, devices)
        both = SampleTally()
        both.absorb(self.tally, names)
        both.absorb(tally, {})
        changed = [
            f"{old} was {self.devices[old].uuid} before, which is {new} here"
            for old, new in names.items()
            if old != new
        ]
        return both, {**{names[old]: device for old, device in self.devices.items()}, **devices}, changed

    def then(self, tally: SampleTally, devices: Mapping[str, SampledGpu]) -> EarlierSamples:
        """Return this and what came after it as one."""
        both, together, _ = self.before(tally, devices)
        return EarlierSamples(both, together)

    @staticmethod
    def from_json(content: Any) -> EarlierSamples:
        """Return what a monitor.json holds; nothing where it cannot be gone on with."""
        try:
            found = EarlierSamples()
            for phase, part in content["phases"].items():
                found.tally._parts[phase] = _Sums.from_json(part)
            for name, stat in content["whole"]["metrics"].items():
                if name.partition("/")[2] in _RISING:
                    found.tally._risen[name] = float(stat["max"])
            found.devices = {
                name: SampledGpu(str(device["name"]), str(device["uuid"]))
                for name, device in content["devices"].items()
            }
            found.covered = Covered(str(content["covered"]["first"]), int(content["covered"]["bytes"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return EarlierSamples()
        return found


def rename(earlier: Mapping[str, SampledGpu], now: Mapping[str, SampledGpu]) -> dict[str, str]:
    """Return for each earlier device its name now: that of the same GPU, else its own where it is free, else a new."""
    of_uuid = {device.uuid: name for name, device in now.items() if device.uuid}
    names = {
        name: of_uuid.get(device.uuid, name if name not in now or not device.uuid or not now[name].uuid else "")
        for name, device in earlier.items()
    }
    free = free_names({*now, *names.values()})
    return {name: new or next(free) for name, new in names.items()}


def free_names(taken: Set[str]) -> Iterator[str]:
    return (name for number in itertools.count() if (name := f"gpu{number}") not in taken)


def renamed(metric: str, names: Mapping[str, str]) -> str:
    device, slash, rest = metric.partition("/")
    return f"{names.get(device, device)}{slash}{rest}"


def _is_far(before_s: float, samples: MachineSamples) -> bool:
    apart = float(samples.times_s[0]) - before_s
    return apart < 0 or apart > 1.5 * float(samples.spans_s[0]) + NEAR_S


def _six_digits(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _six_digits(value) for name, value in content.items()}
    if isinstance(content, tuple):
        return [_six_digits(value) for value in content]
    return float(f"{content:.6g}") if isinstance(content, float) else content


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


# ---------------------------------------------------------------- the file


# The first twelve columns have been there from the beginning; new ones are added at the end of the row.
FIRST_COLUMNS = ("timestamp", "phase", "device", "uuid")
GPU_COLUMNS = (
    Column("util_percent", "util", "%"),
    Column("memory_used_gib", "memory_gib", "GiB"),
    Column("memory_total_gib", "memory_total_gib", "GiB"),
    Column("temperature_c", "temperature_c", "degC"),
    Column("power_w", "power_w", "W"),
    Column("clock_mhz", "clock_mhz", "MHz"),
    Column("memory_util_percent", "memory_util", "%"),
    Column("memory_reserved_gib", "memory_reserved_gib", "GiB"),
    Column("memory_free_gib", "memory_free_gib", "GiB"),
    Column("temperature_limit_c", "temperature_limit_c", "degC"),
    Column("power_limit_w", "power_limit_w", "W"),
    Column("energy_j", "energy_j", "J"),
    Column("memory_clock_mhz", "memory_clock_mhz", "MHz"),
    Column("throttle_reasons", "throttle_reasons", "bits"),
    Column("pcie_generation", "pcie_generation", ""),
    Column("pcie_width", "pcie_width", "lanes"),
    Column("pcie_rx_mb_s", "pcie_rx_mb_s", "MB/s"),
    Column("pcie_tx_mb_s", "pcie_tx_mb_s", "MB/s"),
    Column("ecc_corrected", "ecc_corrected", "errors"),
    Column("ecc_uncorrected", "ecc_uncorrected", "errors"),
    Column("other_processes", "other_processes", "processes"),
    Column("other_memory_gib", "other_memory_gib", "GiB"),
)
MACHINE_COLUMNS = (
    Column("cpu_percent", "cpu/percent", "%"),
    Column("ram_percent", "ram/percent", "%"),
    Column("process_cpu_percent", "process/cpu_percent", "%"),
    Column("process_memory_gib", "process/memory_gib", "GiB"),
    Column("disk_free_gib", "disk/free_gib", "GiB"),
    Column("disk_read_mb_s", "disk/read_mb_s", "MB/s"),
    Column("disk_write_mb_s", "disk/write_mb_s", "MB/s"),
)
COLUMNS = (
    *FIRST_COLUMNS, *(column.name for column in GPU_COLUMNS[:6]), "cpu_percent", "ram_percent",
    "name", "span_s", *(column.name for column in GPU_COLUMNS[6:]), *(column.name for column in MACHINE_COLUMNS[2:]),
)  # fmt: skip
