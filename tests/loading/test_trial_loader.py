"""Data workers that are tried in the first updates: nothing is read twice, left out or out of order, and they are kept
only where updates become faster. Clocks are virtual: they advance when a sample is read or an update computed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from runner.base.fetcher import Fetcher
from runner.base.order import MicroBatchKey
from runner.config.configuration import compose
from runner.config.request import Request
from runner.loading import trial_loader
from runner.loading.loaders import Loader, WorkerLoader
from runner.loading.trial_loader import Clocks, TrialLoader
from runner.plan.inventory import Cpu, Device, Inventory
from runner.plan.planner import make_plan

GIB = 1024**3
KEYS = [MicroBatchKey(0, [2 * number, 2 * number + 1], last=number % 2 == 1) for number in range(60)]
EXPECTED = [key.indices for key in KEYS]


class VirtualTime:
    """Clocks of the process that trains; reading in another process does not advance them."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall, lambda: self.cpu)


class Slow:
    """Samples of which each takes some time; `busy` is the share in which reading computes."""

    def __init__(self, time: VirtualTime, seconds: float, busy: float = 0.0) -> None:
        self.time, self.seconds, self.busy = time, seconds, busy
        self.pid, self.read_here = os.getpid(), list[int]()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.time.wall += self.seconds
        self.time.cpu += self.busy * self.seconds
        if os.getpid() == self.pid:
            self.read_here.append(index)
        return torch.tensor(index)


def make_loader(dataset: Slow, limit: int = 8, new_workers: Any = None) -> TrialLoader:
    fetcher = Fetcher(dataset, lambda samples: torch.stack(list(samples)), bad_samples="stop")

    def workers(count: int) -> WorkerLoader:
        return WorkerLoader(fetcher, num_workers=count, pin_memory=False, prefetch_factor=2, start_method="fork")

    return TrialLoader(Loader(fetcher), new_workers or workers, limit, dataset.time.clocks)


def train(
    loader: TrialLoader, keys: Sequence[MicroBatchKey], *, alone: float, beside_workers: float
) -> Iterator[list[int]]:
    """Yield the samples of each batch; computing one takes the given seconds."""
    time: VirtualTime = loader.fetcher.dataset.time  # type: ignore[attr-defined]
    for item in loader.batches(iter(keys)):
        yield item.batch.tolist()
        time.wall += beside_workers if loader.num_workers else alone


def test_workers_that_make_updates_faster_are_kept() -> None:
    dataset = Slow(VirtualTime(), 0.1)
    with closing(make_loader(dataset)) as loader:
        assert list(train(loader, KEYS, alone=0.3, beside_workers=0.31)) == EXPECTED
        assert loader.num_workers == 1
        assert loader.max_prefetched == 2
        assert "1 data worker" in loader.decision
        assert "0.62" in loader.decision, "0.31 of 0.3 + 0.2"
        first = trial_loader.WARM_UP_UPDATES + trial_loader.TIMED_UPDATES
        assert len(dataset.read_here) == 2 * 2 * first, "this process reads the samples of the first updates only"
        assert [item.batch.tolist() for item in loader.batches(iter(KEYS[:3]))] == EXPECTED[:3], "without another trial"
    assert multiprocessing.active_children() == []


def test_workers_that_slow_updates_down_end_and_no_batch_is_lost() -> None:
    dataset = Slow(VirtualTime(), 0.1)
    with closing(make_loader(dataset)) as loader:
        assert list(train(loader, KEYS, alone=0.3, beside_workers=0.5)) == EXPECTED
        assert multiprocessing.active_children() == []
        assert (loader.num_workers, loader.max_prefetched) == (0, 0)
        assert loader.decision.startswith("no data workers")
        assert dataset.read_here[-1] == KEYS[-1].indices[-1]
        assert list(train(loader, KEYS, alone=0.3, beside_workers=0.5)) == EXPECTED


