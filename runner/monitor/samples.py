"""Machine samples, the columns of gpu.csv, and time-weighted means.

A missing reading is an empty cell, NaN in an array, and absent from a mapping; it never counts as 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from runner.monitor.nvml import decode_throttle_reasons

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Readings = Mapping[str, float]

COUNTERS = frozenset({"energy_j", "ecc_corrected", "ecc_uncorrected"})  # read as totals since the driver was loaded
GAP_TOLERANCE_S = 0.05  # a gap precedes a sample if the time since the previous one exceeds 1.5 spans plus this


@dataclass(frozen=True)
class Column:
    """A column of gpu.csv: its metric (for a GPU, without the prefix `gpu0/`) and its unit."""

    name: str
    metric: str
    unit: str


@dataclass(frozen=True)
class SampledGpu:
    """A monitored GPU."""

    name: str
    uuid: str


@dataclass(frozen=True)
class MachineSamples:
    """Samples over time, oldest first.

    times_s     (N,) seconds since 1970
    spans_s     (N,) seconds that each sample represents: the time since the previous one
    phases      (N) names; empty before the first phase
    values      metric such as `gpu0/util` or `cpu/percent` -> (N,), NaN where it was not read
    devices     `gpu0` -> the GPU; empty on a machine without a GPU
    notes       problems of the file
    previous_s  time of the sample before the first one; None: there is none
    """

    times_s: Floats
    spans_s: Floats
    phases: tuple[str, ...]
    values: Mapping[str, Floats]
    devices: Mapping[str, SampledGpu] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    previous_s: float | None = None

    def __len__(self) -> int:
        return len(self.phases)

    def gaps(self) -> NDArray[np.bool_]:
        """Return (N,) True for each sample after a gap, where a line must be interrupted."""
        intervals = self.times_s - self._before_s()
        return (intervals < 0) | (intervals > 1.5 * self.spans_s + GAP_TOLERANCE_S)

    def _before_s(self) -> Floats:
        """Return (N,) the time of the sample before each one; for the first, its own time if there is none."""
        import numpy as np

        first = self.times_s[:1] if self.previous_s is None else np.array([self.previous_s])
        return np.concatenate([first, self.times_s[:-1]])


@dataclass(frozen=True)
class Stat:
    """A metric over some time: time-weighted mean, extremes, and the seconds in which it was read."""

    mean: float
    min: float
    max: float
    seconds: float


@dataclass(frozen=True)
class SummaryPart:
    """The samples of a phase, or of all phases.

    metrics   metric -> Stat; an ECC counter counts only errors that occurred while sampling
    energy_j  device -> joules, from its energy counter if it has one, otherwise power x time
    slowed    device -> throttle reason -> fraction of the time with known throttle reasons in which it reduced the
              clocks
    """

    seconds: float = 0.0
    samples: int = 0
    metrics: Mapping[str, Stat] = field(default_factory=dict)
    energy_j: Mapping[str, float] = field(default_factory=dict)
    slowed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """The samples of a run, in total and by phase."""

    whole: SummaryPart = SummaryPart()
    phases: Mapping[str, SummaryPart] = field(default_factory=dict)
    devices: Mapping[str, SampledGpu] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of monitor.json; numbers have six significant digits."""
        content: dict[str, Any] = _round_floats(asdict(self))
        return content


