"""Sharpness-aware minimization (SAM): use the gradients at nearby weights with a higher loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.sample_rng import global_generators
from runner.base.values import Positive
from runner.config.chosen_option import make_chosen
from runner.config.configuration import Choice
from runner.distributed.parallel import ForwardPasses, Parallel, Sums
from runner.engine.update.extra_metrics import ExtraMetrics
from runner.engine.update.gradients import ForwardWrapper, GradientSource, SharedSamples, clear
from runner.tensors.module_buffers import TensorVersion, frozen_parameters, restore_buffers, restore_parameters

Ascent = Callable[[Sequence[Tensor], Sequence[Tensor], Callable[[Tensor], Tensor]], list[Tensor]]
# (weights, gradients, function from the norm on this rank to the global norm) -> perturbation of the weights.
# The gradients may have any scale.


def none() -> None:
    """Use the gradients at the current weights."""


def sam(*, rho: Positive = 0.05, adaptive: bool = False) -> Ascent:
    """Sharpness-aware minimization: use the gradient at the worst weights nearby; an update takes twice the time.

    It needs memory for one more copy of the weights.

    rho       distance to the worst weights: norm of the step to them, over all trained parameters
    adaptive  scale the step of each weight by its magnitude (ASAM); choose rho about ten times as large
    Source: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021; Kwon et al.,
    ASAM, ICML 2021.
    """

    def ascent(
        weights: Sequence[Tensor], gradients: Sequence[Tensor], over_ranks: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        sizes = torch._foreach_abs(list(weights)) if adaptive else None
        scaled = torch._foreach_mul(sizes, list(gradients)) if sizes is not None else list(gradients)
        norm = over_ranks(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(scaled))))
        # After an overflow, the norm is not finite; neither are the second gradients, so the update is skipped.
        factor = rho / torch.where(norm == 0, torch.ones_like(norm), norm)
        steps = torch._foreach_mul(sizes, scaled) if sizes is not None else scaled
        return list(torch._foreach_mul(steps, factor))

    return ascent


SHARPNESS: Mapping[str, Callable[..., Ascent | None]] = {"none": none, "sam": sam}


def with_sharpness(
    choice: Choice, inner: GradientSource, weights: Sequence[nn.Parameter], extra: ExtraMetrics
) -> GradientSource:
    """Return `inner`, or a source that applies the selected option to it.

    inner    computes the gradients at the current weights
    weights  parameters that the update changes
    extra    additional metrics that the loss returns; only those at the current weights are kept
    """
    ascent = make_chosen(SHARPNESS, choice)
    return inner if ascent is None else SharpnessSource(inner, ascent, tuple(weights), extra)


@dataclass(frozen=True)
class SharpnessSource(GradientSource):
    """Computes the gradients of an update twice, with the same samples and random numbers.

    All inputs of the update are kept in memory. Buffers, frozen parameters that forward passes change, loss and
    additional metrics come from the first computation, at the current weights.
    """

    inner: GradientSource
    ascent: Ascent
    weights: tuple[nn.Parameter, ...]
    extra: ExtraMetrics

    def accumulate(self, parallel: Parallel, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        samples, modules = SharedSamples(batches), [*passes.model.modules()]
        frozen = {weight: TensorVersion.of(weight) for weight in frozen_parameters(modules)}
        rng_states = [generator.get_state() for generator in global_generators()]
        first = self.inner.accumulate(parallel, passes, samples.read(again=False, keep=True))
        parallel.reduce(first)  # the perturbation uses gradients of all ranks; raises Discarded if a rank failed
        for generator, state in zip(global_generators(), rng_states, strict=True):
            generator.set_state(state)
        # Only parameters that the first passes have changed are copied: those of a pretrained model may be large.
        changed = [weight for weight, before in frozen.items() if before.is_changed(weight)]
        with (
            self._at_ascent_point(parallel),
            restore_buffers(modules),
            restore_parameters(changed),
            self.extra.pause(),
        ):
            second = self.inner.accumulate(parallel, passes, samples.read(again=False, keep=False))
        return second._replace(loss_sum=first.loss_sum, bad=first.bad)

    def wrap_forward(self, wrapper: ForwardWrapper) -> GradientSource:
        return replace(self, inner=self.inner.wrap_forward(wrapper))

    @contextmanager
    def _at_ascent_point(self, parallel: Parallel) -> Iterator[None]:
        """Perturb the weights, and restore them on exit; the first gradients are freed.

        Weights are changed through `data`, which does not increment their version counters. A retry after an
        out-of-memory error would mistake an incremented counter for a change by the task.
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
