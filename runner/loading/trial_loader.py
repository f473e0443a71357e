"""A loader that tries data workers in the first updates, and keeps them if updates are faster."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runner.base.batch import MicroBatch, map_tensors
from runner.base.fetcher import Fetcher
from runner.base.order import MicroBatchKey
from runner.loading.loaders import Keys, Loader, WorkerLoader


class Clocks(NamedTuple):
    """The clocks of a measurement, in seconds: of the wall, and of this thread's use of a CPU."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time


class TrialLoader(Loader):
    """Read in this process. If updates wait for data, try workers, and keep them if updates become faster.

    The timed batches are those of the training, and the same whichever process reads them: nothing is read twice.

    Workers are forked after this process has read samples. There are none if reading leaves a file open or a thread
    running: forked workers would share the position in the file, and a lock that the thread holds stays locked in them.

    new_workers  number of workers -> loader
    limit        of the number of workers
    """

    def __init__(
        self, inline: Loader, new_workers: Callable[[int], WorkerLoader], limit: int, clocks: Clocks | None = None
    ) -> None:
        super().__init__(inline.fetcher)
        self._inline, self._new_workers, self._limit, self._clocks = inline, new_workers, limit, clocks or Clocks()
        self._reads = _ObservedReads()
        self._chosen: Loader | None = None
        self._tried: WorkerLoader | None = None

    def new_like(self, fetcher: Fetcher) -> Loader:
        return self._chosen.new_like(fetcher) if self._chosen else _ObservedLoader(Loader(fetcher), self._reads)

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        return self._chosen.batches(keys) if self._chosen else self._measure(iter(keys))

    def close(self) -> None:
        self._inline.close()
        if self._tried is not None:
            self._tried.close()

    def _measure(self, keys: Iterator[MicroBatchKey]) -> Iterator[MicroBatch]:
        inline = _TimedUpdates(_ObservedLoader(self._inline, self._reads).batches(keys), self._clocks)
        yield from inline.run(WARM_UP_UPDATES + TIMED_UPDATES)
        if not inline.is_complete:  # the keys have ended
            return
        if inline.reading_share < _MIN_GAIN or inline.reading_s < MIN_READ_S:
            self._chosen = self._inline
        else:
            keys, trial = self._start_trial(keys, inline)
            if trial is not None:
                yield from self._compare(inline, trial)
            self._chosen = self._chosen or self._inline
        if self._chosen is self._inline:
            yield from self._inline.batches(keys)

    def _start_trial(
        self, keys: Iterator[MicroBatchKey], inline: _TimedUpdates
    ) -> tuple[Iterator[MicroBatchKey], _Trial | None]:
        """Start workers if that is safe; return the keys that they have not received, and their trial."""
        waiting = f"reading takes {inline.reading_share:.0%} of an update"
        unsafe = self._reads.why_not_fork()
        if unsafe:
            self.decision = f"no data workers, although {waiting}: {unsafe}"
            return keys, None
        count = min(self._limit, inline.useful_workers())
        workers = self._new_workers(count)
        gate = _Gate(keys)
        if not _has_shared_memory(self._reads.batch_bytes * (workers.max_prefetched + count)):
            self.decision = f"no data workers, although {waiting}: /dev/shm is too small for {count}"
            return keys, None
        self._tried = workers
        try:
            batches = workers.batches(gate)
        except (OSError, RuntimeError) as error:  # a limit on processes or threads; the training does not need them
            self.decision = f"no data workers, although {waiting}: {error}"
            return chain(gate.taken or (), keys), None
        gate.taken = None
        self.num_workers, self.max_prefetched = count, workers.max_prefetched
        return keys, _Trial(workers, gate, batches)

    def _compare(self, inline: _TimedUpdates, trial: _Trial) -> Iterator[MicroBatch]:
        """Time updates whose batches workers read; yield from them on if that is faster, else their last batches."""
        timed = _TimedUpdates(trial.batches, self._clocks)
        yield from timed.run(WARM_UP_UPDATES + TIMED_UPDATES)
        if not timed.is_complete:  # the keys have ended
            return
        ratio = timed.update_s / inline.update_s
        count = trial.workers.num_workers
        workers = f"{count} data worker{'s' if count > 1 else ''}"
        if ratio < 1 - _MIN_GAIN:
            self._chosen = trial.workers
            self.decision = (
                f"{workers}: updates take {ratio:.2f} times as long as without, where reading was"
                f" {inline.reading_share:.0%} of them"
            )
            yield from trial.batches
            return
        trial.gate.close()
        yield from trial.batches  # those that workers have already received
        trial.workers.close()
        self.num_workers = self.max_prefetched = 0
        self.decision = f"no data workers: with {count}, updates took {ratio:.2f} times as long"


class _Trial(NamedTuple):
    workers: WorkerLoader
    gate: _Gate
    batches: Iterator[MicroBatch]


class _Gate(Iterator[MicroBatchKey]):
    """Keys until the gate is closed, while more are left for another reader.

    taken  keys that were handed out; None: they are no longer recorded
    """

    def __init__(self, keys: Iterator[MicroBatchKey]) -> None:
        self._keys, self._is_closed = keys, False
        self.taken: list[MicroBatchKey] | None = []

    def __next__(self) -> MicroBatchKey:
        if self._is_closed:
            raise StopIteration
        key = next(self._keys)
        if self.taken is not None:
            self.taken.append(key)
        return key

    def close(self) -> None:
        self._is_closed = True


