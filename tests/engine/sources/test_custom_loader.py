"""A custom data loader is rejected if the run would train on other data or would not be reproducible."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from runner.base.batch import MicroBatch
from runner.base.errors import AccelRunError, DataError, TaskFault
from runner.base.order import MicroBatchKey
from runner.engine.sources.custom_loader import CustomLoader, RequestReader
from runner.loading.fetcher import Fetcher

KEYS = [MicroBatchKey(0, [2, 1], True, first=0), MicroBatchKey(0, [0, 3], True, first=2)]


class Numbers:
    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise KeyError("broken sample")
        return index


class NumbersOfEpochs(Numbers):
    def set_epoch(self, epoch: int) -> None:
        """Change the samples in each epoch."""


class Signals(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)


def load_batches(
    load: Callable[..., Any], dataset: Numbers | None = None, bad_samples: str = "stop"
) -> Iterator[list[int]]:
    fetcher = Fetcher(dataset or Numbers(), torch.tensor, bad_samples=bad_samples)
    loader = CustomLoader(fetcher, load, "mine", "task.py", pins=False)
    try:
        yield from (batch.batch.tolist() for batch in loader.batches(iter(KEYS)))
    finally:
        loader.close()


def load_filled(read: Any, requests: Any) -> Iterator[Any]:
    for request in requests:
        yield read.fill(request, read.collate([read.dataset[index] for index in read.indices(request)]))


def load_in_workers(read: Any, requests: Any) -> Iterator[Any]:
    yield from DataLoader(read, batch_size=None, sampler=requests, num_workers=1)


@pytest.mark.parametrize("start", [load_filled, load_in_workers])
def test_a_loader_reads_the_samples_of_each_request(start: Callable[..., Any]) -> None:
    assert list(load_batches(start)) == [[2, 1], [0, 3]]


def test_a_loader_that_collates_returns_the_same_batches_as_read() -> None:
    """Batches contain the indices of their samples, which determine the random draws of the model."""
    read = RequestReader(Fetcher(Numbers(), torch.tensor, bad_samples="stop"))
    for request in KEYS:
        loaded, filled = read(request).batch, read.fill(request, torch.tensor(request.indices)).batch
        assert isinstance(loaded, MicroBatch)
        assert isinstance(filled, MicroBatch)
        assert filled.samples == loaded.samples
        assert (filled.last, filled.is_counted) == (loaded.last, loaded.is_counted)
        assert torch.equal(filled.batch, loaded.batch)


def test_a_batch_names_the_worker_that_read_it() -> None:
    """At its end, the run kills only the workers that batches name."""
    named: list[int] = []
    running: list[int | None] = []

    def record_workers(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            named.append(batch.worker)
            running.extend(child.pid for child in active_children())
            yield batch

    list(load_batches(lambda read, requests: record_workers(load_in_workers(read, requests))))
    assert len(named) == len(KEYS)
    assert set(named) <= set(running)
    named.clear()
    list(load_batches(lambda read, requests: record_workers(load_filled(read, requests))))
    assert named == [0] * len(KEYS)


def test_changing_a_request_in_place_is_rejected() -> None:
    def change_requests(read: Any, requests: Any) -> Iterator[Any]:
        for request in requests:
            request.indices[:] = [0, 0]
            yield read(request)

    with pytest.raises(TaskFault, match="must be next"):
        list(load_batches(change_requests))


def test_a_loader_can_sort_its_indices_in_place() -> None:
    def sort_indices(read: Any, requests: Any) -> Iterator[Any]:
        for request in requests:
            read.indices(request).sort()
            yield read(request)

    assert list(load_batches(sort_indices)) == [[2, 1], [0, 3]]


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.random()), random.random()


def test_a_loader_does_not_change_the_generators_of_the_model() -> None:
    """The loader's own random numbers are reproducible, because torch's DataLoader seeds its workers with them."""
    drawn: list[Any] = []

    def draw_and_load(read: Any, requests: Any) -> Any:
        drawn.append(draw())

        def rest() -> Iterator[Any]:
            for request in requests:
                drawn.append(draw())
                yield read(request)
            drawn.append(draw())

        return rest()

    before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    list(load_batches(draw_and_load))
    first = drawn.copy()
    drawn.clear()
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1]["state"]["key"], np.random.get_state(legacy=False)["state"]["key"])
    assert before[2] == random.getstate()
    draw()
    list(load_batches(draw_and_load))
    assert drawn == first


def test_loaders_that_call_fill_are_rejected_for_datasets_with_epochs() -> None:
    def direct(read: Any, requests: Any) -> Iterator[Any]:
        for request in requests:
            yield read.fill(request, torch.tensor(request.indices))

    for start in (load_filled, direct):
        with pytest.raises(TaskFault, match="set_epoch"):
            list(load_batches(start, NumbersOfEpochs()))
    assert list(load_batches(load_in_workers, NumbersOfEpochs())) == [[2, 1], [0, 3]]


def test_bad_samples_cannot_be_skipped_by_a_loader_that_collates() -> None:
    with pytest.raises(TaskFault, match="bad_samples=skip"):
        list(load_batches(load_filled, bad_samples="skip"))
    assert list(load_batches(load_in_workers, Numbers(broken=1), bad_samples="skip")) == [[2], [0, 3]]


def load_in_threads(read: Any, requests: Any) -> Iterator[Any]:
    def load(request: Any) -> Any:
        return read.fill(request, read.collate([read.dataset[index] for index in read.indices(request)]))

    with ThreadPoolExecutor(1) as pool:
        yield from (pool.submit(load, request).result() for request in requests)


def load_filled_in_workers(read: Any, requests: Any) -> Iterator[Any]:
    """Raise errors of samples as torch's DataLoader raises errors of its workers."""
    try:
        yield from load_filled(read, requests)
    except KeyError:
        ExceptionWrapper(where="in DataLoader worker process 0").reraise()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("start", [load_filled, load_in_threads, load_in_workers, load_filled_in_workers])
