"""Run a dummy forward and backward pass so that ranks without data still join collectives inside the model.

If ranks have unequal work, those with less work repeat a micro-batch. This dummy pass must change no gradient, count or
statistic. In the collectives of synchronized norms, it contributes a count of zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.parallel import ForwardPasses
from runner.tensors.module_buffers import restore_forward_state


class CollectiveCounter(nn.Module):
    """A module that runs collectives in its forward and backward pass; `is_counted` is False during a dummy pass."""

    is_counted = True


@contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """Inside, passes change no buffers or frozen parameters, and add no statistics to synchronized norms."""
    modules = list(model.modules())
    norms = [module for module in modules if isinstance(module, CollectiveCounter)]
    for norm in norms:
        norm.is_counted = False
    try:
        with restore_forward_state(module for module in modules if not isinstance(module, CollectiveCounter)):
            yield
    finally:
        for norm in norms:
            norm.is_counted = True


def run_dummy_pass(passes: ForwardPasses, batch: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Run a dummy forward and backward pass with all its collectives; gradients and the model are unchanged.

    Only for models whose parameters are plain tensors. Gradients are computed and discarded, so they may be infinite.
    """
    with without_side_effects(passes.model):
        with passes.forward():
            loss, _ = passes.loss(passes.model, batch)
        trained: list[Tensor] = [weight for weight in parameters if weight.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
