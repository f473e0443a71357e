"""Loaders that read in this process, in a thread or in worker processes. All yield identical batches.

A loader receives keys (epoch, indices, last) in the order of base/order.py and yields batches in that order.
Code of the task draws from the global generators, which base/sample_rng.py seeds for each sample in every loader.
"""

from __future__ import annotations

import errno
import io
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import signal_handling

from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import AccelRunError, Exit
from runner.base.oom_errors import find_oom_cause
from runner.base.order import MicroBatchKey
from runner.base.text import RemoteError, describe_exception
from runner.host.loader_processes import (
    PicklerWithoutModel,
    init_worker,
    kill_on_partial_start,
    kill_workers,
    stop_signals_blocked,
    worker_context,
)
from runner.loading.fetcher import Fetcher

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


class PinnedLoader(Loader):
    """Load in this process into page-locked memory, so that copies to the device can overlap."""

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        return map(MicroBatch.pin_memory, super().batches(keys))


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
                collate_fn=identity,  # torch's default would convert tuples to lists
                sampler=chain(first, keys),
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
            # Private, checked on torch 2.13, as is `_shutdown_workers`.
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
            # With a timeout, because after `close` a full queue stays full.
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
            thread.join(timeout=5)  # a read of the dataset may block forever
        self._threads.clear()


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


def _share(tensor: Tensor) -> Tensor:
    # Pickling shares the tensors of a sparse tensor, which has no storage.
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def identity(batch: Any) -> Any:
    """Return the argument: a function to collate what is a batch already."""
    return batch


_SHUTDOWN_TIMEOUT_S = 2.0  # s for a worker to exit; its results are not needed
