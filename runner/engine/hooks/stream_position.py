"""Check a stream, and save and restore the position in each shard."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any, NamedTuple

from runner.base.batch import MicroBatch, ShardMark
from runner.base.errors import DataError
from runner.base.order import MicroBatchKey
from runner.base.text import format_duration
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.parts.train_order import describe_stream
from runner.engine.process.watchdog import DATA
from runner.engine.sources.stream_reader import RESTORE_ERROR, ShardReader, StreamFetcher
from runner.engine.sources.training_identity import hash_content
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader


class StreamPosition(Hook):
    """Tracks how far into each shard of a stream the completed updates have read; inactive for other datasets.

    After a resume, a shard may move to another rank, so several ranks may have a position in it. A checkpoint stores
    the furthest one.
    """

    name = "stream"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._marks: dict[int, ShardMark] = {}
        self._printed_notes: set[str] = set()
        self._needs_replay = False  # loading the stream's state does not restore its position

    @property
    def _fetcher(self) -> StreamFetcher | None:
        fetcher = self.phase.loader.fetcher
        return fetcher if isinstance(fetcher, StreamFetcher) else None

    def seek(self) -> None:
        """Make the loader start after the samples of the completed updates."""
        if self._fetcher is not None:
            self._fetcher.dataset.start_from(self._marks)

    def begin(self) -> None:
        fetcher = self._fetcher
        if fetcher is None or self.phase.is_over:
            return
        screen = self.phase.run.observers.screen
        screen.info(describe_stream(fetcher.dataset, self.phase.parts.plan))
        if self._marks:
            replayed = [mark for mark in self._marks.values() if mark.state is None]
            samples = sum(mark.item - mark.passed for mark in replayed)
            if samples:
                seconds = sum((mark.item - mark.passed) * mark.sample_s for mark in replayed)
                reason = "its state cannot be used" if self._needs_replay else "it has no state_dict"
                screen.record_event("stream replay", samples=samples, expected_s=seconds, reason=reason)
                screen.info(
                    f"replaying the stream from the beginning to the saved position, because {reason}:"
                    f" {samples:,} samples, about {format_duration(seconds)} if one process reads them"
                )
        elif self.phase.run.provenance.is_compared and self.phase.start is None:
            phase, world = self.phase, self.phase.parts.world
            check_fields: list[Any] | None = None
            if world.is_first:
                with phase.progress_mark.doing(DATA, phase.position.update + 1):
                    check_fields = [*check_stream(fetcher, phase.loader)]
            check = StreamCheck(*world.broadcast(check_fields))
            raise_if_invalid(check, fetcher.dataset.source.num_shards)
            self._needs_replay = bool(check.restore_error)
            if check.restore_error:
                screen.warn(
                    f"{check.restore_error}: a resumed run must replay the stream from the beginning to the saved"
                    " position"
                )

    def after_update(self, step: Any) -> None:
        feed = self.phase.feed
        if not feed.marks:
            return
        self._marks.update(feed.marks)
        for note in {mark.note for mark in feed.marks.values()} - self._printed_notes - {""}:
            self._printed_notes.add(note)
            self.phase.run.observers.screen.warn(note)
        feed.marks = {}

    def state_dict(self) -> dict[str, Any] | None:
        if self._fetcher is None:
            return None
        furthest: dict[int, list[Any]] = {}
        marks = [[shard, *mark._replace(note="")] for shard, mark in self._marks.items()]
        for shard, *mark in itertools.chain.from_iterable(self.phase.parts.world.gather(marks)):
            furthest[shard] = max(furthest.get(shard, mark), mark, key=itemgetter(1, 0))  # epoch and item
        return {"shards": [[shard, *mark] for shard, mark in furthest.items()], "replays": self._needs_replay}

    def load_state_dict(self, state: Any) -> None:
        if not state:
            return
        self._needs_replay = bool(state["replays"])
        for shard, *values in state["shards"]:
            mark = ShardMark(*values)
            self._marks[int(shard)] = mark._replace(state=None) if self._needs_replay else mark


class StreamCheck(NamedTuple):
    """Result of reading the first samples of a stream.

    has_state            the stream has `state_dict` and `load_state_dict`
    restore_error        why loading the state does not restore the position; empty if it does
    is_repeatable        the stream returns the same samples when it is opened again
    has_distinct_shards  the first two shards have different samples
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
            "the stream returns different samples each time it is opened: processes that share it would train on some"
            " samples twice and miss others, and no run could be resumed",
            where="stream",
            fix="shuffle with random, numpy.random or torch, whose global generators are seeded; or define"
            " set_epoch(epoch), and seed your own generator with the epoch",
        )
    if not check.has_distinct_shards:
        raise DataError(
            "two shards of the stream start with the same samples: each sample would be trained on"
            f" {num_shards} times per epoch",
            where=f"data.shards={num_shards}",
            fix="in stream(split, shard, num_shards), return only the samples of that shard; or, in __iter__, yield"
            " only the samples for the current worker (torch.utils.data.get_worker_info()); or use data.shards=1",
        )


class _FirstSamples(Fetcher):
    """Runs the check in the process that reads batches, with seeded generators, and returns the result as a batch."""

    def __init__(self, fetcher: StreamFetcher) -> None:
        super().__init__(fetcher.dataset, fetcher.collate, bad_samples="stop", model=fetcher.model)
        self.streams = fetcher.dataset.draws  # seeds the random generators, as in Fetcher; unrelated to `stream`
        self.stream = fetcher.dataset

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        return MicroBatch(tuple(self.streams.read(self._check, key)), key.last)

    def _check(self, _: MicroBatchKey) -> StreamCheck:
        shards = [shard for shard in range(self.stream.source.num_shards) if self._num_samples(shard) > 1]
        if not shards:
            return StreamCheck()
        first = self.stream.reader(shards[0])
        hashes = self._hash_samples(first, shards[0])
        if hashes != self._hash_samples(self.stream.reader(shards[0]), shards[0]):
            return StreamCheck(is_repeatable=False)
        has_distinct_shards = True
        if len(shards) > 1 and len(set(hashes)) > 1:  # equal samples cannot distinguish shards
            other = self._hash_samples(self.stream.reader(shards[1]), shards[1])
            has_distinct_shards = other[: len(hashes)] != hashes[: len(other)]
        error = first.state_error if first.mark.state is None else self._compare_after_restore(first, shards[0], hashes)
        return StreamCheck(first.has_state, error, True, has_distinct_shards)

    def _compare_after_restore(self, first: ShardReader, shard: int, hashes: list[str]) -> str:
        """Restore a new reader to `first.mark`; return why its next samples differ, or an empty string."""
        reader, mark = self.stream.reader(shard), first.mark
        error = reader.restore(mark)
        if error:
            return error
        restored = [hash_content(reader.read(0, item, keep=False)) for item in range(mark.item, len(hashes))]
        return "" if restored == hashes[mark.item :] else RESTORE_ERROR

    def _num_samples(self, shard: int) -> int:
        return _NUM_CHECKED if self.stream.lengths is None else min(_NUM_CHECKED, self.stream.lengths[shard])

    def _hash_samples(self, reader: ShardReader, shard: int) -> list[str]:
        size = self._num_samples(shard)
        # The mark is set at the middle sample, so that there are samples left to compare after it is restored.
        return [hash_content(reader.read(0, item, keep=item == (size - 1) // 2)) for item in range(size)]


_NUM_CHECKED = 16  # samples per shard
