"""Assess the measurements of the monitor; missing readings are not assessed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runner.base.text import format_duration, format_table
from runner.monitor.alerts import Alert
from runner.monitor.nvml import NORMAL_THROTTLING, THROTTLE_MEANINGS
from runner.monitor.samples import Stat, Summary, SummaryPart

Level = Literal["good", "note", "low", "high"]


@dataclass(frozen=True)
class HealthVerdict:
    """The assessment of a group of figures.

    level     good; low or high: something to change; note: information
    subject   "GPU 0 utilization"
    message   the meaning, and what can be done
    evidence  the figures
    """

    level: Level
    subject: str
    message: str
    evidence: str


@dataclass(frozen=True)
class Band:
    """The meaning of values in [low, high)."""

    low: float
    high: float
    level: Level
    message: str


def format_assessment(summary: Summary, alerts: Sequence[Alert], *, of_run: bool, on_gpu: bool = True) -> list[str]:
    """Return a summary as text: its figures, their assessment, and its notes."""
    seconds, count = summary.whole.seconds, summary.whole.samples
    length = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
    lines = [f"monitored for {length} s, {count:,} sample{'' if count == 1 else 's'}", ""]
    lines += [*format_metrics(summary), *format_phases(summary)]
    for verdict in assess_health(summary, alerts, of_run=of_run, on_gpu=on_gpu):
        lines += ["", f"{verdict.level:<5} {verdict.subject}: {verdict.message}", f"{'':6}{verdict.evidence}"]
    known = {alert.text for alert in alerts}
    notes = [f"note  {note}" for note in summary.notes if note not in known]
    return [*lines, *([""] if notes else []), *notes]


def assess_health(
    summary: Summary, alerts: Sequence[Alert] = (), *, of_run: bool = True, on_gpu: bool = True
) -> list[HealthVerdict]:
    """Return the assessments of all rules, problems first.

    alerts  reported by the driver; a lost GPU gets no other assessment
    of_run  True: a run was monitored, and its own processes are not counted; False: the machine was monitored
    on_gpu  False: the run did not use the monitored GPUs, so they are not assessed
    """
    lost = {str(alert.facts.get("device")) for alert in alerts if alert.kind == "lost"}
    excluded = lost if on_gpu else {gpu for gpu, _ in _gpus(summary)}
    assessed = _exclude_gpus(summary, excluded)
    found = [*judge_driver_reports(summary, alerts), *(verdict for rule in RULES for verdict in rule(assessed))]
    found += check_processes(assessed, of_run=of_run)
    if not on_gpu and excluded:
        message = "this run computed on the CPU, so the GPU load comes from other processes"
        found.append(HealthVerdict("note", "GPUs", message, f"{len(excluded)} monitored"))
    return sorted(found, key=lambda verdict: _ORDER[verdict.level])


def judge_driver_reports(summary: Summary, alerts: Sequence[Alert]) -> Iterator[HealthVerdict]:
    """Yield driver reports about a GPU itself: that it is lost, or that it or its memory had an error."""
    reported = {verdict.subject for verdict in check_memory_errors(summary)}
    for alert in sorted(alerts, key=lambda alert: alert.kind != "lost"):
        gpu = str(alert.facts.get("device", ""))
        title = f"GPU {gpu.removeprefix('gpu')} {_DRIVER_REPORTS.get(alert.kind, '')}"
        is_reported = title in reported or (alert.kind == "ecc" and alert.facts.get("ecc") != "uncorrected")
        if alert.kind in _DRIVER_REPORTS and gpu and not is_reported:
            name = summary.devices[gpu].name if gpu in summary.devices else ""
            evidence = [name, str(alert.facts.get("uuid", "")), "reported by the driver"]
            message = (
                alert.text.removeprefix(f"{gpu} ({name})").lstrip(": ").removeprefix("is lost: ").removeprefix("had ")
            )
            yield HealthVerdict("high", title, message, ", ".join(filter(None, evidence)))


def check_utilization(summary: Summary) -> Iterator[HealthVerdict]:
    """Assess the utilization of each GPU: 80 to 100 % is good."""
    for gpu, title in _gpus(summary):
        stat = summary.whole.metrics.get(f"{gpu}/util")
        if stat is None:
            continue
        evidence = f"mean {stat.mean:.0f} %, {stat.min:.0f} to {stat.max:.0f} %, over {format_duration(stat.seconds)}"
        if _is_idle(summary, gpu):
            yield HealthVerdict("note", f"{title} utilization", "idle", evidence)
            continue
        band = _find_band(UTILIZATION, stat.mean)
        yield HealthVerdict(band.level, f"{title} utilization", band.message, evidence)


def check_memory(summary: Summary) -> Iterator[HealthVerdict]:
    """Assess the peak memory use of each GPU: 50 to 80 % is good."""
    for gpu, title in _gpus(summary):
        used = summary.whole.metrics.get(f"{gpu}/memory_gib")
        total = summary.whole.metrics.get(f"{gpu}/memory_total_gib")
        if used is None or total is None or total.max <= 0 or _is_idle(summary, gpu):
            continue
        percent = 100 * used.max / total.max
        band = _find_band(MEMORY, percent)
        evidence = f"at most {used.max:.1f} of {total.max:.1f} GiB, {percent:.0f} %"
        yield HealthVerdict(band.level, f"{title} memory", band.message, evidence)


def check_throttling(summary: Summary) -> Iterator[HealthVerdict]:
    """Yield the reasons why each GPU was throttled."""
    for gpu, title in _gpus(summary):
        for reason, share in summary.whole.slowed.get(gpu, {}).items():
            if share <= 0:
                continue
            message = THROTTLE_MEANINGS.get(reason, "the driver reduced its clocks")
            level: Level = "note" if reason in NORMAL_THROTTLING else "high"
            evidence = [f"{reason}, {_format_share(share)} of the time", *_format_temperature(summary.whole, gpu)]
            yield HealthVerdict(level, f"{title} clocks", message, ", ".join(evidence))


def check_processes(summary: Summary, *, of_run: bool) -> Iterator[HealthVerdict]:
    """Check for GPU processes that do not belong to the run; without a run, for several processes on one GPU."""
    most, message = (
        (0, "shared with other processes, which use its time and memory")
        if of_run
        else (1, "they share its time and memory")
    )
    for gpu, title in _gpus(summary):
        others = summary.whole.metrics.get(f"{gpu}/other_processes")
        memory_gib = summary.whole.metrics.get(f"{gpu}/other_memory_gib")
        if others is not None and others.max > most:
            evidence = [f"at most {others.max:.0f} at once"] + (
                [f"with {memory_gib.max:.1f} GiB"] if memory_gib else []
            )
            yield HealthVerdict("high", f"{title} processes", message, ", ".join(evidence))


def check_host_memory(summary: Summary) -> Iterator[HealthVerdict]:
    """Check whether the RAM was nearly full."""
    ram = summary.whole.metrics.get("ram/percent")
    if ram is not None and ram.max >= NEARLY_FULL_PERCENT:
        message = "nearly full: the system kills processes when it is full; use fewer data workers or a smaller cache"
        yield HealthVerdict("high", "RAM", message, f"at most {ram.max:.0f} %, mean {ram.mean:.0f} %")


def check_cpu(summary: Summary) -> Iterator[HealthVerdict]:
    """Check whether the CPU was saturated while a GPU waited."""
    cpu = summary.whole.metrics.get("cpu/percent")
    waiting = [
        (title, util)
        for gpu, title in _gpus(summary)
        if (util := summary.whole.metrics.get(f"{gpu}/util")) is not None
        and util.mean < UTILIZATION[-1].low
        and not _is_idle(summary, gpu)
    ]
    if cpu is not None and cpu.mean >= SATURATED_PERCENT and waiting:
        message = "saturated while the GPU waits: more data workers do not help, less work per sample does"
        gpus = ", ".join(f"{title} {util.mean:.0f} %" for title, util in waiting)
        yield HealthVerdict("high", "CPU", message, f"mean {cpu.mean:.0f} %; {gpus}")


def check_memory_errors(summary: Summary) -> Iterator[HealthVerdict]:
    """Check for uncorrectable memory errors of GPUs."""
    for gpu, title in _gpus(summary):
        errors = summary.whole.metrics.get(f"{gpu}/ecc_uncorrected")
        if errors is not None and errors.max > errors.min:
            message = "its memory had uncorrectable errors: results may be wrong; have it checked"
            yield HealthVerdict(
                "high", f"{title} memory errors", message, f"{errors.max - errors.min:.0f} while monitored"
            )


def format_metrics(summary: Summary) -> list[str]:
    """Return a table of the lowest, mean and highest value of each metric that was read."""
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
            rows.append((f"  {label}" if gpu else label, unit, *_format_stat(stat, digits)))
    return format_table(rows, "<<>") if len(rows) > 1 else []


def format_phases(summary: Summary) -> list[str]:
    """Return a line per phase if there are several: its duration, and the mean utilization of GPUs and CPU."""
    named = {name: part for name, part in summary.phases.items() if name}
    rows = []
    for name, part in named.items():
        known = {**{f"{gpu}/util": title for gpu, title in _gpus(summary)}, "cpu/percent": "CPU"}
        means = [
            f"{title} {part.metrics[metric].mean:.0f} %" for metric, title in known.items() if metric in part.metrics
        ]
        rows.append((f"phase {name}", format_duration(part.seconds), ", ".join(means)))
    return format_table(rows, "<><") if len(named) > 1 else []


def _format_stat(stat: Stat, digits: int) -> tuple[str, str, str]:
    return tuple(f"{value:.{digits}f}" for value in (stat.min, stat.mean, stat.max))  # type: ignore[return-value]


def _gpus(summary: Summary) -> list[tuple[str, str]]:
    names = {name.partition("/")[0] for name in summary.whole.metrics if name.startswith("gpu")}
    return [(name, f"GPU {name[3:]}") for name in sorted(names, key=lambda name: int(name[3:]))]


def _exclude_gpus(summary: Summary, gpus: Collection[str]) -> Summary:
    if not gpus:
        return summary
    kept = {name: stat for name, stat in summary.whole.metrics.items() if name.partition("/")[0] not in gpus}
    slow = {gpu: reasons for gpu, reasons in summary.whole.slowed.items() if gpu not in gpus}
    return replace(summary, whole=replace(summary.whole, metrics=kept, slowed=slow))


def _is_idle(summary: Summary, gpu: str) -> bool:
    util = summary.whole.metrics.get(f"{gpu}/util")
    return util is not None and util.max == 0


def _find_band(bands: tuple[Band, ...], value: float) -> Band:
    return next((band for band in bands if band.low <= value < band.high), bands[-1])


def _format_temperature(part: SummaryPart, gpu: str) -> list[str]:
    temperature = part.metrics.get(f"{gpu}/temperature_c")
    return [] if temperature is None else [f"up to {temperature.max:.0f} °C"]


def _format_share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


# Typical ranges during training: utilization 80 to 100 %, memory 50 to 80 %.
UTILIZATION = (
    Band(0, 80, "low", "it waits for data or the host, or updates are too small"),
    Band(80, 101, "good", "in the good range of 80 to 100 %"),
)
MEMORY = (
    Band(0, 50, "low", "at least half is free: a larger micro_batch_size or model would fit"),
    Band(50, 80, "good", "in the good range of 50 to 80 %"),
    Band(80, 90, "note", "above the usual 50 to 80 %, with some memory left"),
    Band(
        90, 101, "high", "nearly full: a longer sample may not fit; reduce micro_batch_size, or use memory=checkpoint"
    ),
)
NEARLY_FULL_PERCENT = 90.0  # of the RAM
SATURATED_PERCENT = 90.0  # of the CPU that the run may use

_DRIVER_REPORTS: Mapping[str, str] = {"lost": "lost", "xid": "error", "ecc": "memory errors"}  # kinds of alerts
_ORDER = {"high": 0, "low": 1, "note": 2, "good": 3}

GPU_ROWS = (
    ("util", "utilization", "%", 0),
    ("memory_gib", "memory", "GiB", 1),
    ("temperature_c", "temperature", "°C", 0),
    ("power_w", "power", "W", 0),
    ("clock_mhz", "clock", "MHz", 0),
)
MACHINE_ROWS = (
    ("cpu/percent", "CPU", "%", 1),
    ("ram/percent", "RAM", "%", 1),
    ("disk/free_gib", "disk free", "GiB", 1),
    ("disk/read_mb_s", "disk read", "MB/s", 1),
    ("disk/write_mb_s", "disk written", "MB/s", 1),
)

RULES: tuple[Callable[[Summary], Iterator[HealthVerdict]], ...] = (
    check_utilization, check_memory, check_throttling, check_host_memory, check_cpu, check_memory_errors,
)  # fmt: skip
