"""Plot machine metrics: one figure per GPU, one of all GPUs, and one of GPU, CPU and RAM.

What nobody could read, and the time when nobody looked, is a gap in the line and never a 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.base.picture import COLORS, new_figure, png
from runner.host.dirfd import opened_parent
from runner.monitor.nvml import THROTTLE_REASONS
from runner.monitor.samples import MachineSamples

if TYPE_CHECKING:
    from runner.monitor.samples import Floats

POINTS = 1000  # of a line at most: about as many as a picture has pixels


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a row of PANELS or of MACHINE.

    values  of the samples and "gpu0/", "gpu1/", ... or "" what is drawn (N,)
    top     where the scale ends; None: where the values end
    from_0  the scale begins at 0
    is_gpu  there is a line for each GPU
    limit   the metric of a GPU that says how far the values can go, what it is called, and its unit
    """

    title: str
    axis: str
    values: Callable[[MachineSamples, str], Floats]
    top: float | None = None
    from_0: bool = True
    is_gpu: bool = True
    limit: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class PlotLine:
    """A line of at most about POINTS points: mean, lowest and highest of the samples that make a point.

    is_thinned  a point stands for several samples
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    is_thinned: bool


def pictures(samples: MachineSamples) -> dict[str, bytes]:
    """Return file name -> PNG: a `gpu0.png` for each GPU, `gpus.png` where there are several, and `machine.png`.

    No samples: no pictures.
    """
    return {name: png(figure) for name, figure in figures(samples).items()}


def figures(samples: MachineSamples, points: int = POINTS, *, each: bool = True) -> dict[str, Any]:
    """Return file name -> matplotlib Figure, as `pictures` does.

    points  of a line at most, about
    each    a figure for each GPU, also where several have one together
    """
    if not len(samples):
        return {}
    labels = {gpu: _label(gpu, samples) for gpu in _gpus(samples)}
    apart = labels if each or len(labels) == 1 else {}
    found = {f"gpu{gpu}.png": _stacked(samples, {gpu: label}, label, points) for gpu, label in apart.items()}
    if len(labels) > 1:
        names = {label.partition(": ")[2] for label in labels.values()}
        title = f"{len(labels)} GPUs"
        if len(names) == 1:  # which is not repeated for each
            title, labels = ": ".join([title, *filter(None, names)]), {gpu: f"GPU {gpu}" for gpu in labels}
        found["gpus.png"] = _stacked(samples, labels, title, points)
    return found | {"machine.png": _machine(samples, labels, points)}


def plots(folder: Path, samples: MachineSamples) -> list[Path]:
    """The pictures of these samples lie in `folder`, which is there; returns their paths.

    Raises OSError.
    """
    return [_write(folder / name, content) for name, content in pictures(samples).items()]


def thinned(x: Floats, y: Floats, after_gap: NDArray[np.bool_], points: int = POINTS) -> PlotLine:
    """Return the line through these samples, broken by NaN at the gaps, of at most about `points` points.

    after_gap  (N,) True where nobody watched right before a sample
    """
    size = max(1, math.ceil(len(x) / points))
    edges = [0, *np.flatnonzero(after_gap[1:]) + 1, len(x)]
    parts = [_grouped(x[begin:end], y[begin:end], size) for begin, end in pairwise(edges)]
    when, mean, low, high = (np.concatenate(column)[:-1] for column in zip(*parts, strict=True))
    return PlotLine(when, mean, low, high, is_thinned=size > 1)


# ---------------------------------------------------------------- pictures


@dataclass(frozen=True)
class _Time:
    """How the time axis counts."""

    unit: str
    seconds: float


@dataclass(frozen=True)
class _Canvas:
    """What the panels of one picture share: the samples, their clock, the GPUs, and what the legend explains."""

    samples: MachineSamples
    labels: Mapping[int, str]
    time: _Time
    points: int
    legend: dict[str, Any] = field(default_factory=dict)

    @property
    def x(self) -> Floats:
        moments: Floats = (self.samples.times_s - self.samples.times_s[0]) / self.time.seconds
        return moments


@dataclass(frozen=True)
class _Slowed:
    """A row of what held the clocks down: (N,) True where it did, and its colour."""

    when: NDArray[np.bool_]
    color: str


def _stacked(samples: MachineSamples, labels: Mapping[int, str], title: str, points: int) -> Any:
    """Return utilisation, memory, temperature and power over time, one below the other, with a line for each GPU.

    Below them stands what held the clocks down, where something did.
    """
    slowed = _slowed(samples, labels)
    heights = [_PANEL_INCHES] * len(PANELS) + ([_ROW_INCHES * (len(slowed) + 1)] if slowed else [])
    figure = new_figure(10.0, sum(heights) + _MARGIN_INCHES * len(heights))
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    panels = dict(zip(PANELS, axes[: len(PANELS)], strict=True))
    return _filled(
        figure, panels, _Canvas(samples, labels, _time(samples), points), title, {axes[-1]: slowed} if slowed else {}
    )


def _machine(samples: MachineSamples, labels: Mapping[int, str], points: int) -> Any:
    """Return GPU utilisation and memory, CPU and RAM, all in percent, in two rows; without a GPU in one."""
    panels = [panel for panel in MACHINE if labels or not panel.is_gpu]
    figure = new_figure(12.0, 7.5 if labels else 4.5)
    axes = figure.subplots(len(panels) // 2, 2, sharex=True, squeeze=False)
    title = "GPU, CPU and RAM" if labels else "CPU and RAM"
    return _filled(
        figure, dict(zip(panels, axes.flat, strict=True)), _Canvas(samples, labels, _time(samples), points), title
    )


def _filled(
    figure: Any,
    axes: Mapping[Panel, Any],
    canvas: _Canvas,
    title: str,
    slowed: Mapping[Any, Mapping[str, _Slowed]] = MappingProxyType({}),
) -> Any:
    samples, labels = canvas.samples, canvas.labels
    held = "what held the clocks down" if len(labels) == 1 else "when the clocks were held down (why: see each GPU)"
    titles = {each: panel.title for panel, each in axes.items()} | dict.fromkeys(slowed, held)
    for each, words in titles.items():
        is_first_row = each.get_subplotspec().is_first_row()
        each.set_title(words, loc="left", fontsize=10, pad=16 if is_first_row else None)  # above names of phases
        each.spines[["top", "right"]].set_visible(False)
        _phases(each, canvas, with_names=is_first_row)
        _gaps(each, canvas)
        if each.get_subplotspec().is_last_row():
            each.set_xlabel(f"time since the first sample ({canvas.time.unit})")
    for panel, each in axes.items():
        _draw(each, panel, canvas)
    for each, rows in slowed.items():
        _draw_slowed(each, rows, canvas)
    begun = datetime.fromtimestamp(samples.times_s[0]).astimezone()
    figure.suptitle(title, x=0.005, ha="left", fontsize=13, fontweight="bold")
    figure.text(
        0.995, 0.995, f"{begun:%Y-%m-%d %H:%M:%S}\n{_length(canvas)}", ha="right", va="top", fontsize=8, color="0.4"
    )
    _explain(figure, canvas.legend)
    return figure


def _explain(figure: Any, legend: Mapping[str, Any]) -> None:
    """The legend stands below the panels in as many columns as fit; the figure is as much higher."""
    if not legend:
        return
    for columns in range(min(_COLUMNS, len(legend)), 0, -1):
        drawn = figure.legend(
            legend.values(), legend.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        box = drawn.get_window_extent()
        if box.width <= figure.bbox.width or columns == 1:
            break
        drawn.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + box.height / figure.dpi)


def _draw(axes: Any, panel: Panel, canvas: _Canvas) -> None:
    axes.set_ylabel(panel.axis)
    axes.grid(visible=True, color="0.85", linewidth=0.7)
    axes.set_axisbelow(True)
    several = panel.is_gpu and len(canvas.labels) > 1
    lowest, highest = math.inf, -math.inf
    for gpu in canvas.labels if panel.is_gpu else [0]:
        prefix = f"gpu{gpu}/" if panel.is_gpu else ""
        color = _color(gpu) if panel.is_gpu else _HOST
        values = panel.values(canvas.samples, prefix)
        if np.isfinite(values).any():
            _line(axes, values, canvas, color, canvas.labels[gpu] if several else "")
            lowest, highest = min(lowest, float(np.nanmin(values))), max(highest, float(np.nanmax(values)))
    if panel.limit is not None and highest >= lowest:
        highest = max(highest, *_limits(axes, panel.limit, canvas), 0.0)
    if highest < lowest:
        axes.text(0.5, 0.5, "no reading", transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set_yticks([])
    else:
        _scale(axes, panel, lowest, highest)
    end = float(canvas.x[-1])
    margin = 0.015 * end or 0.5
    axes.set_xlim(-margin, end + margin)


def _line(axes: Any, values: Floats, canvas: _Canvas, color: str, label: str) -> None:
    is_crowded = len(canvas.labels) > _BANDS
    line = thinned(canvas.x, values, canvas.samples.gaps(), canvas.points // 4 if is_crowded else canvas.points)
    is_short = len(line.x) <= _MARKED
    (drawn,) = axes.plot(
        line.x, line.mean, color=color, linewidth=1.4, marker="o" if is_short else None, markersize=3, zorder=3
    )
    alone = _alone(line.mean)
    if alone.any() and not is_short:  # a point between two gaps has no line to be seen by
        axes.plot(line.x[alone], line.mean[alone], "o", color=color, markersize=2.5, zorder=3)
    if line.is_thinned and not is_crowded:
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.22, linewidth=0, zorder=2)
        canvas.legend.setdefault("lowest to highest", axes.fill_between([], [], color="0.7", linewidth=0))
    if label:
        canvas.legend.setdefault(label, drawn)


def _limits(axes: Any, limit: tuple[str, str, str], canvas: _Canvas) -> list[float]:
    """Draw how far the values of each GPU can go, in its color unless it is the same for several; return it."""
    metric, words, unit = limit
    known = {gpu: _column(canvas.samples, f"gpu{gpu}/{metric}") for gpu in canvas.labels}
    values = {gpu: float(np.nanmax(column)) for gpu, column in known.items() if np.isfinite(column).any()}
    for value in sorted(set(values.values())):
        owners = [gpu for gpu in values if values[gpu] == value]
        color = _color(owners[0]) if len(canvas.labels) > 1 and len(owners) == 1 else _HOST
        drawn = axes.axhline(value, color=color, linestyle=(0, (6, 3)), linewidth=1.1, zorder=2)
        canvas.legend.setdefault(f"{words}, {value:.4g} {unit}" if len(set(values.values())) == 1 else words, drawn)
    return list(values.values())


def _slowed(samples: MachineSamples, labels: Mapping[int, str]) -> dict[str, _Slowed]:
    """Return when the driver held the clocks down: by reason, or by GPU where there are several, without the idle."""
    bits = {}
    for gpu in labels:
        known = _column(samples, f"gpu{gpu}/throttle_reasons")
        bits[gpu] = np.where(np.isfinite(known), known, 0).astype(np.int64)
    if len(labels) > 1:
        every = sum(THROTTLE_REASONS)
        rows = {f"GPU {gpu}": _Slowed((held & every) > 0, _color(gpu)) for gpu, held in bits.items()}
    else:
        rows = {
            words: _Slowed((held & bit) > 0, _HOST) for held in bits.values() for bit, words in THROTTLE_REASONS.items()
        }
    return {name: row for name, row in rows.items() if row.when.any()}


def _draw_slowed(axes: Any, rows: Mapping[str, _Slowed], canvas: _Canvas) -> None:
    """Draw a row of bars for each: from the sample before, back to which a sample stands, to the sample."""
    shortest = (float(canvas.x[-1]) or 1.0) / _MARKED / 4  # that can be seen
    begins = np.maximum(canvas.x - canvas.samples.spans_s / canvas.time.seconds, 0.0)
    for at, row in enumerate(rows.values()):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], row.when, [False]])))
        bars = [
            (begins[first], max(canvas.x[end - 1] - begins[first], shortest))
            for first, end in zip(edges[::2], edges[1::2], strict=True)
        ]
        axes.broken_barh(bars, (at - 0.3, 0.6), facecolor=row.color, linewidth=0, zorder=3)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(axis="y", length=0)


def _scale(axes: Any, panel: Panel, lowest: float, highest: float) -> None:
    if panel.top is not None:
        axes.set_ylim(-0.03 * panel.top, 1.05 * panel.top)
    elif panel.from_0:
        axes.set_ylim(-0.03 * highest, 1.1 * highest or 1.0)
    else:
        room = max(0.1 * (highest - lowest), 2.0)  # a reading that stays the same is no mountain range
        axes.set_ylim(lowest - room, highest + room)


def _phases(axes: Any, canvas: _Canvas, *, with_names: bool) -> None:
    """Shade the time of each phase, and write its name above where there is room."""
    stretches: dict[str, list[tuple[float, float]]] = {}
    for phase, begin, end in _stretches(canvas):
        if phase:
            stretches.setdefault(phase, []).append((begin, end - begin))
    whole = float(canvas.x[-1]) or 1.0
    for number, (phase, found) in enumerate(stretches.items()):
        _shaded(axes, found, canvas, f"phase {phase}", facecolor=_SHADES[number % len(_SHADES)], zorder=0)
        for begin, width in found if with_names else ():
            if width / whole > _LETTER * (len(phase) + 1):
                axes.text(
                    begin + width / 2, 1.02, phase, transform=axes.get_xaxis_transform(), ha="center", va="bottom",
                    fontsize=8, color="0.35",
                )  # fmt: skip


def _gaps(axes: Any, canvas: _Canvas) -> None:
    """Hatch the time when nobody looked."""
    x, after = canvas.x, np.flatnonzero(canvas.samples.gaps()[1:]) + 1
    found = [(float(x[index - 1]), float(x[index] - x[index - 1])) for index in after]
    if found:
        _shaded(axes, found, canvas, "not watched", facecolor="white", edgecolor="0.75", hatch="////", zorder=1)


def _shaded(axes: Any, stretches: list[tuple[float, float]], canvas: _Canvas, words: str, **style: Any) -> None:
    """Shade (begin, width) from the foot to the top, all in one: there may be thousands."""
    shade = axes.broken_barh(stretches, (0, 1), transform=axes.get_xaxis_transform(), linewidth=0, **style)
    canvas.legend.setdefault(words, shade)


# ---------------------------------------------------------------- from samples to lines


def _stretches(canvas: _Canvas) -> Iterator[tuple[str, float, float]]:
    """Yield (phase, begin, end); a phase ends where the next one begins, and at a gap."""
    phases, gaps, x = canvas.samples.phases, canvas.samples.gaps(), canvas.x
    begin = 0
    for index in range(1, len(phases) + 1):
        is_end = index == len(phases)
        if is_end or gaps[index] or phases[index] != phases[begin]:
            last = index - 1 if is_end or gaps[index] else index
            yield phases[begin], float(x[begin]), float(x[last])
            begin = index


def _grouped(x: Floats, y: Floats, size: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return time, mean, lowest and highest of each `size` samples or one less, and a NaN behind them.

    NaN where none of them is known.
    """
    starts = np.linspace(0, len(x), math.ceil(len(x) / size), endpoint=False).astype(np.int64)
    known = np.isfinite(y)
    num_known = np.add.reduceat(known.astype(np.float64), starts)
    is_known = num_known > 0
    mean = np.where(is_known, np.add.reduceat(np.where(known, y, 0.0), starts) / np.maximum(num_known, 1), math.nan)
    low = np.where(is_known, np.minimum.reduceat(np.where(known, y, math.inf), starts), math.nan)
    high = np.where(is_known, np.maximum.reduceat(np.where(known, y, -math.inf), starts), math.nan)
    when = np.add.reduceat(x, starts) / np.diff(starts, append=len(x))
    return np.append(when, when[-1]), np.append(mean, math.nan), np.append(low, math.nan), np.append(high, math.nan)


