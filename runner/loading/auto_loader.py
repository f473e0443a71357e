"""A loader that measures at the start whether reading is slow enough for workers to pay off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice

from runner.base.batch import MicroBatch
from runner.base.order import MicroBatchKey
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Keys, Loader, WorkerLoader


class AutoLoader(Loader):
    """Read in workers if a worker needs at least `limit_s` for a batch, otherwise in this process.

    Receiving a batch from a worker also costs this process time: it maps the shared memory of the tensors, and
    page-locks them in a thread that competes with training for the GIL.

    The measurement runs in a worker, because a dataset may open a file when its first sample is read: if this process
    opened it, workers forked afterwards would share its file offset. The worker reads two batches, and the time of the
    second one counts. The two batches are far apart in the dataset, so that reading the first one does not bring
    the second one into the page cache.
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
        """Return the seconds that a worker needs for the second of two batches; None if it exceeds the limit or fails.

        The limit is MAX_MEASUREMENT_S.
        """
        size = len(self.fetcher)
        distant = key._replace(indices=[(index + size // 2) % size for index in key.indices])
        start_method = self._workers.start_method
        reader = WorkerLoader(_TimingFetcher(self.fetcher), start_method=start_method, timeout_s=MAX_MEASUREMENT_S)
        self._measuring = reader
        try:
            seconds = [item.batch for item in reader.batches([key, distant])]
        except Exception:
            # If the dataset raised the error, it is reported when training reads the sample. A slow worker lives until
            # the loader is closed: if it were killed, a file that the dataset is writing would stay incomplete.
            return None
        reader.close()
        return float(seconds[-1])

    def new_like(self, fetcher: Fetcher) -> Loader:
        return (self._chosen or self._workers).new_like(fetcher)

    def for_evaluation(self, fetcher: Fetcher) -> Loader:
        """Return a loader that reads where training does, without another measurement.

        Workers must not be forked for the evaluation alone. If training reads in this process, the training dataset has
        open files here. Forked workers would share their offsets, and the validation data may be in the same files.
        """
        return (self._chosen or self._workers).for_evaluation(fetcher)

    def close(self) -> None:
        if self._measuring is not None:
            self._measuring.close()
        self._workers.close()


class _TimingFetcher(Fetcher):
    """Fetcher that returns how many seconds another fetcher needs for the batch of a key."""

    def __init__(self, timed: Fetcher) -> None:
        super().__init__(timed.dataset, timed.collate, bad_samples="stop", model=timed.model)
        self.timed = timed

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch:
        start = time.perf_counter()
        self.timed[key]
        return MicroBatch(time.perf_counter() - start, key.last)


MAX_MEASUREMENT_S = 0.5  # timeout for each of two batches; training waits for the measurement
