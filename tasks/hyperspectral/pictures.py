"""Plots of score maps: a single map, or several beside the scene, the RX map and the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.base.picture import encode_png, new_figure

from .metrics import UNKNOWN

Array = np.ndarray[Any, Any]
LIMIT = 8.0  # scores are clipped to this range


@dataclass(frozen=True)
class Map:
    """Data of one cube: cube (H, W, C), RX and trained scores (H, W), positive for anomalies, mask (H, W)."""

    title: str
    cube: Array
    rx: Array
    score: Array
    mask: Array


def score_picture(one: Map, unit: str) -> bytes:
    """Return the PNG of one score map, with its scale."""
    figure = new_figure(5.2, 4.4)
    axes = figure.add_subplot()
    _show_score(figure, axes, one.score, unit)
    axes.set_title(f"Score, {one.title}", fontsize=10)
    return encode_png(figure)


def maps_picture(maps: Sequence[Map], unit: str) -> bytes:
    """Return the PNG of one row per cube: false color, RX score, trained score, mask with detections."""
    figure = new_figure(11.5, 2.75 * len(maps) + 0.5)
    grid = figure.subplots(len(maps), 4, squeeze=False)
    heads = ("False colour", "RX alone, sigmas above threshold", f"Trained, {unit}", "Mask and detections")
    for axes, head in zip(grid[0], heads, strict=True):
        axes.set_title(head, fontsize=10)
    for row, one in zip(grid, maps, strict=True):
        row[0].imshow(false_colour(one.cube))
        row[0].set_ylabel(one.title, fontsize=9)
        _show_score(figure, row[1], one.rx)
        _show_score(figure, row[2], one.score)
        row[3].imshow(verdict(one.score, one.mask))
        for axes in row:
            axes.set_xticks([])
            axes.set_yticks([])
    patch = _patch()
    figure.legend(
        handles=[patch(facecolor=np.array(colour) / 255, edgecolor="0.4", label=label) for label, colour in VERDICTS],
        loc="outside lower center",
        ncols=len(VERDICTS),
        frameon=False,
        fontsize=9,
    )
    return encode_png(figure)


def false_colour(cube: Array) -> Array:
    """Return a long, a medium and a short wavelength of cube (H, W, C) as RGB (H, W, 3), with stretched contrast."""
    channels = cube.shape[2]
    chosen = cube[..., [round(share * (channels - 1)) for share in (0.75, 0.45, 0.15)]]
    low, high = np.percentile(chosen, (1, 99))
    stretched: Array = np.clip((chosen - low) / max(high - low, 1e-12), 0, 1)
    return stretched


def verdict(score: Array, mask: Array) -> Array:
    """Return colors (H, W, 3) uint8: targets found, targets missed, false alarms, background, unknown."""
    found = score > 0
    cases = [(mask == 1) & found, (mask == 1) & ~found, (mask == 0) & found, (mask == UNKNOWN) & found, mask == UNKNOWN]
    colours = [np.array(colour) for _, colour in (*VERDICTS[:3], VERDICTS[2], ("unknown", (120, 120, 120)))]
    picture: Array = np.select([case[..., None] for case in cases], colours, np.array(BACKGROUND)).astype(np.uint8)
    return picture


def _show_score(figure: Any, axes: Any, score: Array, label: str = "") -> None:
    image = axes.imshow(np.clip(score, -LIMIT, LIMIT), cmap="RdBu_r", vmin=-LIMIT, vmax=LIMIT)
    figure.colorbar(image, ax=axes, shrink=0.85, label=label)


def _patch() -> Any:
    from matplotlib.patches import Patch  # slow to import

    return Patch


BACKGROUND = (20, 20, 30)
VERDICTS = (
    ("target found", (60, 200, 90)),
    ("target missed", (240, 200, 40)),
    ("false alarm", (220, 60, 60)),
    ("background", BACKGROUND),
)
