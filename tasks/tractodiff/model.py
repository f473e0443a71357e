"""The network that predicts a segment of a streamline from a noisy one: an encoder of the condition and a denoiser."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .diffusion import Schedule
from .fields import CONDITION_SIZE

NUM_POINTS = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of the network.

    encoder   widths of the encoder of the condition; the last one is that of its output
    time      width of the embedding of the diffusion step
    hidden    width of the GRU
    head      widths between the GRU's state and the three coordinates
    channels  channels of the U-Net at 16, 8 and 4 points
    num_steps  default number of diffusion steps T
    """

    encoder: tuple[int, ...]
    time: int
    hidden: int
    head: tuple[int, ...]
    channels: tuple[int, ...]
    num_steps: int


class StreamlineDiffusion(nn.Module):
    """Predict the points x0 (B, 16, 3) from noisy ones, the step (B,) and the condition (B, 346).

    Points are relative to the start and in units of `scale` mm. The condition is standardized with `center` and
    `spread`. All three are computed from the training data and stored with the weights.
    """

    center: Tensor
    spread: Tensor
    scale: Tensor

    def __init__(self, shape: Shape, num_steps: int, denoiser: Literal["gru", "unet"]) -> None:
        super().__init__()
        self.schedule = Schedule(num_steps)
        self.encoder = mlp((CONDITION_SIZE, *shape.encoder), nn.Softsign)
        self.time = nn.Sequential(
            SinusoidalEmbedding(shape.time),
            nn.Linear(shape.time, shape.time),
            nn.SiLU(),
            nn.Linear(shape.time, shape.time),
        )
        width = shape.time + shape.encoder[-1]
        self.denoiser: GRUDenoiser | UNetDenoiser = (
            GRUDenoiser(shape, width) if denoiser == "gru" else UNetDenoiser(shape, width)
        )
        self.register_buffer("center", torch.zeros(CONDITION_SIZE))
        self.register_buffer("spread", torch.ones(CONDITION_SIZE))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, noisy: Tensor, step: Tensor, condition: Tensor) -> Tensor:
        encoded = self.encoder((condition - self.center) / self.spread)
        x0: Tensor = self.denoiser(noisy, torch.cat([self.time(step), encoded], dim=1))
        return x0

    def layers(self) -> list[nn.Module]:
        """Return modules whose composition is this model; they hold its parameters."""
        linear, activations = list(self.encoder)[::2], list(self.encoder)[1::2]
        encoder = [Encode(*pair) for pair in itertools.zip_longest(linear, activations, fillvalue=nn.Identity())]
        return [Begin(self), *encoder, Join(), *self.denoiser.layers()]


class Begin(nn.Module):
    """Map noisy points, step and condition to noisy points, embedded step and normalized condition."""

    def __init__(self, model: StreamlineDiffusion) -> None:
        super().__init__()
        self.time = model.time
        self._model = [
            model
        ]  # in a list, so that it is not a submodule; its buffers are read in each call, because they may be moved

    def forward(self, noisy: Tensor, step: Tensor, condition: Tensor) -> tuple[Tensor, ...]:
        (model,) = self._model
        return noisy, self.time(step), (condition - model.center) / model.spread


