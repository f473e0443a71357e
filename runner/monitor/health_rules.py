"""Interpret the measurements of the monitor; missing readings are not interpreted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runner.base.text import format_duration, format_table
from runner.monitor.alerts import Alert
from runner.monitor.samples import Stat, Summary, SummaryPart

Level = Literal["good", "note", "low", "high"]


@dataclass(frozen=True)
class HealthVerdict:
    """What the figures of one thing mean.

    level     good; low or high: what to change; note: what to know
    subject   "GPU 0 utilisation"
    says      what it means, and what can be done
    evidence  the figures
    """

    level: Level
    subject: str
    says: str
    evidence: str


@dataclass(frozen=True)
class Band:
    """The values from `low` to below `high` mean this."""

    low: float
    high: float
    level: Level
    says: str


def assessment(summary: Summary, alerts: Sequence[Alert], *, of_run: bool, on_gpu: bool = True) -> list[str]:
    """Return the text about a summary: its figures, what they mean, and its notes."""
    seconds, count = summary.whole.seconds, summary.whole.samples
    length = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
    lines = [f"monitored for {length} s, {count:,} sample{'' if count == 1 else 's'}", ""]
    lines += [*table(summary), *phases(summary)]
    for verdict in verdicts(summary, alerts, of_run=of_run, on_gpu=on_gpu):
        lines += ["", f"{verdict.level:<5} {verdict.subject}: {verdict.says}", f"{'':6}{verdict.evidence}"]
    known = {alert.text for alert in alerts}
    notes = [f"note  {note}" for note in summary.notes if note not in known]
    return [*lines, *([""] if notes else []), *notes]


def verdicts(
    summary: Summary, notices: Sequence[Alert] = (), *, of_run: bool = True, on_gpu: bool = True
) -> list[HealthVerdict]:
    """Return what every rule has to say, what to change first.

    notices  what the driver reported besides: a GPU that is lost gets no advice but that
    of_run   a run was watched, so that a process may be another's; else the machine was, and all of them are alike
    on_gpu   the run computed on the GPUs that were watched; else what they did was not its work, and nothing is said
    """
    rules = (*RULES, other_processes if of_run else several_processes)
    lost = {str(notice.facts.get("device")) for notice in notices if notice.kind == "lost"}
    left_out = lost if on_gpu else {gpu for gpu, _ in _gpus(summary)}
    judged = _without(summary, left_out)
    found = [*troubles(summary, notices), *(verdict for rule in rules for verdict in rule(judged))]
    if not on_gpu and left_out:
        says = "this run computed on the CPU: what they did is not its work"
        found.append(HealthVerdict("note", "GPUs", says, f"{len(left_out)} watched"))
    return sorted(found, key=lambda verdict: _ORDER[verdict.level])


def troubles(summary: Summary, notices: Sequence[Alert]) -> Iterator[HealthVerdict]:
    """What the driver reported of a GPU itself: it is lost, it had an error, its memory had one."""
    counted = {verdict.subject for verdict in faults(summary)}
    for notice in sorted(notices, key=lambda notice: notice.kind != "lost"):
        gpu = str(notice.facts.get("device", ""))
        title = f"GPU {gpu.removeprefix('gpu')} {_TROUBLES.get(notice.kind, '')}"
        is_said = title in counted or (notice.kind == "ecc" and notice.facts.get("ecc") != "uncorrected")
        if notice.kind in _TROUBLES and gpu and not is_said:
            name = summary.devices[gpu].name if gpu in summary.devices else ""
            evidence = [name, str(notice.facts.get("uuid", "")), "reported by the driver"]
            says = (
                notice.text.removeprefix(f"{gpu} ({name})").lstrip(": ").removeprefix("is lost: ").removeprefix("had ")
            )
            yield HealthVerdict("high", title, says, ", ".join(filter(None, evidence)))


def utilisation(summary: Summary) -> Iterator[HealthVerdict]:
    """How much of the time each GPU worked: 80 to 100 % is good."""
    for gpu, title in _gpus(summary):
        stat = summary.whole.metrics.get(f"{gpu}/util")
        if stat is None:
            continue
        evidence = f"mean {stat.mean:.0f} %, {stat.min:.0f} to {stat.max:.0f} %, over {format_duration(stat.seconds)}"
        if _is_idle(summary, gpu):
            yield HealthVerdict("note", f"{title} utilisation", "nothing ran on it", evidence)
            continue
        band = _band(UTILISATION, stat.mean)
        yield HealthVerdict(band.level, f"{title} utilisation", band.says, evidence)


def memory(summary: Summary) -> Iterator[HealthVerdict]:
    """How much of each GPU's memory was in use at most: 50 to 80 % is good."""
    for gpu, title in _gpus(summary):
        used = summary.whole.metrics.get(f"{gpu}/memory_gib")
        total = summary.whole.metrics.get(f"{gpu}/memory_total_gib")
        if used is None or total is None or total.max <= 0 or _is_idle(summary, gpu):
            continue
        percent = 100 * used.max / total.max
        band = _band(MEMORY, percent)
        evidence = f"at most {used.max:.1f} of {total.max:.1f} GiB, {percent:.0f} %"
        yield HealthVerdict(band.level, f"{title} memory", band.says, evidence)


