"""Residual networks with group normalization, or with frozen batch normalization and torchvision's names.

Neither normalization mixes the samples of a batch.
Sources: He et al., Deep Residual Learning, CVPR 2016, table 1; Wu and He, Group Normalization, ECCV 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResNet(nn.Module):
    """Map images (N, 3, S, S) from 0 to 1 to feature maps (N, C, h, w) of the last `num_levels` stages.

    stem       channels after the first convolution, which halves the resolution
    stages     channels and blocks of each stage; each halves the resolution, except the first if the stem has pooling
    published  True: the layout of the paper, a 7 x 7 stem with max pooling and bottleneck blocks; False: a 3 x 3 stem
               and basic blocks
    """

    def __init__(self, stem: int, stages: Sequence[tuple[int, int]], *, published: bool, num_levels: int) -> None:
        super().__init__()
        kernel = 7 if published else 3
        self.stem = nn.Conv2d(3, stem, kernel, stride=2, padding=kernel // 2, bias=False)
        self.norm = _norm(stem)
        self.pools = published
        self.num_levels = num_levels
        block = Bottleneck if published else BasicBlock
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

    @property
    def first_modules(self) -> tuple[nn.Module, ...]:
        """Modules with the parameters of `begin`, which a pipeline places on the first stage."""
        return self.stem, self.norm

    def begin(self, x: Tensor) -> Tensor:
        """Return the input of the first stage."""
        x = F.relu(self.norm(self.stem((x - 0.5) * 4)))  # from [0, 1] to about unit variance
        return F.max_pool2d(x, 3, stride=2, padding=1) if self.pools else x

    def forward(self, x: Tensor) -> list[Tensor]:
        return _last_maps(self.begin(x), list(self.stages), self.num_levels)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

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
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a quarter of the channels inside, and a shortcut."""

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


class FrozenBatchNorm2d(nn.Module):
    """Batch normalization with constant statistics, weight and bias: buffers, named as in BatchNorm2d."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None].to(x.dtype) + shift[:, None, None].to(x.dtype)


class PretrainedResNet50(nn.Module):
    """ResNet-50 without classifier, with torchvision's tensor names, for weights trained on ImageNet.

    Maps images (N, 3, S, S) from 0 to 1 to the feature maps of the last `num_levels` stages.
    """

    mean: Tensor
    std: Tensor
    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self, num_levels: int) -> None:
        super().__init__()
        self.num_levels = num_levels
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None], persistent=False)
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = FrozenBatchNorm2d(64)
        width = 64
        for number, (channels, blocks) in enumerate(RESNET_50, start=1):
            stride = 1 if number == 1 else 2
            layers = [
                PretrainedBottleneck(width if i == 0 else channels, channels, stride if i == 0 else 1)
                for i in range(blocks)
            ]
            self.add_module(f"layer{number}", nn.Sequential(*layers))
            width = channels
        self.widths = [channels for channels, _ in RESNET_50][-num_levels:]

    @property
    def first_modules(self) -> tuple[nn.Module, ...]:
        """Modules with the parameters of `begin`, which a pipeline places on the first stage."""
        return self.conv1, self.bn1

    @property
    def stages(self) -> list[nn.Sequential]:
        return [self.layer1, self.layer2, self.layer3, self.layer4]

    def begin(self, images: Tensor) -> Tensor:
        """Return the input of the first stage."""
        x = F.relu(self.bn1(self.conv1((images - self.mean) / self.std)))
        return F.max_pool2d(x, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> list[Tensor]:
        return _last_maps(self.begin(images), self.stages, self.num_levels)


class PretrainedBottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions with a shortcut."""

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        inner = channels // 4
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), FrozenBatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, channels, 1, bias=False), FrozenBatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if width != channels or stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, channels, 1, stride, bias=False), FrozenBatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def _last_maps(x: Tensor, stages: Sequence[nn.Module], count: int) -> list[Tensor]:
    """Return the outputs of the last `count` stages."""
    maps = []
    for stage in stages:
        x = stage(x)
        maps.append(x)
    return maps[-count:]


RESNET_50 = ((256, 3), (512, 4), (1024, 6), (2048, 3))  # channels and blocks of each stage


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels)  # the paper's 32 groups, or fewer with few channels


def _shortcut(width: int, channels: int, stride: int) -> nn.Module:
    if width == channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(width, channels, 1, stride, bias=False), _norm(channels))