class Encode(nn.Module):
    """A linear layer of the condition's encoder, and its activation."""

    def __init__(self, linear: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noisy, time, condition = given
        return noisy, time, self.activation(self.linear(condition))


class Join(nn.Module):
    """Concatenate the embedded step and the encoded condition."""

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noisy, time, encoded = given
        return noisy, torch.cat([time, encoded], dim=1)


class GRUDenoiser(nn.Module):
    """A GRU of 16 time steps, one per point. The condition is its initial state; each input is all noisy points.

    Each output is the step to one point. A line is the cumulative sum of the steps, and therefore always smooth.
    """

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.start = nn.Linear(width, shape.hidden)
        self.gru = nn.GRU(3 * NUM_POINTS, shape.hidden, batch_first=True)
        self.head = mlp((shape.hidden, *shape.head, 3), nn.Softsign)

    def forward(self, noisy: Tensor, known: Tensor) -> Tensor:
        inputs = noisy.flatten(1)[:, None].expand(-1, NUM_POINTS, -1)
        states, _ = self.gru(inputs, self.start(known)[None].contiguous())
        steps: Tensor = self.head(states)
        return steps.cumsum(dim=1)

    def layers(self) -> list[nn.Module]:
        """Return one module, called with (noisy points, condition)."""
        return [Unpacked(self)]


class Unpacked(nn.Module):
    """A module with several arguments, as a layer that takes them as a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self.module(*given)
        return out


class UNetDenoiser(nn.Module):
    """A U-Net along the points; the condition scales and shifts the channels of each block.

    Source: Chi et al., Diffusion Policy, RSS 2023, appendix A; FiLM: Perez et al., AAAI 2018.
    """

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        one, two, three = shape.channels
        self.down = nn.ModuleList([UNetStage(3, one, width), UNetStage(one, two, width), UNetStage(two, three, width)])
        self.shorten = nn.ModuleList([nn.Conv1d(n, n, 3, stride=2, padding=1) for n in (one, two)])
        self.middle = UNetStage(three, three, width)
        self.lengthen = nn.ModuleList([nn.ConvTranspose1d(n, m, 4, 2, 1) for n, m in ((three, two), (two, one))])
        self.up = nn.ModuleList([UNetStage(2 * two, two, width), UNetStage(2 * one, one, width)])
        self.output = nn.Conv1d(one, 3, 1)

    def forward(self, noisy: Tensor, known: Tensor) -> Tensor:
        x = noisy.transpose(1, 2)
        kept = []
        for stage, shorten in zip(self.down, [*self.shorten, nn.Identity()], strict=True):
            x = stage(x, known)
            kept.append(x)
            x = shorten(x)
        x = self.middle(x, known)
        for lengthen, stage, skip in zip(self.lengthen, self.up, kept[1::-1], strict=True):
            x = stage(torch.cat([lengthen(x), skip], dim=1), known)
        points: Tensor = self.output(x).transpose(1, 2)
        return points

    def layers(self) -> list[nn.Module]:
        """Return modules whose composition is this one, on (points, condition); skips are passed in the tuple."""
        layers: list[nn.Module] = [Transposed()]
        for stage, shorten in zip(self.down, [*self.shorten, None], strict=True):
            layers += [*_conditioned(stage), *([] if shorten is None else [Down(shorten)])]
        layers += _conditioned(self.middle)
        for lengthen, stage in zip(self.lengthen, self.up, strict=True):
            layers += [Up(lengthen), *_conditioned(stage)]
        return [*layers, Output(self.output)]


def _conditioned(stage: Any) -> list[nn.Module]:
    return [Conditioned(block) for block in stage.blocks]


class Transposed(nn.Module):
    """Map points (B, 16, 3) to channels (B, 3, 16)."""

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noisy, known = given
        return noisy.transpose(1, 2), known


class Conditioned(nn.Module):
    """Apply a block of a stage, with the condition; pass the condition and the skip connections on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, known, *kept = given
        return self.block(x, known), known, *kept


class Down(nn.Module):
    """Save the output of a stage as a skip connection, and halve the number of points."""

    def __init__(self, shorten: nn.Module) -> None:
        super().__init__()
        self.shorten = shorten

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, known, *kept = given
        return self.shorten(x), known, *kept, x


class Up(nn.Module):
    """Double the number of points, and append the last skip connection."""

    def __init__(self, lengthen: nn.Module) -> None:
        super().__init__()
        self.lengthen = lengthen

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, known, *kept, last = given
        return torch.cat([self.lengthen(x), last], dim=1), known, *kept


class Output(nn.Module):
    """Map channels to points (B, 16, 3)."""

    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        self.output = output

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        points: Tensor = self.output(given[0]).transpose(1, 2)
        return points


class UNetStage(nn.Module):
    """Two residual blocks, each with two convolutions over five points."""

    def __init__(self, channels_in: int, channels: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FiLMBlock(channels_in, channels, width), FiLMBlock(channels, channels, width)])

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, known)
        return x


class FiLMBlock(nn.Module):
    """Two convolutions with group normalization; between them the channels are scaled and shifted by the condition."""

    def __init__(self, channels_in: int, channels: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(channels_in, channels, 5, padding=2), nn.GroupNorm(8, channels), nn.Mish())
        self.film = nn.Sequential(nn.Mish(), nn.Linear(width, 2 * channels))
        self.second = nn.Sequential(nn.Conv1d(channels, channels, 5, padding=2), nn.GroupNorm(8, channels), nn.Mish())
        self.skip = nn.Conv1d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        scale, shift = self.film(known)[:, :, None].chunk(2, dim=1)
        y: Tensor = self.second(self.first(x) * (1 + scale) + shift) + self.skip(x)
        return y


class SinusoidalEmbedding(nn.Module):
    """Sines and cosines (B, width) of a step (B,), as in Vaswani et al., Attention Is All You Need, 2017."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, step: Tensor) -> Tensor:
        angle = step[:, None] * self.frequencies
        return torch.cat([angle.sin(), angle.cos()], dim=1)


def mlp(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), activation()]
    return nn.Sequential(*layers[:-1])
