"""Draws of a dataset from the global generators are a function of (seed, epoch, index), whichever process reads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.axes import dataloader
from runner.base.batch import MicroBatch
from runner.base.errors import DataError
from runner.base.order import MicroBatchKey, Order, permutation, rank_seed
from runner.base.task import sample_rng
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from runner.tensors.global_rng import seed_everything

CPU = torch.device("cpu")
READERS: dict[str, dict[str, Any]] = {
    "0": {"num_workers": 0},
    "1": {"num_workers": 1},
    "3": {"num_workers": 3},
    "spawn": {"num_workers": 1, "start_method": "spawn"},
}
SIZE = 23
ORDERS = ([3, 6, 4, 0, 7, 5, 2, 1], [6, 7, 1, 4, 5, 2, 3, 0])
Draws = dict[tuple[int, int], list[float]]  # (epoch, index) -> drawn numbers


def draw_numbers() -> list[float]:
    """Draw from all generators. NumPy and Python generate normal numbers in pairs, so draw an odd number of them."""
    return [torch.rand((), dtype=torch.float64).item(), np.random.normal(), random.gauss(0, 1), random.random()]


def always(epoch: int, index: int) -> bool:
    return True


class Drawing:
    """Samples that consist of epoch, index and draws. Batches have one row per sample."""

    def __init__(self, when: Callable[[int, int], bool] = always) -> None:
        self.epoch, self.when, self.num_read = 0, when, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        self.num_read += 1
        numbers = draw_numbers() if self.when(self.epoch, index) else [0.0] * 4
        return torch.tensor([self.epoch, index, *numbers], dtype=torch.float64)


def reader(kind: str, dataset: Any, collate: Any = torch.utils.data.default_collate, **options: Any) -> Loader:
    fetcher = Fetcher(dataset, collate, bad_samples=options.get("bad_samples", "stop"))
    if kind == "thread":
        return dataloader.thread(fetcher, CPU, pin_memory=False, **options)
    return dataloader.default(fetcher, CPU, pin_memory=False, **READERS[kind], **options)


def read(loader: Loader, order: Order, *, start: int = 0, updates: int = 7) -> list[MicroBatch]:
    keys = [key for update in range(start, start + updates) for key in order.micro_batches(update)]
    try:
        return list(islice(loader.batches(keys), len(keys)))
    finally:
        loader.close()


def draws_of(batches: Sequence[MicroBatch]) -> Draws:
    result: Draws = {}
    for item in batches:
        for epoch, index, *numbers in item.batch.tolist() if item.batch is not None else ():
            result[int(epoch), int(index)] = numbers
    return result


@pytest.fixture(scope="module")
def reference() -> Draws:
    """The draws of 7 updates of 8 samples that this process reads without accumulation."""
    return draws_of(read(reader("0", Drawing()), Order(SIZE, 8, 8, seed=4)))


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [*READERS, "thread"])
def test_the_reader_does_not_change_draws(kind: str, reference: Draws) -> None:
    assert len({tuple(numbers) for numbers in reference.values()}) == len(reference) > 2 * SIZE
    assert draws_of(read(reader(kind, Drawing()), Order(SIZE, 8, 3, seed=4))) == reference


class Normalized:
    """Large samples, each divided by its norm, whose rounding depends on the number of threads."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.linspace(0, index + 1, 200_000).sin()
        return (sample / sample.norm() + sample.mean())[::1000]


