"""Render machine samples for a terminal with rich: a row per GPU with sparklines, CPU and RAM, and GPU processes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from runner.base.errors import to_one_line
from runner.monitor.alerts import Alert
from runner.monitor.machine_sample import GpuUser
from runner.monitor.nvml import NORMAL_THROTTLING, decode_throttle_reasons
from runner.monitor.samples import Readings, SampledGpu

MAX_SAMPLES = 1000  # samples kept for a sparkline; no terminal has as many columns
BLOCKS = "▁▂▃▄▅▆▇█"
WAITING = "the driver has not responded yet; it may hang"


@dataclass
class View:
    """The content of the screen.

    users       `gpu0` -> processes that compute on it; None if the driver does not report them
    missing     what is not monitored and why, and other problems
    alerts      messages about the GPUs themselves: lost, or with errors
    is_waiting  the first sample is late
    remaining   seconds until the end; None: the display runs until it is stopped
    """

    gpus: Mapping[str, SampledGpu] = field(default_factory=dict)
    interval_s: float = 1.0
    seconds: float = 0.0
    remaining: float | None = None
    users: Mapping[str, Sequence[GpuUser]] | None = None
    missing: list[str] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    is_waiting: bool = False
    history: dict[str, deque[float]] = field(default_factory=dict)
    latest: Readings = field(default_factory=dict)

    def add(self, readings: Readings) -> None:
        self.latest = readings
        length = max((len(values) for values in self.history.values()), default=0)
        for name in readings:
            self.history.setdefault(name, deque([math.nan] * min(length, MAX_SAMPLES - 1), maxlen=MAX_SAMPLES))
        for name, values in self.history.items():
            values.append(readings.get(name, math.nan))

    @property
    def notes(self) -> list[str]:
        """What is not monitored, and why."""
        return [*self.missing, *([WAITING] if self.is_waiting else [])]


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return the newest values, in percent, as at most `columns` block characters of eight heights; NaN is a space."""
    newest = list(values)[-columns:] if columns > 0 else []
    heights = (None if math.isnan(value) else min(7, max(0, int(value / 100 * 8))) for value in newest)
    return "".join(" " if height is None else BLOCKS[height] for height in heights)


def machine_screen(view: View, columns: int, rows: int) -> Group:
    """Return the screen: GPUs, machine, notes, and the processes on the GPUs.

    rows  height of the terminal; a line states how many processes do not fit
    """
    notes = [Text(alert.text, style="bold red") for alert in view.alerts]
    notes += [Text(note, style="yellow") for note in view.notes]
    ending = "Ctrl-C to stop" if view.remaining is None else f"ends in {view.remaining:.0f} s"
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True)
    title.add_column(no_wrap=True, justify="right")
    times = f"{view.seconds:.0f} s elapsed, 1 sample per {view.interval_s:g} s, {ending}"
    title.add_row(Text("accel-run monitor", "bold"), times if columns >= _MIN_SPARK_COLUMNS else "")
    upper = Group(title, _gpus(view, columns), *_throttle_lines(view), _machine(view), *notes)
    if not view.gpus:
        return upper
    console = Console(width=max(1, columns), color_system=None)
    max_rows = max(0, rows - len(console.render_lines(upper, pad=False)) - 2)  # an empty line and the header
    return Group(upper, Text(), _processes(view, max_rows))


def _make_table(*columns: str) -> Table:
    """Return a table; columns: `<` text, `>` right-aligned, `~` a sparkline in the remaining width."""
    table = Table.grid(padding=(0, 2, 0, 0), expand="~" in columns)
    for kind in columns:
        table.add_column(no_wrap=True, justify="right" if kind == ">" else "left", ratio=1 if kind == "~" else None)
    return table


