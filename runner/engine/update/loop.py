"""Run the training loop. It writes nothing and may only wait for the previous update; hooks do the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from runner.axes.optimizer import set_learning_rate
from runner.axes.precision import Precision
from runner.axes.scheduler import Schedule
from runner.base.accelerator import widest_dtype
from runner.base.batch import MicroBatch
from runner.base.task import Sum
from runner.distributed.parallel import ForwardPasses, Parallel
from runner.engine.contract.contract_checks import no_items_error
from runner.engine.update.extra_metrics import ExtraMetrics
from runner.engine.update.gradients import ForwardWrapper, GradientSource, clear, correct_and_clip


@dataclass
class Position:
    """Progress of a training run: its phase, and the number of updates.

    update          number of completed updates in this phase, including skipped ones
    skipped_before  number of updates that were skipped in earlier phases
    """

    phase: str
    update: int = 0
    skipped_before: int = 0


class StepInfo(NamedTuple):
    """Results of one update; tensors stay on the device. A phase of kind fit has no loss and no learning rate.

    bad    (index, reason) of each sample that could not be read
    extra  additional training metrics: name -> (sum, count)
    """

    update: int
    loss_sum: Tensor | None
    items: Tensor | int | float
    grad_norm: Tensor | None
    lr: float | None
    bad: tuple[tuple[int, str], ...]
    extra: Mapping[str, tuple[Tensor | float, Tensor | float]] = {}


class UpdateWrapper:
    """Wraps an update; this base class does nothing, so an error ends the run.

    before_step  called once the gradients are summed, divided and clipped
    """

    before_step: Callable[[], None] = staticmethod(lambda: None)

    def run(self, update: Callable[[], StepInfo]) -> StepInfo:
        """Run `update` and return its result; a subclass may retry it from the same state."""
        return update()

    def failed(self, error: Exception) -> None:
        """Handle an error in a forward or backward pass; return if all ranks can discard the update, else raise it."""
        raise error

    def apply(self, step: Callable[[], None]) -> None:
        """Apply the gradients."""
        step()


@dataclass(frozen=True)
class Training:
    """Inputs of the training loop.

    loss            (model, batch) -> (loss summed over items, number of items)
    per_item        constant factor, about 1 / (items of an update), applied to loss sums before the backward pass to
                    keep float16 gradients in range; it does not affect results, because the gradients are finally
                    divided by the true count
    gradients       how the gradients of an update are computed
    extra           additional metrics that the loss returns
    update_wrapper  wraps each update, as the retry after an out-of-memory error does
    location        file:line of the loss, for messages
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
    gradients: GradientSource = field(default_factory=GradientSource)
    extra: ExtraMetrics = field(default_factory=ExtraMetrics)
    update_wrapper: UpdateWrapper = field(default_factory=UpdateWrapper)
    location: str = ""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of an update."""
        return [self.optimizer]

    def wrap_forward(self, wrapper: ForwardWrapper) -> Training:
        """Return a copy with `wrapper` applied to every forward pass."""
        return replace(self, loss=wrapper(self.loss), gradients=self.gradients.wrap_forward(wrapper))

    def updater(self, batches: Iterator[MicroBatch]) -> Callable[[], StepInfo]:
        """Return a function that runs one update with the next micro-batches."""
        position, precision, parallel = self.position, self.precision, self.parallel
        passes = ForwardPasses(
            self.model,
            self.loss,
            precision.forward,
            backward=lambda loss: precision.backward(loss, self.per_item),
            scale=lambda loss: precision.scale_loss(loss * self.per_item),
            failed=self.update_wrapper.failed,
        )

        def update() -> StepInfo:
            clear(self.parameters)  # a hook or task may have called `backward` since the last update
            sums = self.gradients.accumulate(parallel, passes, self.extra.track(batches))
            total = parallel.reduce(sums)
            extra = self.extra.reduce(parallel)
            # After `reduce`, because the sums then include an overflow on any rank, so copies of the model agree on it.
            precision.unscale(self.optimizer, parallel.any_overflow)
            if not isinstance(total.items, Tensor) and total.items == 0:
                raise no_items_error(position.update + 1, self.location, total.bad)
            correction = 1.0 / (self.per_item * _widen(total.items))
            gradients = parallel.gradients(self.parameters)
            grad_norm = correct_and_clip(gradients, correction, self.max_grad_norm, parallel.global_norm)
            # Updates skipped for an overflow do not advance the schedule. `num_skipped` counts those of all phases.
            factor = self.schedule.factor(position.update - precision.num_skipped() + position.skipped_before)
            lr = set_learning_rate(self.optimizer, factor)
            self.update_wrapper.before_step()  # outside `apply`, which may repeat a step after an out-of-memory error
            self.update_wrapper.apply(lambda: precision.step(self.optimizer, total.loss_sum, grad_norm))
            clear(self.parameters)
            parallel.stopwatch.lap("optimizer")
            return StepInfo(position.update + 1, total.loss_sum, total.items, grad_norm, lr, total.bad, extra)

        return update


class UpdateInputs(Protocol):
    """Inputs of the loop: one loss, or several objectives."""

    @property
    def position(self) -> Position: ...

    @property
    def parallel(self) -> Parallel: ...

    @property
    def update_wrapper(self) -> UpdateWrapper: ...

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    def updater(self, batches: Iterator[MicroBatch]) -> Callable[[], StepInfo]: ...

    def wrap_forward(self, wrapper: ForwardWrapper) -> UpdateInputs: ...


def train_updates(run: UpdateInputs, batches: Iterator[MicroBatch], until: int) -> Iterator[StepInfo]:
    """Run updates until `until` are complete, and yield the result of each. `batches` is infinite."""
    position, stopwatch = run.position, run.parallel.stopwatch
    update = run.updater(batches)
    while position.update < until:
        stopwatch.lap("hooks")
        step = run.update_wrapper.run(update)
        position.update += 1
        stopwatch.stop(position.update)
        yield step


def _widen(items: Tensor | int | float) -> Tensor | int | float:
    """Return the count in the widest float dtype: a float times an integer tensor would be float32.

    The value of a tensor is not read, which would synchronize with the device; a 0 shows up as non-finite gradients.
    """
    return items.to(widest_dtype(items.device)) if isinstance(items, Tensor) else items