@pytest.mark.parametrize("seconds", [0.004, 0.0002], ids=["2 % of an update", "less than receiving a batch"])
def test_no_worker_starts_if_updates_hardly_wait(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Slow(VirtualTime(), seconds)
    with closing(make_loader(dataset, new_workers=lambda _: pytest.fail("workers were started"))) as loader:
        assert list(train(loader, KEYS, alone=100 * seconds if seconds > 0.001 else 0.0, beside_workers=0)) == EXPECTED
        assert loader.decision == ""


class OpensFile(Slow):
    """Samples from a file that is opened at the first read and stays open."""

    def __init__(self, time: VirtualTime, path: Path) -> None:
        super().__init__(time, 0.1)
        self.path = path
        self.file: TextIO | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file = self.file or self.path.open()
        return super().__getitem__(index)


class StartsThread(Slow):
    """Samples that a thread of the dataset decodes."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time, 0.1)
        self.end = threading.Event()
        self.thread: threading.Thread | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.thread is None:
            self.thread = threading.Thread(target=self.end.wait)
            self.thread.start()
        return super().__getitem__(index)


@pytest.mark.parametrize("read_before", [False, True], ids=["in the first update", "by a check before training"])
def test_workers_never_share_an_open_file(tmp_path: Path, read_before: bool) -> None:
    path = tmp_path / "samples.bin"
    path.write_text("samples")
    dataset = OpensFile(VirtualTime(), path)
    loader = make_loader(dataset, new_workers=lambda _: pytest.fail("workers were started"))
    if read_before:
        assert next(iter(loader.new_like(loader.fetcher).batches(iter(KEYS)))).batch.tolist() == EXPECTED[0]
    assert list(train(loader, KEYS, alone=0.3, beside_workers=0)) == EXPECTED
    assert str(path) in loader.decision
    assert dataset.file is not None
    dataset.file.close()


def test_workers_are_not_forked_beside_a_thread_of_the_dataset() -> None:
    dataset = StartsThread(VirtualTime())
    loader = make_loader(dataset, new_workers=lambda _: pytest.fail("workers were started"))
    assert list(train(loader, KEYS, alone=0.3, beside_workers=0)) == EXPECTED
    assert "thread" in loader.decision
    dataset.end.set()


@pytest.mark.parametrize("taken", [0, 3])
def test_training_continues_without_workers_that_cannot_be_started(taken: int) -> None:
    class Failing(WorkerLoader):
        def batches(self, keys: Any) -> Any:
            for _ in range(taken):
                next(keys)
            raise RuntimeError("can't start new thread")

    dataset = Slow(VirtualTime(), 0.1)

    def workers(count: int) -> WorkerLoader:
        return Failing(loader.fetcher, num_workers=count, pin_memory=False, prefetch_factor=2, start_method="fork")

    with closing(make_loader(dataset, new_workers=workers)) as loader:
        assert list(train(loader, KEYS, alone=0.3, beside_workers=0)) == EXPECTED
        assert loader.num_workers == 0
        assert loader.decision.startswith("no data workers")


def test_workers_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    loader = make_loader(Slow(VirtualTime(), 0.1))
    with closing(loader):
        assert list(train(loader, KEYS, alone=0.3, beside_workers=0)) == EXPECTED
    assert "/dev/shm" in loader.decision


@pytest.mark.parametrize(
    ("busy", "alone", "count"), [(0.0, 0.06, 4), (0.0, 0.001, 8), (1.0, 0.001, 2)], ids=["files", "limit", "computing"]
)
def test_as_many_workers_are_tried_as_can_hide_the_reading(
    busy: float, alone: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    asked: list[int] = []

    def workers(count: int) -> WorkerLoader:
        asked.append(count)
        raise_at_start = WorkerLoader(
            loader.fetcher, num_workers=count, pin_memory=False, prefetch_factor=2, start_method="fork"
        )
        monkeypatch.setattr(raise_at_start, "batches", lambda keys: (_ for _ in ()).throw(OSError()))
        return raise_at_start

    loader = make_loader(Slow(VirtualTime(), 0.1, busy), new_workers=workers)
    list(train(loader, KEYS[:16], alone=alone, beside_workers=0))
    assert asked == [count]


@pytest.mark.parametrize("num_keys", [0, 5, 18, 24])
def test_the_keys_may_end_at_any_time(num_keys: int) -> None:
    with closing(make_loader(Slow(VirtualTime(), 0.1))) as loader:
        assert list(train(loader, KEYS[:num_keys], alone=0.3, beside_workers=0.5)) == EXPECTED[:num_keys]


def test_a_reader_that_starts_again_during_the_trial_measures_again() -> None:
    with closing(make_loader(Slow(VirtualTime(), 0.1))) as loader:
        started = train(loader, KEYS, alone=0.3, beside_workers=0.31)
        assert [next(started) for _ in range(18)] == EXPECTED[:18]
        assert len(multiprocessing.active_children()) == 1
        loader.close()
        assert multiprocessing.active_children() == []
        assert list(train(loader, KEYS, alone=0.3, beside_workers=0.31)) == EXPECTED
        assert loader.num_workers == 1


@pytest.mark.parametrize(
    ("words", "on_gpu", "expected"),
    [
        ((), False, 8),
        ((), True, 0),
        (("dataloader.num_workers=0",), False, 0),
        (("dataloader.num_workers=0", "dataloader.try_workers=3"), True, 3),
        (("dataloader.cache=device",), False, 0),
        (("dataloader.start_method=spawn",), False, 0),
    ],
)
def test_workers_are_tried_on_a_cpu_unless_their_number_is_set(
    words: tuple[str, ...], on_gpu: bool, expected: int
) -> None:
    gpus = (Device("cuda", 0, "Tesla T4", "GPU-0", 15 * GIB, capability=(7, 5)),) if on_gpu else ()
    plan = make_plan(compose(Request(words)), Inventory(gpus, Cpu("a processor", 8, 16, 64 * GIB)))
    assert plan.choices["dataloader"].options["try_workers"] == expected
