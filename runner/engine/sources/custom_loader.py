"""Read batches with a loader of the task file or a package, and check that it returns each batch in order."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import get_worker_info

from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import AccelRunError, TaskFault
from runner.base.oom_errors import find_oom_cause
from runner.base.order import MicroBatchKey
from runner.base.paths import PACKAGE
from runner.base.sample_rng import seeded_generators
from runner.base.task import Dataset
from runner.base.text import RemoteError, describe_exception, first_line
from runner.host.loader_processes import PicklerWithoutModel, ignore_stop_signals, kill_workers
from runner.loading.fetcher import Fetcher, traceback_line
from runner.loading.loaders import Keys, Loader, WorkerFetcher, WorkerLoader

FIX = "yield read(request), or read.fill(request, batch), once for each request, in order"


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A batch, or an error of another process, with its request. Not a tuple: a DataLoader would convert it."""

    request: MicroBatchKey
    batch: MicroBatch | AccelRunError | RemoteError
    worker: int = 0  # PID of the worker of torch's DataLoader that read it, or 0


class RequestReader:
    """The first argument of a custom loader: reads the batch of a request.

    A call seeds the global generators of torch, NumPy and Python for each sample. Because threads of a process share
    them, calls are allowed only in the training thread and in the main thread of other processes.

    dataset  dataset of the task, for loaders that read samples themselves
    collate  method of the task that collates samples, for the same loaders
    """

    def __init__(self, fetcher: Fetcher, owner: tuple[int, int] | None = None) -> None:
        self.collate = fetcher.collate
        self._fetcher = fetcher
        self._owner = owner or (os.getpid(), threading.get_ident())  # process and thread that train
        self._ignores_signals = False

    def __len__(self) -> int:
        return len(self._fetcher)

    def __call__(self, request: MicroBatchKey) -> LoadedBatch:
        """Return the batch of a request, as a built-in loader would read it."""
        is_main = threading.current_thread() is threading.main_thread()
        if (os.getpid(), threading.get_ident()) != self._owner and (os.getpid() == self._owner[0] or not is_main):
            raise TaskFault(
                "read(request) was called in another thread, where it would change the random numbers of training",
                fix="call it in the thread of your function or in the main thread of another process, or read samples"
                " with read.dataset, read.indices and read.fill",
            )
        if os.getpid() == self._owner[0]:
            return LoadedBatch(request, self._fetcher[request])
        # Only workers of torch's DataLoader may ignore signals: SIGTERM must end others, such as those of a Pool.
        if get_worker_info() is not None and not self._ignores_signals:
            ignore_stop_signals()
            self._ignores_signals = True
        worker = os.getpid() if self._ignores_signals else 0
        return LoadedBatch(request, WorkerFetcher(self._fetcher)[request], worker)

    __getitem__ = __call__  # so that torch's DataLoader accepts it as a dataset

    @property
    def dataset(self) -> Dataset:
        """The dataset of the task."""
        self._refuse_epochs()
        return self._fetcher.dataset

    def indices(self, request: MicroBatchKey) -> list[int]:
        """Return the samples of a request, as indices in `dataset`. The list may be changed, for example sorted."""
        return list(self._fetcher.dataset_indices(request.indices))

    def fill(self, request: MicroBatchKey, batch: Any) -> LoadedBatch:
        """Return a batch that the loader has read and collated itself."""
        self._refuse_epochs()
        if self._fetcher.skip_bad:
            raise TaskFault(
                "dataloader.bad_samples=skip has no effect on a loader that calls read.fill",
                fix="use dataloader.bad_samples=stop, or read batches with read(request)",
            )
        count = len(request.indices)
        samples = BatchSamples(
            request.seed, request.epoch, request.indices, range(request.first, request.first + count)
        )
        return LoadedBatch(request, MicroBatch(batch, request.last, is_counted=request.is_counted, samples=samples))

    def _refuse_epochs(self) -> None:
        """Raise TaskFault if samples change with the epoch: only `read` knows the epoch that the dataset is in."""
        if self._fetcher.set_epoch is not None:
            raise TaskFault(
                "the dataset defines set_epoch, which only read(request) calls",
                fix="read batches with read(request) instead of read.dataset and read.fill, or remove set_epoch",
            )

    def __reduce__(self) -> tuple[Callable[..., RequestReader], tuple[bytes, tuple[int, int]]]:
        """Pickle without the task's model."""
        content = io.BytesIO()
        PicklerWithoutModel(content, self._fetcher.model).dump(self._fetcher)
        return _unpickle, (content.getvalue(), self._owner)


def _unpickle(content: bytes, owner: tuple[int, int]) -> RequestReader:
    return RequestReader(ForkingPickler.loads(content), owner)


