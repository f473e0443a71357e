"""Data workers ignore stop signals, and exit when their loader is closed or their parent dies."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from runner.axes.dataloader import DATALOADERS, cache_samples, default, thread
from runner.base.errors import ConfigError, DataError, Exit, TaskFault
from runner.base.order import MicroBatchKey, Order
from runner.base.task import Task
from runner.base.text import RemoteError
from runner.config.configuration import compose
from runner.config.option_table import call_option
from runner.config.request import Request
from runner.host.loader_processes import worker_context
from runner.loading import auto_loader
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader, WorkerFetcher
from runner.plan.inventory import GIB, Cpu, Device, Inventory
from runner.plan.planner import make_plan
from tests.axes.worker_data import Owner, Readers
from tests.operations import Operations
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PARENT = """
import os, signal, sys
import torch
from runner.axes.dataloader import default
from runner.loading.fetcher import Fetcher
from runner.base.order import MicroBatchKey
from tests.axes.worker_data import Numbers

method, hangs_at = sys.argv[1], int(sys.argv[2])
received = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: received.append(number))
fetcher = Fetcher(Numbers(hangs_at), torch.tensor, bad_samples="stop")
loader = default(fetcher, torch.device("cpu"), num_workers=2, pin_memory=False, start_method=method)
batches = loader.batches(MicroBatchKey(0, [index], last=True) for index in range(100))
print("started", *(worker.pid for worker in loader._open[0]._workers), flush=True)
for index, batch in enumerate(batches):
    assert batch.batch.tolist() == [index], batch
    print("batch", index, len(received), flush=True)
    if index == hangs_at - 10:
        break
    sys.stdin.readline()
loader.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def start_workers(method: str, hangs_at: int = 110) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process with two workers in a separate process group. Return it and the PIDs of the workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, method, str(hangs_at)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return process, [int(word) for word in read_reply(process, "started")]


