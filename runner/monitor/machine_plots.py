"""Plot machine metrics: a figure per GPU, one of all GPUs, and one of GPU, CPU and RAM.

Missing readings and times without samples are gaps in a line, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.base.picture import COLORS, encode_png, new_figure
from runner.monitor.samples import MachineSamples
from runner.monitor.thinning import ThinnedSamples, as_groups

if TYPE_CHECKING:
    from runner.monitor.samples import Floats

MAX_POINTS = 1000  # points of a line: about the width of a plot in pixels
PHASE_COLORS = ("#E3EEF8", "#FCEBD8", "#E2F2DF", "#F5E1EE", "#EDEDED", "#FCF6CF")


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    values  (samples, "gpu0/" or "") -> values to draw (N,)
    top     upper limit of the y axis; None: chosen from the values
    include_zero  the y axis begins at 0
    is_gpu  one line per GPU
    limit   the metric that is the upper bound of a GPU's values, with its label and unit
    """

    title: str
    axis: str
    values: Callable[[MachineSamples, str], Floats]
    top: float | None = None
    include_zero: bool = True
    is_gpu: bool = True
    limit: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class PlotLine:
    """A thinned line: mean, lowest and highest of the samples of each point."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def draw_png_files(samples: MachineSamples) -> dict[str, bytes]:
    """Return file name -> PNG: `gpu0.png` for each GPU, `gpus.png` for several, and `machine.png`."""
    return {name: encode_png(figure) for name, figure in draw_figures(samples).items()}


def draw_figures(samples: MachineSamples, points: int = MAX_POINTS, *, per_gpu: bool = True) -> dict[str, Any]:
    """Return file name -> matplotlib Figure, as `draw_png_files` does.

    points   approximate maximum number of points of a line
    per_gpu  a figure per GPU even if there are several
    """
    if not len(samples):
        return {}
    groups = as_groups(samples)
    labels = {gpu: _label(gpu, groups) for gpu in _gpus(groups)}
    canvas = _Canvas(groups, labels, next(time for limit, time in _TIME_UNITS if _seconds(groups) < limit), points)
    drawn = {}
    for gpu, label in labels.items() if per_gpu or len(labels) == 1 else ():
        drawn[f"gpu{gpu}.png"] = _draw_figure(canvas.for_labels({gpu: label}), GPU_PANELS, (4, 1), (10.0, 7.8), label)
    if len(labels) > 1:
        names = {label.partition(": ")[2] for label in labels.values()}
        title = f"{len(labels)} GPUs"
        if len(names) == 1:  # named once, in the title
            title, labels = ": ".join([title, *filter(None, names)]), {gpu: f"GPU {gpu}" for gpu in labels}
        drawn["gpus.png"] = _draw_figure(canvas.for_labels(labels), GPU_PANELS, (4, 1), (10.0, 7.8), title)
    title, rows = ("GPU, CPU and RAM", 2) if labels else ("CPU and RAM", 1)
    panels = [panel for panel in MACHINE_PANELS if labels or not panel.is_gpu]
    return drawn | {
        "machine.png": _draw_figure(canvas.for_labels(labels), panels, (rows, 2), (12.0, 3.0 + 2.25 * rows), title)
    }


def thin_line(x: Floats, y: Floats, after_gap: NDArray[np.bool_] | None = None, points: int = MAX_POINTS) -> PlotLine:
    """Return a line of at most about `points` points, broken by NaN at gaps; values that are not finite are left out.

    after_gap  (N,) True if a gap precedes the value
    """
    return _thin(PlotLine(x, y, y, y), np.ones(len(x)), after_gap, points)


def _thin(line: PlotLine, counts: Floats, after_gap: NDArray[np.bool_] | None, points: int) -> PlotLine:
    """Return a line of fewer points, as `thin_line` does.

    counts  (N,) number of values that each point averages
    """
    size = max(1, math.ceil(len(line.x) / points))
    edges = [0, *([] if after_gap is None else np.flatnonzero(after_gap[1:]) + 1), len(line.x)]
    if not edges[-1]:
        return line
    parts = [_average_groups(line, counts, slice(begin, end), size) for begin, end in pairwise(edges)]
    return PlotLine(*(np.concatenate(column)[:-1] for column in zip(*parts, strict=True)))


def shade_phases(axes: Any, phases: Iterable[tuple[str, float, float]], end: float, *, with_names: bool = True) -> Any:
    """Shade (phase, begin, end) of the x axis in a color per phase; write the names above if there is room.

    end  upper limit of the x axis
    Returns phase -> handle for a legend.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for phase, begin, until in phases:
        spans.setdefault(phase, []).append((begin, until - begin))
        if with_names and (until - begin) / (end or 1.0) > _LETTER_WIDTH * (len(phase) + 1):
            at, where = (begin + until) / 2, axes.get_xaxis_transform()
            axes.text(at, 1.02, phase, transform=where, ha="center", va="bottom", fontsize=8, color="#666666")
    return {
        phase: _shade_spans(axes, phase_spans, facecolor=PHASE_COLORS[number % len(PHASE_COLORS)], zorder=0)
        for number, (phase, phase_spans) in enumerate(spans.items())
    }


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class _Canvas:
    """State shared by the panels of a figure; `time` is the unit of the x axis: its name, and its length in seconds."""

    samples: ThinnedSamples
    labels: Mapping[int, str]
    time: tuple[str, float]
    points: int
    legend: dict[str, Any] = field(default_factory=dict)

    def for_labels(self, labels: Mapping[int, str]) -> _Canvas:
        return _Canvas(self.samples, labels, self.time, self.points)

    @property
    def begins(self) -> Floats:
        """Times at which the groups begin, in units of the x axis."""
        moments: Floats = (self.samples.times_s - self.samples.times_s[0]) / self.time[1]
        return moments

    @property
    def ends(self) -> Floats:
        moments: Floats = (self.samples.ends_s - self.samples.times_s[0]) / self.time[1]
        return moments