def _alone(values: Floats) -> NDArray[np.bool_]:
    """Tell of each point whether it is known and neither neighbour is."""
    known = np.isfinite(values)
    around = np.concatenate([[False], known, [False]])
    alone: NDArray[np.bool_] = known & ~around[:-2] & ~around[2:]
    return alone


def _gpus(samples: MachineSamples) -> list[int]:
    named = {name.partition("/")[0] for name in (*samples.values, *samples.devices)}
    return sorted(int(name[3:]) for name in named if name.startswith("gpu"))


def _label(gpu: int, samples: MachineSamples) -> str:
    device = samples.devices.get(f"gpu{gpu}")
    return f"GPU {gpu}: {device.name}" if device and device.name else f"GPU {gpu}"


def _color(gpu: int) -> str:
    return COLORS[gpu % len(COLORS)]


def _time(samples: MachineSamples) -> _Time:
    span = float(samples.times_s[-1] - samples.times_s[0])
    return next(time for limit, time in _TIMES if span < limit)


def _length(canvas: _Canvas) -> str:
    count = len(canvas.samples)
    return f"{float(canvas.x[-1]):.3g} {canvas.time.unit}, {count:,} sample{'s' if count > 1 else ''}"


def _write(path: Path, content: bytes) -> Path:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with opened_parent(path) as (folder, name):
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


