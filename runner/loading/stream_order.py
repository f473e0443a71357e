"""The order of a stream: which sample of which shard is at a position, without reading anything.

A stream has a fixed number of shards, which determines the results of a run, like the seed. An update takes its samples
from its shards in turn, so its content does not depend on the number of ranks or workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from runner.base.order import Indices, Sampler

ENDLESS = 2**40  # number of samples assumed for a shard of unknown length, which is repeated


def encode_index(shard: int, item: int, num_shards: int) -> int:
    """Return the index of a sample, as in `MicroBatchKey`: unique in an epoch."""
    return item * num_shards + shard


def decode_index(code: int, num_shards: int) -> tuple[int, int]:
    """Return the shard of a sample, and its number in the shard."""
    item, shard = divmod(code, num_shards)
    return shard, item


class RoundRobin:
    """Take one element of each sequence in turn, skipping those that have ended.

    lengths  length of each sequence
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.total = lengths, sum(lengths)
        # A round takes one element of each sequence that has not ended. A segment is a series of rounds with the same
        # sequences; `_levels` holds the first round of each segment.
        self._levels = [0, *sorted({length for length in lengths if length})][:-1]
        self._active = [[which for which, length in enumerate(lengths) if length > level] for level in self._levels]
        self._starts = [sum(min(length, level) for length in lengths) for level in self._levels]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the sequence at this position, and the number of the element in it."""
        segment = bisect_right(self._starts, position) - 1
        rounds, place = divmod(position - self._starts[segment], len(self._active[segment]))
        return self._active[segment][place], self._levels[segment] + rounds

    def counts_before(self, position: int) -> list[int]:
        """Return how many elements of each sequence are before this position."""
        if position >= self.total:
            return list(self.lengths)
        segment = bisect_right(self._starts, position) - 1
        rounds, place = divmod(position - self._starts[segment], len(self._active[segment]))
        counts = [min(length, self._levels[segment] + rounds) for length in self.lengths]
        for which in self._active[segment][:place]:
            counts[which] += 1
        return counts


class StreamSampler(Sampler):
    """Updates of `global_batch_size` samples, each from one group of shards; the groups take turns.

    The last update of a group is smaller if `global_batch_size` does not divide its samples, or dropped with
    `drop_last`. The samples of an update are ordered by shard, so that a rank, whose share is a slice of them, reads
    few shards.

    lengths            number of samples of each shard; None: unknown. Then each shard is repeated when it ends, and the
                       epoch never ends
    shards_per_update  number of shards in a group
    """

    def __init__(
        self,
        lengths: Sequence[int] | None,
        num_shards: int,
        shards_per_update: int,
        global_batch_size: int,
        *,
        drop_last: bool = False,
    ) -> None:
        assert num_shards % shards_per_update == 0, "shards_per_update must divide num_shards"
        self.lengths = tuple(lengths or [ENDLESS] * num_shards)
        self.num_shards, self.shards_per_update = num_shards, shards_per_update
        self.global_batch_size = global_batch_size
        firsts = range(0, num_shards, shards_per_update)
        self._groups = [RoundRobin(self.lengths[first : first + shards_per_update]) for first in firsts]
        updates = [group.total // global_batch_size for group in self._groups]
        if not drop_last:
            updates = [-(-group.total // global_batch_size) for group in self._groups]
        self._updates = RoundRobin(updates)
        self.updates_per_epoch = self._updates.total
        self.num_samples = sum(self.lengths)

    def start(self, seed: int, epoch: int, window: int) -> int:
        taken = self._updates.counts_before(window)
        return sum(
            min(number * self.global_batch_size, group.total) for number, group in zip(taken, self._groups, strict=True)
        )

    def draw(self, seed: int, epoch: int, window: int) -> Indices:
        number, visit = self._updates.locate(window)
        group, first = self._groups[number], visit * self.global_batch_size
        positions = range(first, min(first + self.global_batch_size, group.total))
        samples = sorted(group.locate(position) for position in positions)
        offset = number * self.shards_per_update
        return [encode_index(offset + shard, item, self.num_shards) for shard, item in samples]
