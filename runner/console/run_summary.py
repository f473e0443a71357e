"""Format the text printed at the start and at the end of a run; measures and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from runner.base.division import Batch
from runner.base.text import format_duration, format_gib, format_metric, format_rate, format_table
from runner.console import bottleneck


@dataclass(frozen=True)
class TechniqueLine:
    """A technique that makes runs faster or smaller; `why` is its effect, or why it is off."""

    name: str
    on: bool
    why: str


@dataclass(frozen=True)
class StartOfRun:
    """Facts known before the first update.

    devices            one line per device: name, memory, capability
    software           name -> version: torch, CUDA, cuDNN, driver
    notes              additional lines: the checkpoint to resume from, where the tracker writes
    phases             one line per phase to run, if the task declares phases; each has a separate batch size
    memory             one line per kind of device: its predicted memory; empty without a prediction
    """

    run_name: str
    task: str
    devices: tuple[str, ...]
    software: Mapping[str, str]
    techniques: tuple[TechniqueLine, ...]
    num_parameters: int
    num_trainable: int
    batch: Batch
    run_dir: str
    notes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryLine:
    """GiB of a device or of the host; None is unknown.

    peak       maximum in use
    allocated  in use at the end
    reserved   maximum that torch reserved from the driver
    total      memory of the device
    """

    peak: float | None = None
    allocated: float | None = None
    reserved: float | None = None
    total: float | None = None

    def __str__(self) -> str:
        figures = {"peak": self.peak, "allocated": self.allocated, "reserved": self.reserved}
        known = [f"{name} {format_gib(gib)}" for name, gib in figures.items() if gib is not None]
        total = "" if self.total is None else f" of {format_gib(self.total)}"
        return f"{', '.join(known)}{total}" if known else ""


@dataclass(frozen=True)
class TimeSpent:
    """Where the time of the last process of a run went.

    total_s       seconds from start to end
    parts_s       part -> seconds
    updates       number of updates whose time is in parts_s
    busy_percent  GPU -> percent of the time in which it computed
    num_updates   updates of all phases that this process ran; None: all updates of the run
    """

    total_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
    updates: int = 0
    busy_percent: Mapping[str, float] = field(default_factory=dict)
    num_updates: int | None = None


@dataclass(frozen=True)
class LearnedMetrics:
    """Training loss and validation metrics at the end.

    loss       training loss of the last row
    metrics    metrics of the last evaluation
    baselines  metric -> value of a trivial model
    """

    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EndOfRun:
    """Facts known after the last update. None means unknown, and is omitted, never shown as 0.

    outcome          "done", "saved to be continued", "stopped by an error"
    memory           device -> GiB
    places           kind of file -> path
    next_commands    commands to paste
    phases           one line per phase if there are several
    """

    outcome: str
    update: int
    total_updates: int
    time: TimeSpent
    learned: LearnedMetrics = field(default_factory=LearnedMetrics)
    items_per_s: float | None = None
    item: str = "sample"
    memory: Mapping[str, MemoryLine] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    next_commands: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()


def start_report(start: StartOfRun, *, ascii_only: bool = False) -> str:
    """Return the report before the first update: machine, techniques in use, those that are off on one line, batch."""
    rows = [
        ("run", f"{start.run_name} ({start.task})"),
        *_repeat("device", start.devices),
        ("software", ", ".join(f"{name} {version}" for name, version in start.software.items())),
        *_repeat("technique", (f"✓ {each.name} — {each.why}" for each in start.techniques if each.on)),
        *_repeat("off", _off(each for each in start.techniques if not each.on)),
        ("parameters", f"{_count(start.num_parameters)} total, {_count(start.num_trainable)} trainable"),
        *(_repeat("phase", start.phases) or [("batch", _batch(start.batch))]),
        *_repeat("memory", start.memory),
        ("directory", start.run_dir),
        *_repeat("note", start.notes),
    ]
    text = "\n".join(format_table(rows))
    return _in_ascii(text) if ascii_only else text


def end_summary(end: EndOfRun, *, ascii_only: bool = False) -> str:
    """Return the report after the last update: results, where the time went, the bottleneck, the next commands."""
    speed = "" if end.items_per_s is None else f", {format_rate(end.items_per_s)} {end.item}s/s"
    time, learned = end.time, end.learned
    here = "" if time.num_updates in (None, end.update) else f"; this process: {time.num_updates} updates"
    rows = [
        (end.outcome, f"{end.update} of {end.total_updates} updates{here} in {format_duration(time.total_s)}{speed}"),
        *_repeat("phase", end.phases),
        *_repeat("loss", () if learned.loss is None else (f"{learned.loss:.4g}",)),
        *_repeat("validation", (_metric(name, value, learned.baselines) for name, value in learned.metrics.items())),
        *_repeat("time", bottleneck.table(time.parts_s, time.total_s, time.updates)),
        ("limited by", bottleneck.limited_by(time.parts_s, time.total_s, time.busy_percent)),
        *_repeat("memory", (f"{device}: {memory}" for device, memory in end.memory.items() if str(memory))),
        *((what, path) for what, path in end.places.items()),
        *_repeat("note", end.notes),
        *_repeat("next", end.next_commands),
    ]
    text = "\n".join(format_table(rows))
    return _in_ascii(text) if ascii_only else text


def prints_only_ascii(stream: TextIO) -> bool:
    """Return whether `stream` cannot encode the symbols of these reports."""
    try:
        "".join(ASCII).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def _off(techniques: Iterable[TechniqueLine]) -> list[str]:
    """Return one line with the techniques that are off, those with the same reason together; none without any."""
    by_reason: dict[str, list[str]] = {}
    for technique in techniques:
        by_reason.setdefault(technique.why, []).append(technique.name.removesuffix(" none"))
    listed = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    return ["; ".join(listed)] if listed else []


def _batch(batch: Batch) -> str:
    if len(set(batch.shares)) > 1:
        return f"{batch.global_batch_size} = {' + '.join(map(str, batch.shares))} (samples per rank)"
    factors = f"{batch.micro_batch_size} x {batch.accumulation_steps} x {batch.world_size}"
    return f"{batch.global_batch_size} = {factors} (micro-batch x accumulation x ranks)"


def _metric(name: str, value: float, baselines: Mapping[str, float]) -> str:
    beside = f" (baseline {baselines[name]:.4g})" if name in baselines else ""
    return f"{name} {format_metric(value)}{beside}"


def _count(number: int) -> str:
    """Format a count with a unit: 124.4 M (124,439,808)."""
    for unit, size in (("B", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)):
        if number >= size:
            return f"{number / size:.1f} {unit} ({number:,})"
    return str(number)


def _repeat(name: str, values: Iterable[str]) -> list[tuple[str, str]]:
    """Return a row per value, named in the first only."""
    return [(name if index == 0 else "", value) for index, value in enumerate(values)]


def _in_ascii(text: str) -> str:
    for sign, plain in ASCII.items():
        text = text.replace(sign, plain)
    return text.encode("ascii", errors="replace").decode()


ASCII: Mapping[str, str] = {"✓": "+", "–": "-", "—": "-"}  # noqa: RUF001 - notes may have an en dash
