"""Data loaders: in this process, in worker processes or in a thread. All yield identical batches.

A loader receives keys (epoch, indices, last) in the order of base/order.py and yields batches in that order.
Code of the task draws from the global generators, which base/sample_rng.py seeds for each sample in every loader.
"""

from __future__ import annotations

import errno
import io
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data._utils import signal_handling

from runner.base.batch import MicroBatch, are_equal, map_tensors
from runner.base.cached_dataset import CachedDataset, ComposedDataset, FixedPart, concatenate_batches
from runner.base.dataset_access import has_fixed_part
from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, Problem
from runner.base.fetcher import Fetcher
from runner.base.oom_errors import find_oom_cause
from runner.base.order import MicroBatchKey
from runner.base.sample_rng import NoStreams
from runner.base.text import RemoteError, describe_exception
from runner.base.values import Count, NonNegative, PositiveInt
from runner.host.loader_processes import (
    PicklerWithoutModel,
    init_worker,
    kill_on_partial_start,
    kill_workers,
    stop_signals_blocked,
    worker_context,
)

Keys = Iterable[MicroBatchKey]


class Loader:
    """Load synchronously in this process."""

    num_workers = 0
    max_prefetched = 0  # maximum number of prefetched batches
    decision = ""  # whether workers read, if that was measured, and why

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        """Yield the batch of each key, in order."""
        return map(self.fetcher.__getitem__, keys)

    def new_like(self, fetcher: Fetcher) -> Loader:
        """Return a loader for a few batches that reads like this one: in this process, or in one worker."""
        return Loader(fetcher)

    def close(self) -> None:
        """Stop prefetching."""


