"""Which samples an update sees is arithmetic: nothing that reads them can change it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.axes import dataloader
from runner.axes.dataloader import Fetcher
from runner.base.errors import DataError
from runner.base.order import Order, evenly_spread, seed_of_rank
from runner.base.task import sample_rng

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
def test_every_sample_is_seen_once_per_epoch_and_each_update_closes_once(order: Order) -> None:
    if order.updates_per_epoch == 0:
        return
    for epoch in (0, 1):
        updates = range(epoch * order.updates_per_epoch, (epoch + 1) * order.updates_per_epoch)
        seen: list[int] = []
        for update in updates:
            micros = list(order.micros(update))
            assert [micro.last for micro in micros] == [False] * (len(micros) - 1) + [True]
            assert all(micro.epoch == epoch and len(micro.indices) <= order.micro_batch_size for micro in micros)
            seen += [index for micro in micros for index in micro.indices]
            assert order.samples_before(update + 1) - order.samples_before(update) == sum(
                len(m.indices) for m in micros
            )
        expected = order.updates_per_epoch * order.global_batch_size if order.drop_last else order.num_samples
        assert len(seen) == len(set(seen)) == min(expected, order.num_samples)


@given(orders, st.integers(0, 30))
def test_going_on_at_an_update_gives_what_would_have_come(order: Order, update: int) -> None:
    if order.updates_per_epoch == 0:
        return

    def indices(start: int, skip: int) -> list[Any]:
        found, updates = [], 0
        for micro in order.from_update(start):
            found.append((updates + start, micro))
            updates += micro.last
            if updates + start > update + 3:
                break
        return [item for item in found if item[0] >= skip]

    assert indices(update, update) == indices(0, update)


def test_epochs_differ_and_seeds_differ() -> None:
    first = [micro.indices for micro in Order(20, 20, 20, seed=0).micros(0)]
    second = [micro.indices for micro in Order(20, 20, 20, seed=0).micros(1)]
    other = [micro.indices for micro in Order(20, 20, 20, seed=1).micros(0)]
    assert first != second
    assert first != other


class Noisy:
    """Samples with random augmentation that depends on seed, epoch and index alone."""

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


@pytest.mark.parametrize("kind", ["1", "2", "thread"])
def test_workers_do_not_change_the_batches(kind: str) -> None:
    order = Order(23, 8, 3, seed=4)
    expected = list(islice(loader("0", Noisy()).batches(order.from_update(2)), 20))
    reader = loader(kind, Noisy())
    found = list(islice(reader.batches(order.from_update(2)), 20))
    reader.close()
    assert [item.last for item in found] == [item.last for item in expected]
    assert all(torch.equal(mine.batch, theirs.batch) for mine, theirs in zip(found, expected, strict=True))


def test_reading_ahead_does_not_touch_the_global_generators() -> None:
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
def test_a_bad_sample_is_named(kind: str) -> None:
    reader = loader(kind, Squares())
    with pytest.raises(DataError, match="sample 7 cannot be read: ValueError: cut off"):
        list(islice(reader.batches(Order(10, 5, 5, seed=0).from_update(0)), 2))
    reader.close()


@pytest.mark.parametrize("kind", ["0", "2", "thread"])
def test_a_bad_sample_is_left_out_and_listed_by_choice(kind: str) -> None:
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
def test_kept_samples_are_those_that_were_read(where: str) -> None:
    order = Order(30, 8, 8, seed=1)
    plain = list(islice(loader("0", Rows()).batches(order.from_update(0)), 6))
    kept = list(islice(loader("0", Rows(), cache=where).batches(order.from_update(0)), 6))
    for mine, theirs in zip(kept, plain, strict=True):
        assert torch.equal(mine.batch["x"], theirs.batch["x"])
        assert torch.equal(mine.batch["y"], theirs.batch["y"])


def test_samples_that_change_are_not_kept() -> None:
    with pytest.raises(DataError, match="change from epoch to epoch"):
        loader("0", Noisy(), cache="memory")


@given(st.integers(1, 100), st.none() | st.integers(1, 120))
def test_the_samples_of_an_evaluation_are_distinct_and_as_many_as_wanted(num_samples: int, wanted: int | None) -> None:
    chosen = evenly_spread(num_samples, wanted)
    assert len(chosen) == len(set(chosen)) == min(num_samples, wanted or num_samples)
    assert set(chosen) <= set(range(num_samples))


def test_the_random_numbers_of_a_sample_depend_on_seed_epoch_and_index() -> None:
    drawn = {sample_rng(*key).integers(2**60) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1)]}
    assert len(drawn) == 4
    assert isinstance(sample_rng(0, 0, 0), np.random.Generator)


def test_ranks_begin_with_seeds_of_their_own() -> None:
    keys = [(seed, rank, update) for seed in (0, 1) for rank in range(5) for update in (0, 1, 50)]
    seeds = [seed_of_rank(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [seed_of_rank(seed, 0) for seed in (0, 1, 7)] == [0, 1, 7]  # one process and rank 0 draw alike
