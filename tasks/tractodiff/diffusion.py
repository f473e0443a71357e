"""Diffusion with the squared-cosine schedule, and sampling with a model that predicts x0."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Schedule(nn.Module):
    """Signal and noise at each of T steps; step 0 has the least noise.

    signal  (T,) fraction of the variance that is signal, alpha-bar
    Source: Nichol and Dhariwal, Improved Denoising Diffusion Probabilistic Models, ICML 2021, section 3.2.
    """

    signal: Tensor
    x0_weight: Tensor
    xt_weight: Tensor
    deviation: Tensor

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        cosine = torch.cos((torch.arange(num_steps + 1, dtype=torch.float64) / num_steps + 0.008) / 1.008 * math.pi / 2)
        beta = (1 - (cosine[1:] / cosine[:-1]) ** 2).clamp(max=0.999)
        signal = (1 - beta).cumprod(0)
        before = torch.cat([torch.ones(1, dtype=torch.float64), signal[:-1]])
        # The posterior of Ho et al., Denoising Diffusion Probabilistic Models, NeurIPS 2020, equations 6 and 7.
        posterior = {
            "signal": signal,
            "x0_weight": before.sqrt() * beta / (1 - signal),
            "xt_weight": (1 - beta).sqrt() * (1 - before) / (1 - signal),
            "deviation": (beta * (1 - before) / (1 - signal)).sqrt(),
        }
        for name, values in posterior.items():
            self.register_buffer(name, values.float(), persistent=False)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.signal)

    def add_noise(self, x0: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        """Return x0 (B, ...) with the fraction of noise at `step` (B,); `noise` has unit variance."""
        signal = self.signal[step].view(-1, *[1] * (x0.dim() - 1))
        return signal.sqrt() * x0 + (1 - signal).sqrt() * noise

    def sample(
        self, predict: Callable[[Tensor, Tensor], Tensor], draw: Callable[[], Tensor], num_steps: int | None = None
    ) -> Tensor:
        """Return a sample (B, ...) from pure noise.

        predict    (x_t, step (B,)) -> x0
        draw       () -> noise (B, ...) of unit variance
        num_steps  None: ancestral sampling in T steps; otherwise DDIM in that many steps, at most T; calls `draw` once
        """
        return self._ancestral(predict, draw) if num_steps is None else self._ddim(predict, draw(), num_steps)

    def _ddim(self, predict: Callable[[Tensor, Tensor], Tensor], x: Tensor, num_steps: int) -> Tensor:
        """Source: Song et al., Denoising Diffusion Implicit Models, ICLR 2021, equation 12 with sigma = 0."""
        steps = torch.linspace(self.num_steps - 1, 0, num_steps).round().long().tolist()
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            x0 = predict(x, torch.full(x.shape[:1], step, device=x.device)).float()
            if following is None:
                return x0
            signal, kept = self.signal[step], self.signal[following]
            noise = (x - signal.sqrt() * x0) / (1 - signal).sqrt()
            x = kept.sqrt() * x0 + (1 - kept).sqrt() * noise
        return x

    def _ancestral(self, predict: Callable[[Tensor, Tensor], Tensor], draw: Callable[[], Tensor]) -> Tensor:
        x = draw()
        for step in reversed(range(self.num_steps)):
            x0 = predict(x, torch.full(x.shape[:1], step, device=x.device)).float()
            x = self.x0_weight[step] * x0 + self.xt_weight[step] * x
            if step > 0:
                x = x + self.deviation[step] * draw()
        return x
