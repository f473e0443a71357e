"""Attention to tokens, and dense or deformable attention to feature maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["dense", "deformable"]


@dataclass(frozen=True)
class Maps:
    """Flattened feature maps of one or more levels.

    tokens     (N, P, C), level by level, row by row
    shapes     height and width of each level
    sides      (L, 2): width and height of each level, on the device
    positions  (P, 2): x and y of each token, relative to the image size
    """

    tokens: Tensor
    shapes: tuple[tuple[int, int], ...]
    sides: Tensor
    positions: Tensor

    @classmethod
    def of(cls, levels: Sequence[Tensor]) -> Maps:
        """Return the tokens of maps (N, C, h, w)."""
        shapes = tuple((level.shape[-2], level.shape[-1]) for level in levels)
        tokens = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1)
        return cls(tokens, shapes, level_sides(shapes, tokens.device), cell_centers(shapes, tokens.device))

    def levels(self, tokens: Tensor | None = None) -> list[Tensor]:
        """Return the tokens as maps (N, C, h, w)."""
        given = self.tokens if tokens is None else tokens
        N, _, C = given.shape
        parts = torch.split(given, [height * width for height, width in self.shapes], dim=1)
        pairs = zip(parts, self.shapes, strict=True)
        return [part.transpose(1, 2).reshape(N, C, height, width) for part, (height, width) in pairs]


def level_sides(shapes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return the width and height (L, 2) of each level.

    torch.tensor(shapes, device=device) would copy from the host, and wait for the device.
    """
    sides = [torch.full((), float(side), device=device) for height, width in shapes for side in (width, height)]
    return torch.stack(sides).view(-1, 2)


def cell_centers(shapes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return x and y (P, 2) of the center of each cell, relative to the image size."""
    found = []
    for height, width in shapes:
        y, x = ((torch.arange(length, device=device) + 0.5) / length for length in (height, width))
        found.append(torch.stack([x.repeat(height), y.repeat_interleave(width)], dim=1))
    return torch.cat(found)


def sine_embedding(xy: Tensor, width: int) -> Tensor:
    """Return sinusoidal embeddings (..., width) of coordinates (..., 2), half for x and half for y.

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.5, for two axes as in DETR.
    """
    quarter = width // 4
    frequencies = math.tau * 0.5 * 32 ** (torch.arange(quarter, device=xy.device) / quarter)
    angles = (xy.float()[..., None] * frequencies).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def sample(maps: Sequence[Tensor], xy: Tensor) -> Tensor:
    """Return the features (N, K, C) at xy (N, K, 2): bilinear interpolation, averaged over the levels."""
    grid = (2 * xy - 1)[:, :, None]
    read = [
        F.grid_sample(level.float(), grid.float(), padding_mode="border", align_corners=False)[..., 0] for level in maps
    ]
    return torch.stack(read).mean(dim=0).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention whose keys and values can be computed once and reused."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def prepare(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (N, H, S, C / H) of tokens (N, S, C)."""
        return self._heads(self.key(keys)), self._heads(self.value(values))

    def forward(
        self, x: Tensor, prepared: tuple[Tensor, Tensor], *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return (N, T, C). mask (N, 1, 1, S): True where x may attend."""
        q = self._heads(self.query(x))
        y = F.scaled_dot_product_attention(q, *prepared, attn_mask=mask, is_causal=is_causal)
        attended: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        N, T, C = x.shape
        return x.view(N, T, self.num_heads, C // self.num_heads).transpose(1, 2)


class DenseMapAttention(nn.Module):
    """Attention of tokens to all tokens of the maps, with sinusoidal position embeddings."""

    def __init__(self, width: int, num_heads: int, num_levels: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)

    def prepare(self, maps: Maps) -> tuple[Tensor, Tensor]:
        """Return the keys and values, which do not depend on the queries."""
        return self.attention.prepare(maps.tokens + sine_embedding(maps.positions, maps.tokens.shape[-1]), maps.tokens)

    def forward(self, x: Tensor, places: Tensor, prepared: tuple[Tensor, Tensor]) -> Tensor:
        """Return (N, T, C) for tokens x (N, T, C) with coordinates `places` (N, T, 2)."""
        attended: Tensor = self.attention(x + sine_embedding(places, x.shape[-1]), prepared)
        return attended


class DeformableMapAttention(nn.Module):
    """Deformable attention of tokens to a few learned points of each map around their own position.

    Source: Zhu et al., Deformable DETR, ICLR 2021, section 4.1, with grid_sample instead of its kernel.
    """

    num_points = 4

    def __init__(self, width: int, num_heads: int, num_levels: int) -> None:
        super().__init__()
        self.num_heads, self.num_levels = num_heads, num_levels
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.offsets = nn.Linear(width, num_heads * num_levels * self.num_points * 2)
        self.weights = nn.Linear(width, num_heads * num_levels * self.num_points)
        # Initially, the points of each head lie along a different direction. The weights are small, not zero as
        # published, so that queries get gradients from the first update.
        nn.init.normal_(self.offsets.weight, std=0.01)
        nn.init.normal_(self.weights.weight, std=0.01)
        nn.init.zeros_(self.weights.bias)
        angles = torch.arange(num_heads) * (math.tau / num_heads)
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
        directions = directions / directions.abs().amax(dim=-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1)
        start = directions[:, None, None] * steps[None, None, :, None].expand(1, num_levels, -1, 1)
        with torch.no_grad():
            self.offsets.bias.copy_(start.flatten())

    def prepare(self, maps: Maps) -> tuple[Tensor, ...]:
        """Return the sides of the levels (L, 2), and the values of each level (N H, C / H, h, w)."""
        values = maps.levels(self.value(maps.tokens))
        return maps.sides, *(level.reshape(-1, level.shape[1] // self.num_heads, *level.shape[2:]) for level in values)

    def forward(self, x: Tensor, places: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        """Return (N, T, C) for tokens x (N, T, C) with coordinates `places` (N, T, 2)."""
        N, T, C = x.shape
        H, L, P = self.num_heads, self.num_levels, self.num_points
        queries = x + sine_embedding(places, C)
        sides, *values = prepared
        offsets = self.offsets(queries).view(N, T, H, L, P, 2) / sides[:, None]  # an offset of 1 is one cell
        weights = self.weights(queries).view(N, T, H, L * P).softmax(dim=-1).transpose(1, 2).reshape(N * H, 1, T, L * P)
        read = []
        for number, level in enumerate(values):
            at = places[:, :, None, None] + offsets[:, :, :, number]
            grid = (2 * at - 1).transpose(1, 2).flatten(0, 1)
            # in float32: bfloat16 coordinates have a resolution of 1/256 of the image
            read.append(F.grid_sample(level.float(), grid.float(), align_corners=False))
        mixed = (torch.cat(read, dim=-1) * weights).sum(dim=-1)  # (N H, C / H, T)
        attended: Tensor = self.output(mixed.view(N, C, T).transpose(1, 2))
        return attended


class FeedForward(nn.Sequential):
    """Two projections with a GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def map_attention(kind: Kind, width: int, num_heads: int, num_levels: int) -> Any:
    """Return the attention module of this kind."""
    made = DenseMapAttention if kind == "dense" else DeformableMapAttention
    return made(width, num_heads, num_levels)