@pytest.mark.parametrize("kind", ["0", "3"])
def test_the_reader_does_not_change_the_rounding_of_samples(kind: str) -> None:
    dataset, order, num_threads = Normalized(), Order(SIZE, 8, 8, seed=4), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = {index: dataset[index] for index in range(SIZE)}
        torch.set_num_threads(2)
        assert any(not torch.equal(dataset[index], sample) for index, sample in expected.items())
        for key, item in zip(order.micro_batches(0), read(reader(kind, dataset), order, updates=1), strict=True):
            assert torch.equal(item.batch, torch.stack([expected[index] for index in key.indices]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("micro", [1, 5, 8])
@pytest.mark.parametrize("shares", [(8,), (4, 4), (5, 2, 1)], ids=str)
def test_resumes_and_ranks_do_not_change_draws(micro: int, shares: tuple[int, ...], reference: Draws) -> None:
    result: Draws = {}
    for rank in range(len(shares)):
        order = Order(SIZE, 8, micro, seed=4, shares=shares, rank=rank)
        result |= draws_of(read(reader("0", Drawing()), order))
    assert result == reference


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["0", "3"])
def test_draws_do_not_depend_on_the_first_update(kind: str, reference: Draws) -> None:
    for start in (1, 4):
        result = draws_of(read(reader(kind, Drawing()), Order(SIZE, 8, 3, seed=4), start=start, updates=3))
        assert result == {key: reference[key] for key in result}


def test_draws_differ_between_seeds_epochs_samples_and_splits() -> None:
    def first(seed: int, epoch: int, index: int, split: str) -> tuple[float, ...]:
        fetcher = Fetcher(Drawing(), torch.utils.data.default_collate, bad_samples="stop", split=split)
        return tuple(fetcher[MicroBatchKey(epoch, [index], last=True, seed=seed)].batch[0, 2:].tolist())

    keys = [(0, 0, 0, "train"), (1, 0, 0, "train"), (2**32, 0, 0, "train"), (0, 1, 0, "train"), (0, 0, 1, "train")]
    keys += [(0, 0, 0, "val"), (0, 1, 1, "train"), (10, 0, 0, "train"), (1, 0, 0, "val"), (1, 10, 0, "train")]
    columns = list(zip(*(first(*key) for key in keys), strict=True))
    assert [len(set(column)) for column in columns] == [len(keys)] * 4
    assert first(*keys[1]) == first(*keys[1])


def states() -> tuple[bytes, Any, Any]:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (name, keys.tolist(), *rest), random.getstate()  # type: ignore[union-attr]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("kind", ["0", "1", "thread"])
@pytest.mark.parametrize("num_normal", [0, 1])
def test_reading_does_not_advance_the_generators(kind: str, num_normal: int) -> None:
    for _ in range(num_normal):  # the generator caches the second normal number of a pair
        np.random.normal()
        random.gauss(0, 1)
    before = states()
    read(reader(kind, Drawing()), Order(SIZE, 8, 3, seed=4))
    assert states() == before


def test_draws_of_the_model_and_of_samples_are_independent(reference: Draws) -> None:
    """Between two micro-batches, the model draws one of a pair of normal numbers."""

    def of_model(batches: Iterator[MicroBatch]) -> tuple[list[list[float]], Draws]:
        seed_everything(0)
        made, items = [], []
        for item in islice(batches, 14):
            items.append(item)
            made.append(draw_numbers())
        return made, draws_of(items)

    order = Order(SIZE, 8, 3, seed=4)
    constant = iter([MicroBatch(None, last=True)] * 14)
    expected, _ = of_model(constant)
    for when in (always, lambda epoch, index: epoch > 0, lambda epoch, index: False):
        result, of_samples = of_model(reader("0", Drawing(when)).batches(order.from_update(0)))
        assert result == expected
        assert all(numbers == (reference[key] if when(*key) else [0.0] * 4) for key, numbers in of_samples.items())


class Processes(Drawing):
    """Samples that contain the PID of the process that reads them."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(os.getpid())


@pytest.mark.parametrize("kind", ["1", "thread"])
def test_dataset_code_does_not_run_beside_the_model(kind: str) -> None:
    """Generators are global in a process, so draws of two concurrent threads could not be separated."""
    batches = read(reader(kind, Processes()), Order(SIZE, 8, 3, seed=4), updates=2)
    assert os.getpid() not in {int(process) for item in batches for process in item.batch}


@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
def test_late_first_draws_are_detected(generator: str) -> None:
    draw: dict[str, Callable[[], float]] = {
        "torch": lambda: torch.rand(()).item(), "numpy": np.random.random, "python": random.random,
    }  # fmt: skip

    class Late:
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Tensor:
            drawn = draw[generator]() if index % 37 == 36 else 0.0
            return torch.tensor([0, index, drawn], dtype=torch.float64)

    def one_by_one(indices: Sequence[int], size: int) -> Draws:
        fetcher = Fetcher(Late(), torch.utils.data.default_collate, bad_samples="stop")
        keys = [MicroBatchKey(0, list(indices[first : first + size]), last=True) for first in range(0, 400, size)]
        return draws_of([fetcher[key] for key in keys])

    # In one batch of reversed order, the first sample that draws has a different position and batch.
    forwards, backwards = one_by_one(range(400), 8), one_by_one(range(399, -1, -1), 400)
    assert forwards == backwards
    assert len({tuple(numbers) for numbers in forwards.values()}) == 11


@pytest.mark.parametrize("when", [always, lambda epoch, index: False], ids=["draws", "does not draw"])
def test_each_sample_is_read_once(when: Callable[[int, int], bool]) -> None:
    dataset = Drawing(when)
    read(reader("0", dataset), Order(SIZE, 8, 3, seed=4), updates=12)
    assert dataset.num_read == 4 * SIZE


class Unreliable(Drawing):
    """Samples that fail before drawing, after drawing, or depending on the draw."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise ValueError("before")
        result = super().__getitem__(index)
        if index == 7 or (index == 9 and result[2] < 0.5):
            raise ValueError("after")
        return result


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["0", "3", "thread"])
def test_bad_samples_do_not_change_other_draws(kind: str, reference: Draws) -> None:
    batches = read(reader(kind, Unreliable(always), bad_samples="skip"), Order(SIZE, 8, 4, seed=4))
    result = draws_of(batches)
    assert result == {key: reference[key] for key in result}
    bad = {key for key in reference if key[1] in (3, 7) or (key[1] == 9 and reference[key][0] < 0.5)}
    assert result.keys() == reference.keys() - bad


