"""The roofline: the throughput of an update and the limits of its device, by arithmetic intensity.

Source: Williams, Waterman and Patterson, Roofline: An Insightful Visual Performance Model, CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.picture import new_figure
from runner.tools.measure.counting import Count


@dataclass(frozen=True)
class Roofs:
    """The measured limits of a device.

    compute  format -> floating-point operations per second in products of matrices
    memory   bytes per second, read and written
    """

    device_name: str
    compute: Mapping[str, float]
    memory: float

    def over(self, intensity: float, name: str) -> float:
        """Return the attainable floating-point operations per second in a format, at this FLOP per byte."""
        return min(self.compute[name], intensity * self.memory)

    def ridge(self, name: str) -> float:
        """Return the FLOP per byte above which arithmetic, not memory, is the limit."""
        return self.compute[name] / self.memory


@dataclass(frozen=True)
class RooflinePoint:
    """An update.

    name    of the task
    format  of its products: a name among the roofs
    """

    name: str
    count: Count
    seconds: float
    format: str

    @property
    def intensity(self) -> float:
        """FLOP per byte; a lower bound, because caches save memory accesses."""
        return self.count.flops / self.count.bytes

    @property
    def throughput(self) -> float:
        """Floating-point operations per second."""
        return self.count.flops / self.seconds


def judged(roofs: Roofs, point: RooflinePoint) -> str:
    """Return the sentence with the throughput of the update and the roof above it."""
    share = point.throughput / roofs.over(point.intensity, point.format)
    of_memory = point.intensity < roofs.ridge(point.format)
    roof = f"memory at {roofs.memory / 1e9:,.4g} GB/s" if of_memory else f"{point.format} products of matrices"
    rate = f"{_in_words(point.throughput)} at {point.intensity:.3g} FLOP/byte"
    if of_memory and share > 1:
        return f"an update of {point.name} does {rate}: more than {roof} allows, so much of it is in caches"
    return f"an update of {point.name} does {rate}: {share:.0%} of the roof over it, {roof}"


def drawn(roofs: Roofs, point: RooflinePoint | None) -> Any:
    """Return the figure with the roofs and the update; formats that the update does not use are pale."""
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    unit, name = (1e12, "TFLOP/s") if max(roofs.compute.values()) >= 1e12 else (1e9, "GFLOP/s")
    left, right = _ends(roofs, point)
    used = point.format if point else None
    top = max(roofs.compute.values())
    axes.plot([left, top / roofs.memory], [left * roofs.memory / unit, top / unit], color=_INK, linewidth=1.5)
    label = f"memory, {_three(roofs.memory / 1e9)} GB/s"
    axes.annotate(label, (left, left * roofs.memory / unit), (6, -2), textcoords="offset points", va="top", color=_INK)
    for text, value, height in _labels(roofs):
        is_used = text == used or used is None
        color = _INK if is_used else _PALE
        axes.plot([value / roofs.memory, right], [value / unit] * 2, color=color, linewidth=1.5 if is_used else 1.0)
        words = f" {text} {_three(value / unit)}"
        axes.annotate(
            words,
            (right, value / unit),
            (right, height / unit),
            va="center",
            color=color,
            annotation_clip=False,
        )
    if point:
        _mark(axes, roofs, point, unit, name)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        xlabel="arithmetic intensity, FLOP per byte of memory traffic without caches",
        ylabel=f"throughput, {name}",
        title=f"Roofline of {roofs.device_name}, measured",
    )
    rates = [left * roofs.memory, top, *([point.throughput] if point else [])]
    axes.set_ylim(min(rates) / unit / 3, max(rates) / unit * 3)
    axes.grid(which="major", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _mark(axes: Any, roofs: Roofs, point: RooflinePoint, unit: float, name: str) -> None:
    """Draw the update, and a line from it to the roof over it."""
    x, y = point.intensity, point.throughput / unit
    roof = roofs.over(x, point.format)
    axes.plot([x, x], [y, roof / unit], color=_ACCENT, linewidth=1.0, linestyle=":")
    axes.plot([x], [y], color=_ACCENT, marker="o", markersize=8, linestyle="none", label="update")
    share = point.throughput / roof
    judgement = f"{share:.0%} of the roof" if share <= 1 else "more than memory allows: caches"
    words = f"update of {point.name}, {point.format}\n{_three(y)} {name}\n{judgement}"
    left, right = map(math.log10, _ends(roofs, point))
    has_room = (math.log10(x) - left) / (right - left) < _ROOM
    side = {"ha": "left", "xytext": (10, -4)} if has_room else {"ha": "right", "xytext": (-10, -4)}
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
    axes.annotate(words, (x, y), textcoords="offset points", va="top", color=_ACCENT, bbox=ground, **side)


def _labels(roofs: Roofs) -> list[tuple[str, float, float]]:
    """Return name, value and height of the label of each roof, upwards, without overlap."""
    found: list[tuple[str, float, float]] = []
    for name, value in sorted(roofs.compute.items(), key=lambda pair: pair[1]):
        height = max(value, found[-1][2] * _APART) if found else value
        found.append((name, value, height))
    return found


def _ends(roofs: Roofs, point: RooflinePoint | None) -> tuple[float, float]:
    """Return the ends of the axis of intensities: powers of ten around the ridges and the update."""
    ridges = [roofs.ridge(name) for name in roofs.compute]
    seen = [*ridges, *([point.intensity] if point else [])]
    return 10.0 ** (math.floor(math.log10(min(seen))) - 1), 10.0 ** (math.floor(math.log10(max(seen))) + 2)


def _three(value: float) -> str:
    """Return the number with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _in_words(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


_INK, _PALE, _ACCENT = "0.25", "0.65", "#c1440e"
_ROOM = 0.76  # of the axis: further right, the text is on the left of the update
_APART = 1.45  # of two labels, on an axis of about four powers of ten