def read_reply(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[:1] == [word], (line, process.communicate(timeout=60))
    return line[1:]


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def group_of(leader: int) -> list[int]:
    """Return the PIDs of the running processes of the group."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            args = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(args[2]) == leader and args[0] != "Z":
            result.append(int(folder.name))
    return result


def assert_gone(numbers: list[int]) -> None:
    def is_gone(number: int) -> bool:
        try:
            return ") Z " in Path(f"/proc/{number}/stat").read_text()
        except OSError:
            return True

    wait_until(lambda: all(map(is_gone, numbers)), f"all processes of {numbers} are gone")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_ignore_stop_signals_from_the_start(method: str) -> None:
    process, workers = start_workers(method)
    for number in SIGNALS:  # signals are sent immediately, before spawned workers have imported Python's signal module
        os.killpg(process.pid, number)
    assert read_reply(process, "batch")[0] == "0"
    for index in range(1, 10):
        os.killpg(process.pid, SIGNALS[index % len(SIGNALS)])
        for member in group_of(process.pid):
            os.kill(member, SIGNALS[index % len(SIGNALS)])
        send_line(process)
        assert read_reply(process, "batch")[0] == str(index)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert_gone([*workers, *group_of(process.pid)])
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    assert out == ""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_closing_a_loader_kills_a_hanging_worker(method: str) -> None:
    process, workers = start_workers(
        method, hangs_at=12
    )  # sample 5 hangs; it has been requested when the loader is closed after batch 2
    for index in range(3):
        assert read_reply(process, "batch")[0] == str(index)
        if index < 2:
            send_line(process)
    read_reply(process, "closed")
    assert_gone(workers)
    send_line(process)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err, err


class Finishing:
    """Samples that write a file when the process that reads them exits normally."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        Finalize(None, (self.folder / str(os.getpid())).touch, exitpriority=1)
        return index


def test_workers_are_killed_if_closing_a_loader_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher(list(range(100)), torch.tensor, bad_samples="stop")
    loader = default(fetcher, torch.device("cpu"), num_workers=2, pin_memory=False)
    next(iter(loader.batches(MicroBatchKey(0, [index], last=True) for index in range(100))))
    workers = multiprocessing.active_children()
    assert len(workers) == 2

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("runner.loading.loaders.threading.Timer", fail)
    with pytest.raises(MemoryError):
        loader.close()
    for worker in workers:
        worker.join()
        assert worker.exitcode == -signal.SIGKILL


def test_workers_exit_normally_when_their_loader_is_closed(tmp_path: Path) -> None:
    """A dataset may have to finalize files, which a killed worker could not do."""
    fetcher = Fetcher(Finishing(tmp_path), torch.tensor, bad_samples="stop")
    loader = default(fetcher, torch.device("cpu"), num_workers=2, pin_memory=False)
    batches = iter(loader.batches(MicroBatchKey(0, [index], last=True) for index in range(100)))
    for _ in range(4):
        next(batches)
    loader.close()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_spawned_workers_do_not_receive_the_model() -> None:
    """The model may be on a GPU or sharded, or it may not be picklable."""
    owner = Owner()
    fetcher = Fetcher(owner.dataset(), owner.collate, bad_samples="stop", model=owner.model)
    loader = default(fetcher, torch.device("cpu"), num_workers=1, pin_memory=False, start_method="spawn")
    try:
        batches = loader.batches(MicroBatchKey(0, [index], last=True) for index in range(2))
        assert next(batches).batch.tolist() == [0]
        with pytest.raises(RemoteError, match="spawned data workers have no copy of the model"):
            next(batches)
    finally:
        loader.close()


@pytest.mark.slow
def test_spawned_workers_are_kept_between_evaluations() -> None:
    """Spawning takes seconds, so starting new workers for each evaluation would take most of its time."""
    held_out, options = Fetcher(Readers(), torch.tensor, bad_samples="stop", split="val"), {"start_method": "spawn"}
    training = default(held_out, torch.device("cpu"), num_workers=2, pin_memory=False, **options)

    def evaluate(num_batches: int, num_read: int | None = None) -> list[int]:
        loader = training.for_evaluation(held_out)
        with closing(loader):
            batches = loader.batches(MicroBatchKey(0, [index], last=True) for index in range(num_batches))
            return [int(batch.batch) for batch in itertools.islice(batches, num_read)]

    first = evaluate(1)
    more = evaluate(5)
    assert len(set(more)) == 2, "a second worker must start when there is work for it"
    assert set(evaluate(30, num_read=2)) == set(more), "an evaluation that stops early must not start new workers"
    assert evaluate(4) == [more[0], more[1]] * 2, "the remaining batches of a stopped evaluation must be discarded"
    held_out.dataset.offset = 10**9
    assert evaluate(4) == [pid + 10**9 for pid in [more[0], more[1]] * 2], (
        "workers must see the current state of the dataset"
    )
    held_out.dataset.offset = 0
    training.close()
    assert not {child.pid for child in multiprocessing.active_children()} & {*first, *more}
    assert not set(evaluate(2)) & set(more)
    training.close()


@pytest.mark.parametrize(
    "wrap", [list, partial(Subset, indices=[3, 1]), lambda inner: Subset(Subset(inner, [0, 2]), [1])]
)
def test_tensor_datasets_in_wrappers_can_be_sent_to_workers(wrap: Callable[[Any], Any]) -> None:
    dataset = wrap(TensorDataset(torch.arange(8), torch.arange(8) ** 2))
    fetcher = Fetcher(dataset, Task().collate, bad_samples="stop")
    key = MicroBatchKey(0, [0], last=True)
    sent = ForkingPickler.loads(ForkingPickler.dumps(WorkerFetcher(fetcher)))
    resource_sharer.stop()  # stops the thread that shares the memory of tensors
    for received, expected in zip(sent[key].batch, fetcher[key].batch, strict=True):
        assert torch.equal(received, expected)


def test_an_unpicklable_dataset_is_a_task_fault() -> None:
    """Spawned workers receive the dataset as a pickle."""

    class Local(Squares):  # a class inside a function cannot be pickled
        pass

    fetcher = Fetcher(Local(size=2), torch.tensor, bad_samples="stop", split="val")
    with pytest.raises(TaskFault, match="val"):
        ForkingPickler.dumps(WorkerFetcher(fetcher))


class Squares:
    """Squares of the indices, by default more than the cache reads in one batch. Indices in `bad` raise an error."""

    def __init__(self, bad: tuple[int, ...] = (), size: int = 1030) -> None:
        self.bad, self.size = bad, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError("damaged")
        return torch.tensor(index * index)


@pytest.mark.parametrize("bad", [(3,), (1029,)])
def test_a_bad_sample_anywhere_prevents_caching(bad: tuple[int, ...]) -> None:
    fetcher = Fetcher(Squares(bad), default_collate, bad_samples="skip")
    with pytest.raises(DataError, match=str(bad[0])):
        cache_samples(fetcher, "memory", torch.device("cpu"))


class Doubled(Squares):
    """Batches with two rows per sample."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor([*indices, *indices])


def test_batches_must_have_one_row_per_sample_to_be_cached() -> None:
    fetcher = Fetcher(Doubled(size=8), default_collate, bad_samples="stop")
    with pytest.raises(DataError, match="one row per sample"):
        cache_samples(fetcher, "memory", torch.device("cpu"))


def test_batches_without_tensors_cannot_be_cached() -> None:
    fetcher = Fetcher(Squares(size=8), lambda samples: {}, bad_samples="stop")
    with pytest.raises(DataError, match="contains none"):
        cache_samples(fetcher, "memory", torch.device("cpu"))


class TwoTensors(Squares):
    """Batches of two tensors: one with a row per sample, and one with 5 rows."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(indices), torch.zeros(5)]


def test_the_tensor_with_a_wrong_number_of_rows_is_reported() -> None:
    fetcher = Fetcher(TwoTensors(size=8), list, bad_samples="stop")
    with pytest.raises(DataError, match="5 rows for 8 samples"):
        cache_samples(fetcher, "memory", torch.device("cpu"))


class Augmented(Squares):
    """Squares with added noise. The fixed part of a sample is its square; with `draws`, it is random."""

    def __init__(self, size: int = 40, *, draws: bool = False) -> None:
        super().__init__(size=size)
        self.epoch, self.draws = 0, draws

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.compose(self.load_fixed, indices)

    def load_fixed(self, indices: list[int]) -> torch.Tensor:
        squares = torch.tensor([float(index * index) for index in indices])
        return squares + torch.rand(len(indices)) if self.draws else squares

    def compose(self, load: Any, indices: list[int]) -> torch.Tensor:
        neighbors = load([(index + 1) % len(self) for index in indices])
        return load(indices) + neighbors + self.epoch + torch.rand(len(indices))


@pytest.mark.slow
@pytest.mark.parametrize("make", [partial(default, num_workers=0), partial(default, num_workers=2), thread])
def test_only_the_fixed_part_of_samples_is_cached(make: Any) -> None:
    """With every loader, batches are the same as without a cache, including random draws and the epoch."""
    found = []
    for cache in ("memory", "none"):
        fetcher = Fetcher(Augmented(), default_collate, bad_samples="stop")
        loader = make(fetcher, torch.device("cpu"), pin_memory=False, cache=cache)
        keys = itertools.islice(Order(40, 8, 8, seed=0).from_update(0), 12)
        found.append([batch.batch for batch in loader.batches(keys)])
        loader.close()
    assert all(map(torch.equal, *found))


def test_a_fixed_part_that_draws_random_numbers_is_rejected() -> None:
    fetcher = Fetcher(Augmented(draws=True), default_collate, bad_samples="stop")
    with pytest.raises(DataError, match="random numbers"):
        cache_samples(fetcher, "memory", torch.device("cpu"))


def test_batches_composed_on_the_host_are_not_cached_on_devices() -> None:
    fetcher = Fetcher(Augmented(), default_collate, bad_samples="stop")
    with pytest.raises(ConfigError, match="memory"):
        cache_samples(fetcher, "device", torch.device("cpu"))


def test_a_full_queue_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class OftenFull(queue.Queue[Any]):
        num_full = 0

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if timeout is not None and OftenFull.num_full < 20 and OftenFull.num_full % 2 == 0:
                OftenFull.num_full += 1
                raise queue.Full
            OftenFull.num_full += 1
            super().put(item, block, timeout)

    monkeypatch.setattr(queue, "Queue", OftenFull)
    fetcher = Fetcher(Squares(size=40), default_collate, bad_samples="stop")
    # cached, because `thread` reads uncached samples in a worker process
    reader = thread(fetcher, torch.device("cpu"), pin_memory=False, cache="memory")
    batches = list(itertools.islice(reader.batches(Order(40, 4, 4, seed=0).from_update(0)), 10))
    reader.close()
    assert OftenFull.num_full >= 20
    assert sorted(int(value) for batch in batches for value in batch.batch) == [number**2 for number in range(40)]


@pytest.mark.parametrize(
    "args",
    [
        "dataloader.num_workers=0",
        "dataloader.num_workers=2",
        "dataloader.cache=memory",
        "dataloader=thread",
        "dataloader=thread dataloader.cache=memory",
    ],
)
def test_plan_and_loader_agree_on_the_number_of_workers(args: str) -> None:
    plan = make_plan(compose(Request(tuple(args.split()))), Inventory((), Cpu("a processor", 8, 16, 64 * GIB)))
    choice, fetcher = plan.choices["dataloader"], Fetcher([torch.zeros(())], default_collate, bad_samples="stop")  # type: ignore[arg-type]
    loader = call_option(DATALOADERS, choice.function, fetcher, torch.device("cpu"), **choice.options)
    assert plan.num_workers == loader.num_workers


class Exits:
    """A dataset whose first worker exits with the given code when it reads a sample."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id == 0:
            os._exit(self.code)
        return torch.zeros(())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("code", "expected"), [(Exit.SYSTEM, OSError), (Exit.SOFTWARE, RuntimeError), (0, RuntimeError)]
)
def test_running_out_of_file_descriptors_is_reported(code: int, expected: type[Exception]) -> None:
    """A worker that runs out of file descriptors exits with Exit.SYSTEM, unlike a worker that dies."""
    fetcher = Fetcher(Exits(int(code)), default_collate, bad_samples="stop")
    loader = default(fetcher, torch.device("cpu"), num_workers=2, pin_memory=False, start_method="fork")
    with pytest.raises(expected) as caught:
        next(loader.batches(Order(4, 2, 2, seed=0).from_update(0)))
    loader.close()
    assert type(caught.value) is expected


def sparse(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    dense = torch.stack(samples)
    return [dense.to_sparse(), dense]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # from torch, when it unpickles a sparse tensor
def test_a_worker_returns_sparse_batches() -> None:
    data = torch.eye(4)
    fetcher = Fetcher(OneByOne(data), sparse, bad_samples="stop")
    loader = default(fetcher, torch.device("cpu"), num_workers=1, pin_memory=False, start_method="fork")
    with closing(loader):
        batch = next(loader.batches(Order(4, 2, 2, seed=0).from_update(0))).batch
    assert batch[0].is_sparse
    assert torch.equal(batch[0].to_dense(), batch[1])


# ---------------------------------------------------------------- tensors


def make_tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(9, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    return TensorDataset(images, torch.arange(9), torch.arange(27).view(9, 3) > 5)


class OneByOne(torch.utils.data.Dataset[Any]):
    """Hides the type of a dataset, so that its samples are read one by one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


SETS: dict[str, Callable[[], Any]] = {
    "tensors": make_tensors,
    "subset": lambda: Subset(make_tensors(), [8, 2, 5, 1]),
    "subset of subset": lambda: Subset(Subset(make_tensors(), [8, 2, 5, 1]), torch.tensor([3, 0, 1])),
    "from the end": lambda: Subset(make_tensors(), [-1, 2, -3, 1]),
}
KEY = MicroBatchKey(0, [2, 0, 1, 5], last=True, seed=3)


def fetcher(dataset: Any, bad_samples: str = "stop", **options: Any) -> Fetcher:
    return Fetcher(dataset, Task.collate.__get__(Task()), bad_samples=bad_samples, num_samples=3, **options)


@pytest.mark.parametrize("bad_samples", ["stop", "skip"])
@pytest.mark.parametrize("name", SETS)
def test_a_batch_of_tensors_equals_its_collated_samples(name: str, bad_samples: str) -> None:
    """With 3 samples, index 5 wraps around to sample 2."""
    result, wanted = (fetcher(each, bad_samples)[KEY] for each in (SETS[name](), OneByOne(SETS[name]())))
    assert type(result.batch) is type(wanted.batch) is list
    for mine, theirs in zip(result.batch, wanted.batch, strict=True):
        assert torch.equal(mine, theirs)
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
    assert result._replace(batch=None) == wanted._replace(batch=None)


def test_a_batch_of_tensors_takes_one_operation_per_tensor() -> None:
    read = fetcher(make_tensors())
    with Operations() as operations:
        read[KEY]
    assert operations.names.count("index_select") == 3
    assert len(operations.names) <= 2 * 3  # including the operations that create the index tensor


def test_the_error_names_the_subset_sample_with_an_invalid_index() -> None:
    with pytest.raises(DataError, match="sample 1 cannot be read") as raised:
        fetcher(Subset(make_tensors(), [0, 99, 1]))[MicroBatchKey(0, [0, 1], last=True)]
    assert raised.value.problems[0].where == "", "the error must not name a line of code of the runner"


class Waiting:
    """Samples from a file that stays open. Reading a sample waits until the file `awaited` exists."""

    def __init__(self, text: Path, awaited: Path | None = None, fails: bool = False) -> None:
        self.text, self.awaited, self.fails = text, awaited, fails
        self.file: int | None = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.awaited:
            wait_until(self.awaited.exists)
        if self.fails:
            raise ValueError("planted")
        self.file = self.file or os.open(self.text, os.O_RDONLY)
        return torch.tensor(int(os.pread(self.file, 3, 4 * index)))


class Logged(Waiting):
    """Samples that log their index when they are read."""

    def __init__(self, text: Path, log: Path) -> None:
        super().__init__(text)
        self.log = log

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        return super().__getitem__(index)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{index:03}\n" for index in range(64)))
    return path


CPU = torch.device("cpu")
KEYS = [MicroBatchKey(0, [index, index + 1], last=True) for index in range(0, 12, 2)]


def auto(dataset: Any, limit_ms: float) -> Loader:
    kept = Fetcher(dataset, default_collate, bad_samples="stop")
    return default(kept, CPU, num_workers=2, workers_above_ms=limit_ms, pin_memory=False)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("limit_ms", "num_workers"), [(600_000.0, 0), (1e-6, 2)])
