"""Format the text printed at the start and at the end of a run; measures and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from runner.base.text import format_duration, format_gib, format_metric, format_rate, format_table
from runner.console import bottleneck
from runner.workload.division import Batch

MAX_METRICS = 20


@dataclass(frozen=True)
class OptionLine:
    """An option that affects speed or memory, and why it was selected.

    name      group and option
    on        False: the option disables a feature, and is listed as off
    settings  keys of the option with their values
    """

    name: str
    on: bool
    why: str
    settings: str = ""

    def __str__(self) -> str:
        selected = f"{self.name}, {self.settings}" if self.settings else self.name
        return f"{selected} — {self.why}" if self.why else selected


@dataclass(frozen=True)
class StartOfRun:
    """Facts known before the first update.

    devices            one line per device: name, memory, capability
    software           name -> version: torch, CUDA, cuDNN, driver
    training           one line per phase or objective: optimizer, schedule and clipping
    notes              additional lines: the checkpoint to resume from, where the tracker writes
    phases             one line per phase to run, if the task declares phases; each has a separate batch size
    memory             one line per kind of device: its predicted memory; empty without a prediction
    """

    run_name: str
    task: str
    devices: tuple[str, ...]
    software: Mapping[str, str]
    options: tuple[OptionLine, ...]
    num_parameters: int
    num_trainable: int
    batch: Batch
    run_dir: str
    training: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryLine:
    """GiB of a device or of the host; None is unknown.

    peak       peak memory in use
    allocated  memory in use at the end
    reserved   peak memory that torch reserved from the driver
    total      memory of the device
    """

    peak: float | None = None
    allocated: float | None = None
    reserved: float | None = None
    total: float | None = None

    def __str__(self) -> str:
        figures = {"peak": self.peak, "allocated": self.allocated, "reserved": self.reserved}
        shown = [f"{name} {format_gib(gib)}" for name, gib in figures.items() if gib is not None]
        total = "" if self.total is None else f" of {format_gib(self.total)}"
        return f"{', '.join(shown)}{total}" if shown else ""


@dataclass(frozen=True)
class TimeSpent:
    """How the last process of a run spent its time.

    total_s       seconds from start to end
    parts_s       part -> seconds
    updates       number of updates whose time is in parts_s
    busy_percent  GPU -> percent of the time in which it computed
    num_updates   updates of all phases that this process ran; None: all updates of the run
    other_load    CPU use of other processes; empty if there was hardly any
    """

    total_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
    updates: int = 0
    busy_percent: Mapping[str, float] = field(default_factory=dict)
    num_updates: int | None = None
    other_load: str = ""


@dataclass(frozen=True)
class LearnedMetrics:
    """Training loss and validation metrics at the end.

    loss           training loss of the last row
    metrics        metrics of the last evaluation
    baselines      metric -> value of a trivial model; metric_SUFFIX -> value of another one
    baseline_name  name of the trivial model
    first          metrics to show first if there are too many to show all
    """

    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    baseline_name: str = "trivial model"
    first: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield each metric with its baselines, then baselines without a metric."""
        owners = {name: self._metric_of(name) for name in self.baselines}
        shown, notes = select_metrics(self.metrics, (*self.first, *filter(None, owners.values())))
        for metric in shown:
            models = [
                f"{name.removeprefix(metric)[1:].replace('_', ' ') or self.baseline_name} {self.baselines[name]:.4g}"
                for name, owner in owners.items()
                if owner == metric
            ]
            baselines = f" (baseline: {', '.join(models)})" if models else ""
            yield f"{metric} {format_metric(self.metrics[metric])}{baselines}"
        yield from notes
        yield from (f"{name}: baseline {self.baselines[name]:.4g}" for name, owner in owners.items() if owner is None)

    def _metric_of(self, baseline: str) -> str | None:
        """Return the metric of a baseline: the longest metric name that equals the baseline's name without a suffix."""
        names = [metric for metric in self.metrics if baseline == metric or baseline.startswith(f"{metric}_")]
        return max(names, key=len, default=None)


@dataclass(frozen=True)
class EndOfRun:
    """Facts known after the last update. None means unknown, and is omitted, never shown as 0.

    outcome          "finished", "saved (SIGINT)", "stopped (early)"
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


def select_metrics(metrics: Iterable[str], first: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return the names of the metrics to print, at most `MAX_METRICS`, and a note if there are others.

    first  metrics to print first if there are others
    """
    names = list(metrics)
    if len(names) <= MAX_METRICS:
        return names, []
    available = dict.fromkeys(names)
    ordered = list(dict.fromkeys((*(name for name in first if name in available), *names)))
    return ordered[:MAX_METRICS], [f"and {len(names) - MAX_METRICS:,} more in metrics.jsonl"]


