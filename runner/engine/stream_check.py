"""Check a stream before training: it repeats its samples, divides them among its shards, and restores its state.

Otherwise a fault would show only in a resumed run, or never: samples would be trained on twice without a message.
"""

from __future__ import annotations

from typing import NamedTuple

from runner.axes.dataloader import Loader
from runner.base.batch import MicroBatch
from runner.base.errors import DataError
from runner.base.fetcher import Fetcher
from runner.base.order import MicroBatchKey
from runner.engine.stream_reader import RESTORE_ERROR, ShardReader, StreamFetcher
from runner.engine.training_identity import hash_content


class StreamCheck(NamedTuple):
    """Result of reading the first samples of a stream.

    has_state            it has `state_dict` and `load_state_dict`
    restore_error        why loading the state does not continue with the next sample; empty: it does
    is_repeatable        it returns the same samples when it is opened again
    has_distinct_shards  its first two shards have different samples
    """

    has_state: bool = False
    restore_error: str = ""
    is_repeatable: bool = True
    has_distinct_shards: bool = True


def check_stream(fetcher: StreamFetcher, loader: Loader) -> StreamCheck:
    """Check the first samples of the stream, read by a worker if training uses workers."""
    reader = loader.new_like(_FirstSamples(fetcher))
    try:
        (micro_batch,) = reader.batches([MicroBatchKey(0, [0], last=True)])
    finally:
        reader.close()
    return StreamCheck(*micro_batch.batch)


def raise_if_invalid(check: StreamCheck, num_shards: int) -> None:
    """Raise DataError for a stream that cannot be used for training."""
    if not check.is_repeatable:
        raise DataError(
            "the stream returns other samples each time it is opened: processes that share it would train on some"
            " samples twice and miss others, and no run could be resumed",
            where="stream",
            fix="shuffle with random, numpy.random or torch, whose global generators are seeded, or seed your own"
            " generator from the epoch, which set_epoch(epoch) receives",
        )
    if not check.has_distinct_shards:
        raise DataError(
            "shards 0 and 1 of the stream start with the same samples: each sample would be trained on"
            f" {num_shards} times per epoch",
            where=f"data.shards={num_shards}",
            fix="return only the samples of the shard from stream(split, shard, num_shards), or those of"
            " torch.utils.data.get_worker_info() from __iter__, or use data.shards=1",
        )


class _FirstSamples(Fetcher):
    """Fetcher that returns the result of the check for any key."""

    def __init__(self, fetcher: StreamFetcher) -> None:
        super().__init__(fetcher.dataset, fetcher.collate, bad_samples="stop", model=fetcher.model)
        self.streams = fetcher.dataset.draws
        self.samples = fetcher.dataset

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        return MicroBatch(tuple(self.streams.read(self._check, key)), key.last)

    def _check(self, _: MicroBatchKey) -> StreamCheck:
        shards = [shard for shard in range(self.samples.source.num_shards) if self._num_samples(shard) > 1]
        if not shards:
            return StreamCheck()
        first = self.samples.reader(shards[0])
        hashes = self._hash_samples(first, shards[0])
        if hashes != self._hash_samples(self.samples.reader(shards[0]), shards[0]):
            return StreamCheck(is_repeatable=False)
        has_distinct_shards = True
        if len(shards) > 1 and len(set(hashes)) > 1:
            other = self._hash_samples(self.samples.reader(shards[1]), shards[1])
            has_distinct_shards = other[: len(hashes)] != hashes[: len(other)]
        error = first.state_error if first.mark.state is None else self._compare_after_restore(first, shards[0], hashes)
        return StreamCheck(first.has_state, error, True, has_distinct_shards)

    def _compare_after_restore(self, first: ShardReader, shard: int, hashes: list[str]) -> str:
        """Restore the state of the mark; return why the samples after it differ, empty if they do not."""
        reader, mark = self.samples.reader(shard), first.mark
        error = reader.restore(mark)
        if error:
            return error
        restored = [hash_content(reader.read(0, item, keep=False)) for item in range(mark.item, len(hashes))]
        return "" if restored == hashes[mark.item :] else RESTORE_ERROR

    def _num_samples(self, shard: int) -> int:
        return _NUM_CHECKED if self.samples.lengths is None else min(_NUM_CHECKED, self.samples.lengths[shard])

    def _hash_samples(self, reader: ShardReader, shard: int) -> list[str]:
        size = self._num_samples(shard)
        return [hash_content(reader.read(0, item, keep=item == (size - 1) // 2)) for item in range(size)]


_NUM_CHECKED = 16  # samples per shard
