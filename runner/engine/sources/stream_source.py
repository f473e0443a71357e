"""Open the shards of `Task.stream`, or of an iterable dataset that divides itself among DataLoader workers."""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset
from torch.utils.data._utils import worker
from torch.utils.data._utils.worker import WorkerInfo

from runner.base.errors import DataError, TaskFault
from runner.base.json_state import decode_state, encode_state
from runner.base.rank_env import patched_environment
from runner.base.text import error_line
from runner.engine.contract.error_diagnosis import locate_definition

_SINGLE_RANK_ENV = {"RANK": "0", "WORLD_SIZE": "1"}


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated over, such as torch's IterableDataset or that of Hugging Face.

    MosaicML's StreamingDataset is an IterableDataset that can also be indexed. It is read by index, in the order of the
    runner, because iteration would divide it among processes that wait for each other.
    """
    if isinstance(dataset, IterableDataset):  # it inherits a __getitem__ that raises
        return type(dataset).__getitem__ is IterableDataset.__getitem__ or not hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def is_exhaustible(dataset: Any) -> bool:
    """Return whether a dataset can be read only once: a generator or another iterator without a state."""
    return hasattr(dataset, "__next__") and not isinstance(dataset, IterableDataset) and not _has_state(dataset)


@dataclass(frozen=True)
class StreamSource:
    """A stream that is divided into shards. Given the state of the global generators, its samples are deterministic.

    dataset  an iterable dataset; None: `make` returns the samples of a shard
    make     (split, shard, num_shards) -> iterable
    limit    number of samples to use from the beginning of each epoch; None: all
    """

    split: str
    num_shards: int
    dataset: Any = None
    make: Callable[[str, int, int], Iterable[Any]] | None = None
    limit: int | None = None

    def samples(self, shard: int, epoch: int) -> Any:
        """Return the samples of a shard in a pass over it."""
        if self.make is not None:
            samples: Any = self._make_shard(shard)
        elif self.num_shards > 1 or _has_state(self.dataset):
            samples = self._copy_dataset()
        else:
            samples = self.dataset
        set_epoch = getattr(samples, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return samples

    def _make_shard(self, shard: int) -> Any:
        assert self.make is not None
        samples = self.make(self.split, shard, self.num_shards)
        if not hasattr(samples, "__iter__"):
            what = f'stream("{self.split}", {shard}, {self.num_shards}) must return an iterable of samples'
            fix = "yield the samples of the shard, or return an IterableDataset"
            where = locate_definition(self.make, Path("stream"))
            raise TaskFault(f"{what}, but returned {type(samples).__name__}", where=where, fix=fix)
        return samples

    def _copy_dataset(self) -> Any:
        """Return a copy of the dataset, which may store its epoch, position and loaded state in attributes."""
        try:
            return copy.deepcopy(self.dataset)
        except Exception as error:
            if self.num_shards == 1:
                return self.dataset
            raise DataError(
                f"the dataset cannot be copied for each shard: {error_line(error)}",
                where=f"data.shards={self.num_shards}",
                fix="define stream(split, shard, num_shards) instead, or use data.shards=1",
            ) from error

    def lengths(self) -> tuple[int, ...] | None:
        """Return the number of samples in use per shard, or None if it is unknown."""
        full = self._full_lengths()
        if self.limit is None:
            return full
        if full is None:
            return tuple(_even_part(self.limit, shard, self.num_shards) for shard in range(self.num_shards))
        return _limit_lengths(full, self.limit)

    def _full_lengths(self) -> tuple[int, ...] | None:
        shards = range(self.num_shards)
        if self.make is None:  # the length of a dataset covers all shards
            total = _length(self.dataset)
            return None if total is None else tuple(_even_part(total, shard, self.num_shards) for shard in shards)
        lengths = [_length(self._make_shard(shard)) for shard in shards]
        return None if None in lengths else tuple(length for length in lengths if length is not None)

    @contextmanager
    def reading(self, shard: int) -> Iterator[None]:
        """Make `torch.utils.data.get_worker_info` return the shard, which datasets use to divide themselves.

        Without shards it returns None, even in workers of a loader, because datasets must not divide themselves among
        workers. They must not divide themselves among ranks either, so RANK and WORLD_SIZE show a single rank:
        webdataset would otherwise divide its files by them, or raise an error.
        """
        info = None
        if self.make is None and self.num_shards > 1:
            info = WorkerInfo(id=shard, num_workers=self.num_shards, seed=0, dataset=self.dataset)
        with _worker_info(info), patched_environment(_SINGLE_RANK_ENV):
            yield


class OpenShard:
    """Iterator over one pass over a shard, whose state can be saved if the stream has one."""

    def __init__(self, source: StreamSource, shard: int, epoch: int, state: Any = None) -> None:
        self._source, self._shard = source, shard
        with source.reading(shard):
            samples = source.samples(shard, epoch)
            self._iterator = iter(samples)
            self._stateful = next((item for item in (self._iterator, samples) if _has_state(item)), None)
            if state is not None and self._stateful is not None:
                self._stateful.load_state_dict(decode_state(state))
                if self._stateful is samples and samples is not self._iterator:
                    self._iterator = iter(samples)

    @property
    def has_state(self) -> bool:
        """True if the position can be saved."""
        return self._stateful is not None

    def state(self) -> Any:
        """Return the JSON-serializable state, or None if there is none. Raises TypeError if it cannot be stored."""
        if self._stateful is None:
            return None
        with self._source.reading(self._shard):
            return encode_state(self._stateful.state_dict())

    def __next__(self) -> Any:
        with self._source.reading(self._shard):
            return next(self._iterator)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


_NO_INTEGER = re.compile(r"^'[\w.]+' object cannot be interpreted as an integer$")  # message of Python's len()


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError as error:
        if not hasattr(value, "__len__") or not _NO_INTEGER.search(str(error)):  # `__len__` may raise it on purpose
            return None
        problem: Exception = error
    except (ValueError, OverflowError) as error:
        problem = error
    raise DataError(
        f"the length of the stream is invalid: {problem}",
        where="stream",
        fix="return the number of samples from __len__, or remove it and use updates=N",
    ) from problem


def _even_part(total: int, shard: int, num_shards: int) -> int:
    return -(-(total - shard) // num_shards) if total > shard else 0


def _limit_lengths(lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the number of samples to use from each shard, `limit` in total.

    The numbers differ by at most 1, except that all samples of a shorter shard are used.
    """
    part = bisect_right(range(limit + 1), limit, key=lambda part: sum(min(length, part) for length in lengths)) - 1
    num_longer = limit - sum(min(length, part) for length in lengths)
    longer = {*[shard for shard, length in enumerate(lengths) if length > part][:num_longer]}
    return tuple(min(length, part + (shard in longer)) for shard, length in enumerate(lengths))


