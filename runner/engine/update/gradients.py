"""Compute the gradients of an update, scale their sums to means, measure their norm and clip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from runner.base import noise
from runner.base.batch import MicroBatch
from runner.distributed.parallel import ForwardPasses, Parallel, Sums


def correct_and_clip(
    gradients: list[Tensor],
    correction: float | Tensor | None,
    max_norm: float | None,
    over_ranks: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> Tensor | None:
    """Multiply the gradients by `correction`, then scale them down to `max_norm`; return their norm before clipping.

    max_norm    None: no clipping; the norm still shows whether the gradients are finite
    over_ranks  computes the global norm from the local norm if ranks hold different gradients

    Both factors are applied in one pass. Returns None if there are no gradients.
    """
    if not gradients:
        return None
    # The correction is in float64. It is converted, because a product of two scalar tensors has the wider dtype, but
    # not to half precision, which would be too inaccurate for gradients in float32.
    dtype = reduce(torch.promote_types, {gradient.dtype.to_real() for gradient in gradients}, torch.float32)
    if isinstance(correction, Tensor):
        correction = correction.to(dtype)
    elif correction == 1.0:
        correction = None
    # Not torch.nn.utils.clip_grad_norm_: it takes no further factor, so the correction would be a second pass. It uses
    # the same private functions (torch 2.13), and adds the same 1e-6 to the norm.
    norm = over_ranks(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)), dtype=dtype))
    if correction is not None:
        norm = norm * correction
    if max_norm is None:
        if correction is not None:
            _multiply(gradients, correction)
        return norm
    factor = 1.0 if correction is None else correction
    scale: float | Tensor
    if isinstance(factor, Tensor):
        scale = (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0) * factor
    elif norm.device.type == "cpu":  # reading the norm does not wait
        scale = min(1.0, max_norm / (norm.item() + 1e-6)) * factor
    else:  # factor * min(1, max_norm / (norm + 1e-6)), with one operation fewer
        scale = (norm + 1e-6).reciprocal_().mul_(max_norm * factor).clamp_(max=factor)
    _multiply(gradients, scale)
    return norm


def _multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients in place by a number or a scalar tensor, in one pass per dtype."""
    if not isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor)
        return
    for dtype in {gradient.dtype for gradient in gradients}:  # the fused kernel needs a factor of the same dtype
        torch._foreach_mul_([each for each in gradients if each.dtype == dtype], factor.to(dtype.to_real()))


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradients to None to free their memory."""
    for parameter in parameters:
        parameter.grad = None


ForwardWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class GradientSource:
    """Gradients of a loss that is a sum over samples."""

    def accumulate(self, parallel: Parallel, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        """Accumulate the gradients of this rank's share of an update; return its sums."""
        return parallel.accumulate(passes, batches)

    def wrap_forward(self, wrapper: ForwardWrapper) -> GradientSource:
        """Return this source with `wrapper` applied to forward passes that do not go through `passes.loss`."""
        return self


class SharedSamples:
    """The micro-batches of one update, which are read once and then repeated from memory, with the same noise."""

    def __init__(self, batches: Iterator[MicroBatch]) -> None:
        self._batches = batches
        self._kept: list[MicroBatch] = []

    def read(self, *, again: bool, keep: bool) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the current update.

        again  after an out-of-memory error, take them from the iterator again, in different sizes
        keep   keep them in memory, because they are needed once more
        """
        if self._kept and not again:
            for micro in self._kept:
                noise.start_pass(micro.samples)
                yield micro
            return
        self._kept = []
        while True:
            micro = next(self._batches)
            if keep:
                self._kept.append(micro)
            yield micro
            if micro.last:
                return

    def end(self) -> None:
        """Free the micro-batches of this update."""
        self._kept = []