def _of(name: str) -> Callable[[MachineSamples, str], Floats]:
    return lambda samples, prefix: _column(samples, prefix + name)


def _memory_percent(samples: MachineSamples, prefix: str) -> Floats:
    return 100 * _column(samples, f"{prefix}memory_gib") / _column(samples, f"{prefix}memory_total_gib")


def _column(samples: MachineSamples, name: str) -> Floats:
    return samples.values.get(name, np.full(len(samples), math.nan))


_TIMES = (
    (180.0, _Time("s", 1.0)),
    (3 * 3600.0, _Time("min", 60.0)),
    (3 * 86400.0, _Time("h", 3600.0)),
    (math.inf, _Time("days", 86400.0)),
)
_MARKED = 60  # points up to which each has a mark
_BANDS = 2  # GPUs up to which the band from lowest to highest is drawn
_LETTER = 0.009  # of the axes' width, that a letter takes
_COLUMNS = 4  # of the legend at most
_PANEL_INCHES, _ROW_INCHES, _MARGIN_INCHES = 1.5, 0.14, 0.45  # heights of a panel, a row of bars, titles and ticks
_HOST = "#444444"
_SHADES = ("#E3EEF8", "#FCEBD8", "#E2F2DF", "#F5E1EE", "#EDEDED", "#FCF6CF")

PANELS: tuple[Panel, ...] = (
    Panel("utilisation", "utilisation (%)", _of("util"), top=100.0),
    Panel("memory", "memory (GiB)", _of("memory_gib"), limit=("memory_total_gib", "memory capacity", "GiB")),
    Panel("temperature", "temperature (°C)", _of("temperature_c"), from_0=False),
    Panel("power", "power (W)", _of("power_w"), limit=("power_limit_w", "power limit", "W")),
)
MACHINE: tuple[Panel, ...] = (
    Panel("GPU utilisation", "utilisation (%)", _of("util"), top=100.0),
    Panel("GPU memory", "memory in use (%)", _memory_percent, top=100.0),
    Panel("CPU", "CPU in use (%)", _of("cpu/percent"), top=100.0, is_gpu=False),
    Panel("RAM", "RAM in use (%)", _of("ram/percent"), top=100.0, is_gpu=False),
)