def test_workers_start_if_reading_exceeds_the_limit(
    numbers: Path, limit_ms: float, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_loader, "MAX_MEASUREMENT_S", 600.0)  # a busy machine may need longer than usual
    dataset = Waiting(numbers)
    loader = auto(dataset, limit_ms)
    assert loader.num_workers == 2
    with closing(loader):
        assert [item.batch.tolist() for item in loader.batches(iter(KEYS))] == [key.indices for key in KEYS]
        assert loader.num_workers == num_workers
        assert loader.max_prefetched == 2 * num_workers
        assert str(num_workers or "no") in loader.decision
        assert (dataset.file is None) == bool(
            num_workers
        )  # this process has not opened a file that workers would share
    if dataset.file is not None:
        os.close(dataset.file)


def test_a_new_loader_reads_its_data_in_workers(numbers: Path) -> None:
    """Only workers may open the files of the dataset, not this process."""
    first, other = Waiting(numbers), Waiting(numbers)
    fetcher = Fetcher(other, default_collate, bad_samples="stop")
    with closing(auto(first, 1e-6)) as loader, closing(loader.new_like(fetcher)) as like:
        assert [item.batch.tolist() for item in like.batches(iter(KEYS[:2]))] == [key.indices for key in KEYS[:2]]
    assert first.file is None
    assert other.file is None