def test_the_error_of_an_unreadable_sample_names_the_line(start: Callable[..., Any]) -> None:
    with pytest.raises(AccelRunError) as raised:
        list(load_batches(start, Numbers(broken=1)))
    problem = raised.value.problems[0]
    assert problem.where.startswith(f"{__file__}:")
    assert "Traceback" not in problem.what
    assert "KeyError: 'broken sample'" in problem.what
    if start is load_in_workers:
        assert isinstance(raised.value, DataError)
        assert "sample 1" in problem.what


def test_an_error_raised_outside_the_task_names_the_task_file() -> None:
    def without_arguments() -> None:
        pass

    with pytest.raises(TaskFault) as raised:
        list(load_batches(without_arguments))
    assert raised.value.problems[0].where == "task.py"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_torch_ignore_stop_signals(method: str) -> None:
    """Workers are needed until the update is complete, but a scheduler sends signals to every process."""

    def start_workers(read: Any, requests: Any) -> Iterator[Any]:
        yield from DataLoader(read, None, sampler=requests, num_workers=1, multiprocessing_context=method)

    assert list(load_batches(start_workers, Signals())) == [[1, 1], [1, 1]]
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


class Hanging(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == KEYS[1].indices[0]:
            threading.Event().wait()
        return index


@pytest.mark.slow
def test_workers_still_reading_at_the_end_are_killed() -> None:
    batches = load_batches(load_in_workers, Hanging())
    assert next(batches) == KEYS[0].indices
    workers = active_children()
    batches.close()  # type: ignore[attr-defined]
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL]


@pytest.mark.parametrize("error", [DataError("a file is missing"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_errors_that_name_their_cause_are_raised_unchanged(error: Exception) -> None:
    """Any other error is reported with the line of the loader that raised it."""

    def fails(read: Any, requests: Any) -> Iterator[Any]:
        raise error
        yield

    with pytest.raises(type(error)) as caught:
        list(load_batches(fails))
    assert caught.value is error


def test_a_request_without_samples_does_not_end_the_batches() -> None:
    """A rank may have no sample in an update."""
    fetcher = Fetcher(Numbers(), torch.tensor, bad_samples="stop")
    loader = CustomLoader(fetcher, load_filled, "mine", "task.py", pins=False)
    keys = [KEYS[0], MicroBatchKey(0, [], True, first=2), KEYS[1]]
    found = [batch.batch for batch in loader.batches(iter(keys))]
    loader.close()
    assert [None if batch is None else batch.tolist() for batch in found] == [[2, 1], None, [0, 3]]
