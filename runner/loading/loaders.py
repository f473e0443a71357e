"""Loaders that read in this process, in a thread or in worker processes. All yield identical batches.

A loader receives one `MicroBatchKey` (base/order.py) for each micro-batch, and yields the batches in the same order.
Task code draws from the global random generators, which base/sample_rng.py seeds for each sample in every loader.
"""

from __future__ import annotations

import errno
import io
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data._utils import signal_handling

from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import AccelRunError, Exit, TaskFault
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
    decision = ""  # message about the choice between workers and this process, if it was measured; else empty

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        """Yield the batch of each key, in order."""
        return map(self.fetcher.__getitem__, keys)

    def new_like(self, fetcher: Fetcher) -> Loader:
        """Return a loader for a few batches: with one worker if this loader uses workers, else in this process."""
        return Loader(fetcher)

    def for_evaluation(self, fetcher: Fetcher) -> Loader:
        """Return a loader with the same settings for samples that are not cached; close it after each evaluation."""
        return Loader(fetcher)

    def close(self) -> None:
        """Stop prefetching."""


class PinnedLoader(Loader):
    """Load in this process into page-locked memory, so that copies to the device can overlap."""

    def for_evaluation(self, fetcher: Fetcher) -> Loader:
        return PinnedLoader(fetcher)

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        return map(MicroBatch.pin_memory, super().batches(keys))


class WorkerLoader(Loader):
    """Prefetch in worker processes. Each iterator that `batches` returns has its own workers.

    Workers ignore stop signals, which a terminal or scheduler sends to every process of the run, because their batches
    are needed until the current update is complete. Workers end when the loader is closed or this process ends.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        start_method: str,
        num_workers: int = 1,
        pin_memory: bool = False,
        prefetch_factor: int = 1,
        timeout_s: float = 0.0,
    ) -> None:
        super().__init__(fetcher)
        self.timeout_s = timeout_s  # maximum wait for a batch; 0: no limit
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.start_method = start_method
        self.max_prefetched = num_workers * prefetch_factor
        self._open: list[Any] = []
        self._evaluation: KeptWorkerLoader | None = None

    def new_like(self, fetcher: Fetcher) -> Loader:
        return WorkerLoader(fetcher, start_method=self.start_method)

    def for_evaluation(self, fetcher: Fetcher) -> Loader:
        if self.fetcher.is_cached:  # this process has read the dataset: forked workers would share its open files
            return Loader(fetcher)
        options: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "prefetch_factor": self.prefetch_factor,
            "start_method": self.start_method,
            "timeout_s": self.timeout_s,
        }
        if self.start_method != "spawn":
            return WorkerLoader(fetcher, **options)
        if self._evaluation is None or self._evaluation.fetcher is not fetcher:
            self._end_evaluation()
            self._evaluation = KeptWorkerLoader(fetcher, **options)
        return self._evaluation

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        keys = iter(keys)
        first = list(islice(keys, self.num_workers))  # an evaluation may have fewer batches than there are workers
        if not first:
            return iter(())
        return self._raise_errors(self._iterate(self._data_loader(first, chain(first, keys))))

    def _data_loader(
        self, first: list[MicroBatchKey], keys: Iterable[Any], *, keeps_workers: bool = False
    ) -> torch.utils.data.DataLoader[MicroBatch]:
        """Return torch's loader of `keys`, which begin with `first`, with a worker for each key in `first`."""
        with _without_core_warning():
            return torch.utils.data.DataLoader(
                WorkerFetcher(self.fetcher),  # type: ignore[arg-type]
                batch_size=None,
                collate_fn=identity,  # torch's default would convert tuples to lists
                sampler=keys,
                num_workers=len(first),
                persistent_workers=keeps_workers,
                pin_memory=self.pin_memory,
                prefetch_factor=self.prefetch_factor,
                timeout=self.timeout_s,
                multiprocessing_context=worker_context(self.start_method),
                worker_init_fn=partial(init_worker, os.getpid()),
                # torch draws the seed of the workers from a generator when it creates an iterator. A separate generator
                # leaves the state of the global one unchanged. It also gives different seeds to the workers of
                # different ranks, for datasets that create their own generators from the worker's seed.
                generator=torch.Generator().manual_seed(self.fetcher.streams.number("workers", first[0])),
            )

    def _iterate(self, loader: torch.utils.data.DataLoader[MicroBatch]) -> Any:
        if self._open and loader.persistent_workers:
            return iter(loader)
        # Workers start with stop signals blocked, so that none arrives before `init_worker` ignores them.
        with _without_core_warning(), stop_signals_blocked(self.start_method), kill_on_partial_start():
            iterator = iter(loader)
        self._open.append(iterator)
        return iterator

    def _raise_errors(self, iterator: Any) -> Iterator[MicroBatch]:
        try:
            for item in iterator:
                if isinstance(item, (AccelRunError, RemoteError)):
                    raise item
                yield item
        except RuntimeError as error:  # raised by torch if a worker died
            if any(worker.exitcode == Exit.SYSTEM for worker in iterator._workers):
                raise OSError(errno.EMFILE, "a data worker: too many open files") from error
            raise

    def close(self) -> None:
        with ExitStack() as stack:
            for iterator in self._open:
                stack.callback(self._close, iterator)
            self._open.clear()
            stack.callback(self._end_evaluation)

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end_workers()

    @staticmethod
    def _close(iterator: Any) -> None:
        try:
            # Private, checked on torch 2.13, as is `_shutdown_workers`.
            if iterator._worker_pids_set:  # otherwise torch would raise an error for a worker that is killed here
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
        finally:  # when memory is exhausted, any line above may raise an error
            kill_workers(iterator._workers)