def slowed(summary: Summary) -> Iterator[HealthVerdict]:
    """What held the clocks of each GPU down."""
    for gpu, title in _gpus(summary):
        for reason, share in summary.whole.slowed.get(gpu, {}).items():
            if share <= 0:
                continue
            says = SLOWED.get(reason, "the driver held its clocks down")
            level: Level = "note" if reason in BY_DESIGN else "high"
            evidence = [f"{reason}, {_share(share)} of the time", *_hottest(summary.whole, gpu)]
            yield HealthVerdict(level, f"{title} clocks", says, ", ".join(evidence))


def other_processes(summary: Summary) -> Iterator[HealthVerdict]:
    """Whether processes that are not the run's compute on a GPU."""
    says = "others share it: neither its time nor its memory is this run's alone"
    return _crowded(summary, 1, says)


def several_processes(summary: Summary) -> Iterator[HealthVerdict]:
    """Whether several processes compute on a GPU."""
    return _crowded(summary, 2, "they share its time and its memory")


def host_memory(summary: Summary) -> Iterator[HealthVerdict]:
    """Whether the RAM was nearly full."""
    ram = summary.whole.metrics.get("ram/percent")
    if ram is not None and ram.max >= NEARLY_FULL:
        says = "nearly full: the system ends processes when it is; fewer data workers or a smaller cache need less"
        yield HealthVerdict("high", "RAM", says, f"at most {ram.max:.0f} %, mean {ram.mean:.0f} %")


def processor(summary: Summary) -> Iterator[HealthVerdict]:
    """Whether the CPU was busy all the time while a GPU waited."""
    cpu = summary.whole.metrics.get("cpu/percent")
    waiting = [
        (title, util)
        for gpu, title in _gpus(summary)
        if (util := summary.whole.metrics.get(f"{gpu}/util")) is not None
        and util.mean < UTILISATION[-1].low
        and not _is_idle(summary, gpu)
    ]
    if cpu is not None and cpu.mean >= SATURATED and waiting:
        says = "busy all the time while the GPU waits: more data workers cannot help, less work per sample can"
        gpus = ", ".join(f"{title} {util.mean:.0f} %" for title, util in waiting)
        yield HealthVerdict("high", "CPU", says, f"mean {cpu.mean:.0f} %; {gpus}")


def faults(summary: Summary) -> Iterator[HealthVerdict]:
    """Whether a GPU's memory had errors that could not be corrected."""
    for gpu, title in _gpus(summary):
        errors = summary.whole.metrics.get(f"{gpu}/ecc_uncorrected")
        if errors is not None and errors.max > errors.min:
            says = "its memory had errors that could not be corrected: results may be wrong; have it looked at"
            yield HealthVerdict(
                "high", f"{title} memory errors", says, f"{errors.max - errors.min:.0f} while it was watched"
            )


def table(summary: Summary) -> list[str]:
    """Return lowest, mean and highest of what was read, a line each below a head; no line for what was not."""
    rows: list[tuple[str, ...]] = [("", "", "lowest", "mean", "highest")]
    for gpu, title in [*_gpus(summary), ("", "")]:
        device = summary.devices.get(gpu)
        known = [
            (label, unit, summary.whole.metrics[name], digits)
            for metric, label, unit, digits in (GPU_ROWS if gpu else MACHINE_ROWS)
            if (name := f"{gpu}/{metric}" if gpu else metric) in summary.whole.metrics
        ]
        if known and gpu:
            rows.append((f"{title}  {device.name}" if device and device.name else title,))
        for label, unit, stat, digits in known:
            rows.append((f"  {label}" if gpu else label, unit, *_figures(stat, digits)))
    return format_table(rows, "<<>") if len(rows) > 1 else []


def phases(summary: Summary) -> list[str]:
    """Return a line for each phase, where there are several: how long, and how busy GPUs and CPU were on average."""
    named = {name: part for name, part in summary.phases.items() if name}
    rows = []
    for name, part in named.items():
        known = {**{f"{gpu}/util": title for gpu, title in _gpus(summary)}, "cpu/percent": "CPU"}
        means = [
            f"{title} {part.metrics[metric].mean:.0f} %" for metric, title in known.items() if metric in part.metrics
        ]
        rows.append((f"phase {name}", format_duration(part.seconds), ", ".join(means)))
    return format_table(rows, "<><") if len(named) > 1 else []


