"""Gradients at the worst weights in a neighborhood: sharpness-aware minimization (SAM)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from runner.base import noise
from runner.base.batch import MicroBatch
from runner.base.module_buffers import restore_buffers
from runner.base.sample_rng import global_generators
from runner.base.values import Positive
from runner.config.configuration import Choice
from runner.config.option_table import call_option
from runner.distributed.parallel import ForwardPasses, Parallel, Sums
from runner.engine.extra_metrics import ExtraMetrics
from runner.engine.gradient_source import ForwardWrapper, GradientSource
from runner.engine.gradients import clear

Ascent = Callable[[Sequence[Tensor], Sequence[Tensor], Callable[[Tensor], Tensor]], list[Tensor]]
# (weights, gradients, norm over ranks) -> the step to the worst weights; the scale of the gradients is arbitrary


def none() -> None:
    """Use the gradients at the weights themselves."""


def sam(*, rho: Positive = 0.05, adaptive: bool = False) -> Ascent:
    """Sharpness-aware minimization: step by `rho` along the gradient, and use the gradient there.

    An update takes twice the time, and memory for one more copy of the weights.

    rho       length of the step, as the norm over all trained parameters
    adaptive  scale the step of each weight by its magnitude (ASAM); rho is then about ten times as large
    Source: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021; Kwon et al.,
    ASAM, ICML 2021.
    """

    def ascent(
        weights: Sequence[Tensor], gradients: Sequence[Tensor], over_ranks: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        sizes = torch._foreach_abs(list(weights)) if adaptive else None
        scaled = torch._foreach_mul(sizes, list(gradients)) if sizes is not None else list(gradients)
        norm = over_ranks(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(scaled))))
        # Not finite after an overflow: then the second gradients are not, either, and the update is skipped.
        factor = rho / torch.where(norm == 0, torch.ones_like(norm), norm)
        steps = torch._foreach_mul(sizes, scaled) if sizes is not None else scaled
        return list(torch._foreach_mul(steps, factor))

    return ascent


SHARPNESS: Mapping[str, Callable[..., Ascent | None]] = {"none": none, "sam": sam}


def with_sharpness(
    choice: Choice, inner: GradientSource, weights: Sequence[nn.Parameter], extra: ExtraMetrics
) -> GradientSource:
    """Return the source of gradients that the option selects.

    inner    computes the gradients at the current weights
    weights  those that the update changes
    extra    further metrics of the loss; those of the first pass are kept
    """
    ascent = call_option(SHARPNESS, choice.function, **choice.options)
    return inner if ascent is None else SharpnessSource(inner, ascent, tuple(weights), extra)


@dataclass(frozen=True)
class SharpnessSource(GradientSource):
    """Computes the gradients of an update twice, with the same samples and random numbers.

    All inputs of the update are kept in memory. Buffers, further metrics and the loss are those of the first pass.
    """

    inner: GradientSource
    ascent: Ascent
    weights: tuple[nn.Parameter, ...]
    extra: ExtraMetrics

    def accumulate(self, parallel: Parallel, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        recorded: list[MicroBatch] = []
        marks = [generator.mark() for generator in global_generators()]
        first = self.inner.accumulate(parallel, passes, _record_batches(batches, recorded))
        parallel.reduce(first)  # the direction is that of all ranks; raises Discarded if one of them failed
        for generator, mark in zip(global_generators(), marks, strict=True):
            generator.restore(mark)
        with self._at_ascent_point(parallel), restore_buffers(passes.model.modules()), self.extra.pause():
            second = self.inner.accumulate(parallel, passes, _repeat_batches(recorded))
        return second._replace(loss_sum=first.loss_sum, bad=first.bad)

    def wrap_forward(self, wrapper: ForwardWrapper) -> GradientSource:
        return replace(self, inner=self.inner.wrap_forward(wrapper))

    @contextmanager
    def _at_ascent_point(self, parallel: Parallel) -> Iterator[None]:
        """Move the weights to the ascent point and restore them on exit; the first gradients are freed.

        They are changed through `data`, because a retry after out of memory takes a new tensor version for a change by
        the task.
        """
        moved = [weight for weight in self.weights if weight.grad is not None]
        values = [weight.data for weight in moved]
        copies = [value.clone() for value in values]
        steps = self.ascent(values, parallel.gradients(moved), parallel.global_norm) if moved else []
        clear(self.weights)
        try:
            if moved:
                torch._foreach_add_(values, steps)
            del steps
            yield
        finally:
            if moved:
                torch._foreach_copy_(values, copies)


def _record_batches(batches: Iterator[MicroBatch], recorded: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of an update, and append them to `recorded`."""
    for micro in batches:
        recorded.append(micro)
        yield micro
        if micro.last:
            return


def _repeat_batches(recorded: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches again, with the same random draws."""
    for micro in recorded:
        noise.start_pass(micro.samples)
        yield micro
