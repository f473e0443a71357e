"""Read the batch of a `MicroBatchKey` from a dataset, in the training process or in a data worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import AccelRunError, DataError, TaskFault
from runner.base.order import MicroBatchKey
from runner.base.sample_rng import SampleSeeding, seeded_generators
from runner.base.task import Dataset, Task
from runner.base.text import ExceptionInfo, abbreviate, describe_exception, error_line, error_message
from runner.loading.dataset_access import batch_reader, tensor_rows

Collate = Callable[[Sequence[Any]], Any]


class Fetcher:
    """Load the batch of a key in the process that calls it.

    model  model of the task that `collate` belongs to; it is not sent to spawned processes
    split  split of the samples; each split draws separate random numbers

    is_sequential  samples can only be read in order, so one process must read all of them
    """

    is_sequential = False
    is_cached = False  # this process has read the samples, and keeps them
    # The id of the fetcher that last called `set_epoch`. Training and evaluation may read the same dataset, so each
    # must set its epoch again after the other.
    _set_last_by: ClassVar[int] = 0

    def __init__(
        self,
        dataset: Dataset,
        collate: Collate,
        *,
        bad_samples: str,
        num_samples: int | None = None,
        model: nn.Module | None = None,
        split: str = "train",
    ) -> None:
        self.dataset = dataset
        self.source = dataset  # the dataset of the task, if `dataset` is a cache of it
        self.streams = SampleSeeding(split)
        self.collate = collate
        self.model = model
        self.skip_bad = bad_samples == "skip"
        self.read_rows = tensor_rows(dataset) if _is_default(collate) else None
        self.read_many: Callable[[list[int]], Any] | None = batch_reader(dataset)
        self.set_epoch: Callable[[int], None] | None = getattr(dataset, "set_epoch", None)
        self._length = len(dataset)
        self.num_samples = self._length if num_samples is None else min(num_samples, self._length)
        self.may_be_empty = False  # True: a batch may have no readable samples, if others of its update have some
        self._epoch = -1

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        if not key.indices:  # this rank has no samples in this update
            return MicroBatch(None, key.last, is_counted=False)
        if self.set_epoch is not None and (key.epoch != self._epoch or Fetcher._set_last_by != id(self)):
            with seeded_generators(key.seed, self.streams.split, "set_epoch", key.epoch):
                self.set_epoch(key.epoch)
            if len(self.dataset) != self._length:  # the order of the samples is computed for all epochs at the start
                raise TaskFault(
                    f"set_epoch({key.epoch}) changed the length of the {self.streams.split} dataset from"
                    f" {self._length} to {len(self.dataset)}, but all epochs must have the same number of samples",
                    fix="return the same len() in every epoch, and select an epoch's samples with a sampler in"
                    " SAMPLERS",
                )
            self._epoch, Fetcher._set_last_by = key.epoch, id(self)
        if self.read_rows is not None:  # runs no code that could draw random numbers
            with suppress(IndexError):  # raised by a Subset with an invalid index; `_read` reports the sample
                samples = _batch_samples(key, range(len(key.indices)))
                return MicroBatch(
                    self.read_rows(self.dataset_indices(key.indices)),
                    key.last,
                    is_counted=key.is_counted,
                    samples=samples,
                )
        # The rounding of a sum depends on the number of threads. torch.utils.data sets one thread in data workers, so
        # all loaders use one.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            item = self.streams.read(self._read, key)
        finally:
            torch.set_num_threads(num_threads)
        return item if key.is_counted else item._replace(is_counted=False, bad=())

    @property
    def probe_indices(self) -> list[int]:
        """The samples whose content identifies the dataset."""
        return sorted({0, len(self) // 2, len(self) - 1})

    def dataset_indices(self, indices: list[int]) -> list[int]:
        """Return the dataset indices of `MicroBatchKey` indices, which grow by `num_samples` per repeated draw."""
        size = self.num_samples
        return indices if max(indices) < size else [index % size for index in indices]

    def _read(self, key: MicroBatchKey) -> MicroBatch:
        if self.read_many is not None and not self.skip_bad:
            self.streams.begin("batch", key.seed, key.epoch, key.indices)
            try:
                samples = self.read_many(self.dataset_indices(key.indices))
            except AccelRunError:
                raise
            except BaseException as error:  # torch ends a worker silently on a BaseException
                raise self._read_error(error, self.dataset_indices(key.indices)) from error
            batch = self._collate(samples, key) if isinstance(samples, list) else samples
            return MicroBatch(batch, key.last, samples=_batch_samples(key, range(len(key.indices))))
        samples, bad, positions, is_seeding = [], [], [], self.streams.is_seeding
        for position, (drawn, index) in enumerate(zip(key.indices, self.dataset_indices(key.indices), strict=True)):
            if is_seeding:
                self.streams.begin("sample", key.seed, key.epoch, [drawn])
            try:
                samples.append(self.dataset[index])
                positions.append(position)
            except BaseException as error:
                if not (self.skip_bad and isinstance(error, Exception)):
                    raise self._read_error(error, [index]) from error
                bad.append((index, error_line(error)))
        if not samples and self.may_be_empty:
            return MicroBatch(None, key.last, tuple(bad), is_counted=False)
        if not samples:
            what = f"every sample of a batch is unreadable: {[index for index, _ in bad]}; the first error: {bad[0][1]}"
            raise DataError(what, fix="fix the samples listed above: a batch needs at least one readable sample")
        return MicroBatch(self._collate(samples, key), key.last, tuple(bad), samples=_batch_samples(key, positions))

    def _collate(self, samples: list[Any], key: MicroBatchKey) -> Any:
        if not _is_default(self.collate):
            self.streams.begin("collate", key.seed, key.epoch, key.indices)
            batch = self.collate(samples)  # errors in task code are reported with their own source lines
            if isinstance(batch, Iterator):
                raise TaskFault(
                    f"collate() must return a batch, but returned a {type(batch).__name__}",
                    fix="return a tensor, or a tuple, list or dictionary of tensors: use tuple(...) instead of yield",
                )
            return batch
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError, KeyError) as error:
            if "shared memory" in error_message(error) or "allocate memory" in error_message(error):  # system limits
                raise
            raise DataError(
                f"samples cannot be collated into a batch: {error_line(error).partition(': ')[2]}",
                fix="give all samples the same shape, or define collate(samples) in the task",
            ) from error

    def _read_error(self, error: BaseException, indices: list[int]) -> AccelRunError:
        if isinstance(error, AccelRunError):
            return error
        which = f"sample {indices[0]}" if len(indices) == 1 else f"one of the samples {abbreviate(indices)}"
        description = describe_exception(error)
        named = DataError(
            f"{which} cannot be read: {description}",
            where=traceback_line(description),
            fix="fix the sample, or skip bad samples with dataloader.bad_samples=skip",
        )
        named.place = {"samples": indices}
        return named


def _batch_samples(key: MicroBatchKey, positions: Sequence[int]) -> BatchSamples:
    if len(positions) == len(key.indices):  # avoids the lists, which take 2 us
        return BatchSamples(key.seed, key.epoch, key.indices, range(key.first, key.first + len(positions)))
    return BatchSamples(
        key.seed,
        key.epoch,
        [key.indices[position] for position in positions],
        [key.first + position for position in positions],
    )


def _is_default(collate: Collate) -> bool:
    return getattr(collate, "__func__", None) is Task.collate


def traceback_line(error: ExceptionInfo) -> str:
    """Return file:line of the dataset's own code: the last line outside of installed packages and Python."""
    python = str(Path(os.__file__).parent)
    frames = [
        frame
        for frame in error.frames
        if frame.file != __file__ and not frame.file.startswith(("<", python)) and "site-packages/" not in frame.file
    ]
    return f"{frames[-1].file}:{frames[-1].line}" if frames else ""