class WorkerLoader(Loader):
    """Prefetch in worker processes, which live while one iterator of `batches` does.

    Workers ignore stop signals, which a terminal or scheduler sends to every process of the run: they are needed
    until the current update is complete, and end when they are closed, or with this process.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        num_workers: int,
        pin_memory: bool,
        prefetch_factor: int,
        start_method: str,
        timeout_s: float = 0.0,
    ) -> None:
        super().__init__(fetcher)
        self.timeout_s = timeout_s  # for a batch; 0: without a limit
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.start_method = start_method
        self.max_prefetched = num_workers * prefetch_factor
        self._open: list[Any] = []

    def new_like(self, fetcher: Fetcher) -> Loader:
        return WorkerLoader(fetcher, num_workers=1, pin_memory=False, prefetch_factor=1, start_method=self.start_method)

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        keys = iter(keys)
        first = list(islice(keys, 1))
        with warnings.catch_warnings():  # the plan warns about more workers than cores
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            loader: torch.utils.data.DataLoader[MicroBatch] = torch.utils.data.DataLoader(
                WorkerFetcher(self.fetcher),  # type: ignore[arg-type]
                batch_size=None,
                collate_fn=_identity,  # torch's default would convert tuples to lists
                sampler=_Keys(chain(first, keys)),
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                prefetch_factor=self.prefetch_factor,
                timeout=self.timeout_s,
                multiprocessing_context=worker_context(self.start_method),
                worker_init_fn=partial(init_worker, os.getpid()),
                # A private generator, because a new iterator must not draw from the model's. It seeds the workers'
                # own generators, for datasets that create generators themselves: different on each rank.
                generator=torch.Generator().manual_seed(self.fetcher.streams.number("workers", *first)),
            )
            # Set before workers run any other code.
            with stop_signals_blocked(self.start_method), kill_on_partial_start():
                iterator = iter(loader)
        self._open.append(iterator)
        return self._raise_errors(iterator)

    def _raise_errors(self, iterator: Iterator[MicroBatch | AccelRunError | RemoteError]) -> Iterator[MicroBatch]:
        try:
            for item in iterator:
                if isinstance(item, (AccelRunError, RemoteError)):
                    raise item
                yield item
        except RuntimeError as error:  # raised by torch if a worker died
            if any(worker.exitcode == Exit.SYSTEM for worker in iterator._workers):  # type: ignore[attr-defined]
                raise OSError(errno.EMFILE, "a data worker: too many open files") from error
            raise

    def close(self) -> None:
        with ExitStack() as stack:
            for iterator in self._open:
                stack.callback(self._close, iterator)
            self._open.clear()

    @staticmethod
    def _close(iterator: Any) -> None:
        try:
            if iterator._worker_pids_set:  # else torch raises for a worker killed here
                signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
                iterator._worker_pids_set = False
            kill_timer = threading.Timer(_SHUTDOWN_TIMEOUT_S, kill_workers, [iterator._workers])
            try:
                kill_timer.start()
            except RuntimeError:  # thread creation failed; the workers' results are not needed
                kill_workers(iterator._workers)
            try:
                iterator._shutdown_workers()
            finally:
                kill_timer.cancel()
        finally:  # out of memory, any line above may fail
            kill_workers(iterator._workers)


class AutoLoader(Loader):
    """Read in workers if one needs at least `limit_s` for a batch, otherwise in this process.

    Receiving a batch from a worker costs this process time, too: it maps the tensors, and page-locks them in a thread
    that takes the interpreter lock from the training.

    A worker measures, because a dataset may open a file at its first sample: workers forked afterwards would share its
    position. The samples of the second batch are far from those of the first one in the dataset, so that the first
    read does not bring them into the page cache.
    """

    def __init__(self, workers: WorkerLoader, inline: Loader, *, limit_s: float) -> None:
        super().__init__(workers.fetcher)
        self._workers, self._inline, self._limit_s = workers, inline, limit_s
        self._chosen: Loader | None = None
        self._measuring: Loader | None = None
        self.num_workers, self.max_prefetched = workers.num_workers, workers.max_prefetched

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        keys = iter(keys)
        first = list(islice(keys, 1))
        if self._chosen is None:
            seconds = self._measure(first[0]) if first and first[0].indices else None
            is_fast = seconds is not None and seconds < self._limit_s
            self._chosen = self._inline if is_fast else self._workers
            self.num_workers, self.max_prefetched = self._chosen.num_workers, self._chosen.max_prefetched
            if seconds is not None:
                readers = f"{self.num_workers} data workers" if self.num_workers else "no data workers"
                self.decision = f"{readers}: reading a batch takes {1e3 * seconds:.2g} ms"
        assert self._chosen is not None
        return self._chosen.batches(chain(first, keys))

    def _measure(self, key: MicroBatchKey) -> float | None:
        """Return the seconds that a worker needs for the second of two batches; None if it is slow or fails."""
        size = len(self.fetcher)
        distant = key._replace(indices=[(index + size // 2) % size for index in key.indices])
        reader = WorkerLoader(
            _TimingFetcher(self.fetcher),
            num_workers=1,
            pin_memory=False,
            prefetch_factor=1,
            start_method=self._workers.start_method,
            timeout_s=MAX_MEASUREMENT_S,
        )
        self._measuring = reader
        try:
            seconds = [item.batch for item in reader.batches([key, distant])]
        except Exception:
            # Training reports errors of the dataset itself. A slow worker lives until the loader is closed: if it were
            # killed, a file that the dataset is writing would stay incomplete.
            return None
        reader.close()
        return float(seconds[-1])

    def new_like(self, fetcher: Fetcher) -> Loader:
        return (self._chosen or self._workers).new_like(fetcher)

    def close(self) -> None:
        if self._measuring is not None:
            self._measuring.close()
        self._workers.close()


class _TimingFetcher(Fetcher):
    """Fetcher that returns how many seconds another one needs for the batch of a key."""

    def __init__(self, timed: Fetcher) -> None:
        super().__init__(timed.dataset, timed.collate, bad_samples="stop", model=timed.model)
        self.timed = timed

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        start = time.perf_counter()
        self.timed[key]
        return MicroBatch(time.perf_counter() - start, key.last)


class ThreadLoader(Loader):
    """Prefetch in one thread. For cached samples only: code of a task may draw from the process's generators."""

    def __init__(self, fetcher: Fetcher, *, depth: int, pin_memory: bool) -> None:
        super().__init__(fetcher)
        self.depth = depth
        self.max_prefetched = depth + 1  # one is held until the queue has room
        self.pin_memory = pin_memory
        self._threads: list[tuple[threading.Thread, threading.Event]] = []

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        ready: queue.Queue[MicroBatch | BaseException | None] = queue.Queue(self.depth)
        stop = threading.Event()

        def put(item: MicroBatch | BaseException | None) -> None:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return
                except queue.Full:
                    continue

        def read() -> None:
            try:
                for key in keys:
                    item = self.fetcher[key]
                    put(item.pin_memory() if self.pin_memory else item)
                    if stop.is_set():
                        return
                put(None)
            except BaseException as error:  # re-raised in the training thread
                put(error)

        thread = threading.Thread(target=read, name="loader", daemon=True)
        self._threads.append((thread, stop))
        thread.start()
        return self._drain(ready)

    def _drain(self, ready: queue.Queue[MicroBatch | BaseException | None]) -> Iterator[MicroBatch]:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        for _, stop in self._threads:
            stop.set()
        for thread, _ in self._threads:
            thread.join(timeout=5)
        self._threads.clear()