def _draw_figure(
    canvas: _Canvas, panels: Iterable[Panel], shape: tuple[int, int], inches: tuple[float, float], title: str
) -> Any:
    samples = canvas.samples
    figure = new_figure(*inches)
    begins, ends, after = canvas.begins, canvas.ends, np.flatnonzero(samples.gaps()[1:]) + 1
    phases = [span for span in _phases(canvas) if span[0]]
    for panel, axes in zip(panels, figure.subplots(*shape, sharex=True, squeeze=False).flat, strict=True):
        is_first_row = axes.get_subplotspec().is_first_row()
        axes.set_title(panel.title, loc="left", fontsize=10, pad=16 if is_first_row else None)  # above the phase names
        axes.spines[["top", "right"]].set_visible(False)
        shades = shade_phases(axes, phases, float(ends[-1]), with_names=is_first_row)
        canvas.legend.update({f"phase {name}": shade for name, shade in shades.items()})
        if len(after):
            spans = [(float(ends[index - 1]), float(begins[index] - ends[index - 1])) for index in after]
            shade = _shade_spans(axes, spans, facecolor="white", edgecolor="0.75", hatch="////", zorder=1)
            canvas.legend.setdefault("not monitored", shade)
        _draw_panel(axes, panel, canvas)
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(f"time since the first sample ({canvas.time[0]})")
    num = int(samples.counts.sum())
    started = datetime.fromtimestamp(samples.times_s[0]).astimezone()
    length = f"{float(ends[-1]):.3g} {canvas.time[0]}, {num:,} sample{'s' * (num > 1)}"
    figure.suptitle(title, x=0.005, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.995, 0.995, f"{started:%Y-%m-%d %H:%M:%S}\n{length}", ha="right", va="top", fontsize=8, color="0.4")
    _add_legend(figure, canvas.legend)
    return figure


