"""Read the samples of a stream by index: forward in each shard, skipping the samples that other processes use.

Every process reads the shards that contain its samples. It also reads and drops the samples of other processes in these
shards, because a stream has no other way to skip a sample. `MicroBatchKey.indices` of a stream encode shard and
position, see `loading/stream_order.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from runner.base.batch import MicroBatch, ShardMark
from runner.base.errors import AccelRunError, DataError
from runner.base.order import MicroBatchKey
from runner.base.sample_rng import SeedEverySample, keyed_generators
from runner.base.text import describe_exception, error_line
from runner.engine.sources.stream_source import OpenShard, StreamSource
from runner.engine.sources.training_identity import hash_content
from runner.loading.fetcher import Collate, Fetcher, traceback_line
from runner.loading.stream_order import ENDLESS, decode_index, encode_index

Seed = Callable[[str, int, list[int]], None]  # (what, epoch, indices): seeds the global generators


class ShardReader:
    """Reads one shard forward, and restores an earlier position.

    length  number of samples of the shard; None: unknown, so the shard is repeated when it ends
    mark    position that an earlier process saved, or None; earlier positions are reached from the beginning of a pass
    """

    def __init__(
        self, source: StreamSource, shard: int, length: int | None, seed: Seed, mark: ShardMark | None
    ) -> None:
        self._source, self._shard, self._length, self._seed, self._start = source, shard, length, seed, mark
        self._open: OpenShard | None = None
        self._epoch = self._pass_start = self._next = 0
        self._seconds, self._read = 0.0, 0
        self._note = ""
        self._last: ShardMark | None = None
        self.state_error = ""  # why its state cannot be stored

    def read(self, epoch: int, item: int, *, keep: bool) -> Any:
        """Return a sample; with `keep`, `mark` returns the position after it."""
        if not self._can_continue(epoch, item):
            self._seek(epoch, item)
        while self._next < item:
            self._advance()
        before = (self._epoch, self._pass_start, self._state()) if keep else None
        sample = self._advance()
        if before is not None:
            self._last = ShardMark(
                item + 1, before[0], before[1], hash_content(sample), before[2], self._seconds / self._read, self._note
            )
        if self._next == self._length and self._source.limit is None:
            self._check_end()
        return sample

    @property
    def has_state(self) -> bool:
        """True if the stream has a state."""
        return self._open is not None and self._open.has_state

    @property
    def mark(self) -> ShardMark:
        """The position after the last sample that was read with `keep`."""
        assert self._last is not None, "something was read"
        return self._last

    def _can_continue(self, epoch: int, item: int) -> bool:
        """Return whether continuing with the open iterator is the fastest way to reach the sample."""
        if self._open is None or self._next > item or (self._length is not None and epoch != self._epoch):
            return False
        start = self._start
        return start is None or not self._is_usable(start, epoch, item) or start.item - 1 <= self._next

    def _is_usable(self, mark: ShardMark, epoch: int, item: int) -> bool:
        return mark.item <= item and (self._length is None or mark.epoch == epoch)

    def _seek(self, epoch: int, item: int) -> None:
        mark = self._start
        if mark is None or not self._is_usable(mark, epoch, item):
            self._open_at_pass(0 if self._length is None else epoch, 0)
            return
        if mark.state is not None:
            error = self.restore(mark)
            if not error:
                return
            self._note = f"{self._name()}: {error}; it was read again from its beginning"
        self._open_at_pass(mark.epoch, mark.passed)
        sample = None
        while self._next < mark.item:
            sample = self._advance()
        if hash_content(sample) != mark.hash:
            raise DataError(
                f"sample {mark.item - 1} of {self._name()} differs from the one read before the run was stopped",
                where="stream",
                fix="return the same samples in the same order for the same epoch; or start a new run with run=NAME",
            )

    def restore(self, mark: ShardMark) -> str:
        """Load the state of the mark; return why the stream is not at that position, or an empty string."""
        try:
            self._open_at_pass(mark.epoch, mark.passed, mark.state)
            self._next = mark.item - 1
            last = hash_content(self._advance())
        except Exception as error:  # raised by load_state_dict, or by an iterator that it broke
            return f"load_state_dict does not restore its state ({error_line(error)})"
        return "" if last == mark.hash else RESTORE_ERROR

    def _open_at_pass(self, epoch: int, pass_start: int, state: Any = None) -> None:
        self._epoch, self._pass_start, self._next = epoch, pass_start, pass_start
        self._seed("open", epoch, [self._shard])
        try:
            self._open = OpenShard(self._source, self._shard, epoch, state)
        except AccelRunError:
            raise
        except BaseException as error:
            raise self._fault(f"{self._name()} cannot be opened", error) from error

    def _state(self) -> Any:
        assert self._open is not None, "it is read"
        try:
            return self._open.state()
        except TypeError as error:  # reported before training, by the check of the stream
            self.state_error = f"state_dict of the stream cannot be stored: {error}"
            return None

    def _advance(self) -> Any:
        assert self._open is not None, "it is read"
        code = encode_index(self._shard, self._next, self._source.num_shards)
        self._seed("sample", 0 if self._length is None else self._epoch, [code])
        began = time.perf_counter()
        try:
            sample = next(self._open)
        except StopIteration:
            return self._start_next_pass()
        except AccelRunError:
            raise
        except BaseException as error:  # torch ends a worker silently on a BaseException
            raise self._fault(
                f"sample {self._next - self._pass_start} of {self._name()} cannot be read", error
            ) from error
        self._seconds += time.perf_counter() - began
        self._read += 1
        self._next += 1
        return sample

    def _start_next_pass(self) -> Any:
        count = self._next - self._pass_start
        if self._length is not None and self._source.limit is not None:
            raise DataError(
                f"{self._name()} ended after {count:,} samples, but training uses {self._length:,} of its samples",
                where=f"data.train_samples={self._source.limit}",
                fix="use fewer samples, use fewer shards (data.shards), or return an object from stream() whose len()"
                " is the length of the shard",
            )
        if self._length is not None:
            raise DataError(
                f"{self._name()} ended after {count:,} samples, but its length is {self._length:,}",
                where="stream",
                fix="correct its len(), or remove len() and use updates=N",
            )
        if not count:
            raise DataError(
                f"{self._name()} has no samples",
                where=f"data.shards={self._source.num_shards}",
                fix="use fewer shards, so that each has samples",
            )
        self._open_at_pass(self._epoch + 1, self._next)
        return self._advance()

    def _check_end(self) -> None:
        assert self._open is not None, "it is read"
        try:
            next(self._open)
        except StopIteration:
            return
        raise DataError(
            f"{self._name()} has more samples than its length of {self._length:,}",
            where="stream",
            fix="correct its len(), or remove len() and use updates=N",
        )

    def _name(self) -> str:
        many = self._source.num_shards > 1
        return f"shard {self._shard} of the {self._source.split} stream" if many else f"the {self._source.split} stream"

    def _fault(self, what: str, error: BaseException) -> DataError:
        described = describe_exception(error)
        return DataError(
            f"{what}: {described}",
            where=traceback_line(described),
            fix="fix the error, or skip such samples in the stream",
        )


class StreamSamples:
    """The samples of a stream by index. Reading in order is fast; an earlier sample restarts the pass over its shard.

    lengths  number of samples of each shard; None if unknown
    """

    def __init__(self, source: StreamSource, lengths: tuple[int, ...] | None, seed: int) -> None:
        self.source, self.lengths, self.draws = source, lengths, SeedEverySample(source.split)
        self._seed, self._epoch = seed, 0
        self._start: Mapping[int, ShardMark] = {}
        self._readers: dict[int, ShardReader] = {}
        self._last: Mapping[int, int] = {}

    def __len__(self) -> int:
        return sum(self.lengths) if self.lengths is not None else ENDLESS * self.source.num_shards

    def start_from(self, marks: Mapping[int, ShardMark]) -> None:
        """Restore these positions at the next read."""
        self._start, self._readers = dict(marks), {}

    def begin(self, key: MicroBatchKey) -> None:
        """Prepare to read the samples of a batch; the position after the last one of each shard is kept."""
        self._epoch, self._last = key.epoch, {}
        located = (decode_index(code, self.source.num_shards) for code in key.indices)
        self._last = dict(located)  # the samples of a shard are in order

    def __getitem__(self, code: int) -> Any:
        shard, item = decode_index(code, self.source.num_shards)
        if shard not in self._readers:
            self._readers[shard] = self.reader(shard)
        return self._readers[shard].read(self._epoch, item, keep=self._last.get(shard) == item)

    def reader(self, shard: int) -> ShardReader:
        """Return a new reader of a shard. Use it inside `draws.read`, which provides the generators."""
        length = None if self.lengths is None else self.lengths[shard]
        return ShardReader(self.source, shard, length, self._derive, self._start.get(shard))

    def marks(self) -> dict[int, ShardMark]:
        """Return the position after the batch in each shard that has samples in it."""
        return {shard: self._readers[shard].mark for shard in self._last}

    def _derive(self, what: str, epoch: int, indices: list[int]) -> None:
        self.draws.begin(what, self._seed, epoch, indices)

    def __getstate__(self) -> dict[str, Any]:
        """Omit open shards, which a spawned worker opens for itself."""
        return {**self.__dict__, "_readers": {}}


class StreamFetcher(Fetcher):
    """Loads the batches of a stream."""

    dataset: StreamSamples
    is_sequential = True

    def __init__(self, samples: StreamSamples, collate: Collate, *, model: nn.Module | None = None) -> None:
        super().__init__(samples, collate, bad_samples="stop", model=model, split=samples.source.split)
        self.streams = samples.draws
        self.is_lockstep = False  # True: ranks run dummy micro-batches, which repeat the last batch
        self._repeated: tuple[MicroBatchKey, MicroBatch] | None = None

    @property
    def probe_indices(self) -> list[int]:
        return []

    def dataset_indices(self, indices: list[int]) -> list[int]:
        return indices

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        if not key.indices:
            return super().__getitem__(key)
        if not key.is_counted and self._repeated is not None and self._repeated[0].indices == key.indices:
            return self._repeated[1]._replace(last=key.last, is_counted=False)  # a stream cannot go back
        self.dataset.begin(key)
        read = super().__getitem__(key)
        if self.is_lockstep:
            self._repeated = (key, read)
        return read._replace(marks=self.dataset.marks())


def read_all_samples(source: StreamSource, limit: int | None, seed: int) -> list[Any]:
    """Return the samples of an undivided stream, or the first `limit` of them; for evaluation."""
    samples: list[Any] = []
    with keyed_generators() as derive:
        derive(seed, source.split, "open", 0, 0)
        opened = OpenShard(source, 0, 0)
        while limit is None or len(samples) < limit:
            derive(seed, source.split, "sample", 0, len(samples))
            try:
                samples.append(next(opened))
            except StopIteration:
                break
            if limit is None and len(samples) > _MAX_IN_MEMORY:
                raise DataError(
                    f"the {source.split} stream has more than {_MAX_IN_MEMORY:,} samples, too many to keep in memory",
                    where="evaluate.samples=null",
                    fix="use evaluate.samples=N, the number of samples to take from its beginning",
                )
    return samples


RESTORE_ERROR = "load_state_dict does not restore its state: a different sample follows"
_MAX_IN_MEMORY = 100_000