def default(
    fetcher: Fetcher,
    device: torch.device,
    *,
    num_workers: Count | Literal["auto"] = "auto",
    workers_above_ms: NonNegative | Literal["auto"] = "auto",
    pin_memory: bool | Literal["auto"] = "auto",
    prefetch_factor: PositiveInt = 2,
    start_method: Literal["fork", "spawn"] = "fork",
    drop_last: bool = False,
    cache: Literal["none", "memory", "device"] = "none",
    bad_samples: Literal["stop", "skip"] = "stop",
) -> Loader:
    """Load in worker processes, or in this process if there are none.

    num_workers       worker processes; 0 reads in this process; auto: by device and cores
    workers_above_ms  start workers only if reading a batch takes longer, in ms, measured at the start; 0: always start
                      them; auto: 1 with num_workers=auto, else 0
    pin_memory        copy batches to page-locked memory, from which copies to a GPU can overlap; auto: with a GPU
    prefetch_factor   batches each worker reads ahead
    start_method      how workers start; fork: fast, shares the dataset's memory; spawn: slow, imports all modules again
                      and copies the dataset; for libraries that do not support fork
    drop_last         drop the last, smaller update of each epoch (training only)
    cache             memory: read every sample once and keep it in host memory; device: keep it in device memory
    bad_samples       stop: end the run at a sample that cannot be read; skip: skip and list the sample
    """
    assert num_workers != "auto", "the plan resolves it"
    assert pin_memory != "auto", "the plan resolves it"
    fetcher = cache_samples(fetcher, cache, device)
    inline = PinnedLoader(fetcher) if pin_memory and cache != "device" else Loader(fetcher)
    if num_workers == 0:
        return inline
    workers = WorkerLoader(
        fetcher,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        start_method=start_method,
    )
    if workers_above_ms in (0, "auto") or fetcher.is_sequential:  # the plan resolves auto if it chose num_workers
        return workers
    return AutoLoader(workers, inline, limit_s=float(workers_above_ms) / 1e3)


def thread(
    fetcher: Fetcher,
    device: torch.device,
    *,
    depth: PositiveInt = 2,
    pin_memory: bool | Literal["auto"] = "auto",
    drop_last: bool = False,
    cache: Literal["none", "memory", "device"] = "none",
    bad_samples: Literal["stop", "skip"] = "stop",
) -> Loader:
    """Prefetch cached samples in one thread; without a cache, or with a random part, in one worker process.

    depth        batches read ahead
    pin_memory   copy batches to page-locked memory; auto: if there is a GPU
    drop_last    drop the last, smaller update of each epoch (training only)
    cache        memory: read every sample once and keep it in host memory; device: keep it in device memory
    bad_samples  stop: end the run at a sample that cannot be read; skip: skip and list the sample
    """
    assert pin_memory != "auto", "the plan resolves it"
    cached = cache_samples(fetcher, cache, device)
    if cache == "none" or has_fixed_part(fetcher.dataset):
        # Random generators belong to a process: a dataset in a thread would draw from those of the model trained
        # in parallel, and neither would be reproducible. See docs/decisions/0019.
        return WorkerLoader(cached, num_workers=1, pin_memory=pin_memory, prefetch_factor=depth, start_method="fork")
    return ThreadLoader(cached, depth=depth, pin_memory=pin_memory and cache != "device")


class PinnedLoader(Loader):
    """Load in this process into page-locked memory, so that copies to the device can overlap."""

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        return map(MicroBatch.pin_memory, super().batches(keys))


def cache_samples(fetcher: Fetcher, where: str, device: torch.device) -> Fetcher:
    """Read all samples once and return a fetcher that keeps them as one tensor per field.

    Of a dataset with `load_fixed`, only that part is kept.
    """
    if where == "none":
        return fetcher
    if has_fixed_part(fetcher.dataset):
        return _cache_fixed_part(fetcher, where)
    if fetcher.set_epoch is not None:
        raise _changing_samples("the dataset has set_epoch", where)
    parts = _read_twice(fetcher, len(fetcher), where)
    if any(part.bad for part in parts):
        bad = [index for part in parts for index, _ in part.bad]
        fix = "use dataloader.cache=none, or remove them from the dataset"
        raise DataError(f"bad samples cannot be cached: {bad}", where=f"dataloader.cache={where}", fix=fix)
    samples = _rows([part.batch for part in parts], len(fetcher), where)
    kept = CachedDataset(
        map_tensors(lambda tensor: tensor.to(device), samples) if where == "device" else samples, len(fetcher)
    )
    cached = Fetcher(kept, _identity, bad_samples="stop")
    cached.streams = NoStreams()
    return cached