@contextmanager
def _worker_info(info: WorkerInfo | None) -> Iterator[None]:
    """Set what torch's `get_worker_info` returns, which datasets use to divide themselves (private, torch 2.13)."""
    before = worker._worker_info
    worker._worker_info = info
    try:
        yield
    finally:
        worker._worker_info = before


def undivided(dataset: Any) -> Any:
    """Return the samples of all ranks, because the length of MosaicML's `StreamingDataset` is that of a rank's share.

    Checked with mosaicml-streaming 0.13. Raises TaskFault if another dataset contains a StreamingDataset.
    """
    if _is_divided(dataset):
        return Subset(dataset, range(dataset.epoch_size))
    if any(map(_is_divided, _find_parts(dataset, depth=4))):
        raise TaskFault(
            "a dataset contains a StreamingDataset, whose length is that of the share of one rank",
            where="dataset",
            fix="return the StreamingDataset itself; change samples in its __getitem__, or in collate",
        )
    return dataset


def _is_divided(dataset: Any) -> bool:
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(dataset).__mro__]
    return "streaming.base.dataset.StreamingDataset" in names and len(dataset) != dataset.epoch_size


def _find_parts(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield the datasets that a dataset has as attributes or in lists, such as those of a Subset or ConcatDataset."""
    for value in getattr(dataset, "__dict__", {}).values() if depth else ():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, Dataset):
                yield part
                yield from _find_parts(part, depth - 1)
