"""The loop: it waits for the device no longer than for the update before, and never writes; all else is a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.axes.optimizer import set_learning_rate
from runner.axes.precision import Precision
from runner.axes.scheduler import Schedule
from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.base.task import Sum
from runner.distributed.parallel import Parallel, Passes
from runner.engine.gradients import clear, correct_and_clip


@dataclass
class Position:
    """Where the training is.

    update          number of updates made in this phase, skipped ones included
    skipped_before  updates that were skipped in earlier phases
    """

    phase: str
    update: int = 0
    skipped_before: int = 0


class StepInfo(NamedTuple):
    """What one update was; tensors stay on the device. A fit has no loss and no learning rate."""

    update: int
    loss_sum: Tensor | None
    items: Tensor | int | float
    grad_norm: Tensor | None
    lr: float | None
    bad: tuple[tuple[int, str], ...]


class Around:
    """What wraps an update: nothing, so an error in it ends the run."""

    def run(self, update: Callable[[], StepInfo]) -> StepInfo:
        """Return what `update` returns; a subclass may call it again, from the same beginning."""
        return update()

    def failed(self, error: Exception) -> None:
        """Take an error of a forward or backward pass; return if all ranks can discard the update, else raise it."""
        raise error

    def apply(self, step: Callable[[], None]) -> None:
        """Apply the gradients."""
        step()


@dataclass(frozen=True)
class Training:
    """What the loop turns with.

    loss      (model, batch) -> (loss summed over items, number of items)
    per_item  constant by which sums are multiplied before backward, about 1 / (items of an update): it keeps the
              gradients in range; the true count replaces it after the last backward, so results do not depend on it
    around    wraps each update, as the retry after out of memory does
    """

    position: Position
    model: nn.Module
    loss: Callable[[nn.Module, Any], Sum]
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    parallel: Parallel
    per_item: float
    max_grad_norm: float | None
    around: Around = field(default_factory=Around)


def train_updates(run: Training, batches: Iterator[MicroBatch], until: int) -> Iterator[StepInfo]:
    """Yield after each update until `until` updates are made. `batches` has no end."""
    position, precision, parallel = run.position, run.precision, run.parallel
    watch = parallel.watch
    passes = Passes(
        run.model,
        run.loss,
        precision.forward,
        backward=lambda loss: precision.backward(loss * run.per_item),
        scale=lambda loss: precision.scaled(loss * run.per_item),
        failed=run.around.failed,
    )

    def update() -> StepInfo:
        mine = parallel.accumulate(passes, batches)
        total = parallel.reduce(mine)
        precision.unscale(run.optimizer, parallel.overflow)
        correction = 1.0 / (run.per_item * _exact(total.items))
        gradients = parallel.gradients(run.parameters)
        grad_norm = correct_and_clip(gradients, correction, run.max_grad_norm, parallel.norm)
        factor = run.schedule.factor(position.update - precision.num_skipped() + position.skipped_before)
        lr = set_learning_rate(run.optimizer, factor)
        run.around.apply(lambda: precision.step(run.optimizer, total.loss_sum, grad_norm))
        clear(run.parameters)
        watch.lap("optimizer")
        return StepInfo(position.update + 1, total.loss_sum, total.items, grad_norm, lr, total.bad)

    while position.update < until:
        watch.lap("hooks")
        step = run.around.run(update)
        position.update += 1
        watch.stop(position.update)
        yield step


def _exact(items: Tensor | int | float) -> Tensor | int | float:
    """Return a count that may be multiplied: a float times an integer tensor would be float32.

    Raises TaskFault for 0; where it is a tensor nobody waits for it, and the gradients are found not to be finite.
    """
    if not isinstance(items, Tensor):
        if items == 0:
            raise TaskFault("the losses of a whole update count no items", fix="return (the sum, the number of items)")
        return items
    return items.to(torch.float32 if items.device.type == "mps" else torch.float64)