def _cache_fixed_part(fetcher: Fetcher, where: str) -> Fetcher:
    """Return a fetcher that composes batches of cached rows. All samples are kept: a batch may need any of them."""
    if where == "device":
        raise ConfigError(
            Problem(
                "the batches of this dataset are composed in host memory",
                f"dataloader.cache={where}",
                "use dataloader.cache=memory",
            )
        )
    dataset: Any = fetcher.dataset
    loader = Fetcher(FixedPart(dataset), _identity, bad_samples="stop")
    parts = _read_twice(loader, len(dataset), where)
    kept = CachedDataset(_rows([part.batch for part in parts], len(dataset), where), len(dataset))
    return Fetcher(
        ComposedDataset(dataset, kept),
        fetcher.collate,
        bad_samples="stop",  # all fixed parts have been read
        num_samples=fetcher.num_samples,
        model=fetcher.model,
        split=fetcher.streams.split,
    )


def _read_twice(fetcher: Fetcher, num_samples: int, where: str) -> list[MicroBatch]:
    """Return all samples in parts of 1024. Raises DataError if they use random numbers."""
    keys = [
        MicroBatchKey(0, list(range(first, min(first + 1024, num_samples))), last=False)
        for first in range(0, num_samples, 1024)
    ]
    parts = [fetcher[key] for key in keys]
    if fetcher.streams.has_drawn:
        # A dataset may seed the generators itself and draw the same numbers each time: compare two epochs.
        for key, part in zip(keys, parts, strict=True):
            if not are_equal(part.batch, fetcher[key._replace(epoch=1)].batch):
                raise _changing_samples("they use random numbers", where)
    return parts


def _rows(batches: list[Any], num_samples: int, where: str) -> Any:
    """Concatenate batches with a row per sample."""
    place, fix = f"dataloader.cache={where}", "use dataloader.cache=none"
    try:
        samples = concatenate_batches(batches)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"the samples have no common shape: {error}", where=place, fix=fix) from error
    lengths: list[int] = []
    map_tensors(lambda tensor: lengths.append(len(tensor) if tensor.dim() else 0), samples)
    if (rows := next((length for length in lengths if length != num_samples), None)) is not None:
        what = f"a batch must have one row per sample, but a tensor has {rows} rows for {num_samples} samples"
        raise DataError(what, where=place, fix=f"{fix}, or define load_fixed and compose in the dataset")
    return samples


def _changing_samples(why: str, where: str) -> DataError:
    return DataError(
        f"the samples change from epoch to epoch ({why}), so they cannot be cached",
        where=f"dataloader.cache={where}",
        fix="use dataloader.cache=none",
    )


class WorkerFetcher:
    """A fetcher that returns an error as a value, which torch would wrap in a traceback.

    Batches are moved to shared memory here: if that is full, torch's queue thread would print a
    traceback and drop the batch, and the run would hang.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __len__(self) -> int:
        return len(self.fetcher)

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch | AccelRunError | RemoteError:
        try:
            read = self.fetcher[key]
            map_tensors(_share, read.batch)
            return read
        except AccelRunError as error:
            # Causes would keep memory alive, and smaller batches may resolve a lack of memory.
            return (
                RemoteError(describe_exception(error))
                if find_oom_cause(error) is not None
                else error.with_traceback(None)
            )
        except (Exception, SystemExit) as error:  # the task's collate may call sys.exit
            return RemoteError(describe_exception(error))

    def __reduce__(self) -> tuple[Callable[..., WorkerFetcher], tuple[bytes]]:
        """Pickle without the task's model: it may be on a GPU, where each worker would allocate memory, or sharded."""
        content = io.BytesIO()
        PicklerWithoutModel(content, self.fetcher.model).dump(self.fetcher)
        return _unpickle, (content.getvalue(),)


def _unpickle(content: bytes) -> WorkerFetcher:
    return WorkerFetcher(ForkingPickler.loads(content))


class _Keys(Sequence[MicroBatchKey]):
    """The keys as an endless sampler, which DataLoader requires."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[MicroBatchKey]:
        return iter(self.keys)

    def __len__(self) -> int:
        raise TypeError("the keys have no end")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the keys are read in order")


def _share(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes():
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _identity(batch: Any) -> Any:
    return batch


_SHUTDOWN_TIMEOUT_S = 2.0  # s for a worker to exit; its results are not needed
MAX_MEASUREMENT_S = 0.5  # for each of two batches; training waits for it
DATALOADERS: Mapping[str, Callable[..., Loader]] = {"default": default, "thread": thread}
