"""The samples of an update are a pure function of the seed and the update, independent of the data loader."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.axes import dataloader
from runner.base import order as module
from runner.base.errors import DataError
from runner.base.order import KEYED, KEYED_ABOVE, KeyedPermutation, Order, rank_seed, spread_evenly
from runner.base.task import sample_rng
from runner.engine.hooks.checkpointing import Checkpointing
from runner.loading.fetcher import Fetcher
from tests.opened import opened

CPU = torch.device("cpu")

orders = st.builds(
    Order,
    num_samples=st.integers(1, 60),
    global_batch_size=st.integers(1, 20),
    micro_batch_size=st.integers(1, 20),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
)


@given(orders)
def test_every_sample_is_seen_once_per_epoch(order: Order) -> None:
    if order.updates_per_epoch == 0:
        return
    for epoch in (0, 1):
        updates = range(epoch * order.updates_per_epoch, (epoch + 1) * order.updates_per_epoch)
        seen: list[int] = []
        for update in updates:
            micros = list(order.micro_batches(update))
            assert [micro.last for micro in micros] == [False] * (len(micros) - 1) + [True]
            assert all(micro.epoch == epoch and len(micro.indices) <= order.micro_batch_size for micro in micros)
            seen += [index for micro in micros for index in micro.indices]
            assert order.samples_before(update + 1) - order.samples_before(update) == sum(
                len(m.indices) for m in micros
            )
        expected = order.updates_per_epoch * order.global_batch_size if order.drop_last else order.num_samples
        assert len(seen) == len(set(seen)) == min(expected, order.num_samples)


@given(orders, st.integers(0, 30))
def test_resuming_at_any_update_continues_the_order(order: Order, update: int) -> None:
    if order.updates_per_epoch == 0:
        return

    def indices(start: int, skip: int) -> list[Any]:
        result, updates = [], 0
        for micro in order.from_update(start):
            result.append((updates + start, micro))
            updates += micro.last
            if updates + start > update + 3:
                break
        return [item for item in result if item[0] >= skip]

    assert indices(update, update) == indices(0, update)


def test_epochs_differ_and_seeds_differ() -> None:
    first = [micro.indices for micro in Order(20, 20, 20, seed=0).micro_batches(0)]
    second = [micro.indices for micro in Order(20, 20, 20, seed=0).micro_batches(1)]
    other = [micro.indices for micro in Order(20, 20, 20, seed=1).micro_batches(0)]
    assert first != second
    assert first != other


class Noisy:
    """Samples with random augmentation, which depends only on seed, epoch and index."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        rng = sample_rng(0, self.epoch, index)
        return torch.tensor([index, self.epoch, rng.standard_normal()], dtype=torch.float64)


def loader(kind: str, dataset: Any, **options: Any) -> dataloader.Loader:
    bad = options.get("bad_samples", "stop")
    fetcher = Fetcher(dataset, torch.utils.data.default_collate, bad_samples=bad)
    if kind == "thread":
        return dataloader.thread(fetcher, CPU, pin_memory=False, **options)
    return dataloader.default(fetcher, CPU, num_workers=int(kind), pin_memory=False, **options)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["1", "2", "thread"])
def test_workers_do_not_change_the_batches(kind: str) -> None:
    order = Order(23, 8, 3, seed=4)
    expected = list(islice(loader("0", Noisy()).batches(order.from_update(2)), 20))
    reader = loader(kind, Noisy())
    result = list(islice(reader.batches(order.from_update(2)), 20))
    reader.close()
    assert [item.last for item in result] == [item.last for item in expected]
    assert all(torch.equal(mine.batch, theirs.batch) for mine, theirs in zip(result, expected, strict=True))


def test_prefetching_does_not_advance_the_global_generators() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for kind in ("0", "2", "thread"):
        reader = loader(kind, Noisy())
        list(islice(reader.batches(Order(23, 8, 3, seed=4).from_update(0)), 5))
        reader.close()
    assert torch.equal(before, torch.get_rng_state())


class Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise ValueError("cut off")
        return torch.tensor(index * index)


@pytest.mark.parametrize("kind", ["0", "2", "thread"])
def test_bad_samples_are_reported_by_index(kind: str) -> None:
    reader = loader(kind, Squares())
    with pytest.raises(DataError, match="sample 7 cannot be read: ValueError: cut off"):
        list(islice(reader.batches(Order(10, 5, 5, seed=0).from_update(0)), 2))
    reader.close()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["0", "2", "thread"])
def test_bad_samples_can_be_skipped(kind: str) -> None:
    reader = loader(kind, Squares(), bad_samples="skip")
    batches = list(islice(reader.batches(Order(10, 5, 5, seed=0).from_update(0)), 2))
    reader.close()
    assert sorted(int(value) for item in batches for value in item.batch) == [0, 1, 4, 9, 16, 25, 36, 64, 81]
    assert [bad for item in batches for bad in item.bad] == [(7, "ValueError: cut off")]


class Rows:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((2,), index), "y": index}


@pytest.mark.parametrize("where", ["memory", "device"])
def test_cached_samples_equal_read_samples(where: str) -> None:
    order = Order(30, 8, 8, seed=1)
    plain = list(islice(loader("0", Rows()).batches(order.from_update(0)), 6))
    kept = list(islice(loader("0", Rows(), cache=where).batches(order.from_update(0)), 6))
    for mine, theirs in zip(kept, plain, strict=True):
        assert torch.equal(mine.batch["x"], theirs.batch["x"])
        assert torch.equal(mine.batch["y"], theirs.batch["y"])