def _crowded(summary: Summary, least: int, says: str) -> Iterator[HealthVerdict]:
    for gpu, title in _gpus(summary):
        others = summary.whole.metrics.get(f"{gpu}/other_processes")
        held = summary.whole.metrics.get(f"{gpu}/other_memory_gib")
        if others is not None and others.max >= least:
            evidence = [f"at most {others.max:.0f} at once"] + ([f"with {held.max:.1f} GiB"] if held else [])
            yield HealthVerdict("high", f"{title} processes", says, ", ".join(evidence))


def _figures(stat: Stat, digits: int) -> tuple[str, str, str]:
    return tuple(f"{value:.{digits}f}" for value in (stat.min, stat.mean, stat.max))  # type: ignore[return-value]


def _gpus(summary: Summary) -> list[tuple[str, str]]:
    """Return ("gpu0", "GPU 0") of each GPU."""
    names = {name.partition("/")[0] for name in summary.whole.metrics if name.startswith("gpu")}
    return [(name, f"GPU {name[3:]}") for name in sorted(names, key=lambda name: int(name[3:]))]


def _without(summary: Summary, gpus: Collection[str]) -> Summary:
    """Return what was seen of everything but these GPUs."""
    if not gpus:
        return summary
    kept = {name: stat for name, stat in summary.whole.metrics.items() if name.partition("/")[0] not in gpus}
    slow = {gpu: reasons for gpu, reasons in summary.whole.slowed.items() if gpu not in gpus}
    return replace(summary, whole=replace(summary.whole, metrics=kept, slowed=slow))


def _is_idle(summary: Summary, gpu: str) -> bool:
    util = summary.whole.metrics.get(f"{gpu}/util")
    return util is not None and util.max == 0


def _band(bands: tuple[Band, ...], value: float) -> Band:
    return next((band for band in bands if band.low <= value < band.high), bands[-1])


def _hottest(part: SummaryPart, gpu: str) -> list[str]:
    temperature = part.metrics.get(f"{gpu}/temperature_c")
    return [] if temperature is None else [f"up to {temperature.max:.0f} °C"]


def _share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


# The ranges to expect of a training run: utilisation 80 to 100 %, memory 50 to 80 %.
UTILISATION = (
    Band(0, 80, "low", "it waits: for data, for the host, or each update is too little work"),
    Band(80, 101, "good", "in the range of 80 to 100 % that is good"),
)
MEMORY = (
    Band(0, 50, "low", "half or more is free: a larger micro_batch_size or model would fit"),
    Band(50, 80, "good", "in the range of 50 to 80 % that is good"),
    Band(80, 90, "note", "above the usual 50 to 80 %, with some left"),
    Band(
        90,
        101,
        "high",
        "nearly full: a longer sample may not fit; a smaller micro_batch_size or memory=checkpoint needs less",
    ),
)
NEARLY_FULL = 90.0  # percent of the RAM
SATURATED = 90.0  # percent of the CPU that the run may use

SLOWED: Mapping[str, str] = {
    "power limit": "it works at its power limit, as a busy GPU does",
    "board limit": "it works at the limit of its board, as a busy GPU does",
    "sync boost": "it keeps step with another GPU",
    "software temperature limit": "too warm: better cooling or a lower power limit keeps the clocks up",
    "hardware temperature limit": "much too warm: the hardware itself slows it down; look at the cooling",
    "hardware slowdown": "the hardware itself slows it down: look at cooling and power supply",
    "power brake": "the power supply asks it to slow down: look at power supply and cables",
    "reliability": "it may not run faster at this voltage, as a busy GPU does",
}
# No fault of the machine: what a busy GPU does.
BY_DESIGN = ("power limit", "board limit", "sync boost", "reliability")
_TROUBLES: Mapping[str, str] = {"lost": "lost", "xid": "error", "ecc": "memory errors"}  # kinds of notices
_ORDER = {"high": 0, "low": 1, "note": 2, "good": 3}

GPU_ROWS = (
    ("util", "utilisation", "%", 0),
    ("memory_gib", "memory", "GiB", 1),
    ("temperature_c", "temperature", "°C", 0),
    ("power_w", "power", "W", 0),
    ("clock_mhz", "clock", "MHz", 0),
    ("pcie_rx_mb_s", "PCIe to the GPU", "MB/s", 0),
    ("pcie_tx_mb_s", "PCIe from the GPU", "MB/s", 0),
)
MACHINE_ROWS = (
    ("cpu/percent", "CPU", "%", 1),
    ("ram/percent", "RAM", "%", 1),
    ("disk/free_gib", "disk free", "GiB", 1),
    ("disk/read_mb_s", "disk read", "MB/s", 1),
    ("disk/write_mb_s", "disk written", "MB/s", 1),
)

RULES: tuple[Callable[[Summary], Iterator[HealthVerdict]], ...] = (
    utilisation, memory, slowed, host_memory, processor, faults,
)  # fmt: skip