class SampleTally:
    """Sums over samples, in constant memory.

    counters  last value of each counter since the last gap
    """

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self._parts: dict[str, PhaseSums] = {}

    def of_phase(self, phase: str) -> PhaseSums:
        """Return the sums of a phase, to which samples may be added."""
        return self._parts.setdefault(phase, PhaseSums())

    def add(self, phase: str, span_s: float, readings: Readings, *, after_gap: bool = False) -> None:
        """Add a sample that represents `span_s` seconds; increases of counters across a gap are not counted."""
        part = self.of_phase(phase)
        part.seconds += span_s
        part.samples += 1
        if after_gap:
            self.counters.clear()
        for name, value in readings.items():
            device, _, metric = name.partition("/")
            if metric in COUNTERS:
                previous = self.counters.get(name)
                self.counters[name] = value
                # Unknown if there is no previous value, or if the counter was reset.
                increase = value - previous if previous is not None and value >= previous else None
                if metric != "energy_j" or increase is not None:
                    part.increases[name] += increase or 0.0
            elif metric == "throttle_reasons":
                part.known_s[device] += span_s
                for reason in decode_throttle_reasons(value):
                    part.slowed_s[device, reason] += span_s
            else:
                part.add_value(name, span_s, span_s * value, value, value)
                energy = f"{device}/energy_j"
                if metric == "power_w" and energy not in readings and energy not in self.counters:
                    part.increases[energy] += value * span_s

    def summary(
        self, devices: Mapping[str, SampledGpu], notes: Sequence[str] = (), names: Mapping[str, str] | None = None
    ) -> Summary:
        """Return the means, extremes and increases.

        names  temporary name of a device in the samples -> final name; other names are kept
        """
        whole = PhaseSums()
        for part in self._parts.values():
            whole.merge(part)
        phases = {name: part.to_part(names or {}) for name, part in self._parts.items()}
        return Summary(whole.to_part(names or {}), phases, dict(devices), tuple(notes))


class PhaseSums:
    """The sums of a phase.

    values     metric -> [seconds, seconds x value, min, max]
    increases  counter -> its increase
    known_s    device -> seconds with known throttle reasons; slowed_s: (device, reason) -> seconds
    """

    def __init__(self) -> None:
        self.seconds, self.samples = 0.0, 0
        self.values: dict[str, list[float]] = {}
        self.increases = defaultdict[str, float](float)
        self.known_s = defaultdict[str, float](float)
        self.slowed_s = defaultdict[tuple[str, str], float](float)

    def add_value(self, name: str, seconds: float, total: float, low: float, high: float) -> None:
        sums = self.values.setdefault(name, [0.0, 0.0, low, high])
        sums[:] = sums[0] + seconds, sums[1] + total, min(sums[2], low), max(sums[3], high)

    def merge(self, other: PhaseSums) -> None:
        self.seconds += other.seconds
        self.samples += other.samples
        for name, (seconds, total, low, high) in other.values.items():
            self.add_value(name, seconds, total, low, high)
        for name, increase in other.increases.items():
            self.increases[name] += increase
        for device, seconds in other.known_s.items():
            self.known_s[device] += seconds
        for slowed, seconds in other.slowed_s.items():
            self.slowed_s[slowed] += seconds

    def to_part(self, names: Mapping[str, str]) -> SummaryPart:
        metrics = {
            rename_device(name, names): Stat(total / seconds if seconds > 0 else (low + high) / 2, low, high, seconds)
            for name, (seconds, total, low, high) in self.values.items()
        }
        energy = {}
        for counter, increase in self.increases.items():
            name = rename_device(counter, names)
            device, _, metric = name.partition("/")
            if metric == "energy_j":
                energy[device] = increase
            else:
                metrics[name] = Stat(increase, 0.0, increase, self.seconds)
        slowed: dict[str, dict[str, float]] = {}
        for (device, reason), seconds in self.slowed_s.items():
            if self.known_s[device] > 0:
                slowed.setdefault(names.get(device, device), {})[reason] = seconds / self.known_s[device]
        return SummaryPart(self.seconds, self.samples, metrics, energy, slowed)


def rename_device(name: str, names: Mapping[str, str]) -> str:
    """Return the metric of a renamed device: id0/util -> gpu1/util.

    names  old name -> new name; others are kept
    """
    device, slash, metric = name.partition("/")
    return f"{names.get(device, device)}{slash}{metric}"


def _round_floats(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _round_floats(value) for name, value in content.items()}
    if isinstance(content, tuple):
        return [_round_floats(value) for value in content]
    return float(f"{content:.6g}") if isinstance(content, float) else content


# ---------------------------------------------------------------- the file


# The first twelve columns have existed since the first version; new ones are added at the end of the row.
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