def test_samples_that_change_are_not_cached() -> None:
    with pytest.raises(DataError, match="change from epoch to epoch"):
        loader("0", Noisy(), cache="memory")


@given(st.integers(1, 100), st.none() | st.integers(1, 120))
def test_evaluations_have_the_requested_number_of_samples(num_samples: int, wanted: int | None) -> None:
    chosen = spread_evenly(num_samples, wanted)
    assert len(chosen) == len(set(chosen)) == min(num_samples, wanted or num_samples)
    assert set(chosen) <= set(range(num_samples))


def test_random_numbers_depend_on_seed_epoch_and_index() -> None:
    drawn = {sample_rng(*key).integers(2**60) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1)]}
    assert len(drawn) == 4
    assert isinstance(sample_rng(0, 0, 0), np.random.Generator)


def test_ranks_start_with_different_seeds() -> None:
    keys = [(seed, rank, update) for seed in (0, 1) for rank in range(5) for update in (0, 1, 50)]
    seeds = [rank_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [rank_seed(seed, 0) for seed in (0, 1, 7)] == [0, 1, 7]  # rank 0 draws the numbers of a single process


# ---------------------------------------------------------------- orders too large for an array


@pytest.mark.parametrize("sizes", [range(1, 300), [10**3, 2**12 - 1, 2**12, 2**12 + 1, 99_991]], ids=["small", "large"])
def test_a_keyed_permutation_contains_each_sample_once(sizes: Iterable[int]) -> None:
    for size in sizes:
        result = KeyedPermutation(seed=size, epoch=1, num_samples=size)[:size]
        assert np.array_equal(np.sort(result), np.arange(size))


@pytest.mark.slow
@given(st.integers(1, 10**10), st.integers(0, 2**40), st.integers(0, 200))
def test_slices_of_a_keyed_permutation_can_be_computed(size: int, seed: int, count: int) -> None:
    order = KeyedPermutation(seed, 3, size)
    first = seed % size
    whole = order[first : first + count]
    parts = [order[place : place + 1] for place in range(first, min(size, first + count))]
    assert np.array_equal(whole, np.concatenate([*parts, np.empty(0, np.int64)]))
    assert len(set(whole.tolist())) == len(whole)
    assert all(0 <= index < size for index in whole.tolist())


def surplus(counts: Any, categories: int) -> float:
    """Return the chi-squared statistic for equal probabilities, in standard deviations above its mean."""
    counts = np.array(list(counts))
    expected = counts.sum() / categories
    statistic = ((counts - expected) ** 2 / expected).sum() + expected * (categories - len(counts))
    return float((statistic - (categories - 1)) / np.sqrt(2 * (categories - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_samples_are_equally_likely(size: int) -> None:
    result = Counter(tuple(KeyedPermutation(seed, 0, size)[:size].tolist()) for seed in range(4000))
    # fails by chance for one in 30,000 choices of 4,000 seeds
    assert surplus(result.values(), math.factorial(size)) < 4


@pytest.mark.parametrize("size", [2**24 + 1, 2**25 + 12345, 10**10])
def test_indices_and_differences_of_a_large_order_are_uniform(size: int) -> None:
    for epoch in (0, 1):
        result = KeyedPermutation(7, epoch, size)[size // 3 : size // 3 + 100_000]
        steps = np.diff(result) % size
        assert surplus(np.bincount(result * 256 // size, minlength=256), 256) < 4
        assert surplus(np.bincount(result % 251, minlength=251), 251) < 4
        assert surplus(np.bincount(steps * 256 // size, minlength=256), 256) < 4
    assert not np.array_equal(KeyedPermutation(7, 0, size)[:100], KeyedPermutation(7, 1, size)[:100])
    assert not np.array_equal(KeyedPermutation(7, 0, size)[:100], KeyedPermutation(8, 0, size)[:100])


def test_the_order_of_ten_billion_samples_takes_no_memory() -> None:
    order = Order(10**10, 64, 16, seed=3)
    tracemalloc.start()
    try:
        micros = list(order.micro_batches(order.updates_per_epoch - 1)) + list(
            order.micro_batches(order.updates_per_epoch)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len({index for micro in micros for index in micro.indices}) == 2 * 64
    assert peak < 1 << 20


def test_small_orders_are_those_of_earlier_versions() -> None:
    """Up to 16 million samples, runs of earlier versions can be resumed with equal results."""
    assert Order(KEYED_ABOVE, 8, 8, seed=3).update_sampler.content == ""
    assert Order(KEYED_ABOVE + 1, 8, 8, seed=3).update_sampler.content == KEYED
    assert [micro.indices for micro in Order(20, 8, 8, seed=3).micro_batches(0)] == [[8, 0, 18, 5, 9, 3, 12, 16]]


def run_two_updates(folder: Path) -> list[Any]:
    """Run two updates and save. Return the micro-batches of the third update."""
    with opened(folder) as phase:
        phase.run.provenance.is_compared = True  # like a run of `train`
        updates = phase.updates()
        for _ in range(2):
            next(updates)
        phase.hook(Checkpointing).save()
        return list(phase.order.micro_batches(2))


def test_a_resumed_run_keeps_its_kind_of_permutation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes runs of versions that had no keyed permutations."""
    as_array = run_two_updates(tmp_path / "array")
    monkeypatch.setattr(module, "KEYED_ABOVE", 8)
    keyed = run_two_updates(tmp_path / "keyed")
    assert as_array != keyed
    for name, wanted in (("array", as_array), ("keyed", keyed)):
        with opened(tmp_path / name) as phase:
            assert phase.position.update == 2
            assert list(phase.order.micro_batches(2)) == wanted
