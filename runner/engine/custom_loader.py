"""Read batches with a loader of the task file or a package, and check that it returns each batch in order."""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from runner.axes.dataloader import Keys, Loader, WorkerLoader
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import AccelRunError, TaskFault
from runner.base.fetcher import Fetcher
from runner.base.oom_errors import find_oom_cause
from runner.base.order import MicroBatchKey
from runner.host.loader_processes import PicklerWithoutModel

FIX = "yield read(request), or read.fill(request, batch), once for each request, in order"


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A batch with its request. Not a tuple, which torch's DataLoader would convert."""

    request: MicroBatchKey
    batch: MicroBatch


class RequestReader:
    """The first argument of a custom loader: reads the batch of a request.

    The call seeds torch's, NumPy's and Python's generators for each sample, which belong to a process. It therefore
    works in the thread that trains and in the main thread of other processes.

    dataset, collate  of the task, for loaders that read samples themselves
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.dataset, self.collate = fetcher.dataset, fetcher.collate
        self._fetcher = fetcher
        self._owner = os.getpid(), threading.get_ident()

    def __len__(self) -> int:
        return len(self._fetcher)

    def __call__(self, request: MicroBatchKey) -> LoadedBatch:
        """Return the batch of a request, as a shipped loader would read it."""
        is_main = threading.current_thread() is threading.main_thread()
        if (os.getpid(), threading.get_ident()) != self._owner and (os.getpid() == self._owner[0] or not is_main):
            raise TaskFault(
                "read(request) was called in another thread, where it would change the random numbers of the training",
                fix="call it in a process, or read samples with read.dataset, read.indices and read.fill",
            )
        return LoadedBatch(request, self._fetcher[request])

    __getitem__ = __call__  # so that torch's DataLoader accepts it as a dataset

    def indices(self, request: MicroBatchKey) -> list[int]:
        """Return the samples of a request, as indices in `dataset`."""
        return self._fetcher.dataset_indices(request.indices)

    def fill(self, request: MicroBatchKey, batch: Any) -> LoadedBatch:
        """Return a batch that the loader has read and collated itself."""
        count = len(request.indices)
        samples = BatchSamples(
            request.seed, request.epoch, request.indices, range(request.first, request.first + count)
        )
        return LoadedBatch(request, MicroBatch(batch, request.last, counts=request.counts, samples=samples))

    def __reduce__(self) -> tuple[Callable[..., RequestReader], tuple[bytes]]:
        """Pickle without the task's model."""
        content = io.BytesIO()
        PicklerWithoutModel(content, self._fetcher.model).dump(self._fetcher)
        return _unpickle, (content.getvalue(),)


def _unpickle(content: bytes) -> RequestReader:
    return RequestReader(ForkingPickler.loads(content))


class _Requests:
    """The requests of a loader, which may take them ahead, also in a thread; `next` returns what must follow.

    Empty keys, for which this rank has no samples, are not requested.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys, self._lock = iter(keys), threading.Lock()
        self._taken: deque[MicroBatchKey] = deque()  # by the loader, before their batches were needed
        self._needed: deque[MicroBatchKey] = deque()  # before the loader took them

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> MicroBatchKey:
        with self._lock:
            if self._needed:
                return self._needed.popleft()
            for key in self._keys:
                self._taken.append(key)
                if key.indices:
                    return key
            raise StopIteration

    def next(self) -> MicroBatchKey | None:
        """Return the key of the next batch, None at the end."""
        with self._lock:
            if self._taken:
                return self._taken.popleft()
            key = next(self._keys, None)
            if key is not None and key.indices:
                self._needed.append(key)
            return key


class CustomLoader(Loader):
    """Reads with a function of the task file or a package.

    load  (read, requests) -> batches
    name  of the option, and `where` it is defined
    """

    def __init__(
        self, fetcher: Fetcher, load: Callable[..., Iterable[LoadedBatch]], name: str, where: str, *, pins: bool
    ) -> None:
        super().__init__(fetcher)
        self._load, self._name, self._where, self._pins = load, name, where, pins
        self._open: list[Any] = []

    def new_like(self, fetcher: Fetcher) -> Loader:
        # Other fetchers return more than batches. A worker reads, because forked processes of the custom loader would
        # share the files that the dataset opened here.
        return WorkerLoader(fetcher, num_workers=1, pin_memory=False, prefetch_factor=1, start_method="fork")

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        requests = _Requests(keys)
        loaded: Iterator[Any] | None = None
        while (key := requests.next()) is not None:
            if not key.indices:
                yield self.fetcher[key]
                continue
            if loaded is None:
                loaded = self._call(self._start, requests)
                self._open.append(loaded)
            batch = self._check(key, self._call(next, loaded, None))
            yield batch.pin_memory() if self._pins else batch
        if loaded is not None and self._call(next, loaded, None) is not None:
            raise self._fault("yields more batches than were requested")

    def _check(self, key: MicroBatchKey, loaded: Any) -> MicroBatch:
        if loaded is None:
            raise self._fault("ended before the last requested batch")
        if not isinstance(loaded, LoadedBatch):
            raise self._fault(f"must yield what read or read.fill return, but yields {type(loaded).__name__}")
        if loaded.request != key:
            found, wanted = (f"samples {request.indices[:3]}..." for request in (loaded.request, key))
            raise self._fault(f"yields the batch of {found} where that of {wanted} must follow")
        return loaded.batch

    def _start(self, requests: _Requests) -> Iterator[Any]:
        return iter(self._load(RequestReader(self.fetcher), requests))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of the loader, and name the loader if it raises."""
        try:
            return function(*args)
        except AccelRunError:
            raise
        except Exception as error:
            if find_oom_cause(error) is not None:
                raise
            raise self._fault(f"{type(error).__name__}: {error}", fix="fix the loader") from error

    def _fault(self, what: str, fix: str = FIX) -> TaskFault:
        return TaskFault(f"dataloader={self._name} {what}", where=self._where, fix=fix)

    def close(self) -> None:
        for loaded in self._open:
            if hasattr(loaded, "close"):  # a generator, whose `finally` blocks stop its workers
                with suppress(Exception):
                    loaded.close()
        self._open.clear()