@pytest.mark.parametrize(("second_s", "num_workers"), [(0.25, 0), (0.5, 2)])
def test_the_second_batch_decides_whether_workers_start(
    numbers: Path, second_s: float, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the first batch may take longer because it opens files. Two batches that are not adjacent are read."""
    clock = iter([0.0, 100.0, 100.0, 100.0 + second_s])  # read in the forked process that measures
    monkeypatch.setattr(auto_loader, "MAX_MEASUREMENT_S", 600.0)
    monkeypatch.setattr(auto_loader, "time", SimpleNamespace(perf_counter=clock.__next__))
    log = numbers.with_name("read.txt")
    with closing(auto(Logged(numbers, log), 500.0)) as loader:
        loader.batches(iter(KEYS))
        assert loader.num_workers == num_workers
        like = loader.new_like(Fetcher(Logged(numbers, log), default_collate, bad_samples="stop"))
        assert bool(like.num_workers) == bool(num_workers)
    assert log.read_text().split()[:4] == ["0", "1", "32", "33"]


@pytest.mark.slow
def test_workers_start_before_a_slow_measurement_ends(numbers: Path, tmp_path: Path) -> None:
    dataset = Waiting(numbers, awaited=tmp_path / "ready")
    with closing(auto(dataset, 600_000.0)) as loader:
        found = loader.batches(iter(KEYS))  # returns although no sample can be read yet
        assert (loader.num_workers, loader.decision) == (2, "")
        assert (
            len(multiprocessing.active_children()) == 3
        )  # two workers, and the measuring process: it may be writing a file of the dataset, so it is not killed
        dataset.awaited.touch()  # type: ignore[union-attr]
        assert [item.batch.tolist() for item in found] == [key.indices for key in KEYS]
    assert multiprocessing.active_children() == []


def test_a_key_is_consumed_only_when_its_batch_is_needed(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of ranks may change until the samples of an update are read."""
    monkeypatch.setattr(auto_loader, "MAX_MEASUREMENT_S", 600.0)
    keys = iter(KEYS)
    with closing(auto(Waiting(numbers), 600_000.0)) as loader:
        next(loader.batches(keys))
        assert loader.num_workers == 0
        assert next(keys) is KEYS[1]


def test_workers_start_if_the_first_update_has_no_samples(numbers: Path) -> None:
    """A rank without samples cannot measure how long reading takes."""
    with closing(auto(Waiting(numbers), 600_000.0)) as loader:
        keys = [MicroBatchKey(0, [], last=True), *KEYS]
        assert [item.batch is not None for item in loader.batches(iter(keys))] == [False] + [True] * len(KEYS)
        assert loader.num_workers == 2


def test_dataset_errors_are_raised_by_the_training_loader(numbers: Path) -> None:
    with closing(auto(Waiting(numbers, fails=True), 600_000.0)) as loader:
        with pytest.raises(DataError, match="planted"):
            list(loader.batches(iter(KEYS)))
        assert loader.num_workers == 2


def test_streams_are_read_by_workers_without_measuring() -> None:
    kept = fetcher(make_tensors())
    kept.is_sequential = True
    workers = default(kept, CPU, num_workers=2, workers_above_ms=600_000.0, pin_memory=False)
    assert type(workers) is type(default(kept, CPU, num_workers=2, workers_above_ms=0, pin_memory=False))


@pytest.mark.parametrize(
    ("words", "limit_ms"),
    [((), 1.0), (("dataloader.num_workers=3",), 0.0), (("dataloader.start_method=spawn",), 0.0)],
)
def test_reading_is_measured_unless_a_worker_setting_is_given(words: tuple[str, ...], limit_ms: float) -> None:
    gpu = Device("cuda", 0, "Tesla T4", "GPU-0", 15 * GIB, capability=(7, 5))
    plan = make_plan(compose(Request(words)), Inventory((gpu,), Cpu("a processor", 8, 16, 64 * GIB)))
    assert plan.choices["dataloader"].options["workers_above_ms"] == limit_ms


def test_an_unsent_shutdown_message_is_not_reported_as_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = worker_context("fork").Queue()
    lost: list[int] = []
    monkeypatch.setattr(queue, "_send", lambda number, _: lost.append(number))  # lint-tests: private: the pipe
    queue._buffer.append((2, "indices"))  # lint-tests: private: the buffer of multiprocessing's queue
    queue._on_queue_feeder_error(MemoryError(), None)  # lint-tests: private: a method for subclasses to override
    assert lost == [2]
    queue.close()


class Epochs:
    """Samples that depend on the epoch. A task may use one dataset object for training and validation."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.epoch)


def test_evaluations_do_not_change_the_training_epoch() -> None:
    dataset = Epochs()
    training, validation = (
        Fetcher(dataset, default_collate, bad_samples="stop", split=split) for split in ("train", "val")
    )
    epochs = [
        int(reader[MicroBatchKey(epoch, [1], last=True)].batch)
        for reader, epoch in [(training, 3), (validation, 0), (training, 3), (training, 3), (validation, 0)]
    ]
    assert epochs == [3, 0, 3, 3, 0]


class Growing(Epochs):
    """A curriculum in which each epoch has more samples than the one before."""

    def __len__(self) -> int:
        return 8 * (1 + max(self.epoch, 0))


def test_the_length_of_a_dataset_must_not_change() -> None:
    fetcher = Fetcher(Growing(), default_collate, bad_samples="stop")
    assert int(fetcher[MicroBatchKey(0, [1], last=True)].batch) == 0
    with pytest.raises(TaskFault):
        fetcher[MicroBatchKey(1, [1], last=True)]


def test_views_share_the_epoch_of_their_dataset() -> None:
    class View(Epochs):
        """Samples of part of a dataset; `set_epoch` sets the epoch of the dataset."""

        def __init__(self, whole: Epochs) -> None:
            self.whole = whole

        def set_epoch(self, epoch: int) -> None:
            self.whole.set_epoch(epoch)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.whole[index]

    whole = Epochs()
    training, validation = (
        Fetcher(View(whole), default_collate, bad_samples="stop", split=split) for split in ("train", "val")
    )
    epochs = [
        int(reader[MicroBatchKey(epoch, [1], last=True)].batch)
        for reader, epoch in [(training, 3), (validation, 0), (training, 3), (validation, 0)]
    ]
    assert epochs == [3, 0, 3, 0]


@pytest.mark.parametrize(("limit_ms", "num_workers"), [(600_000.0, 0), (1e-6, 2)])
def test_evaluations_use_workers_if_training_does(
    numbers: Path, limit_ms: float, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation does not measure again."""
    monkeypatch.setattr(auto_loader, "MAX_MEASUREMENT_S", 600.0)
    training, held_out = Waiting(numbers), Waiting(numbers)
    with closing(auto(training, limit_ms)) as loader:
        assert [item.batch.tolist() for item in loader.batches(iter(KEYS))] == [key.indices for key in KEYS]
        evaluation = loader.for_evaluation(Fetcher(held_out, default_collate, bad_samples="stop"))
        with closing(evaluation):
            assert [item.batch.tolist() for item in evaluation.batches(KEYS)] == [key.indices for key in KEYS]
        assert evaluation.num_workers == num_workers
        assert (held_out.file is None) == bool(num_workers)
    for dataset in (training, held_out):
        if dataset.file is not None:
            os.close(dataset.file)
