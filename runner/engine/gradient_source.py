"""Compute the gradients of an update by adding the losses of its micro-batches; subclasses do it differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from runner.base.batch import MicroBatch
from runner.distributed.parallel import ForwardPasses, Parallel, Sums

ForwardWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class GradientSource:
    """Gradients of a loss that is a sum over samples."""

    def accumulate(self, parallel: Parallel, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        """Accumulate the gradients of this rank's share of an update; return its sums."""
        return parallel.accumulate(passes, batches)

    def wrap_forward(self, wrapper: ForwardWrapper) -> GradientSource:
        """Return the same with `wrapper` applied to forward passes that do not go through `passes.loss`."""
        return self
