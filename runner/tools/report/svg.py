"""Render figures as inline SVG: text stays text, and ids are unique."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as Tree

import matplotlib as mpl  # slow to import
import numpy as np

from runner.tools.report.chart_parts import Chart, Drawing
from runner.tools.report.run_data import Curve


@contextmanager
def page_style() -> Iterator[None]:
    """Apply matplotlib settings for figures of the page: text stays text, and "$" does not start a formula."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def make_chart(drawing: Drawing, name: str, title: str, *, wide: bool = False) -> Chart:
    """Return the chart of a drawing; must be called inside `page_style`."""
    return Chart(name, title, drawing.description, render_svg(drawing, name, title), drawing.note, wide)


def render_svg(drawing: Drawing, name: str, title: str) -> str:
    """Return the figure as an <svg> element for the page; must be called inside `page_style`.

    name  prefix of every id in it, so that the ids of several figures on a page differ
    """
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawing.figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = _STYLE_ELEMENT.sub("", buffer.getvalue()).replace("xlink:href", "href")
    root = Tree.fromstring(_ID.sub(rf"\1{name}-", text))  # trusted: written by matplotlib above
    for element in root.iter():
        for key in _COORDINATES & element.attrib.keys():
            element.attrib[key] = _LONG.sub(_round_match, element.attrib[key])  # a tenth of a point is not visible
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    add_hover_bands(root, drawing)
    root.attrib |= {"width": "100%", "role": "img", "aria-labelledby": f"{name}-title {name}-desc", "id": name}
    root.attrib.pop("height", None)
    for tag, text in (("desc", drawing.description), ("title", title)):
        element = Tree.Element(f"{{{SVG_NAMESPACE}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(0, element)
    root.attrib["style"] = f"aspect-ratio: {width:.4g} / {height:.4g}"
    Tree.register_namespace("", SVG_NAMESPACE)
    return Tree.tostring(root, encoding="unicode")


def _round_match(match: re.Match[str]) -> str:
    return f"{float(match[0]):.1f}".removesuffix(".0")


_STYLE_ELEMENT = re.compile(r"<style.*?</style>", re.DOTALL)
_ID = re.compile(r'( id="|url\(#|href="#)')
_LONG = re.compile(r"-?\d+\.\d{2,}")
_COORDINATES = {"d", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "points"}
INK, MUTED, GRID = "#111111", "#666666", "#d9d9d9"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "accel-run",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "path.simplify_threshold": 0.3,
}


# ---------------------------------------------------------------- values under the pointer, without a script

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
Arrays = dict[str, tuple[Any, Any]]  # name -> x and y, arrays (N,)


def add_hover_bands(root: Tree.Element, drawing: Drawing) -> None:
    """Append invisible vertical bands to the <svg>; browsers show the title of the band under the pointer.

    Axes without a curve get no bands. Call it after drawing the figure, when its layout is final.
    """
    group = Tree.Element(f"{{{SVG_NAMESPACE}}}g", {"class": "hover"})
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    for number, axes in enumerate(drawing.figure.axes):
        for left, right, text in _bands(axes, _get_curves(axes) | ({} if number else _to_arrays(drawing.stacked))):
            (x0, y0), (x1, y1) = _to_figure(axes, left, 0.0), _to_figure(axes, right, 1.0)
            box = {"x": x0 * width, "y": (1 - y1) * height, "width": (x1 - x0) * width, "height": (y1 - y0) * height}
            band = Tree.SubElement(
                group, f"{{{SVG_NAMESPACE}}}rect", {key: f"{value:.1f}" for key, value in box.items()}
            )
            Tree.SubElement(band, f"{{{SVG_NAMESPACE}}}title").text = text
    if len(group):
        root.append(group)


def _bands(axes: Any, curves: Arrays) -> Iterator[tuple[float, float, str]]:
    """Yield the left and right edge (in data coordinates) and the text of each band of these axes."""
    if not curves:
        return
    x = max((x for x, _ in curves.values()), key=len)
    low, high = sorted(axes.get_xlim())
    x = np.unique(x[np.isfinite(x) & (x >= low) & (x <= high)])
    x = x[np.unique(np.linspace(0, len(x) - 1, _MAX_BANDS).round().astype(int))] if len(x) > _MAX_BANDS else x
    edges = [low, *((x[1:] + x[:-1]) / 2), high]
    for at, left, right in zip(x, edges, edges[1:], strict=False):
        shown = [f"{name}: {value:.4g}" for name, value in _values_at(curves, at, right - left)]
        if shown:
            yield left, right, "\n".join((f"{_x_label(axes)} {at:.6g}", *shown))


def _x_label(axes: Any) -> str:
    """Return the label of the x axis; in a column of panels, only the last one has a label."""
    labels = (panel.get_xlabel() for panel in (axes, *axes.figure.axes))
    return next(filter(None, labels), "x")


def _get_curves(axes: Any) -> Arrays:
    """Return name -> (x, y) of the curves of the axes, both (N,); limits drawn across the axes are not curves."""
    curves: Arrays = {}
    for line in axes.get_lines():
        x, y = (np.asarray(values, dtype=np.float64) for values in line.get_data())
        if line.get_transform() != axes.transData or not len(x):
            continue  # axhline and axvline
        label = str(line.get_label())
        name = axes.get_ylabel() or axes.get_title(loc="left") or "value" if label.startswith("_") else label
        if name not in curves:
            curves[name] = (x, y)
    return curves


def _to_arrays(curves: Mapping[str, Curve]) -> Arrays:
    return {name: (np.asarray(curve.x, float), np.asarray(curve.y, float)) for name, curve in curves.items()}


def _values_at(curves: Arrays, at: float, width: float) -> Iterator[tuple[str, float]]:
    """Yield the value of each curve that has a finite one within the band."""
    for name, (x, y) in curves.items():
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.any():
            continue
        nearest = int(np.argmin(np.abs(x[finite] - at)))
        if abs(x[finite][nearest] - at) <= width:
            yield name, float(y[finite][nearest])


def _to_figure(axes: Any, x: float, share: float) -> tuple[float, float]:
    """Convert a point (x in data coordinates, y as a fraction of the axes' height) to fractions of the figure."""
    across = axes.figure.transFigure.inverted().transform(axes.transData.transform((x, axes.get_ylim()[0])))[0]
    box = axes.get_position()
    return float(across), float(box.y0 + share * box.height)


_MAX_BANDS = 40
