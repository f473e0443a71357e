"""Types and helper functions shared by the charts of a run, and the drawing of curves over updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.base.picture import COLORS, new_figure
from runner.monitor.machine_plots import PlotLine, shade_phases, thin_line
from runner.tools.report.run_data import Curve, RunData

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Drawing:
    """A figure with a text alternative.

    description  text alternative: a sentence with the numbers
    note         shown below the figure
    stacked      curves of the stack plot in the first axes; the page shows their values at the mouse pointer
    """

    figure: Any
    description: str
    note: str = ""
    stacked: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A chart on the page; a wide chart spans the full row."""

    id: str
    title: str
    description: str
    svg: str
    note: str
    wide: bool


@dataclass(frozen=True)
class MissingPart:
    """A part that is missing from the page, with the reason."""

    title: str
    reason: str


@dataclass(frozen=True)
class ChartSpec:
    """A chart of a CHARTS table: `draw` returns a Drawing, or the reason why there is none."""

    id: str
    title: str
    draw: Callable[[RunData], Drawing | str]
    wide: bool = False


def bin_curve(curve: Curve, points: int = 320) -> PlotLine:
    """Return the curve without non-finite values, reduced to about `points` points."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.asarray(curve.y, dtype=np.float64)
    return thin_line(x, y, points=points)


def smooth(curve: Curve) -> Curve:
    """Smooth the curve without lag: average a forward and a backward exponential moving average."""
    keep = 1 - 1 / max(1.0, _WINDOW * len(curve))
    forward, backward = _moving_average(curve.y, keep), _moving_average(reversed(curve.y), keep)
    return Curve(curve.x, [(a + b) / 2 for a, b in zip(forward, reversed(backward), strict=True)])


def smooth_by_phase(run: RunData, curve: Curve) -> Curve:
    """Smooth the curve of each phase separately."""
    ends = [end for _, end in run.curves.phases.values()]
    edges = [0, *np.searchsorted(np.asarray(curve.x), ends, side="right").tolist(), len(curve)]
    parts = [Curve(curve.x[begin:end], curve.y[begin:end]) for begin, end in pairwise(edges) if end > begin]
    return Curve(curve.x, [value for part in parts for value in smooth(part).y])


def _moving_average(values: Iterable[float], keep: float) -> list[float]:
    """Return the exponential moving average with bias correction; NaN before the first finite value."""
    mean = weight = 0.0
    means: list[float] = []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(mean / weight if weight else math.nan)
    return means


def draw_over_updates(run: RunData, key: str, name: str, color: str) -> Drawing | str:
    """Draw mean and range of a metric over the updates, from 0; return the reason if there is nothing to draw."""
    curve = run.curves[key]
    if not any(math.isfinite(value) for value in curve.y):
        return missing_reason(run, f"metrics.jsonl has no finite {key}")
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    line = bin_curve(curve)
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
    mark = {"marker": "o", "markersize": 3} if len(curve) <= MAX_MARKED_POINTS else {}
    axes.plot(line.x, line.mean, color=color, linewidth=1.6, **mark)
    format_axes(axes, run, name)
    axes.set_ylim(min(0.0, float(np.nanmin(line.low))), 1.08 * max(0.0, float(np.nanmax(line.high))) or 1.0)
    return Drawing(figure, describe_range(name, curve))


def format_axes(axes: Any, run: RunData, label: str, *, with_names: bool = True) -> None:
    """Label the axes. If there are several phases, shade them, and name them where there is space."""
    label_axes(axes, "update", label)
    phases = run.curves.phases
    total = max((end for _, end in phases.values()), default=0) or 1
    axes.set_xlim(-0.02 * total, 1.02 * total)
    if len(phases) < 2:
        return
    shade_phases(axes, [(name, *ends) for name, ends in phases.items()], total, with_names=with_names)


def label_axes(axes: Any, x: str, y: str, *, is_whole: bool = True) -> None:
    """Label the axes and draw a grid.

    is_whole  ticks of the x axis are integers
    """
    axes.set(xlabel=x, ylabel=y)
    axes.locator_params(axis="x", integer=is_whole)
    axes.grid(visible=True)
    axes.set_axisbelow(True)


def describe_range(name: str, curve: Curve) -> str:
    """Describe a curve by its first and last finite value, for readers who do not see the picture."""
    known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    if not known:
        return f"{name}: no finite value"
    (first_x, first), (last_x, last) = known[0], known[-1]
    if len(known) == 1:
        return f"{name} {last:.4g} at update {last_x:.0f}"
    return f"{name} from {first:.4g} at update {first_x:.0f} to {last:.4g} at update {last_x:.0f}"


def align_to(x: Floats, curve: Curve) -> Floats:
    """Return the values of the curve at the updates `x`; missing, non-finite and negative values become 0."""
    values_at = np.zeros(len(x))
    values = np.nan_to_num(np.asarray(curve.y, dtype=np.float64), posinf=0.0, neginf=0.0)
    values_at[np.searchsorted(x, np.asarray(curve.x, dtype=np.float64))] = np.maximum(values, 0.0)
    return values_at


def missing_reason(run: RunData, otherwise: str) -> str:
    """Return why the run has no metrics, or `otherwise` if it has some."""
    return run.missing.get("metrics", otherwise)


SIZE = (6.2, 3.1)  # inches: text of 10 points is readable on a phone
MAX_MARKED_POINTS = 60
_WINDOW = 0.04  # length of the window of `smooth`, as a fraction of the number of points
PART_COLORS = {
    "data": COLORS[4],
    "transfer": COLORS[3],
    "forward": COLORS[5],
    "backward": COLORS[0],
    "optimizer": COLORS[2],
    "wait": COLORS[1],
    "evaluation": "#b07aa1",
    "saving": "#9c755f",
    "hooks": "#bab0ac",
    "other": COLORS[7],
}
