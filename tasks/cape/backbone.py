"""Residual networks with group normalisation, which does not mix the samples of a batch as batch normalisation does.

Sources: He et al., Deep Residual Learning, CVPR 2016, table 1; Wu and He, Group Normalization, ECCV 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class ResNet(nn.Module):
    """Pictures (N, 3, S, S) to feature maps (N, C, h, w), one for each of the last `num_levels` stages.

    stem      channels after the first convolution, which halves the sides
    stages    channels and blocks of each stage; each halves the sides, but the first where the stem pools
    published  the layout of ResNet-50: a stem of 7 x 7 with pooling, and bottleneck blocks
    """

    def __init__(self, stem: int, stages: Sequence[tuple[int, int]], *, published: bool, num_levels: int) -> None:
        super().__init__()
        kernel = 7 if published else 3
        self.stem = nn.Conv2d(3, stem, kernel, stride=2, padding=kernel // 2, bias=False)
        self.norm = _norm(stem)
        self.pools = published
        self.num_levels = num_levels
        block = Bottleneck if published else Basic
        width, made = stem, []
        for number, (channels, blocks) in enumerate(stages):
            stride = 1 if published and number == 0 else 2
            layers = [block(width if i == 0 else channels, channels, stride if i == 0 else 1) for i in range(blocks)]
            made.append(nn.Sequential(*layers))
            width = channels
        self.stages = nn.ModuleList(made)
        self.widths = [channels for channels, _ in stages][-num_levels:]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.norm(self.stem(x)))
        if self.pools:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps[-self.num_levels :]


class Basic(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, channels, 3, stride, padding=1, bias=False),
            _norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            _norm(channels),
        )
        self.shortcut = _shortcut(width, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, the inner ones of a quarter of the channels, beside a shortcut."""

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        inner = channels // 4
        self.branch = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            _norm(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            _norm(inner),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1, bias=False),
            _norm(channels),
        )
        self.shortcut = _shortcut(width, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels)


def _shortcut(width: int, channels: int, stride: int) -> nn.Module:
    if width == channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(width, channels, 1, stride, bias=False), _norm(channels))