def collate_with_draws(samples: list[Tensor]) -> Tensor:
    """Collate samples with random draws, as for mixup."""
    return torch.cat([torch.stack(samples), torch.tensor([draw_numbers()] * len(samples), dtype=torch.float64)], dim=1)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["1", "3", "spawn", "thread"])
def test_draws_in_collate_depend_on_the_samples(kind: str) -> None:
    order = Order(SIZE, 8, 3, seed=4)
    expected = draws_of(read(reader("0", Drawing(), collate_with_draws), order))
    assert draws_of(read(reader(kind, Drawing(), collate_with_draws), order)) == expected
    assert draws_of(
        read(reader("0", Drawing(), collate_with_draws), Order(SIZE, 8, 3, seed=4), start=5, updates=1)
    ).items() <= (expected.items())
    assert len({tuple(numbers[4:]) for numbers in expected.values()}) == len(list(order.micro_batches(0))) * 5 + 3 * 2


def test_different_batches_have_different_collate_draws() -> None:
    fetcher = Fetcher(Drawing(), collate_with_draws, bad_samples="stop")
    first, second = (fetcher[MicroBatchKey(0, indices, last=True)].batch[-1].tolist() for indices in ([1, 2], [3, 2]))
    assert first[:6] == second[:6]
    assert all(one != other for one, other in zip(first[6:], second[6:], strict=True))


class Together(Drawing):
    """Reads each batch in one call."""

    def __getitems__(self, indices: list[int]) -> Tensor:
        numbers = torch.rand(len(indices), 4, dtype=torch.float64)
        where = torch.tensor([[self.epoch, index] for index in indices], dtype=torch.float64)
        return torch.cat([where, numbers], dim=1)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["1", "3", "thread"])
def test_draws_for_a_batch_depend_on_its_samples(kind: str) -> None:
    order = Order(SIZE, 8, 3, seed=4)
    expected = draws_of(read(reader("0", Together()), order))
    assert draws_of(read(reader(kind, Together()), order)) == expected
    later = draws_of(read(reader(kind, Together()), order, start=3, updates=2))
    assert later == {key: expected[key] for key in later}


def subset(dataset: Any) -> Any:
    return torch.utils.data.Subset(dataset, range(SIZE))


def stacked(dataset: Any) -> Any:
    return torch.utils.data.StackDataset(dataset)


def by_name(dataset: Any) -> Any:
    return torch.utils.data.StackDataset(sample=dataset)


def first_of(samples: list[Any]) -> Tensor:
    """Collate samples that may be tuples or mappings of one tensor."""
    while not isinstance(samples[0], Tensor):
        samples = [next(iter(each.values() if isinstance(each, dict) else each)) for each in samples]
    return torch.stack(samples)