class _TimedUpdates:
    """Yields batches, and measures the time of updates from one request for the first batch to the next one."""

    def __init__(self, batches: Iterator[MicroBatch], clocks: Clocks) -> None:
        self._batches, self._clocks = batches, clocks
        self._seconds: list[float] = []
        self._reading: list[float] = []
        self._busy: list[float] = []  # seconds of a CPU while reading
        self.is_complete = False

    def run(self, num_updates: int) -> Iterator[MicroBatch]:
        wall, cpu = self._clocks
        for _ in range(num_updates):
            began, reading, busy, is_last = wall(), 0.0, 0.0, False
            while not is_last:
                before, cpu_before = wall(), cpu()
                batch = next(self._batches, None)
                if batch is None:
                    return
                reading += wall() - before
                busy += cpu() - cpu_before
                is_last = batch.last
                yield batch
                del batch  # before the next is read, so that one fewer batch is in memory
            self._seconds.append(wall() - began)
            self._reading.append(reading)
            self._busy.append(busy)
        self.is_complete = True

    @property
    def update_s(self) -> float:
        """Median seconds of an update."""
        return statistics.median(self._seconds[WARM_UP_UPDATES:])

    @property
    def reading_s(self) -> float:
        """Median seconds in which an update waits for its batches."""
        return statistics.median(self._reading[WARM_UP_UPDATES:])

    @property
    def reading_share(self) -> float:
        """Median share of an update in which it waits for its batches."""
        timed = zip(self._reading[WARM_UP_UPDATES:], self._seconds[WARM_UP_UPDATES:], strict=True)
        return statistics.median(reading / max(seconds, _CLOCK_S) for reading, seconds in timed)

    def useful_workers(self) -> int:
        """Return the number of workers that read a batch in the time in which this process computes one.

        Workers that compute, instead of waiting for files, need a core each.
        """
        wanted = max(1, math.ceil(self.reading_s / max(self.update_s - self.reading_s, _CLOCK_S)))
        computes = statistics.median(self._busy[WARM_UP_UPDATES:]) > self.reading_s / 2
        return min(wanted, torch.get_num_threads()) if computes else wanted


class _ObservedReads:
    """What reading samples in this process leaves behind, and the largest batch in bytes."""

    def __init__(self) -> None:
        self.batch_bytes = 0
        self._opened: set[tuple[str, str]] = set()

    @contextmanager
    def observe(self) -> Iterator[None]:
        before = _list_resources()
        yield
        self._opened |= _list_resources() - before

    def record_size(self, batch: Any) -> None:
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(tensor.nbytes), batch)
        self.batch_bytes = max(self.batch_bytes, sum(sizes))

    def why_not_fork(self) -> str:
        """Return why workers that are forked now could read other samples or hang; empty if they cannot."""
        if not _TASKS.exists():
            return "whether the dataset keeps files open is only known on Linux"
        left = self._opened & _list_resources()
        files = sorted(target for kind, target in left if kind != _THREAD)
        if files:
            return f"the dataset keeps {files[0]} open, whose position workers would share"
        return "the dataset has started a thread, which does not exist in workers" if left else ""


class _ObservedLoader(Loader):
    """Load with another loader of this process, and observe what that leaves behind."""

    def __init__(self, loader: Loader, reads: _ObservedReads) -> None:
        super().__init__(loader.fetcher)
        self._loader, self._reads = loader, reads

    def batches(self, keys: Keys) -> Iterator[MicroBatch]:
        # Otherwise the pool of PyTorch, which workers do not use, would look like threads of the dataset.
        torch.zeros(_PARALLEL_ELEMENTS).add_(1)
        batches = self._loader.batches(keys)
        while True:
            with self._reads.observe():
                batch = next(batches, None)
            if batch is None:
                return
            self._reads.record_size(batch.batch)
            yield batch
            del batch


def _list_resources() -> set[tuple[str, str]]:
    """Return the open files and the threads of this process, as (kind or number, name)."""
    found: set[tuple[str, str]] = set()
    with suppress(OSError):
        found |= {(_THREAD, task.name) for task in _TASKS.iterdir()}
    with suppress(OSError):
        for file in _FILES.iterdir():
            with suppress(OSError):  # that of the listing itself
                found.add((file.name, str(file.readlink())))
    return found


def _has_shared_memory(size: int) -> bool:
    """Return whether half of the free shared memory, through which workers send batches, is more than `size` bytes."""
    try:
        free = os.statvfs("/dev/shm")
    except OSError:
        return False
    return size < free.f_bavail * free.f_frsize / 2


_TASKS, _FILES = Path("/proc/self/task"), Path("/proc/self/fd")
_THREAD = "thread"
_PARALLEL_ELEMENTS = 1 << 18  # PyTorch divides an operation over its threads from 32,768 elements on
WARM_UP_UPDATES, TIMED_UPDATES = 2, 5  # updates
_MIN_GAIN = 0.03  # of the time of an update; less is not worth other processes
MIN_READ_S = 1e-3  # about what receiving a batch from a worker costs this process
_CLOCK_S = 1e-9
