"""What the charts of a run share: their types, and curves over updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.base.picture import COLORS, new_figure
from runner.monitor.machine_plots import PlotLine, shade_phases, thinned
from runner.tools.report.run_data import Curve, RunData

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Drawing:
    """A figure with a text alternative.

    described  what it shows, in a sentence with its numbers, for readers who cannot see it
    note       shown below the figure
    stacked    curves of a stack plot in the first axes, whose values cannot be read from its areas
    """

    figure: Any
    described: str
    note: str = ""
    stacked: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A chart on the page; a wide one has a separate row."""

    id: str
    title: str
    described: str
    svg: str
    note: str
    wide: bool


@dataclass(frozen=True)
class Missing:
    """What is not on the page, and why."""

    title: str
    reason: str


@dataclass(frozen=True)
class Kind:
    """A row of CHARTS: `draw` returns a Drawing, or the reason why there is none."""

    id: str
    title: str
    draw: Callable[[RunData], Drawing | str]
    wide: bool = False


def binned(curve: Curve, points: int = 320) -> PlotLine:
    """Return a line of at most about this many points; values that are not finite are left out."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.asarray(curve.y, dtype=np.float64)
    return thinned(x, y, points=points)


def smoothed(curve: Curve, share: float = 0.04) -> Curve:
    """Return the exponential moving mean over this share of the rows, forth and back so that it does not lag behind."""
    keep = 1 - 1 / max(1.0, share * len(curve))
    forth, back = _moving(curve.y, keep), _moving(reversed(curve.y), keep)
    return Curve(curve.x, [(one + other) / 2 for one, other in zip(forth, reversed(back), strict=True)])


def smoothed_by_phase(story: RunData, curve: Curve) -> Curve:
    """Return the smoothed curve of each phase, one after the other: what one ends with says nothing of the next."""
    ends = [end for _, end in story.curves.phases.values()]
    edges = [0, *np.searchsorted(np.asarray(curve.x), ends, side="right").tolist(), len(curve)]
    parts = [Curve(curve.x[begin:end], curve.y[begin:end]) for begin, end in pairwise(edges) if end > begin]
    return Curve(curve.x, [value for part in parts for value in smoothed(part).y])


def _moving(values: Iterable[float], keep: float) -> list[float]:
    """Return the exponential moving mean without the pull of its first value; NaN before the first that is finite."""
    mean = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight if weight else math.nan)
    return found


def over_updates(story: RunData, key: str, name: str, color: str, *, from_0: bool = False) -> Drawing | str:
    curve = story.curves[key]
    if not any(math.isfinite(value) for value in curve.y):
        return no_rows(story, f"no row has {key}")
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    line = binned(curve)
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
    mark = {"marker": "o", "markersize": 3} if len(curve) <= MARKED else {}
    axes.plot(line.x, line.mean, color=color, linewidth=1.6, **mark)
    dress(axes, story, name)
    if from_0:
        axes.set_ylim(min(0.0, float(np.nanmin(line.low))), 1.08 * max(0.0, float(np.nanmax(line.high))) or 1.0)
    return Drawing(figure, from_to(name, curve))


def dress(axes: Any, story: RunData, label: str, *, with_names: bool = True) -> None:
    """Name the axes, and shade the phases where there are several, and name them where there is room."""
    axes.set_ylabel(label)
    axes.set_xlabel("update")
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    phases = story.curves.phases
    whole = max((end for _, end in phases.values()), default=0) or 1
    axes.set_xlim(-0.02 * whole, 1.02 * whole)
    if len(phases) < 2:
        return
    shade_phases(axes, [(name, *ends) for name, ends in phases.items()], whole, with_names=with_names)


def from_to(name: str, curve: Curve) -> str:
    known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    if not known:
        return f"{name}: no finite value"
    (first_x, first), (last_x, last) = known[0], known[-1]
    if len(known) == 1:
        return f"{name} {last:.4g} at update {last_x:.0f}"
    return f"{name} from {first:.4g} at update {first_x:.0f} to {last:.4g} at update {last_x:.0f}"


def interpolated(x: Floats, curve: Curve) -> Floats:
    """Return the values of the curve at these updates, 0 where it has none."""
    found = np.zeros(len(x))
    values = np.nan_to_num(np.asarray(curve.y, dtype=np.float64), posinf=0.0, neginf=0.0)
    found[np.searchsorted(x, np.asarray(curve.x, dtype=np.float64))] = np.maximum(values, 0.0)
    return found


def no_rows(story: RunData, otherwise: str) -> str:
    return story.missing.get("metrics", otherwise)


LEGEND: Mapping[str, Any] = {"fontsize": 8, "handlelength": 1.0, "columnspacing": 1.0}
SIZE = (6.2, 3.1)  # inches: letters of 10 points can be read where a telephone shows it
MARKED = 60
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
