"""Streamlines in space, coloured by direction: red to the side, green to the front, blue upwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runner.base.packages import require
from runner.base.picture import new_figure, png

Array = np.ndarray[Any, Any]
VIEWS = {"from the left and front": (18, 150), "from above": (90, -90)}  # elevation and azimuth in degrees
MOST = 400  # streamlines in one view; more hide each other


def side_by_side(sets: Mapping[str, Sequence[Array]], title: str) -> bytes:
    """Return a PNG: one column per set of lines (n, 3) in RAS mm, one row per view, all in the same box."""
    collection = require("mpl_toolkits.mplot3d.art3d", "plots").Line3DCollection
    require("mpl_toolkits.mplot3d", "plots")  # makes the projection known
    figure = new_figure(4.8 * len(sets), 9.2)
    points = np.concatenate([line for lines in sets.values() for line in lines])
    low, high = points.min(axis=0), points.max(axis=0)
    for row, (view, (elevation, azimuth)) in enumerate(VIEWS.items()):
        for column, (name, lines) in enumerate(sets.items()):
            axes = figure.add_subplot(len(VIEWS), len(sets), row * len(sets) + column + 1, projection="3d")
            shown = [lines[i] for i in np.linspace(0, len(lines) - 1, min(MOST, len(lines))).astype(int)]
            segments = np.concatenate([np.stack([line[:-1], line[1:]], axis=1) for line in shown])
            steps = np.abs(np.diff(segments, axis=1)[:, 0])
            colours = steps / np.maximum(steps.max(axis=1, keepdims=True), 1e-6)
            axes.add_collection3d(collection(segments, colors=0.9 * colours, linewidths=0.9, alpha=0.7))
            axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), zlim=(low[2], high[2]))
            axes.set_box_aspect(np.maximum(high - low, 1e-3))
            axes.view_init(elevation, azimuth)
            axes.set(xlabel="right (mm)", ylabel="front (mm)", zlabel="up (mm)")
            axes.set_title(f"{name}, {view}\n{len(lines)} streamlines", fontsize=10)
    figure.suptitle(f"{title}\nred: left and right, green: back and front, blue: down and up", fontsize=11)
    return png(figure)
