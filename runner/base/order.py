"""Which samples an update sees: arithmetic on (seed, epoch, update), whatever reads them.

The order of an epoch is a permutation drawn from (seed, epoch) alone. The position is the number of updates made,
so resuming is starting to count elsewhere; workers, prefetching and ranks cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Indices = list[int]


class Micro(NamedTuple):
    """The key of one micro-batch: samples `indices` of epoch `epoch`; `last` closes the update."""

    epoch: int
    indices: Indices
    last: bool


@dataclass(frozen=True)
class Order:
    """Cut each epoch into updates of `global_batch_size` samples, and those into micro-batches.

    The last update of an epoch has fewer samples, or is left out with `drop_last`.
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    drop_last: bool = False

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates in an epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (0 if self.drop_last or not rest else 1)

    def epoch_of(self, update: int) -> int:
        """Return the epoch to which update number `update` (from 0) belongs."""
        return update // self.updates_per_epoch

    def samples_before(self, update: int) -> int:
        """Return how many samples the updates before number `update` have consumed."""
        epoch, window = divmod(update, self.updates_per_epoch)
        per_epoch = min(self.num_samples, self.updates_per_epoch * self.global_batch_size)
        return epoch * per_epoch + window * self.global_batch_size

    def micros(self, update: int) -> Iterator[Micro]:
        """Yield the micro-batches of update number `update`."""
        epoch, window = divmod(update, self.updates_per_epoch)
        start = window * self.global_batch_size
        samples = permutation(self.seed, epoch, self.num_samples)[start : start + self.global_batch_size].tolist()
        for first in range(0, len(samples), self.micro_batch_size):
            stop = first + self.micro_batch_size
            yield Micro(epoch, samples[first:stop], stop >= len(samples))

    def from_update(self, update: int) -> Iterator[Micro]:
        """Yield micro-batches from update number `update` on, without end."""
        while True:
            yield from self.micros(update)
            update += 1


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the order of the samples in one epoch, (num_samples,)."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return rng.permutation(num_samples)


def evenly_spread(num_samples: int, wanted: int | None) -> Indices:
    """Return `wanted` sample indices spread evenly over the data set, always the same ones; all if None."""
    if wanted is None or wanted >= num_samples:
        return list(range(num_samples))
    return [index * num_samples // wanted for index in range(wanted)]
