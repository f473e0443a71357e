"""Grow streamlines from seeds, segment by segment in both directions, until they leave the mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .fields import NUM_DIRECTIONS, Fields
from .lines import unit_steps
from .model import NUM_POINTS, StreamlineDiffusion

Draw = Callable[[Tensor], Tensor]


def sample_segments(
    model: nn.Module,
    bare: StreamlineDiffusion,
    condition: Tensor,
    noise: Callable[[], Tensor],
    num_steps: int | None = None,
) -> Tensor:
    """Return segments (B, 16, 3) in mm from their start for the conditions (B, 346), from noise (B, 16, 3).

    num_steps  None: ancestral sampling; otherwise that many steps of DDIM
    """

    def predict(noisy: Tensor, step: Tensor) -> Tensor:
        x0: Tensor = model(noisy, step, condition)
        return x0

    return bare.scale * bare.schedule.sample(predict, noise, num_steps)


class SegmentSampler:
    """Draw the next 16 points (B, 16, 3) after the last 9 points (B, 9, 3), all in mm, and count the segments.

    If fewer than 9 points are known, the first one is repeated, so that its directions are zero, as in training.
    """

    def __init__(
        self,
        model: nn.Module,
        bare: StreamlineDiffusion,
        fields: Fields,
        subject: int,
        generator: torch.Generator,
        num_steps: int | None = None,
    ) -> None:
        self.model, self.bare, self.fields, self.subject, self.generator = model, bare, fields, subject, generator
        self.num_steps, self.count = num_steps, 0

    def __call__(self, tails: Tensor) -> Tensor:
        self.count += len(tails)
        last = tails[:, -1]
        of = torch.full(last.shape[:1], self.subject, device=last.device)
        condition = self.fields.condition(last, unit_steps(tails), of)

        def noise() -> Tensor:
            shape = (len(last), NUM_POINTS, 3)
            return torch.randn(shape, generator=self.generator, device=self.generator.device)

        return last[:, None] + sample_segments(self.model, self.bare, condition, noise, self.num_steps)


def generate_streamlines(
    draw: Draw, inside: Callable[[Tensor], Tensor], seeds: Tensor, *, advance: int, max_points: int
) -> list[Tensor]:
    """Return a streamline (n, 3) through each seed (N, 3), n at least 1; `inside` is true for all points.

    inside      points (M, 3) -> (M,) bool
    advance     number of points to keep of each segment of 16 before the next one is drawn
    max_points  maximum number of points on each side of the seed
    """
    ahead = _one_way(draw, inside, seeds[:, None].expand(-1, NUM_DIRECTIONS + 1, -1), advance, max_points)
    # Backward from the seed, the forward points are the history.
    heads = [torch.cat([seed[None], line])[: NUM_DIRECTIONS + 1] for seed, line in zip(seeds, ahead, strict=True)]
    tails = [torch.cat([head[-1:].expand(NUM_DIRECTIONS + 1 - len(head), -1), head.flip(0)]) for head in heads]
    behind = _one_way(draw, inside, torch.stack(tails), advance, max_points)
    return [
        torch.cat([back.flip(0), seed[None], front]) for back, seed, front in zip(behind, seeds, ahead, strict=True)
    ]


def _one_way(
    draw: Draw, inside: Callable[[Tensor], Tensor], tails: Tensor, advance: int, max_points: int
) -> list[Tensor]:
    """Return the points (n, 3) that follow each of the tails (N, 9, 3), n from 0 to `max_points`."""
    lines = [[tail[:0]] for tail in tails]
    active = torch.arange(len(tails), device=tails.device)
    for start in range(0, max_points, advance):
        points = draw(tails)[:, : min(advance, max_points - start)]
        kept = inside(points.reshape(-1, 3)).view(points.shape[:2]).int().cumprod(dim=1).sum(dim=1)
        for number, line, count in zip(active.tolist(), points, kept.tolist(), strict=True):
            lines[number].append(line[:count])
        is_complete = kept == points.shape[1]
        active, tails = active[is_complete], torch.cat([tails, points], dim=1)[is_complete, -NUM_DIRECTIONS - 1 :]
        if not len(active):
            break
    return [torch.cat(parts) for parts in lines]
