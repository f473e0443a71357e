"""Sum the additional metrics that a loss returns over the micro-batches and ranks of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from runner.base.accelerator import widest_dtype
from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.distributed.parallel import Parallel

Sums = Mapping[str, tuple[Tensor | float, Tensor | float]]


class ExtraMetrics:
    """Sums and counts of the additional metrics of the current update.

    Ranks agree on the names after the first update, so that later ones need a single all-reduce of known size.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._names: list[str] | None = None  # names on all ranks; None before the first update
        self._is_counted = True

    def track(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Start an update and yield its micro-batches; metrics of dummy micro-batches are ignored."""
        self._sums, self._is_counted = {}, True
        for micro in batches:
            self._is_counted = micro.is_counted
            yield micro

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore metrics in this context, in which forward passes of the update are repeated."""
        kept, self._sums = self._sums, {}
        try:
            yield
        finally:
            self._sums = kept

    def add(self, metrics: Sums) -> None:
        """Add the metrics of a micro-batch."""
        for name, pair in metrics.items() if self._is_counted else ():
            total, count = (_widen(number) for number in pair)
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count

    def reduce(self, parallel: Parallel) -> Sums:
        """Return the sums and counts over all ranks. A collective; does not synchronize with the device."""
        world = parallel.world
        if world.world_size == 1:
            return self._sums
        if self._sums and not parallel.splits_batch:
            what = "the third value of loss() is not supported in a pipeline"
            raise TaskFault(what, fix="return (sum, count), or use parallelism=ddp")
        if self._names is None:
            self._names = sorted({name for names in world.gather(list(self._sums)) for name in names})
        new = [name for name in self._sums if name not in self._names]
        if new:
            what = f"loss() returned new metrics, {', '.join(new)}, which no rank returned for the first update"
            raise TaskFault(
                what, fix="return the same names for each batch, with a count of 0 where there are no items"
            )
        if not self._names:
            return {}
        pairs = [self._sums.get(name, (0.0, 0.0)) for name in self._names]
        numbers = world.zeros(2 * len(pairs))
        for index, number in enumerate(number for pair in pairs for number in pair):
            numbers[index] = number
        totals = world.sum(numbers)
        return {name: (totals[2 * index], totals[2 * index + 1]) for index, name in enumerate(self._names)}


def _widen(number: Tensor | float) -> Tensor | float:
    """Convert a number to the widest dtype of its device, so that long sums do not lose small terms."""
    if not isinstance(number, Tensor):
        return float(number)
    return number.detach().to(widest_dtype(number.device))
