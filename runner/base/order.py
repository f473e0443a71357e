"""Sample order as a pure function of (seed, epoch, update), independent of what reads the samples.

The order of an epoch is a permutation drawn from (seed, epoch) alone. The position is the number of completed updates,
so resuming only changes the starting index; workers, prefetching and ranks cannot change the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from runner.base.shares import Shares, slices, window_shares

Indices = list[int]


class Micro(NamedTuple):
    """Loader key of a micro-batch: samples `indices` of epoch `epoch`; `last` marks the last one of this rank's update.

    counts  False: read only to keep the ranks in step, or empty because this rank has no samples
    first   position of the first sample in the order of the epoch
    seed    seed of the run
    """

    epoch: int
    indices: Indices
    last: bool
    counts: bool = True
    first: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Order:
    """Split each epoch into updates of `global_batch_size` samples, and these into shares of ranks and micro-batches.

    The last update of an epoch is smaller, or dropped with `drop_last`.

    shares   samples per update for each rank, summing to `global_batch_size`; empty: one rank has them all
    rank     rank whose micro-batches are returned
    in_step  every rank gets the same number of micro-batches; missing ones are dummy micro-batches
    smaller  (update, size): from update `update` (from 0) on, micro-batches of this rank have at most `size` samples
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    drop_last: bool = False
    shares: tuple[int, ...] = ()
    rank: int = 0
    in_step: bool = False
    smaller: tuple[tuple[int, int], ...] = ()

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates in an epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (0 if self.drop_last or not rest else 1)

    def samples_before(self, update: int) -> int:
        """Return the number of samples consumed before update number `update`."""
        epoch, window = divmod(update, self.updates_per_epoch)
        per_epoch = min(self.num_samples, self.updates_per_epoch * self.global_batch_size)
        return epoch * per_epoch + window * self.global_batch_size

    def size_of(self, update: int) -> int:
        """Return the maximum micro-batch size in update number `update` (from 0)."""
        return min([self.micro_batch_size, *(size for first, size in self.smaller if update >= first)])

    def micros(self, update: int, shares: Shares | None = None) -> Iterator[Micro]:
        """Yield the micro-batches of this rank in update number `update`; a dummy one if the rank has no samples.

        shares  shares of this update, if they differ from the usual ones
        """
        epoch, window = divmod(update, self.updates_per_epoch)
        start = window * self.global_batch_size
        whole = permutation(self.seed, epoch, self.num_samples)[start : start + self.global_batch_size].tolist()
        split_by = shares or self.shares
        bounds = slices(len(whole), split_by) if split_by else [(0, len(whole))]
        parts = [whole[first:stop] for first, stop in bounds]
        mine, before = parts[self.rank], start + bounds[self.rank][0]
        size = self.size_of(update)
        passes = [mine[first : first + size] for first in range(0, len(mine), size)]
        wanted = max(-(-len(part) // size) for part in parts) if self.in_step else max(1, len(passes))
        for number in range(wanted):
            counts = number < len(passes)
            dummy = (passes[-1] if passes else whole[:1]) if self.in_step else []
            indices = passes[number] if counts else dummy
            yield Micro(epoch, indices, number == wanted - 1, counts, before + number * size, self.seed)

    def samples_of_ranks(self, update: int, shares: Shares | None = None) -> Shares:
        """Return the number of samples of each rank in update number `update`."""
        window = update % self.updates_per_epoch
        available = min(self.global_batch_size, self.num_samples - window * self.global_batch_size)
        split_by = shares or self.shares
        return window_shares(available, split_by) if split_by else (available,)

    def from_update(self, update: int, shares_of: Callable[[int], Shares | None] = lambda _: None) -> Iterator[Micro]:
        """Yield micro-batches from update number `update` on, indefinitely.

        shares_of  returns the shares of an update, None for the usual ones; called when the update is read
        """
        while True:
            yield from self.micros(update, shares_of(update))
            update += 1


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the order of the samples in one epoch, (num_samples,)."""
    return np.random.Generator(np.random.Philox(_sequence(seed, epoch))).permutation(num_samples)


def evenly_spread(num_samples: int, wanted: int | None) -> Indices:
    """Return `wanted` sample indices, evenly spaced over the data set and always the same; all if None."""
    if wanted is None or wanted >= num_samples:
        return list(range(num_samples))
    return [index * num_samples // wanted for index in range(wanted)]


def seed_of_rank(seed: int, rank: int, update: int = 0) -> int:
    """Return the seed of a rank's generators from an update on; rank 0 at update 0 uses `seed` unchanged."""
    if rank == 0 and update == 0:
        return seed
    return int(_sequence(seed, rank, update).generate_state(1, np.uint64)[0] >> 1)


def _sequence(seed: int, *numbers: int) -> np.random.SeedSequence:
    """Return a SeedSequence that is unique to this seed and these numbers below 2**32.

    Smaller seeds keep the sequences of earlier versions, so that their runs can be resumed. Larger seeds take two
    words in NumPy: in one list with the numbers, they would collide with a smaller seed and other numbers.
    """
    return np.random.SeedSequence([seed, *numbers] if seed < 2**32 else seed, spawn_key=() if seed < 2**32 else numbers)