WRAPPERS = [(subset,), (stacked,), (by_name,), (subset, stacked), (by_name, subset, subset)]


@pytest.mark.parametrize("wrappers", WRAPPERS, ids=lambda found: " of ".join(each.__name__ for each in found))
def test_wrappers_that_read_single_samples_draw_per_sample(
    wrappers: Sequence[Callable[[Any], Any]], reference: Draws
) -> None:
    """torch's Subset, which `random_split` returns, and StackDataset have `__getitems__`."""
    dataset: Any = Drawing()
    for wrap in reversed(wrappers):
        dataset = wrap(dataset)
    order = Order(SIZE, 8, 3, seed=4)
    result = draws_of(read(reader("0", dataset, first_of), order, updates=3))
    assert result == {key: numbers for key, numbers in reference.items() if key[0] == 0}


def test_wrappers_of_datasets_with_getitems_read_batches() -> None:
    class Counting(Drawing):
        num_batches = 0

        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            self.num_batches += 1
            return [torch.zeros(()) for _ in indices]

    for wrappers in ((subset,), (stacked,), (by_name, subset)):
        inner = dataset = Counting()
        for wrap in reversed(wrappers):
            dataset = wrap(dataset)
        read(reader("0", dataset, first_of), Order(SIZE, 8, 4, seed=4), updates=1)
        assert (inner.num_batches, inner.num_read) == (2, 0)


class OnGpu(Drawing):
    """Draws from the current GPU's generator, and changes the current GPU."""

    def __getitem__(self, index: int) -> Tensor:
        generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]  # type: ignore[assignment]
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
        torch.cuda.set_device(7)
        return torch.tensor([self.epoch, index, drawn], dtype=torch.float64)