def format_start(start: StartOfRun) -> str:
    """Return the report before the first update: machine, options in use, disabled options on one line, batch."""
    rows = [
        ("run", f"{start.run_name} ({start.task})"),
        *_label_rows("device", start.devices),
        ("software", ", ".join(f"{name} {version}" for name, version in start.software.items())),
        *_label_rows("options", (str(option) for option in start.options if option.on)),
        *_label_rows("off", _format_disabled(option for option in start.options if not option.on)),
        ("parameters", _format_parameters(start.num_parameters, start.num_trainable)),
        *(_label_rows("phase", start.phases) or [("batch", _format_batch(start.batch))]),
        *_label_rows("training", start.training),
        *_label_rows("memory", start.memory),
        ("directory", start.run_dir),
        *_label_rows("note", start.notes),
    ]
    return "\n".join(format_table(rows))


def format_end(end: EndOfRun) -> str:
    """Return the report after the last update: results, where the time went, the bottleneck, the next commands."""
    throughput = "" if end.items_per_s is None else f", {format_rate(end.items_per_s)} {end.item}s/s"
    times, learned = end.time, end.learned
    scope = f" of {len(end.phases)} phases" if end.phases else ""
    process_note = (
        "" if times.num_updates in (None, end.update) else f"; this process: {times.num_updates} updates{scope}"
    )
    last_phase = "last phase: " if end.phases else ""
    progress = f"{last_phase}{end.update} of {end.total_updates} updates"
    duration = f"in {format_duration(times.total_s)}"
    if end.phases:  # the throughput is that of the last phase, and the time that of all phases
        progress += f"{throughput}{process_note} {duration}"
    else:
        progress += f"{process_note} {duration}{throughput}"
    rows = [
        (end.outcome, progress),
        *_label_rows("phase", end.phases),
        *_label_rows("train loss", () if learned.loss is None else (f"{learned.loss:.4g}",)),
        *_label_rows("validation", learned.lines()),
        *_label_rows("time", bottleneck.format_time_table(times.parts_s, times.total_s, times.updates)),
        *_label_rows("limited by", () if times.num_updates == 0 else (_describe_limits(times),)),
        *_label_rows("memory", (f"{device}: {memory}" for device, memory in end.memory.items() if str(memory))),
        *((what, path) for what, path in end.places.items()),
        *_label_rows("note", end.notes),
        *_label_rows("next", end.next_commands),
    ]
    return "\n".join(format_table(rows))


def _format_disabled(options: Iterable[OptionLine]) -> list[str]:
    """Return one line with the disabled options, grouped by reason; no line if there are none."""
    by_reason: dict[str, list[str]] = {}
    for option in options:
        by_reason.setdefault(option.why, []).append(option.name.removesuffix(" none").removesuffix(" default"))
    groups = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    return ["; ".join(groups)] if groups else []


def _format_batch(batch: Batch) -> str:
    copy = "rank" if batch.stages == 1 else "pipeline"
    if len(set(batch.shares)) > 1:
        return f"{batch.global_batch_size} = {' + '.join(map(str, batch.shares))} (samples per {copy})"
    factors = f"{batch.micro_batch_size} x {batch.accumulation_steps} x {batch.num_shares}"
    return f"{batch.global_batch_size} = {factors} (micro-batch x accumulation x {copy}s)"


def _format_parameters(total: int, trainable: int) -> str:
    if total == trainable:
        return f"{_format_count(total)}, all trainable"
    return f"{_format_count(total)} total, {_format_count(trainable)} trainable"


def _format_count(number: int) -> str:
    """Format a count with a unit: 124.4 M (124,439,808)."""
    for unit, size in (("B", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)):
        if number >= size:
            return f"{number / size:.1f} {unit} ({number:,})"
    return str(number)


def _describe_limits(times: TimeSpent) -> str:
    limit = bottleneck.describe_bottleneck(times.parts_s, times.total_s, times.busy_percent)
    return f"{limit}; {times.other_load}" if times.other_load else limit


def _label_rows(name: str, values: Iterable[str]) -> list[tuple[str, str]]:
    """Return a row per value; only the first row has the name."""
    return [(name if index == 0 else "", value) for index, value in enumerate(values)]
