"""Render machine metrics as text: a sparkline per metric, and the processes on each GPU.

Values in, lines of text out: nothing is measured here. What is not known is left out, or a gap in a sparkline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rich.text import Text

from runner.base.text import aligned
from runner.monitor.alerts import Alert
from runner.monitor.health_rules import BY_DESIGN
from runner.monitor.nvml import slowed_by

Readings = Mapping[str, float]

KEPT = 1000  # samples that a sparkline can show: more columns than terminals have
BLOCKS = "▁▂▃▄▅▆▇█"
BLOCKS_ASCII = "_.:-=+*#"
WAITING = "the driver has not answered yet; it may hang"


@dataclass(frozen=True)
class Use:
    """A process that computes on a GPU. What cannot be known is empty, and memory None.

    run  the name of the run it belongs to
    """

    gpu: int
    pid: int
    user: str = ""
    name: str = ""
    memory_gib: float | None = None
    run: str = ""


@dataclass
class View:
    """What the screen shows.

    gpus      the name of each GPU that is watched, gpu0 first; `uuids` what tells it from its like
    uses      None: the driver does not tell who uses the GPUs
    missing   what is not watched, and why; what went wrong
    unsaid    what is `missing`, or why nothing is watched: which of them, the first sample tells
    troubles  what the driver reported of the GPUs themselves: lost, in error
    waits     the first sample is late
    seconds   since the start; `remaining` until the end, None: until somebody ends it
    """

    gpus: Sequence[str] = ()
    uuids: Sequence[str] = ()
    interval_s: float = 1.0
    seconds: float = 0.0
    remaining: float | None = None
    uses: Sequence[Use] | None = None
    missing: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    troubles: list[Alert] = field(default_factory=list)
    waits: bool = False
    history: dict[str, deque[float]] = field(default_factory=dict)
    latest: Readings = field(default_factory=dict)

    def add(self, readings: Readings) -> None:
        """Take note of a sample."""
        self.latest = readings
        length = max((len(values) for values in self.history.values()), default=0)
        for name in readings:
            self.history.setdefault(name, deque([math.nan] * min(length, KEPT - 1), maxlen=KEPT))
        for name, values in self.history.items():
            values.append(readings.get(name, math.nan))


def sparkline(values: Sequence[float], columns: int, *, ascii_only: bool = False) -> str:
    """Return the newest values, percent, as at most `columns` blocks of eight heights; a gap where there is none."""
    blocks = BLOCKS_ASCII if ascii_only else BLOCKS
    newest = list(values)[-columns:] if columns > 0 else []
    return "".join(" " if math.isnan(value) else blocks[_height(value, len(blocks))] for value in newest)


def lines_of(view: View, columns: int, rows: int, *, ascii_only: bool = False) -> list[Text]:
    """Return the screen as at most `rows` lines of at most `columns` characters.

    Where there is little room GPUs take one line each, then processes give way, then GPUs; each time it is said.
    """
    page = _Page(view, columns, ascii_only)
    head, machine, notes = [page.head()], page.machine(), page.notes()
    wide = [line for gpu in range(len(view.gpus)) for line in page.gpu(gpu)]
    short = [page.short_gpu(gpu) for gpu in range(len(view.gpus))]
    uses = page.uses()
    fixed = len(head) + len(machine) + len(notes)
    gpus = wide
    if fixed + len(wide) + min(len(uses), _ROWS_OF_USES) > rows:
        gpus, notes = short, page.alarms() + notes
        fixed = len(head) + len(machine) + len(notes)
    gpus = _at_most(gpus, max(1, rows - fixed), "more GPUs: the terminal is too small")
    found = head + gpus + machine + notes
    found += _at_most(uses, rows - len(found), "more processes: the terminal is too small", head=2)
    for line in found:
        line.truncate(columns, overflow="ellipsis" if not ascii_only else "crop")
    return found[:rows]


class _Page:
    """The parts of the screen at one width."""

    def __init__(self, view: View, columns: int, ascii_only: bool) -> None:
        self.view, self.columns, self.ascii = view, columns, ascii_only
        self.degree = " C" if ascii_only else " °C"

    def head(self) -> Text:
        view = self.view
        ends = "Ctrl-C ends it" if view.remaining is None else f"ends in {view.remaining:.0f} s"
        left = Text("accel-run monitor", style="bold")
        return self._apart(left, [f"{view.seconds:.0f} s, every {view.interval_s:g} s", ends])

    def gpu(self, gpu: int) -> list[Text]:
        """Return name and figures, what slows it down below them where it does not fit, utilisation, memory."""
        latest = self.view.latest
        util, memory = latest.get(f"gpu{gpu}/util"), _memory(latest, gpu)
        name, figures, slowed = Text(self._name(gpu), style="bold"), self._figures(gpu), self._slowed(gpu)
        fits = len(name) + 2 + len("   ".join([*figures, slowed.plain])) <= self.columns
        below = [] if fits else [Text(part, style=slowed.style) for part in _wrapped(f"  {slowed}", self.columns)]
        return [
            self._apart(name, figures, slowed if fits else Text()),
            *below,
            self._row("  util", _percent(util, 0), "", f"gpu{gpu}/util", "green"),
            self._row("  memory", _percent(memory.percent, 0), memory.text, _MEMORY.format(gpu), "cyan"),
        ]

    def short_gpu(self, gpu: int) -> Text:
        """Return the same in one line, in columns that are the same for every GPU."""
        memory, slowed = _memory(self.view.latest, gpu), self._slowed(gpu)
        is_alarm = slowed.style == _ALARM
        label = f"GPU{gpu}{'!' if is_alarm else ''}"  # what it means is said below all of them
        line = Text(f"{label:<6}", style="bold red" if is_alarm else "bold")
        for name, percent, style in (
            (f"gpu{gpu}/util", self.view.latest.get(f"gpu{gpu}/util"), "green"),
            (_MEMORY.format(gpu), memory.percent, "cyan"),
        ):
            line.append(f"{_percent(percent, 0):>5} ", style="not bold")
            if self._short_spark >= _LEAST_SPARK:
                line.append(f"{self._spark(name, self._short_spark):>{self._short_spark}} ", style=f"not bold {style}")
        line.append(f" {memory.text:<{self._memory_width}}", style="not bold")
        for figure, width in zip(self._figures(gpu), (7, 10, 9), strict=False):
            if len(line) + 1 + width <= self.columns:
                line.append(f" {figure:>{width}}", style="not bold dim")
        name = f"  {self.view.gpus[gpu]}"
        if len(line) + len(name) <= self.columns:
            line.append(name, style="not bold dim")
        return line

    @cached_property
    def _memory_width(self) -> int:
        return max((len(_memory(self.view.latest, gpu).text) for gpu in range(len(self.view.gpus))), default=0)

    @cached_property
    def _short_spark(self) -> int:
        """Return the columns of a sparkline where a GPU has one line: what the figures leave, at most 30."""
        for figures in (29, 8, 0):  # temperature, power and clocks; the temperature; nothing
            left = (self.columns - 6 - 2 * 7 - 1 - self._memory_width - figures) // 2
            if left >= _LEAST_SPARK:
                return min(30, left)
        return 0

    def alarms(self) -> list[Text]:
        """Return a line for each fault that slows GPUs down, with their numbers: where each GPU has only one line."""
        found: dict[str, list[str]] = {}
        for gpu in range(len(self.view.gpus)):
            for reason in slowed_by(self.view.latest.get(f"gpu{gpu}/throttle_reasons")):
                if reason not in BY_DESIGN:
                    found.setdefault(reason, []).append(f"GPU{gpu}")
        return [
            Text(part, style=_ALARM)
            for reason, gpus in found.items()
            for part in _wrapped(f"slowed: {reason} ({', '.join(gpus)})", self.columns)
        ]

    def machine(self) -> list[Text]:
        """Return CPU, RAM and disk, as far as they are known."""
        latest = self.view.latest
        found = [
            self._row(label, _percent(latest.get(name), 1), "", name, style)
            for label, name, style in _MACHINE
            if name in latest or name in self.view.history
        ]
        disk = [words.format(latest[name]) for name, words in _DISK if name in latest]
        return [*found, Text(f"{'disk':<9}{', '.join(disk)}")] if disk else found

    def notes(self) -> list[Text]:
        """Return what is not watched, and why."""
        told = [
            *((notice.text, "bold red") for notice in self.view.troubles),
            *((note, "yellow") for note in [*self.view.missing, *([WAITING] if self.view.waits else [])]),
        ]
        return [Text(part, style=style) for note, style in told for part in _wrapped(note, self.columns)]

    def uses(self) -> list[Text]:
        """Return the table of processes, below an empty line."""
        view = self.view
        if not view.gpus:
            return []
        plural = "s" if len(view.gpus) > 1 else ""
        if view.uses is None:
            return [Text(), Text(f"the driver does not report which processes use the GPU{plural}", style="dim")]
        if not view.uses:
            return [Text(), Text(f"no process computes on the GPU{plural}", style="dim")]
        rows: list[tuple[str, ...]] = [("GPU", "PID", "USER", "MEMORY", "RUN", "COMMAND")]
        rows += [
            (str(use.gpu), str(use.pid), use.user or "?", _gib(use.memory_gib), use.run or "-", use.name or "?")
            for use in view.uses
        ]
        if not any(use.run for use in view.uses):
            rows = [(*row[:4], row[5]) for row in rows]
        lines = aligned(rows, ">><><")
        return [Text(), Text(lines[0], style="bold"), *map(Text, lines[1:])]

    def _name(self, gpu: int) -> str:
        return f"GPU {gpu}  {self.view.gpus[gpu]}"

    def _figures(self, gpu: int) -> list[str]:
        """Return temperature, power and clocks, as far as they are known."""
        found = []
        latest = self.view.latest
        for name, limit, unit in (
            ("temperature_c", "", self.degree), ("power_w", "power_limit_w", " W"), ("clock_mhz", "", " MHz"),
        ):  # fmt: skip
            value, most = latest.get(f"gpu{gpu}/{name}"), latest.get(f"gpu{gpu}/{limit}")
            if value is not None:
                found.append(f"{value:.0f}{'' if most is None else f'/{most:.0f}'}{unit}")
        return found

    def _slowed(self, gpu: int) -> Text:
        """Return what holds its clocks down, in red only where that is a fault; empty where nothing does."""
        reasons = slowed_by(self.view.latest.get(f"gpu{gpu}/throttle_reasons"))
        reasons = tuple(sorted(reasons, key=lambda reason: reason in BY_DESIGN))
        is_fault = any(reason not in BY_DESIGN for reason in reasons)
        return Text(f"slowed: {', '.join(reasons)}" if reasons else "", style=_ALARM if is_fault else _NORMAL)

    def _row(self, label: str, value: str, detail: str, name: str, style: str) -> Text:
        lead = f"{label:<9}{value:>6}  "
        lead += f"{detail:<{self._memory_width}}  " if self._memory_width else ""
        line = Text(lead if len(lead) + _LEAST_SPARK <= self.columns else lead.rstrip())
        spark = self.columns - len(lead)
        return line.append(self._spark(name, spark), style=style) if spark >= _LEAST_SPARK else line

    def _spark(self, name: str, columns: int) -> str:
        gpu = name.partition("/")[0]
        values: Sequence[float] = self.view.history.get(name, ())
        if name.endswith("/memory_gib"):
            totals = self.view.history.get(f"{gpu}/memory_total_gib", ())
            values = [100 * used / total if total else math.nan for used, total in zip(values, totals, strict=False)]
        return sparkline(values, columns, ascii_only=self.ascii)

    def _apart(self, left: Text, figures: list[str], slowed: Text | None = None) -> Text:
        """Return left and right of a line; of the figures the last gives way first."""
        slowed = slowed or Text()
        figures = list(figures)
        while figures and self._right(figures, slowed) + len(left) + 2 > self.columns:
            figures.pop()
        right = self._right(figures, slowed)
        line = left.copy()
        line.append(" " * max(2, self.columns - len(left) - right) if right else "", style="default")
        line.append("   ".join(figures), style="not bold")
        return line.append(("   " if figures else "") + slowed.plain, style=slowed.style) if slowed else line

    @staticmethod
    def _right(figures: list[str], slowed: Text) -> int:
        return len("   ".join([*figures, slowed.plain] if slowed else figures))


@dataclass(frozen=True)
class _Memory:
    percent: float | None
    text: str


def _memory(latest: Readings, gpu: int) -> _Memory:
    used, total = latest.get(f"gpu{gpu}/memory_gib"), latest.get(f"gpu{gpu}/memory_total_gib")
    if used is None:
        return _Memory(None, "")
    return _Memory(100 * used / total, f"{used:.1f}/{total:.1f} GiB") if total else _Memory(None, f"{used:.1f} GiB")


def _height(value: float, heights: int) -> int:
    return min(heights - 1, max(0, int(value / 100 * heights)))


def _percent(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}%"


def _gib(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} GiB" if value >= 0.1 else f"{value * 1024:.0f} MiB"


def _wrapped(text: str, columns: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(10, columns), subsequent_indent="  ")


def _at_most(lines: list[Text], rows: int, more: str, head: int = 0) -> list[Text]:
    """Return the lines, or those that fit and how many are left out; the first `head` are no such thing."""
    if len(lines) <= rows:
        return lines
    shown = max(0, rows - 1)
    left_out = len(lines) - max(shown, head)
    return [*(lines[:shown] if shown > head else []), Text(f"... {left_out} {more}", style="dim")][: max(0, rows)]


_MEMORY = "gpu{}/memory_gib"
_ALARM, _NORMAL = "not bold red", "not bold dim"  # what is a fault, and what a busy GPU does
_LEAST_SPARK = 6  # columns: a shorter one shows nothing
_ROWS_OF_USES = 4  # an empty line, the head and two processes
_MACHINE = (("CPU", "cpu/percent", "blue"), ("RAM", "ram/percent", "magenta"))
_DISK = (
    ("disk/free_gib", "{:.1f} GiB free"),
    ("disk/read_mb_s", "{:.1f} MB/s read"),
    ("disk/write_mb_s", "{:.1f} MB/s written"),
)