@contextmanager
def _without_core_warning() -> Iterator[None]:
    """Suppress torch's warning about more workers than cores: the plan warns about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


class KeptWorkerLoader(WorkerLoader):
    """Keep the workers for the next iterator, because spawning one takes seconds; only one iterator is open at a time.

    Like new workers, kept workers receive the current state of the dataset. Only `end_workers` ends them, not `close`.
    """

    def __init__(self, fetcher: Fetcher, **options: Any) -> None:
        super().__init__(fetcher, **options)
        self._keys = _Keys()
        self._loader: torch.utils.data.DataLoader[MicroBatch] | None = None

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        keys = iter(keys)
        first = list(islice(keys, self.num_workers))
        if not first:
            return iter(())
        if self._loader is not None and self._loader.num_workers < len(first):
            self.end_workers()
        if self._loader is None:
            self._keys.keys = chain(first, keys)
            self._loader = self._data_loader(first, self._keys, keeps_workers=True)
        else:  # each key goes to a different worker and needs its own pickle: shared memory can be sent only once
            sent = (_FirstKey(key, WorkerFetcher(self.fetcher).pickled()) for key in first)
            self._keys.keys = chain(sent, keys)
        return self._raise_errors(self._iterate(self._loader))

    def close(self) -> None:
        """Keep the workers."""

    def end_workers(self) -> None:
        """End the workers; the next iterator starts new ones."""
        super().close()
        self._loader = None


class _Keys:
    """A sampler whose keys change between iterators."""

    keys: Iterable[MicroBatchKey | _FirstKey] = ()

    def __iter__(self) -> Iterator[MicroBatchKey | _FirstKey]:
        return iter(self.keys)


class ThreadLoader(Loader):
    """Prefetch cached samples in one thread.

    Other samples must not be read in a thread: task code could draw from the generators that the model uses.
    """

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
    """A fetcher that returns errors as values, because torch would replace their messages with the worker's traceback.

    It also moves batches to shared memory. Otherwise torch would do so in the thread of the result queue, which prints
    a traceback and drops the batch if shared memory is full, and the run would hang.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __len__(self) -> int:
        return len(self.fetcher)

    def __getitem__(self, key: MicroBatchKey | _FirstKey) -> MicroBatch | AccelRunError | RemoteError:
        try:
            if isinstance(key, _FirstKey):
                self.fetcher, key = ForkingPickler.loads(key.fetcher), key.key
            read = self.fetcher[key]
            map_tensors(_share, read.batch)
            return read
        except AccelRunError as error:
            # Pickling drops the causes of an exception. A RemoteError describes them as text, in which the run finds
            # the out-of-memory error, and can then continue with smaller micro-batches.
            return (
                RemoteError(describe_exception(error))
                if find_oom_cause(error) is not None
                else error.with_traceback(None)
            )
        except (Exception, SystemExit) as error:  # the task's collate may call sys.exit
            return RemoteError(describe_exception(error))

    def pickled(self) -> bytes:
        """Return the pickled fetcher without the task's model, for which each worker would allocate GPU memory."""
        content = io.BytesIO()
        try:
            PicklerWithoutModel(content, self.fetcher.model).dump(self.fetcher)
        except Exception as error:  # PicklingError, TypeError, AttributeError, and what __getstate__ raises
            what = f"dataset({self.fetcher.streams.split!r}) cannot be sent to a spawned worker: {error}"
            fix = "define its classes and functions at module level, or use dataloader.start_method=fork"
            raise TaskFault(what, fix=fix) from error
        return content.getvalue()

    def __reduce__(self) -> tuple[Callable[..., WorkerFetcher], tuple[bytes]]:
        return _unpickle, (self.pickled(),)


class _FirstKey(NamedTuple):
    """The first key that a kept worker receives in an evaluation, with the pickled fetcher and its current dataset."""

    key: MicroBatchKey
    fetcher: bytes


def _unpickle(content: bytes) -> WorkerFetcher:
    return WorkerFetcher(ForkingPickler.loads(content))


def _share(tensor: Tensor) -> Tensor:
    # A sparse tensor has no storage; the tensors in it are moved to shared memory when it is pickled.
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def identity(batch: Any) -> Any:
    """Return the argument; the collate function for datasets that return complete batches."""
    return batch


_SHUTDOWN_TIMEOUT_S = 2.0  # seconds for a worker to exit; its results are not needed