@dataclass(frozen=True)
class _Spark:
    """A sparkline as wide as its column."""

    values: Sequence[float]
    color: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = sparkline(self.values, options.max_width)
        yield Text(text, style=self.color, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def _gpus(view: View, columns: int) -> Table:
    has_sparks = columns >= _MIN_SPARK_COLUMNS
    figures = 3 if columns >= 100 else 1 if columns >= 70 else 0  # narrow terminals show fewer
    spark = ["~"] * has_sparks
    table = _make_table("<", ">", *spark, ">", ">", *spark, *">" * figures)
    for number, (gpu, device) in enumerate(view.gpus.items()):
        used, total = view.latest.get(f"{gpu}/memory_gib"), view.latest.get(f"{gpu}/memory_total_gib")
        size = "" if used is None else f"{used:.1f} GiB" if not total else f"{used:.1f}/{total:.1f} GiB"
        cells: list[RenderableType] = [Text(f"GPU {number}  {to_one_line(device.name, 60)}", "bold")]
        cells += [_percent(view.latest.get(f"{gpu}/util"), 0)]
        cells += [_Spark(_history(view, f"{gpu}/util"), "green")] * has_sparks
        cells += [size, _percent(100 * used / total if used is not None and total else None, 0)]
        cells += [_Spark(_memory_percent(view, gpu), "cyan")] * has_sparks
        table.add_row(*cells, *_figure_cells(view.latest, gpu)[:figures])
    return table


def _figure_cells(latest: Readings, gpu: str) -> list[Text]:
    figures = []
    for name, limit, unit in (
        ("temperature_c", "", " °C"),
        ("power_w", "power_limit_w", " W"),
        ("clock_mhz", "", " MHz"),
    ):
        value, limit_value = latest.get(f"{gpu}/{name}"), latest.get(f"{gpu}/{limit}")
        text = "" if value is None else f"{value:.0f}{'' if limit_value is None else f'/{limit_value:.0f}'}{unit}"
        figures.append(Text(text, "dim"))
    return figures


def _throttle_lines(view: View) -> list[Text]:
    gpus_by_reason: dict[str, list[str]] = {}
    for number, gpu in enumerate(view.gpus):
        for reason in decode_throttle_reasons(view.latest.get(f"{gpu}/throttle_reasons")):
            gpus_by_reason.setdefault(reason, []).append(f"GPU {number}")
    return [
        Text(f"throttled: {reason} ({', '.join(gpus)})", "dim" if reason in NORMAL_THROTTLING else "red")
        for reason, gpus in sorted(gpus_by_reason.items(), key=lambda item: item[0] in NORMAL_THROTTLING)
    ]


def _machine(view: View) -> Table:
    table = _make_table("<", ">", "~")
    for label, name, color in (("CPU", "cpu/percent", "blue"), ("RAM", "ram/percent", "magenta")):
        if name in view.latest or name in view.history:
            spark = _Spark(_history(view, name), color)
            table.add_row(label, _percent(view.latest.get(name), 1), spark)
    disk = [template.format(view.latest[name]) for name, template in _DISK.items() if name in view.latest]
    if disk:
        table.add_row("disk", "", ", ".join(disk))
    return table


def _processes(view: View, max_rows: int) -> RenderableType:
    plural = "s" if len(view.gpus) > 1 else ""
    if view.users is None:
        return Text(f"the driver does not report which processes use the GPU{plural}", style="dim")
    users = [(number, user) for number, gpu in enumerate(view.gpus) for user in view.users.get(gpu, ())]
    if not users:
        return Text(f"no process computes on the GPU{plural}", style="dim")
    shown = users if len(users) <= max_rows else users[: max(0, max_rows - 1)]
    table = _make_table(">", ">", "<", ">", "<")
    table.add_row("GPU", "PID", "USER", "MEMORY", "COMMAND", style="bold")
    for number, user in shown:
        names = [to_one_line(name, 60) or "?" for name in (user.user, user.name)]
        table.add_row(str(number), str(user.pid), names[0], _gib(user.memory_gib), names[1])
    omitted = len(users) - len(shown)
    return Group(table, Text(f"... {omitted} more processes: the terminal is too small", "dim")) if omitted else table


def _history(view: View, name: str) -> Sequence[float]:
    return view.history.get(name, deque())


def _memory_percent(view: View, gpu: str) -> list[float]:
    pairs = zip(_history(view, f"{gpu}/memory_gib"), _history(view, f"{gpu}/memory_total_gib"), strict=False)
    return [100 * used / total if total else math.nan for used, total in pairs]


def _percent(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}%"


def _gib(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} GiB" if value >= 0.1 else f"{value * 1024:.0f} MiB"


_MIN_SPARK_COLUMNS = 60
_DISK = {
    "disk/free_gib": "{:.1f} GiB free",
    "disk/read_mb_s": "{:.1f} MB/s read",
    "disk/write_mb_s": "{:.1f} MB/s written",
}
