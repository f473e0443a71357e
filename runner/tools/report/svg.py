"""Render figures as inline SVG: text stays text, colors follow the theme of the page, ids are unique."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as Tree

import matplotlib as mpl  # slow to import

from runner.base.picture import COLORS
from runner.tools.report.chart_parts import Chart, Drawing
from runner.tools.report.hover import SVG_NAMESPACE, add_hover_bands

_LINK = "{http://www.w3.org/1999/xlink}href"


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
    buffer = io.BytesIO()
    drawing.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = Tree.fromstring(buffer.getvalue())  # trusted: written by matplotlib above
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG_NAMESPACE}}}metadata", f"{{{SVG_NAMESPACE}}}style"):
                parent.remove(child)
    _prefix_ids(root, name)
    for element in root.iter():
        for key, value in element.attrib.items():
            element.attrib[key] = _shorten_coordinates(key, _replace_colors(value))
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


def _prefix_ids(root: Tree.Element, name: str) -> None:
    """Prefix the ids that are referenced with `name`, and remove the others."""
    used = set()
    for element in root.iter():
        for value in element.attrib.values():
            used.update(_REFERENCE.findall(value))
        if _LINK in element.attrib:
            used.add(element.attrib[_LINK][1:])
    for element in root.iter():
        if "id" in element.attrib:
            element_id = element.attrib.pop("id")
            if element_id in used:
                element.attrib["id"] = f"{name}-{element_id}"
        link = element.attrib.pop(_LINK, None)
        if link is not None:  # to an element of the figure, or an embedded image (data:)
            element.attrib["href"] = f"#{name}-{link[1:]}" if link.startswith("#") else link
        for key, value in element.attrib.items():
            element.attrib[key] = _REFERENCE.sub(lambda match: f"url(#{name}-{match[1]})", value)


def _replace_colors(value: str) -> str:
    return _HEX.sub(lambda match: PALETTE.get(match[0], match[0]), value)


def _shorten_coordinates(key: str, value: str) -> str:
    """Round coordinates to one decimal: a tenth of a point is not visible."""
    return _LONG.sub(_round_match, value) if key in _COORDINATES else value


def _round_match(match: re.Match[str]) -> str:
    return f"{float(match[0]):.1f}".removesuffix(".0")


_HEX = re.compile(r"#[0-9a-f]{6}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_LONG = re.compile(r"-?\d+\.\d{2,}")
_COORDINATES = ("d", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "points")
INK, MUTED, GRID = "#111111", "#666666", "#d9d9d9"
# color of a figure -> CSS variable of the page, which has a light and a dark value
PALETTE = {
    INK: "var(--ink)",
    "#222222": "var(--ink)",
    "#404040": "var(--ink)",
    "#444444": "var(--strong)",
    "#595959": "var(--muted)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    "#e0e0e0": "var(--grid)",
    "#ffffff": "var(--card)",
    "#bfbfbf": "var(--hatch)",
    **{color.lower(): f"var(--c{number})" for number, color in enumerate(COLORS)},
    **{
        color: f"var(--s{number})"
        for number, color in enumerate(("#e3eef8", "#fcebd8", "#e2f2df", "#f5e1ee", "#ededed", "#fcf6cf"))
    },
}
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
