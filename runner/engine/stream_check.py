"""Check a stream before training: it repeats its samples, divides them among its shards, and restores its state.

A stream that does not would be noticed much later, in a resumed run, or never: with samples that are trained on twice.
"""

from __future__ import annotations

from typing import NamedTuple

from runner.axes.dataloader import Fetcher, Loader
from runner.base.batch import MicroBatch
from runner.base.errors import DataError
from runner.base.order import MicroBatchKey
from runner.engine.stream_reader import ANOTHER_SAMPLE, ShardReader, StreamFetcher
from runner.engine.training_identity import hash_content


class StreamVerdict(NamedTuple):
    """What was found in the first samples of a stream.

    has_state  it has `state_dict` and `load_state_dict`
    why_lost   why the state does not return to its samples; empty: it does
    repeats    the same samples come when it is opened again
    divides    its first two shards have different samples
    """

    has_state: bool = False
    why_lost: str = ""
    repeats: bool = True
    divides: bool = True


def check_stream(fetcher: StreamFetcher, loader: Loader) -> StreamVerdict:
    """Read the first samples of the stream in a process that training would read it in, and return what was found."""
    reader = loader.new_like(_FirstSamples(fetcher))
    try:
        (found,) = reader.batches([MicroBatchKey(0, [0], last=True)])
    finally:
        reader.close()
    return StreamVerdict(*found.batch)


def raise_fault(verdict: StreamVerdict, num_shards: int) -> None:
    """Raise DataError for a stream that cannot be trained with."""
    if not verdict.repeats:
        raise DataError(
            "the stream returns other samples each time it is opened: processes that share it would train on some"
            " samples twice and miss others, and no run could be resumed",
            where="stream",
            fix="shuffle with random, numpy.random or torch, whose global generators are seeded, or seed your own"
            " generator from the epoch, which set_epoch(epoch) receives",
        )
    if not verdict.divides:
        raise DataError(
            "shards 0 and 1 of the stream begin with the same samples: each sample would be trained on"
            f" {num_shards} times per epoch",
            where=f"data.shards={num_shards}",
            fix="return only the samples of the shard from stream(split, shard, num_shards), or those of"
            " torch.utils.data.get_worker_info() from __iter__, or use data.shards=1",
        )


class _FirstSamples(Fetcher):
    """Data set that returns the verdict for any key."""

    def __init__(self, fetcher: StreamFetcher) -> None:
        super().__init__(fetcher.dataset, fetcher.collate, bad_samples="stop", model=fetcher.model)
        self.streams = fetcher.dataset.draws
        self.samples = fetcher.dataset

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        return MicroBatch(tuple(self.streams.read(self._verdict, key)), key.last)

    def _verdict(self, _: MicroBatchKey) -> StreamVerdict:
        shards = [shard for shard in range(self.samples.source.num_shards) if self._size(shard) > 1]
        if not shards:
            return StreamVerdict()
        first = self.samples.reader(shards[0])
        hashes = self._hashes(first, shards[0])
        if hashes != self._hashes(self.samples.reader(shards[0]), shards[0]):
            return StreamVerdict(repeats=False)
        divides = True
        if len(shards) > 1 and len(set(hashes)) > 1:
            other = self._hashes(self.samples.reader(shards[1]), shards[1])
            divides = other[: len(hashes)] != hashes[: len(other)]
        why = first.unsaved if first.mark.state is None else self._why_lost(first, shards[0], hashes)
        return StreamVerdict(first.has_state, why, True, divides)

    def _why_lost(self, first: ShardReader, shard: int, hashes: list[str]) -> str:
        """Return why the samples after the mark differ once its state is loaded; empty if they do not."""
        reader, mark = self.samples.reader(shard), first.mark
        why = reader.restore(mark)
        if why:
            return why
        found = [hash_content(reader.read(0, item, keep=False)) for item in range(mark.item, len(hashes))]
        return "" if found == hashes[mark.item :] else ANOTHER_SAMPLE

    def _size(self, shard: int) -> int:
        return _LOOKED_AT if self.samples.lengths is None else min(_LOOKED_AT, self.samples.lengths[shard])

    def _hashes(self, reader: ShardReader, shard: int) -> list[str]:
        size = self._size(shard)
        return [hash_content(reader.read(0, item, keep=item == (size - 1) // 2)) for item in range(size)]


_LOOKED_AT = 16  # samples of a shard