def _add_legend(figure: Any, legend: Mapping[str, Any]) -> None:
    """Add the legend below the panels, in as many columns as fit, and make the figure higher by its height."""
    for columns in range(min(_MAX_LEGEND_COLUMNS, len(legend)), 0, -1):
        artist = figure.legend(
            legend.values(), legend.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        box = artist.get_window_extent()
        if box.width <= figure.bbox.width or columns == 1:
            width, height = figure.get_size_inches()
            figure.set_size_inches(width, height + box.height / figure.dpi)
            return
        artist.remove()


def _draw_panel(axes: Any, panel: Panel, canvas: _Canvas) -> None:
    axes.set_ylabel(panel.axis)
    axes.grid(visible=True, color="0.85", linewidth=0.7)
    axes.set_axisbelow(True)
    has_labels = panel.is_gpu and len(canvas.labels) > 1
    lowest, highest = math.inf, -math.inf
    for gpu in canvas.labels if panel.is_gpu else [0]:
        prefix = f"gpu{gpu}/" if panel.is_gpu else ""
        color = _color(gpu) if panel.is_gpu else _HOST_COLOR
        line = PlotLine(
            (canvas.begins + canvas.ends) / 2,
            panel.values(canvas.samples, prefix),
            panel.values(canvas.samples.lowest(), prefix),
            panel.values(canvas.samples.highest(), prefix),
        )
        if np.isfinite(line.mean).any():
            _draw_line(axes, line, canvas, color, canvas.labels[gpu] if has_labels else "")
            lowest, highest = min(lowest, float(np.nanmin(line.low))), max(highest, float(np.nanmax(line.high)))
    if panel.limit is not None and highest >= lowest:
        highest = max(highest, *_draw_limits(axes, panel.limit, canvas), 0.0)
    if highest < lowest:
        axes.text(0.5, 0.5, "no reading", transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set_yticks([])
    else:
        _scale_axes(axes, panel, lowest, highest)
    end = float(canvas.ends[-1])
    margin = 0.015 * end or 0.5
    axes.set_xlim(-margin, end + margin)


def _draw_line(axes: Any, groups: PlotLine, canvas: _Canvas, color: str, label: str) -> None:
    is_crowded = len(canvas.labels) > _MAX_BAND_GPUS
    points = canvas.points // 4 if is_crowded else canvas.points
    line = _thin(groups, canvas.samples.counts, canvas.samples.gaps(), points)
    marked = 2.5 if len(line.x) <= _MAX_MARKED_POINTS else 1.5  # an isolated point would be invisible without a marker
    (artist,) = axes.plot(
        line.x, line.mean, "o-", color=color, linewidth=1.4, markersize=marked, zorder=3, label=label or None
    )
    if len(groups.x) > points and not is_crowded:
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.22, linewidth=0, zorder=2)
        canvas.legend.setdefault("lowest to highest", axes.fill_between([], [], color="0.7", linewidth=0))
    if label:
        canvas.legend.setdefault(label, artist)


def _draw_limits(axes: Any, limit: tuple[str, str, str], canvas: _Canvas) -> list[float]:
    """Draw the limit of each GPU, in its color unless several GPUs share it; return the limits."""
    metric, label, unit = limit
    columns = {gpu: _column(canvas.samples.highest(), f"gpu{gpu}/{metric}") for gpu in canvas.labels}
    values = {gpu: float(np.nanmax(column)) for gpu, column in columns.items() if np.isfinite(column).any()}
    for value in sorted(set(values.values())):
        gpus = [gpu for gpu in values if values[gpu] == value]
        color = _color(gpus[0]) if len(canvas.labels) > 1 and len(gpus) == 1 else _HOST_COLOR
        artist = axes.axhline(value, color=color, linestyle=(0, (6, 3)), linewidth=1.1, zorder=2)
        canvas.legend.setdefault(f"{label}, {value:.4g} {unit}" if len(set(values.values())) == 1 else label, artist)
    return list(values.values())


def _scale_axes(axes: Any, panel: Panel, lowest: float, highest: float) -> None:
    if panel.top is not None:
        axes.set_ylim(-0.03 * panel.top, 1.05 * panel.top)
    elif panel.include_zero:
        axes.set_ylim(-0.03 * highest, 1.1 * highest or 1.0)
    else:
        room = max(0.1 * (highest - lowest), 2.0)  # so that a constant reading is a flat line
        axes.set_ylim(lowest - room, highest + room)


def _shade_spans(axes: Any, spans: list[tuple[float, float]], **style: Any) -> Any:
    """Shade spans (begin, width) over the height of the axes. They form one collection, as there may be thousands."""
    return axes.broken_barh(spans, (0, 1), transform=axes.get_xaxis_transform(), linewidth=0, **style)


# ---------------------------------------------------------------- from samples to lines


def _phases(canvas: _Canvas) -> Iterator[tuple[str, float, float]]:
    """Yield (phase, begin, end); a phase ends where the next one begins, and at a gap."""
    phases, gaps, begins, ends = canvas.samples.phases, canvas.samples.gaps(), canvas.begins, canvas.ends
    begin = 0
    for index in range(1, len(phases) + 1):
        is_end = index == len(phases)
        if is_end or gaps[index] or phases[index] != phases[begin]:
            until = ends[index - 1] if is_end or gaps[index] else begins[index]
            yield phases[begin], float(begins[begin]), float(until)
            begin = index


def _average_groups(line: PlotLine, counts: Floats, part: slice, size: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return time, mean, lowest and highest of groups of about `size` points, then a NaN that interrupts the line.

    The values of a group are NaN if none of its points is finite.
    """
    x, y = line.x[part], line.mean[part]
    starts = np.linspace(0, len(x), math.ceil(len(x) / size), endpoint=False).astype(np.int64)
    is_finite = np.isfinite(y)
    known = np.where(is_finite, counts[part], 0.0)
    num_known = np.add.reduceat(known, starts)
    is_known = num_known > 0
    total = np.add.reduceat(np.where(is_finite, y, 0.0) * known, starts)
    mean = np.where(is_known, total / np.maximum(num_known, 1), math.nan)
    low = np.where(is_known, np.minimum.reduceat(np.where(is_finite, line.low[part], math.inf), starts), math.nan)
    high = np.where(is_known, np.maximum.reduceat(np.where(is_finite, line.high[part], -math.inf), starts), math.nan)
    when = np.add.reduceat(x, starts) / np.diff(starts, append=len(x))
    return np.append(when, when[-1]), np.append(mean, math.nan), np.append(low, math.nan), np.append(high, math.nan)


def _gpus(samples: MachineSamples) -> list[int]:
    named = {name.partition("/")[0] for name in (*samples.values, *samples.devices)}
    return sorted(int(name[3:]) for name in named if name.startswith("gpu"))


def _label(gpu: int, samples: MachineSamples) -> str:
    device = samples.devices.get(f"gpu{gpu}")
    return f"GPU {gpu}: {device.name}" if device and device.name else f"GPU {gpu}"


def _color(gpu: int) -> str:
    return COLORS[gpu % len(COLORS)]


def _seconds(samples: ThinnedSamples) -> float:
    return float(samples.ends_s[-1] - samples.times_s[0])


def _metric(name: str) -> Callable[[MachineSamples, str], Floats]:
    return lambda samples, prefix: _column(samples, prefix + name)


def _memory_percent(samples: MachineSamples, prefix: str) -> Floats:
    return 100 * _column(samples, f"{prefix}memory_gib") / _column(samples, f"{prefix}memory_total_gib")


def _column(samples: MachineSamples, name: str) -> Floats:
    return samples.values.get(name, np.full(len(samples), math.nan))


_TIME_UNITS = (
    (180.0, ("s", 1.0)),
    (3 * 3600.0, ("min", 60.0)),
    (3 * 86400.0, ("h", 3600.0)),
    (math.inf, ("days", 86400.0)),
)
_MAX_MARKED_POINTS = 60  # a line with more points has markers as thin as the line
_MAX_BAND_GPUS = 2  # with more GPUs, the band from lowest to highest is not drawn
_LETTER_WIDTH = 0.012  # as a fraction of the width of the axes
_MAX_LEGEND_COLUMNS = 4
_HOST_COLOR = "#444444"

GPU_PANELS: tuple[Panel, ...] = (
    Panel("utilization", "utilization (%)", _metric("util"), top=100.0),
    Panel("memory", "memory (GiB)", _metric("memory_gib"), limit=("memory_total_gib", "memory capacity", "GiB")),
    Panel("temperature", "temperature (°C)", _metric("temperature_c"), include_zero=False),
    Panel("power", "power (W)", _metric("power_w"), limit=("power_limit_w", "power limit", "W")),
)
MACHINE_PANELS: tuple[Panel, ...] = (
    Panel("GPU utilization", "utilization (%)", _metric("util"), top=100.0),
    Panel("GPU memory", "memory in use (%)", _memory_percent, top=100.0),
    Panel("CPU", "CPU in use (%)", _metric("cpu/percent"), top=100.0, is_gpu=False),
    Panel("RAM", "RAM in use (%)", _metric("ram/percent"), top=100.0, is_gpu=False),
)