class _Requests:
    """Iterator over the requests, which a loader may read ahead and in another thread; `next` returns the one now due.

    Empty keys, for which this rank has no samples, are not requested. The loader receives copies, because it may change
    the list of indices.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys, self._lock = iter(keys), threading.Lock()
        self._taken: deque[MicroBatchKey] = deque()  # keys that the loader took before their batches were due
        self._needed: deque[MicroBatchKey] = deque()  # keys that were due before the loader took them

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> MicroBatchKey:
        with self._lock:
            if self._needed:
                return _copy(self._needed.popleft())
            for key in self._keys:
                self._taken.append(key)
                if key.indices:
                    return _copy(key)
            raise StopIteration

    def next(self) -> MicroBatchKey | None:
        """Return the key of the next batch, or None at the end."""
        with self._lock:
            if self._taken:
                return self._taken.popleft()
            key = next(self._keys, None)
            if key is not None and key.indices:
                self._needed.append(key)
            return key


def _copy(key: MicroBatchKey) -> MicroBatchKey:
    return key._replace(indices=list(key.indices))


class CustomLoader(Loader):
    """Reads with a function of the task file or a package.

    load   (read, requests) -> batches
    name   name of the option
    where  file:line of its definition
    pins   whether to copy batches to pinned memory
    """

    def __init__(
        self, fetcher: Fetcher, load: Callable[..., Iterable[LoadedBatch]], name: str, where: str, *, pins: bool
    ) -> None:
        super().__init__(fetcher)
        self._load, self._name, self._where, self._pins = load, name, where, pins
        self._open: list[Any] = []
        self._workers: set[int] = set()

    def new_like(self, fetcher: Fetcher) -> Loader:
        # Not a custom loader, because other fetchers return more than batches. A worker process reads, because
        # processes that the custom loader forks later would share files that the dataset opened in this process.
        return WorkerLoader(fetcher, start_method="fork")

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        requests, last = _Requests(keys), None
        loaded: Iterator[Any] | None = None
        while (key := requests.next()) is not None:
            if not key.indices:
                yield self.fetcher[key]
                continue
            if loaded is None:
                loaded = self._call(key, self._start, requests)
                self._open.append(loaded)
            batch, last = self._check(key, self._call(key, next, loaded, None)), key
            yield batch.pin_memory() if self._pins else batch
        if loaded is not None and last is not None and self._call(last, next, loaded, None) is not None:
            raise self._fault("yields more batches than were requested")

    def _check(self, key: MicroBatchKey, loaded: Any) -> MicroBatch:
        if loaded is None:
            raise self._fault("ended before the last requested batch")
        if not isinstance(loaded, LoadedBatch):
            raise self._fault(f"must yield what read or read.fill return, but yields {type(loaded).__name__}")
        if loaded.request != key:
            found, wanted = (f"samples {request.indices[:3]}..." for request in (loaded.request, key))
            raise self._fault(f"yields the batch of {found}, but the batch of {wanted} must be next")
        self._workers.add(loaded.worker)
        if isinstance(loaded.batch, Exception):
            raise loaded.batch
        return loaded.batch

    def _start(self, requests: _Requests) -> Iterator[Any]:
        loaded = self._load(RequestReader(self.fetcher), requests)
        if not isinstance(loaded, Iterable):
            raise self._fault(f"must be a generator function, but returns {type(loaded).__name__}")
        return iter(loaded)

    def _call(self, key: MicroBatchKey, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of the loader with generators seeded for this batch, and name the loader if it raises.

        The generators are restored, because the loader must not change the random numbers of the model; torch's
        DataLoader, for example, draws the seeds of its workers when it starts.
        """
        try:
            with seeded_generators(key.seed, self.fetcher.streams.split, "loader", key.epoch, key.first):
                return function(*args)
        except Exception as error:
            in_worker = _WORKER_ERROR in first_line(str(error))  # raised again by torch, with a traceback as message
            if isinstance(error, AccelRunError) and not in_worker:
                raise
            if find_oom_cause(error) is not None:
                raise
            what = str(error).strip().splitlines()[-1] if in_worker else f"{type(error).__name__}: {error}"
            raise self._fault(what, _error_line(error), "fix the loader, or the data that it reads") from error

    def _fault(self, what: str, where: str = "", fix: str = FIX) -> TaskFault:
        return TaskFault(f"dataloader={self._name} {what}", where=where or self._where, fix=fix)

    def close(self) -> None:
        for loaded in self._open:
            if hasattr(loaded, "close"):  # a generator, whose `finally` blocks stop its workers
                with suppress(Exception):
                    loaded.close()
                # A worker that is still reading ignores torch's SIGTERM, and Python would wait for it at exit.
                kill_workers([child for child in active_children() if child.pid in self._workers])
        self._open.clear()


_WORKER_ERROR = "in DataLoader worker process"


def _error_line(error: Exception) -> str:
    """Return file:line of the task's code that raised an error; empty if none did."""
    described = describe_exception(error)
    frames = tuple(frame for frame in described.frames if not frame.file.startswith(f"{PACKAGE}{os.sep}"))
    return traceback_line(dataclasses.replace(described, frames=frames))
