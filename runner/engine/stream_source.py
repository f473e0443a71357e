"""Open the shards of a stream: those of `Task.stream`, or of an iterable data set as torch's workers divide it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker
from torch.utils.data._utils.worker import WorkerInfo

from runner.base.errors import DataError, TaskFault
from runner.base.json_state import decode_state, encode_state
from runner.base.text import error_line
from runner.engine.error_diagnosis import locate_definition

_OF_SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def is_stream(dataset: Any) -> bool:
    """Return whether a data set can only be iterated over: torch's IterableDataset, one of `datasets`."""
    if isinstance(dataset, IterableDataset):  # it inherits a __getitem__ that raises
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def is_exhaustible(dataset: Any) -> bool:
    """Return whether a data set can be read only once: a generator or another iterator without a state."""
    return hasattr(dataset, "__next__") and not isinstance(dataset, IterableDataset) and not _has_state(dataset)


@dataclass(frozen=True)
class StreamSource:
    """A stream that is divided into shards. Everything in it is deterministic, given the global generators.

    dataset  an iterable data set; None: `make` returns the samples of a shard
    make     (split, shard, num_shards) -> iterable
    limit    number of samples of each epoch that are used, from its beginning; None: all
    """

    split: str
    num_shards: int
    dataset: Any = None
    make: Callable[[str, int, int], Iterable[Any]] | None = None
    limit: int | None = None

    def samples(self, shard: int, epoch: int) -> Any:
        """Return the samples of a shard in a pass over it."""
        if self.make is not None:
            found: Any = self._made(shard)
        elif self.num_shards > 1 or _has_state(self.dataset):
            found = self._copied()
        else:
            found = self.dataset
        set_epoch = getattr(found, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return found

    def _made(self, shard: int) -> Any:
        assert self.make is not None
        found = self.make(self.split, shard, self.num_shards)
        if not hasattr(found, "__iter__"):
            what = f'stream("{self.split}", {shard}, {self.num_shards}) must return an iterable of samples'
            fix = "yield the samples of the shard, or return an IterableDataset"
            where = locate_definition(self.make, Path("stream"))
            raise TaskFault(f"{what}, but returned {type(found).__name__}", where=where, fix=fix)
        return found

    def _copied(self) -> Any:
        """Return a copy of the data set: it may keep its epoch, its position and a loaded state in itself."""
        try:
            return copy.deepcopy(self.dataset)
        except Exception as error:
            if self.num_shards == 1:
                return self.dataset
            raise DataError(
                f"the data set cannot be copied for each shard: {error_line(error)}",
                where=f"data.shards={self.num_shards}",
                fix="define stream(split, shard, num_shards) instead, or use data.shards=1",
            ) from error

    def lengths(self) -> tuple[int, ...] | None:
        """Return the number of samples of each shard that are used, None if it is unknown."""
        shards = range(self.num_shards)
        parts = [_even_part(self.limit, shard, self.num_shards) for shard in shards] if self.limit is not None else None
        known = self._lengths()
        if parts is None or known is None:
            return tuple(parts) if parts is not None else known
        return tuple(map(min, known, parts))

    def _lengths(self) -> tuple[int, ...] | None:
        shards = range(self.num_shards)
        if self.make is None:  # the length of a data set is that of all shards
            total = _length(self.dataset)
            return None if total is None else tuple(_even_part(total, shard, self.num_shards) for shard in shards)
        found = [_length(self._made(shard)) for shard in shards]
        return None if None in found else tuple(length for length in found if length is not None)

    @contextmanager
    def reading(self, shard: int) -> Iterator[None]:
        """Let `torch.utils.data.get_worker_info` return the shard: data sets divide themselves by it.

        Without a shard it returns None, also in workers of a loader, which do not divide anything here. Nor do ranks:
        webdataset, which divides its files by RANK and WORLD_SIZE or refuses to, sees a single one.
        """
        info = None
        if self.make is None and self.num_shards > 1:
            info = WorkerInfo(id=shard, num_workers=self.num_shards, seed=0, dataset=self.dataset)
        with _worker_info(info), _single_rank():
            yield


class OpenShard:
    """An iterator over a pass over a shard, with its state if it has one."""

    def __init__(self, source: StreamSource, shard: int, epoch: int, state: Any = None) -> None:
        self._source, self._shard = source, shard
        with source.reading(shard):
            samples = source.samples(shard, epoch)
            self._iterator = iter(samples)
            self._keeper = next((each for each in (self._iterator, samples) if _has_state(each)), None)
            if state is not None and self._keeper is not None:
                self._keeper.load_state_dict(decode_state(state))
                if self._keeper is samples and samples is not self._iterator:
                    self._iterator = iter(samples)

    @property
    def has_state(self) -> bool:
        """True if the position can be saved."""
        return self._keeper is not None

    def state(self) -> Any:
        """Return the JSON-serializable state, None if it has none. Raises TypeError if it cannot be stored."""
        if self._keeper is None:
            return None
        with self._source.reading(self._shard):
            return encode_state(self._keeper.state_dict())

    def __next__(self) -> Any:
        with self._source.reading(self._shard):
            return next(self._iterator)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _length(value: Any) -> int | None:
    """Return the length of a stream, None if it has none, as for a generator."""
    try:
        return len(value)
    except TypeError:
        return None
    except ValueError as error:
        raise DataError(f"the length of the stream is invalid: {error}", fix="return the number of samples") from error


def _even_part(total: int, shard: int, num_shards: int) -> int:
    return -(-(total - shard) // num_shards) if total > shard else 0


@contextmanager
def _worker_info(info: WorkerInfo | None) -> Iterator[None]:
    """Set what torch's `get_worker_info` returns. Checked on torch 2.13."""
    before = worker._worker_info
    worker._worker_info = info
    try:
        yield
    finally:
        worker._worker_info = before


@contextmanager
def _single_rank() -> Iterator[None]:
    """Set the environment variables of torchrun to those of a single rank."""
    before = {name: os.environ.get(name) for name in _OF_SINGLE_RANK}
    os.environ.update(_OF_SINGLE_RANK)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
