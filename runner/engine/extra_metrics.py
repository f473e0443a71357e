"""Further training metrics that a loss returns, added over the micro-batches and ranks of an update."""

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
    """Sums and counts of the current update.

    Ranks agree on the names after the first update, so that later ones need a single all-reduce of known size.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._names: list[str] | None = None  # on any rank; None: not agreed on yet
        self._counts = True

    def counted(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Start an update; yield its micro-batches, and ignore what the loss returns for dummy ones."""
        self._sums, self._counts = {}, True
        for micro in batches:
            self._counts = micro.counts
            yield micro

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what the loss returns inside: passes that repeat those of the update."""
        kept, self._sums = self._sums, {}
        try:
            yield
        finally:
            self._sums = kept

    def add(self, found: Sums) -> None:
        """Add what the loss of a micro-batch returned."""
        for name, pair in found.items() if self._counts else ():
            total, count = (_wide(number) for number in pair)
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count

    def reduced(self, parallel: Parallel) -> Sums:
        """Return the sums and counts over all ranks; collective. Does not synchronize with the device."""
        world = parallel.world
        if world.world_size == 1:
            return self._sums
        if self._sums and not parallel.splits_batch:
            what = "the third value of loss cannot be reported by the stages of a pipeline"
            raise TaskFault(what, fix="return (sum, count), or use parallelism=ddp")
        if self._names is None:
            self._names = sorted({name for names in world.gather(list(self._sums)) for name in names})
        new = [name for name in self._sums if name not in self._names]
        if new:
            what = f"loss returns {', '.join(new)} now, but no rank returned it for the first update"
            raise TaskFault(
                what, fix="return the same names for each batch, with a count of 0 where there are no items"
            )
        if not self._names:
            return {}
        pairs = [self._sums.get(name, (0.0, 0.0)) for name in self._names]
        numbers = world.zeros(2 * len(pairs))
        for place, number in enumerate(number for pair in pairs for number in pair):
            numbers[place] = number
        totals = world.sum(numbers)
        return {name: (totals[2 * place], totals[2 * place + 1]) for place, name in enumerate(self._names)}


def _wide(number: Tensor | float) -> Tensor | float:
    """Return a number in the widest dtype of its device: sums of many micro-batches must not stop growing."""
    if not isinstance(number, Tensor):
        return float(number)
    return number.detach().to(widest_dtype(number.device))
