"""Streamlines as arrays: steps, distances, resampling, and files for other programs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.packages import require

Array = np.ndarray[Any, Any]


def mdf(one: Tensor, other: Tensor) -> Tensor:
    """Return the minimum average direct-flip distance (MDF) (...) of lines (..., P, 3).

    This is the mean distance between corresponding points, in the better of the two orientations.

    Source: Garyfallidis et al., QuickBundles, Frontiers in Neuroscience 6:175, 2012, section 2.2.
    """
    direct = (one - other).norm(dim=-1).mean(dim=-1)
    flipped = (one - other.flip(-2)).norm(dim=-1).mean(dim=-1)
    return torch.minimum(direct, flipped)


def unit_steps(points: Tensor) -> Tensor:
    """Return the unit steps (..., K, 3) between points (..., K + 1, 3); zero if two points are equal."""
    steps = points.diff(dim=-2)
    unit: Tensor = steps / steps.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return unit


def resample_by_step(line: Array, step: float) -> Array:
    """Return points each `step` along a line (n, 3), from its first point; the remainder is dropped."""
    along = _along(line)
    return _between(line, along, np.arange(0, along[-1] + 1e-3 * step, step))


def resample_by_count(line: Array, count: int) -> Array:
    """Return `count` evenly spaced points along a line (n, 3), both ends included."""
    along = _along(line)
    return _between(line, along, np.linspace(0, along[-1], count))


def length(line: Array) -> float:
    """Return the length of a line (n, 3)."""
    return float(_along(line)[-1])


def ends_of(lines: Sequence[Array]) -> Array:
    """Return the first and last points (N, 2, 3) of lines (n, 3)."""
    return np.stack([line[[0, -1]] for line in lines])


def connects(line: Array, ends: Array, reach: float) -> bool:
    """Return whether both ends of a line (n, 3) are within `reach` of those of another line, in either direction.

    ends  (N, 2, 3) of the other lines
    """
    senses = np.stack([ends, ends[:, ::-1]])  # (2, lines, ends, 3)
    return bool((np.linalg.norm(senses - line[[0, -1]], axis=-1).max(axis=-1) <= reach).any())


def trk(lines: Sequence[Array], affine: Array, shape: Sequence[int]) -> bytes:
    """Return a TrackVis file of lines (n, 3) in RAS mm, in the space of an image with this affine and shape."""
    nibabel = require("nibabel", "tractodiff")
    header = {
        "voxel_to_rasmm": affine.astype(np.float32),
        "voxel_sizes": np.linalg.norm(affine[:3, :3], axis=0),
        "dimensions": np.asarray(shape),
        "voxel_order": "".join(nibabel.aff2axcodes(affine)),
    }
    tractogram = nibabel.streamlines.Tractogram(lines, affine_to_rasmm=np.eye(4))
    file = io.BytesIO()
    nibabel.streamlines.TrkFile(tractogram, header=header).save(file)
    return file.getvalue()


def tck(lines: Sequence[Array]) -> bytes:
    """Return an MRtrix file of lines (n, 3) in RAS mm."""
    nibabel = require("nibabel", "tractodiff")
    file = io.BytesIO()
    nibabel.streamlines.TckFile(nibabel.streamlines.Tractogram(lines, affine_to_rasmm=np.eye(4))).save(file)
    return file.getvalue()


def voxels(lines: Sequence[Array], affine: Array) -> set[tuple[int, ...]]:
    """Return the voxels that lines (n, 3) in RAS mm pass through, sampled four times per voxel.

    affine  (4, 4) from voxels to RAS mm
    """
    step = float(np.linalg.norm(affine[:3, :3], axis=0).min()) / 4
    to_voxel = np.linalg.inv(affine)
    points = [resample_by_step(line, step) for line in lines if len(line) > 1]
    if not points:
        return set()
    at = np.rint(np.concatenate(points) @ to_voxel[:3, :3].T + to_voxel[:3, 3]).astype(int)
    return {tuple(voxel) for voxel in np.unique(at, axis=0).tolist()}


def _along(line: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(line, axis=0), axis=1))])


def _between(line: Array, along: Array, at: Array) -> Array:
    return np.stack([np.interp(at, along, line[:, axis]) for axis in range(3)], axis=1)
