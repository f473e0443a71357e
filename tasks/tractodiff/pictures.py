"""Plots of streamlines, colored by direction: red left-right, green front-back, blue up-down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runner.base.picture import encode_png, new_figure

Array = np.ndarray[Any, Any]
# name -> elevation and azimuth in degrees, magnification, and whether the upward axis is seen end on
VIEWS = {"from the right and front": (20, 35, 0.9, False), "from above": (90, -90, 1.1, True)}
MAX_LINES = 400  # streamlines per view; more would occlude each other


def draw_side_by_side(sets: Mapping[str, Sequence[Array]], title: str) -> bytes:
    """Return a PNG: one column per set of lines (n, 3) in RAS mm, one row per view, with the same axis limits."""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection  # slow to import; registers the projection "3d"

    figure = new_figure(4.9 * len(sets), 9.0)
    points = np.concatenate([line for lines in sets.values() for line in lines])
    low, high = points.min(axis=0), points.max(axis=0)
    number = 0
    for view, (elevation, azimuth, zoom, end_on) in VIEWS.items():
        for name, lines in sets.items():
            number += 1
            axes = figure.add_subplot(len(VIEWS), len(sets), number, projection="3d", proj_type="ortho")
            segments, colours = _color_segments(lines)
            axes.add_collection3d(Line3DCollection(segments, colors=colours, linewidths=1.1, alpha=0.75))
            axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), zlim=(low[2], high[2]))
            axes.set(xlabel="right (mm)", ylabel="front (mm)", zlabel="up (mm)")
            axes.set_box_aspect(np.maximum(high - low, 1e-3), zoom=zoom)
            axes.view_init(elevation, azimuth)
            for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
                axis.set_pane_color((0.97, 0.97, 0.97))
                axis.get_major_locator().set_params(nbins=4)
                axis.set_tick_params(labelsize=8)
            if end_on:  # its ticks would overlap
                axes.set(zticks=[], zlabel="")
            axes.set_title(f"{len(lines)} {name}, {view}", fontsize=10)
    figure.suptitle(f"{title}\ndirections: red to the side, green to the front, blue upwards", fontsize=11)
    return encode_png(figure)


def _color_segments(lines: Sequence[Array]) -> tuple[Array, Array]:
    """Return the segments (n, 2, 3) of at most 400 evenly spaced lines, and their colors (n, 3)."""
    shown = [lines[i] for i in np.linspace(0, len(lines) - 1, min(MAX_LINES, len(lines))).astype(int)]
    segments = np.concatenate([np.stack([line[:-1], line[1:]], axis=1) for line in shown])
    steps = np.abs(segments[:, 1] - segments[:, 0])
    return segments, 0.85 * steps / np.maximum(steps.max(axis=1, keepdims=True), 1e-6)
