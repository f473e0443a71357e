"""Image data at a point of a brain: spherical-harmonic coefficients and a mask, interpolated between voxels.

Points are in millimetres, RAS, everywhere; this module alone converts them to voxels, with the affine of the subject.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

SH_ORDER = 8
NUM_SH = 45  # coefficients of even order up to 8
NUM_CHANNELS = NUM_SH + 1  # the last one is the mask
NUM_NEIGHBOURS = 7  # the point and its neighbors on both sides along each axis
NUM_DIRECTIONS = 8  # steps before the point
CONDITION_SIZE = NUM_NEIGHBOURS * NUM_CHANNELS + NUM_DIRECTIONS * 3  # 346
REACH = 1.5  # voxels between a point and its neighbors


@dataclass(frozen=True)
class Fields:
    """Values at the voxels of several subjects, with images of any shapes.

    values    (V, C): concatenated voxels of all subjects, each in C order
    shapes    (S, 3) int64
    to_voxel  (S, 4, 4) float32: from RAS mm to voxels
    """

    values: Tensor
    shapes: Tensor
    to_voxel: Tensor

    def to(self, device: torch.device) -> Fields:
        """Return the fields on a device."""
        return Fields(self.values.to(device), self.shapes.to(device), self.to_voxel.to(device))

    @property
    def mask(self) -> Fields:
        """The fields with the mask as the only channel."""
        return Fields(self.values[:, -1:].float(), self.shapes, self.to_voxel)

    @property
    def voxel_size(self) -> Tensor:
        """Length of a voxel in mm (S,), the mean over its axes."""
        size: Tensor = torch.linalg.det(self.to_voxel[:, :3, :3]).abs() ** (-1 / 3)
        return size

    def image(self, subject: int) -> Tensor:
        """Return the values of one subject (X, Y, Z, C)."""
        sizes = self.shapes.prod(dim=1)
        first = int(sizes[:subject].sum())
        return self.values[first : first + int(sizes[subject])].view(*self.shapes[subject].tolist(), -1)

    def sample(self, points: Tensor, subject: Tensor) -> Tensor:
        """Interpolate the values (N, C), float32, at points (N, 3) of subjects (N,): trilinear, zero outside the image.

        Differentiable with respect to the points; unlike that of grid_sample, the gradient is always deterministic.
        """
        matrix = self.to_voxel[subject]
        voxel = (matrix[:, :3, :3] @ points[:, :, None])[:, :, 0] + matrix[:, :3, 3]
        shape = self.shapes[subject]
        ends = self.shapes.prod(dim=1).cumsum(0)
        first = (ends - self.shapes.prod(dim=1))[subject]
        low = voxel.detach().floor()
        share = voxel - low
        weights, indices = [], []  # of the lower and the upper corners, per axis
        for upper in (0, 1):
            at = low.long() + upper
            inside = (at >= 0) & (at < shape)
            weights.append(((share if upper else 1 - share) * inside).unbind(1))
            indices.append(torch.minimum(at.clamp(min=0), shape - 1).unbind(1))
        total = torch.zeros(len(points), self.values.shape[1], device=points.device)
        for i, j, k in itertools.product((0, 1), repeat=3):
            row = first + (indices[i][0] * shape[:, 1] + indices[j][1]) * shape[:, 2] + indices[k][2]
            # The gradient of prod() would wait for the device.
            weight = weights[i][0] * weights[j][1] * weights[k][2]
            total = total + weight[:, None] * self.values[row].float()
        return total

    def condition(self, points: Tensor, directions: Tensor, subject: Tensor) -> Tensor:
        """Return the input of the model (B, 346) for points (B, 3) after steps in directions (B, 8, 3).

        The values around the points, then the directions: unit vectors in temporal order, zero if unknown.
        """
        return torch.cat([self.around(points, subject), directions.flatten(1)], dim=1)

    def around(self, points: Tensor, subject: Tensor) -> Tensor:
        """Return the values (B, 322) at points (B, 3) and six neighbors of each, 1.5 voxels away along R, A and S."""
        axes = torch.eye(3, device=points.device)
        offsets = torch.cat([torch.zeros_like(axes[:1]), axes, -axes])
        around = points[:, None] + REACH * self.voxel_size[subject][:, None, None] * offsets
        values = self.sample(around.reshape(-1, 3), subject.repeat_interleave(NUM_NEIGHBOURS))
        return values.view(len(points), -1)