def test_draws_on_the_current_gpu_depend_on_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPU generators replace those of two GPUs."""
    in_use, generators = [6], {6: torch.Generator(), 7: torch.Generator()}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: in_use[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: in_use.__setitem__(0, device))

    def drawn_by(size: int, warm_up: int) -> Draws:
        fetcher = Fetcher(OnGpu(), torch.utils.data.default_collate, bad_samples="stop")
        result: list[MicroBatch] = []
        indices = [0] * warm_up + list(range(16))
        for first in range(0, len(indices), size):
            in_use[0] = 6
            torch.rand(3, generator=generators[6])  # like dropout of the model
            before = [generator.get_state() for generator in generators.values()]
            result.append(fetcher[MicroBatchKey(0, indices[first : first + size], last=True, seed=4)])
            assert all(map(torch.equal, before, [generator.get_state() for generator in generators.values()]))
        return draws_of(result)

    expected = drawn_by(1, 0)
    assert len({tuple(numbers) for numbers in expected.values()}) == 16
    assert drawn_by(1, 100) == expected


class Shuffling(Drawing):
    """Draws in `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.of_epoch = draw_numbers()
        super().set_epoch(epoch)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.epoch, index, *self.of_epoch], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["0", "3"])
def test_draws_for_an_epoch_depend_on_the_epoch(kind: str) -> None:
    order = Order(SIZE, 8, 3, seed=4)
    expected = draws_of(read(reader("0", Shuffling()), order))
    assert len({(key[0], *numbers) for key, numbers in expected.items()}) == 3
    assert draws_of(read(reader(kind, Shuffling()), order, start=4, updates=3)).items() <= expected.items()


class Kept(Drawing):
    set_epoch = None  # type: ignore[assignment]


class SeedsItself(Kept):
    """Random samples that are the same in each epoch."""

    def __getitem__(self, index: int) -> Tensor:
        torch.manual_seed(index)
        return torch.tensor([0, index, torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("where", ["memory", "device"])
def test_only_constant_samples_are_cached(where: str) -> None:
    with pytest.raises(DataError):
        reader("0", Kept(always), cache=where)
    order = Order(SIZE, 8, 3, seed=4)
    before = states()
    plain = draws_of(read(reader("0", SeedsItself()), order))
    assert draws_of(read(reader("0", SeedsItself(), cache=where), order)) == plain
    assert draws_of(read(reader("thread", SeedsItself(), cache=where), order)) == plain
    assert states() == before


class Rare(Kept):
    """Few samples are random, and the first ones are not."""

    def __len__(self) -> int:
        return 1100

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random() if index == 1050 else 0.0])


def test_one_changing_sample_disables_the_cache() -> None:
    with pytest.raises(DataError):
        reader("0", Rare(), cache="memory")


class Missing(Kept):
    """Samples with NaN that are the same in each epoch, from a dataset that seeds the generators itself."""

    def __getitem__(self, index: int) -> Tensor:
        random.seed(index)
        return torch.tensor([0, index, random.random(), float("nan")], dtype=torch.float64)


def test_samples_with_nan_are_cached() -> None:
    order = Order(SIZE, 8, 3, seed=4)
    plain, kept = (read(reader("0", Missing(), cache=cache), order) for cache in ("none", "memory"))
    assert all(map(torch.equal, *([each.batch[:, :3] for each in batches] for batches in (plain, kept))))


def test_the_order_is_that_of_earlier_versions() -> None:
    """Checkpoints do not contain the order, so a resumed run computes it again."""
    assert permutation(0, 0, 8).tolist() == ORDERS[0]
    assert permutation(2**32 - 1, 7, 8).tolist() == ORDERS[1]


class Numbers:
    """Samples that consist of the first draw of each generator."""

    first: Any = None

    def __len__(self) -> int:
        return SIZE

    def set_epoch(self, epoch: int) -> None:
        self.first = first_numbers()

    def __getitem__(self, index: int) -> list[int]:
        return first_numbers()


class NumbersTogether(Numbers):
    def __getitems__(self, indices: list[int]) -> list[list[int]]:
        return [first_numbers()]


def first_numbers() -> list[int]:
    return [int(torch.randint(1 << 24, ())), int(np.random.randint(1 << 24)), random.getrandbits(24)]


EPOCH, COLLATED = [10452019, 7988850, 11529755], [2591111, 12749362, 3337947]
SAMPLES = [[4682196, 16122164, 6213520], [2846748, 19372, 12111934]]
BATCH = [[9321899, 11782550, 7220949]]


@pytest.mark.parametrize(("dataset", "expected"), [(Numbers(), SAMPLES), (NumbersTogether(), BATCH)])
def test_draws_are_those_of_earlier_versions(dataset: Numbers, expected: list[list[int]]) -> None:
    """Checkpoints do not contain draws of samples, so a run resumed with a later version must draw the same numbers."""
    fetcher = Fetcher(dataset, lambda samples: [*samples, first_numbers()], bad_samples="stop")
    batch = fetcher[MicroBatchKey(2, [3, 5], last=True, seed=4)].batch
    assert (dataset.first, batch) == (EPOCH, [*expected, COLLATED])


def test_different_seeds_give_different_orders_and_draws() -> None:
    """The two 32-bit words of a large seed must not be interpreted as a seed and an epoch, or as a seed and a rank."""
    pairs = [(5, 0), (5, 7), (5 + 7 * 2**32, 0), (5 + 2**32, 7), (7 * 2**32, 5), (7, 5), (0, 5), (5 * 2**32, 0)]
    assert len({tuple(permutation(seed, epoch, 32).tolist()) for seed, epoch in pairs}) == len(pairs)
    keys = [(5, 1, 0), (5, 1, 3), (5, 3, 1), (5 + 2**32, 3, 0), (5 + 2**32, 0, 3), (5 + 3 * 2**32, 1, 0)]
    assert len({rank_seed(*key) for key in keys}) == len(keys)


def test_samples_and_order_use_different_random_streams() -> None:
    big = 5 + 7 * 2**32
    keys = [(5, 0, 0), (5, 7, 0), (5, 0, 7), (big, 0, 0), (5, 7, 1), (big, 1, 0), (big, 0, 1), (5, 7 * 2**32, 1)]
    keys += [(5, 0, 7 * 2**32), (5, 7, 2**32), (5 + 2**64, 7, 0), (5 + 2**32, 0, 0), (0, 5, 0), (0, 0, 5)]
    args = {key: sample_rng(*key).integers(2**63) for key in keys}
    args |= {  # the stream that `permutation` uses
        (seed, epoch): np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).integers(2**63)
        for seed in (0, 5)
        for epoch in (0, 7)
    }
    assert len(set(args.values())) == len(args)
    assert sample_rng(*keys[0]).integers(2**63) == args[keys[0]]
