"""Sample order as a pure function of (seed, epoch, update), independent of workers and ranks.

The order of an epoch is a permutation drawn from (seed, epoch) alone. It is an array for up to `KEYED_ABOVE` samples.
For more samples it is computed by a function, which needs neither memory nor time for samples that are not read. The
position of a run in the order is the number of completed updates, so resuming only changes the starting index; workers,
prefetching and ranks cannot change the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import isqrt
from typing import Any, NamedTuple, Protocol

import numpy as np

from runner.base.shares import Shares, distribute_samples, rank_slices

Indices = list[int]
IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
KEYED_ABOVE = 1 << 24  # samples; an array of their order takes 128 MiB and a second per epoch
KEYED = "keyed permutation"  # `Sampler.content` of this order, stored in checkpoints


class Permutation(Protocol):
    """The samples of an epoch in order; only slices are read."""

    def __getitem__(self, positions: slice, /) -> IntArray: ...


class MicroBatchKey(NamedTuple):
    """Loader key of a micro-batch: samples `indices` of epoch `epoch`; `last` marks the last one of this rank's update.

    indices     sample indices; in a dataset of n samples, `index + n` is sample `index` drawn again in the epoch, with
                other random numbers
    is_counted  False: read only to keep the ranks in lockstep, or empty because this rank has no samples
    first       position of the first sample in the order of the epoch
    seed        seed of the run
    """

    epoch: int
    indices: Indices
    last: bool
    is_counted: bool = True
    first: int = 0
    seed: int = 0


class Sampler:
    """Draws the samples of an update as a function of (seed, epoch, window).

    window             number of the update in its epoch
    num_samples        samples drawn in an epoch
    updates_per_epoch  the same in each epoch
    content            identifies what the order depends on besides seed and number of samples, such as a hash of
                       weights; empty: it depends on nothing else
    """

    num_samples: int
    updates_per_epoch: int
    content: str = ""

    def start(self, seed: int, epoch: int, window: int) -> int:
        """Return the number of samples of the epoch before update `window`, which may be `updates_per_epoch`."""
        raise NotImplementedError

    def draw(self, seed: int, epoch: int, window: int) -> Indices:
        """Return the sample indices of this update, as in `MicroBatchKey`."""
        raise NotImplementedError

    def split(self, indices: Indices, size: int) -> list[Indices]:
        """Split the samples of a rank in an update into micro-batches of at most `size`."""
        return [indices[first : first + size] for first in range(0, len(indices), size)]


class EvenUpdates(Sampler):
    """Updates of `global_batch_size` samples; the last one of an epoch is smaller, or dropped with `drop_last`.

    order  function from (seed, epoch) to the samples of the epoch in order, (num_samples,)
    """

    def __init__(
        self, num_samples: int, global_batch_size: int, order: Callable[[int, int], Permutation], *, drop_last: bool
    ) -> None:
        num_full, rest = divmod(num_samples, global_batch_size)
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.updates_per_epoch = num_full + (0 if drop_last or not rest else 1)
        self._order = lru_cache(maxsize=2)(order)

    def start(self, seed: int, epoch: int, window: int) -> int:
        return min(self.num_samples, window * self.global_batch_size)

    def draw(self, seed: int, epoch: int, window: int) -> Indices:
        first = window * self.global_batch_size
        indices: Indices = self._order(seed, epoch)[first : first + self.global_batch_size].tolist()
        return indices


@dataclass(frozen=True)
class Order:
    """Split each epoch into updates, each update into one share per rank, and each share into micro-batches.

    An update has `global_batch_size` samples. The last one of an epoch is smaller, or dropped with `drop_last`.

    sampler  draws the samples of each update; None: every sample once per epoch, in random order
    shares   samples per update for each rank, summing to `global_batch_size`; empty: one rank has all samples
    rank     rank whose micro-batches are returned
    is_lockstep  every rank gets the same number of micro-batches; missing ones are dummy micro-batches
    smaller  (update, size): from update number `update` on, counted from 0, micro-batches of this rank have at most
             `size` samples
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    drop_last: bool = False
    shares: tuple[int, ...] = ()
    rank: int = 0
    is_lockstep: bool = False
    smaller: tuple[tuple[int, int], ...] = ()
    sampler: Sampler | None = None

    @cached_property
    def update_sampler(self) -> Sampler:
        """Return the sampler, by default the shuffled order."""
        return self.sampler or shuffled_sampler(self.num_samples, self.global_batch_size, drop_last=self.drop_last)

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates in an epoch."""
        return self.update_sampler.updates_per_epoch

    def samples_before(self, update: int) -> int:
        """Return the number of samples consumed before update number `update`."""
        epoch, window = divmod(update, self.updates_per_epoch)
        per_epoch = self.update_sampler.start(self.seed, 0, self.updates_per_epoch) if epoch else 0
        return epoch * per_epoch + self.update_sampler.start(self.seed, epoch, window)

    def micro_batches(self, update: int, shares: Shares | None = None) -> Iterator[MicroBatchKey]:
        """Yield the micro-batches of this rank in update number `update`; a dummy one if the rank has no samples.

        shares  shares of this update; None: those of the order
        """
        epoch, window = divmod(update, self.updates_per_epoch)
        indices_of_update = self.update_sampler.draw(self.seed, epoch, window)
        split_by = shares or self.shares
        bounds = rank_slices(len(indices_of_update), split_by) if split_by else [(0, len(indices_of_update))]
        size = min([self.micro_batch_size, *(size for first, size in self.smaller if update >= first)])
        per_rank = [self.update_sampler.split(indices_of_update[first:stop], size) for first, stop in bounds]
        mine = per_rank[self.rank]
        position = self.update_sampler.start(self.seed, epoch, window) + bounds[self.rank][0]
        count = max(map(len, per_rank)) if self.is_lockstep else max(1, len(mine))
        for number in range(count):
            is_counted = number < len(mine)
            dummy = (mine[-1] if mine else indices_of_update[:1]) if self.is_lockstep else []
            indices = mine[number] if is_counted else dummy
            yield MicroBatchKey(epoch, indices, number == count - 1, is_counted, position, self.seed)
            position += len(indices)

    def samples_per_rank(self, update: int, shares: Shares | None = None) -> Shares:
        """Return the number of samples of each rank in update number `update`."""
        epoch, window = divmod(update, self.updates_per_epoch)
        start = self.update_sampler.start(self.seed, epoch, window)
        available = self.update_sampler.start(self.seed, epoch, window + 1) - start
        split_by = shares or self.shares
        return distribute_samples(available, split_by) if split_by else (available,)

    def from_update(
        self, update: int, shares_of: Callable[[int], Shares | None] = lambda _: None
    ) -> Iterator[MicroBatchKey]:
        """Yield micro-batches from update number `update` on, indefinitely.

        shares_of  returns the shares of an update, None for those of the order; called when the update is read
        """
        while True:
            yield from self.micro_batches(update, shares_of(update))
            update += 1


def shuffled_sampler(
    num_samples: int, global_batch_size: int, *, drop_last: bool = False, uses_array_order: bool = False
) -> Sampler:
    """Draw every sample once per epoch, in random order.

    uses_array_order  draw the order as an array for any number of samples, as versions before `KeyedPermutation` did
    """
    is_keyed = num_samples > KEYED_ABOVE and not uses_array_order
    kind: Callable[..., Permutation] = KeyedPermutation if is_keyed else permutation
    sampler = EvenUpdates(num_samples, global_batch_size, partial(kind, num_samples=num_samples), drop_last=drop_last)
    sampler.content = KEYED if is_keyed else ""
    return sampler


class KeyedPermutation:
    """A random permutation of range(num_samples) in constant memory; any slice is computed independently.

    A Feistel network: a position is a pair (left, right) of numbers below about sqrt(num_samples); each round adds a
    keyed hash of one half to the other. Each addition is invertible, so the rounds permute the pairs. The at most
    sqrt(num_samples) pairs beyond the last sample are permuted again until they are samples (cycle walking).
    Sources: Luby and Rackoff, How to Construct Pseudorandom Permutations, SIAM J. Comput. 1988; Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """

    def __init__(self, seed: int, epoch: int, num_samples: int) -> None:
        self.num_samples = num_samples
        self._left = np.uint64(isqrt(num_samples - 1) + 1)
        self._right = np.uint64(-(-num_samples // int(self._left)))
        self._keys = _seed_sequence(seed, epoch, _KEY_STREAM).generate_state(_ROUNDS, np.uint64)

    def __getitem__(self, positions: slice) -> IntArray:
        indices = self._permute(np.arange(*positions.indices(self.num_samples), dtype=np.uint64))
        while (outside := indices >= self.num_samples).any():
            indices[outside] = self._permute(indices[outside])
        return indices.astype(np.int64)

    def _permute(self, pairs: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        left, right = pairs // self._right, pairs % self._right
        for left_key, right_key in self._keys.reshape(-1, 2):
            left = (left + _hash(right + left_key) % self._left) % self._left
            right = (right + _hash(left + right_key) % self._right) % self._right
        indices: np.ndarray[Any, np.dtype[np.uint64]] = left * self._right + right
        return indices


def _hash(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a hash of each number. Source: Steele, Lea and Flood, SplitMix, OOPSLA 2014 (the variant of Stafford)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


_ROUNDS = 12
_KEY_STREAM = 0x4665_6973  # separates these keys from other random numbers of the same seed and epoch


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_samples: int) -> IntArray:
    """Return the order of the samples in one epoch, (num_samples,)."""
    return order_rng(seed, epoch).permutation(num_samples)


def order_rng(seed: int, *numbers: int) -> np.random.Generator:
    """Return the generator for the order of an epoch."""
    return np.random.Generator(np.random.Philox(_seed_sequence(seed, *numbers)))


def spread_evenly(num_samples: int, count: int | None) -> Indices:
    """Return `count` sample indices, evenly spaced over the dataset and always the same; None: all indices."""
    if count is None or count >= num_samples:
        return list(range(num_samples))
    return [index * num_samples // count for index in range(count)]


def rank_seed(seed: int, rank: int, update: int = 0) -> int:
    """Return the seed of a rank's generators for a start at `update`; rank 0 at update 0 uses `seed` unchanged."""
    if rank == 0 and update == 0:
        return seed
    return int(_seed_sequence(seed, rank, update).generate_state(1, np.uint64)[0] >> 1)


def _seed_sequence(seed: int, *numbers: int) -> np.random.SeedSequence:
    """Return a SeedSequence that is unique to this seed and these numbers below 2**32.

    Seeds below 2**32 keep the sequences of earlier versions, so that runs started by those can be resumed. NumPy splits
    a larger seed into two words; in one list with the numbers, it could equal a smaller seed with other numbers.
    """
    return np.random.SeedSequence([seed, *numbers] if seed < 2**32 else seed, spawn_key=() if seed < 2**32 else numbers)
