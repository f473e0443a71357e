"""Every sampler draws as a pure function of (seed, epoch, position), independent of the data loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from runner.axes import dataloader
from runner.axes.sampler import (
    SAMPLERS,
    TrainingSamples,
    length_buckets,
    mixture,
    sequential,
    shuffle,
    token_budget,
    weighted,
)
from runner.base.errors import AccelRunError, ConfigError, DataError, TaskFault
from runner.base.order import Order, Sampler
from runner.loading.fetcher import Fetcher

CPU = torch.device("cpu")
SIZE = 53
SIZES = (40, 10, 3)
LENGTHS = np.random.default_rng(5).integers(1, 60, SIZE)
WEIGHTS = np.random.default_rng(6).random(SIZE) ** 3


def samples(batch: int = 8, *, drop_last: bool = False, **other: Any) -> TrainingSamples:
    """Return 53 samples with weights and lengths, in datasets of 40, 10 and 3 samples."""
    content = {"weights": WEIGHTS, "lengths": LENGTHS, "sizes": SIZES, **other}
    return TrainingSamples(
        num_samples=len(content["weights"]),
        global_batch_size=batch,
        drop_last=drop_last,
        weights=lambda: np.asarray(content["weights"], dtype=np.float64),
        lengths=lambda: np.asarray(content["lengths"]),
        sizes=lambda: tuple(content["sizes"]),
    )


MADE: dict[str, Callable[..., Sampler]] = {
    "shuffle": shuffle,
    "sequential": sequential,
    "weighted": weighted,
    "weighted without replacement": lambda facts: weighted(facts, replacement=False, num_samples=20),
    "mixture": lambda facts: mixture(facts, weights=[0.2, 0.5, 0.3]),
    "length_buckets": lambda facts: length_buckets(facts, bucket=4),
    "token_budget": lambda facts: token_budget(facts, tokens=128, bucket=4),
    "token_budget in micro-batches": lambda facts: token_budget(facts, tokens=200, bucket=4, micro_tokens=64),
}
kinds = pytest.mark.parametrize("kind", MADE)


def order_of(kind: str, *, micro: int = 3, **ranks: Any) -> Order:
    sampler = MADE[kind](samples())
    return Order(sampler.num_samples, 8, micro, seed=4, sampler=sampler, **ranks)


def indices_of(order: Order, update: int) -> list[int]:
    return [index for micro in order.micro_batches(update) for index in micro.indices]


def test_every_option_has_a_test() -> None:
    assert {kind.split()[0] for kind in MADE} == set(SAMPLERS)


@kinds
def test_the_order_depends_only_on_seed_and_update(kind: str) -> None:
    one, other = order_of(kind), order_of(kind)
    last = 3 * one.updates_per_epoch
    backwards = {update: indices_of(one, update) for update in reversed(range(last))}
    assert [indices_of(other, update) for update in range(last)] == [backwards[update] for update in range(last)]


@kinds
def test_epochs_and_seeds_differ(kind: str) -> None:
    if kind == "sequential":
        return
    order = order_of(kind)
    drawn = [
        tuple(
            index
            for window in range(order.updates_per_epoch)
            for index in order.update_sampler.draw(seed, epoch, window)
        )
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert len(set(drawn)) == 4


@kinds
@pytest.mark.parametrize("shares", [(5, 3), (4, 1, 3), (7, 1)], ids=str)
def test_ranks_with_unequal_shares_divide_one_update(kind: str, shares: tuple[int, ...]) -> None:
    alone = order_of(kind)
    ranks = [order_of(kind, shares=shares, rank=rank) for rank in range(len(shares))]
    for update in range(2 * alone.updates_per_epoch):
        parts = [indices_of(rank, update) for rank in ranks]
        assert [index for part in parts for index in part] == indices_of(alone, update)
        assert tuple(map(len, parts)) == ranks[0].samples_per_rank(update)
        places = [micro.first for rank in ranks for micro in rank.micro_batches(update) if micro.indices]
        assert places == sorted(places)
        assert places[0] == alone.samples_before(update) - alone.samples_before(
            update // alone.updates_per_epoch * alone.updates_per_epoch
        )


@kinds
def test_ranks_in_lockstep_have_equal_numbers_of_micro_batches(kind: str) -> None:
    ranks = [order_of(kind, shares=(5, 3), rank=rank, is_lockstep=True) for rank in range(2)]
    for update in range(ranks[0].updates_per_epoch):
        assert len({len(list(rank.micro_batches(update))) for rank in ranks}) == 1


@kinds
def test_a_resumed_order_continues(kind: str) -> None:
    order = order_of(kind)
    whole = list(islice(order.from_update(0), 200))
    for update in range(0, 2 * order.updates_per_epoch, 3):
        before = sum(len(list(order.micro_batches(earlier))) for earlier in range(update))
        if before < 150:
            assert list(islice(order.from_update(update), 20)) == whole[before : before + 20]


@kinds
def test_samples_before_counts_drawn_samples(kind: str) -> None:
    order, counted = order_of(kind), 0
    for update in range(3 * order.updates_per_epoch):
        assert order.samples_before(update) == counted
        counted += len(indices_of(order, update))
    assert counted == 3 * order.num_samples


class Drawing:
    """Samples that contain a random number from torch's global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        assert 0 <= index < self.size
        return torch.cat([torch.tensor([float(index)]), torch.rand(1)])


def read(workers: int, order: Order, number: int, size: int = SIZE) -> list[torch.Tensor]:
    fetcher = Fetcher(Drawing(size), torch.utils.data.default_collate, bad_samples="stop")
    reader = dataloader.default(fetcher, CPU, num_workers=workers, pin_memory=False)
    try:
        return [item.batch for item in islice(reader.batches(order.from_update(0)), number)]
    finally:
        reader.close()


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@kinds
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_random_samples(kind: str, workers: int) -> None:
    order = order_of(kind)
    for mine, theirs in zip(read(workers, order, 12), read(0, order, 12), strict=True):
        assert torch.equal(mine, theirs)


# ---------------------------------------------------------------- distributions of draws


@pytest.mark.parametrize("kind", ["shuffle", "sequential", "length_buckets", "token_budget"])
def test_each_sample_is_drawn_once_per_epoch(kind: str) -> None:
    order = order_of(kind)
    for epoch in range(3):
        updates = range(epoch * order.updates_per_epoch, (epoch + 1) * order.updates_per_epoch)
        assert sorted(index for update in updates for index in indices_of(order, update)) == list(range(SIZE))


def test_sequential_keeps_the_order_of_the_dataset() -> None:
    order = order_of("sequential")
    assert [index for update in range(order.updates_per_epoch) for index in indices_of(order, update)] == [*range(SIZE)]


def outside(counts: np.ndarray[Any, Any], draws: int, shares: np.ndarray[Any, Any]) -> list[int]:
    """Return the samples whose counts are outside of exact binomial bounds, at a joint level of 1e-6."""
    tail = 1e-6 / (2 * len(shares))
    low, high = binom.ppf(tail, draws, shares), binom.isf(tail, draws, shares)
    return [index for index, count in enumerate(counts) if not low[index] <= count <= high[index]]


def test_weighted_counts_match_the_distribution() -> None:
    """The same bounds hold for torch's WeightedRandomSampler."""
    epochs, shares = 400, WEIGHTS / WEIGHTS.sum()
    sampler = weighted(samples())
    drawn = [index % SIZE for epoch in range(epochs) for window in range(7) for index in sampler.draw(0, epoch, window)]
    generator = torch.Generator().manual_seed(0)
    reference = [*torch.utils.data.WeightedRandomSampler(WEIGHTS.tolist(), epochs * SIZE, generator=generator)]
    for result in (drawn, reference):
        assert len(result) == epochs * SIZE
        assert outside(np.bincount(result, minlength=SIZE), epochs * SIZE, shares) == []
    assert outside(np.bincount(drawn, minlength=SIZE), epochs * SIZE, np.full(SIZE, 1 / SIZE)) != []


def test_a_sample_without_weight_is_never_drawn() -> None:
    sampler = weighted(samples(weights=[0.0, 1.0, 0.0, 2.0, 0.0]))
    drawn = {index % 5 for epoch in range(50) for index in sampler.draw(1, epoch, 0)}
    assert drawn == {1, 3}


def test_samples_are_drawn_at_most_once_without_replacement() -> None:
    sampler = weighted(samples(), replacement=False, num_samples=20)
    firsts = Counter()
    for epoch in range(2000):
        drawn = [index for window in range(3) for index in sampler.draw(0, epoch, window)]
        assert len(drawn) == len(set(drawn)) == 20
        assert max(drawn) < SIZE
        firsts[drawn[0]] += 1
    counts = np.array([firsts[index] for index in range(SIZE)])
    assert outside(counts, 2000, WEIGHTS / WEIGHTS.sum()) == []  # the first draw is distributed as with replacement


def test_repeated_draws_of_a_sample_have_different_random_numbers() -> None:
    sampler = weighted(samples(weights=[1.0, 1e-9]), num_samples=8)
    rows = torch.cat(read(0, Order(8, 8, 8, seed=0, sampler=sampler), 1, size=2))
    assert set(rows[:, 0].tolist()) <= {0.0, 1.0}
    assert len(set(rows[:, 1].tolist())) == 8


def test_custom_repetitions_have_different_random_numbers() -> None:
    facts = samples()
    sampler = facts.in_order(lambda seed, epoch: np.asarray([3, 1, 3, epoch, 3]), num_samples=5)
    assert sampler.draw(0, 1, 0) == [3, 1, 3 + SIZE, 1 + SIZE, 3 + 2 * SIZE]


@pytest.mark.parametrize(
    "wrong", [range(SIZE - 1), range(SIZE + 1), range(1, SIZE + 1), [-1] * SIZE, [0.5] * SIZE, [[0]] * SIZE]
)
def test_custom_orders_need_a_valid_index_per_position(wrong: Any) -> None:
    """A shorter epoch, for example, would lead to updates without samples."""
    sampler = samples().in_order(lambda seed, epoch: list(range(SIZE)) if epoch == 0 else list(wrong))
    assert sampler.draw(0, 0, 0) == list(range(8))
    with pytest.raises(TaskFault):
        sampler.draw(0, 1, 0)


def test_every_prefix_of_a_mixture_has_its_shares() -> None:
    """After p draws, the count of each of the S datasets is within S + 1 of its share of p."""
    shares = np.array([0.2, 0.5, 0.3])
    sampler = mixture(samples(), weights=[2, 5, 3])
    drawn = np.concatenate([sampler.draw(3, epoch, window) for epoch in range(30) for window in range(7)]) % SIZE
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    source = np.searchsorted(starts, drawn, side="right") - 1
    for epoch in range(30):
        part = source[epoch * SIZE : (epoch + 1) * SIZE]
        for number in range(3):
            excess = np.cumsum(part == number) - shares[number] * np.arange(1, SIZE + 1)
            assert np.abs(excess).max() <= len(SIZES) + 1
    for number, size in enumerate(SIZES):
        mine = drawn[source == number]
        for first in range(0, len(mine) - size + 1, size):
            assert len(set(mine[first : first + size])) == size  # every sample is drawn once before any is repeated


def test_unweighted_mixtures_draw_equally_from_each_dataset() -> None:
    sampler = mixture(samples(), num_samples=300)
    drawn = np.array([index % SIZE for window in range(38) for index in sampler.draw(0, 0, window)])
    assert [int((drawn < 40).sum()), int(((drawn >= 40) & (drawn < 50)).sum()), int((drawn >= 50).sum())] == [100] * 3


def padding(order: Order) -> int:
    updates = [indices_of(order, update) for update in range(order.updates_per_epoch)]
    return sum(int(LENGTHS[drawn].max()) * len(drawn) - int(LENGTHS[drawn].sum()) for drawn in updates)


def test_length_buckets_group_similar_lengths() -> None:
    order = order_of("length_buckets")
    ceilings = -(-LENGTHS // 4)
    spans = [np.ptp(np.sort(ceilings[indices_of(order, update)])) for update in range(order.updates_per_epoch - 1)]
    ranked = np.sort(ceilings)
    assert max(spans) <= max(ranked[first + 7] - ranked[first] for first in range(SIZE - 7))
    assert padding(order) < padding(order_of("shuffle")) / 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_buckets_use_all_samples_over_the_epochs(drop_last: bool) -> None:
    """Otherwise, drop_last would omit the longest samples in every epoch."""
    sampler = length_buckets(samples(drop_last=drop_last))
    whole = range(SIZE // 8)
    seen = {index for epoch in range(40) for window in whole for index in sampler.draw(0, epoch, window)}
    assert seen == set(range(SIZE))
    assert all(len(sampler.draw(0, epoch, window)) == 8 for epoch in range(3) for window in whole)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    tokens=st.integers(30, 200),
    batch=st.integers(1, 20),
    bucket=st.integers(1, 9),
)
def test_updates_stay_within_the_token_budget(lengths: list[int], tokens: int, batch: int, bucket: int) -> None:
    facts = samples(batch, lengths=lengths, weights=lengths)
    sampler = token_budget(facts, tokens=tokens, bucket=bucket)
    order = Order(len(lengths), batch, batch, seed=1, sampler=sampler)
    for epoch in range(2):
        updates = range(epoch * order.updates_per_epoch, (epoch + 1) * order.updates_per_epoch)
        drawn = [indices_of(order, update) for update in updates]
        assert all(max(lengths[index] for index in each) * len(each) <= tokens for each in drawn)
        assert all(1 <= len(each) <= batch for each in drawn)
        assert sorted(index for each in drawn for index in each) == list(range(len(lengths)))


def test_micro_batches_stay_within_their_token_budget() -> None:
    whole, order = order_of("token_budget in micro-batches", micro=8), order_of("token_budget in micro-batches")
    for update in range(order.updates_per_epoch):
        micros = [micro.indices for micro in whole.micro_batches(update)]
        assert all(int(LENGTHS[each].max()) * len(each) <= 64 for each in micros)
        assert [index for each in micros for index in each] == indices_of(order, update)
    assert any(len(list(whole.micro_batches(update))) > 1 for update in range(order.updates_per_epoch))


WRONG: list[tuple[str, Callable[[], object], type[AccelRunError]]] = [
    ("a weight below 0", lambda: weighted(samples(weights=[1.0, -1.0])), DataError),
    ("a weight that is NaN", lambda: weighted(samples(weights=[1.0, float("nan")])), DataError),
    ("no weight above 0", lambda: weighted(samples(weights=[0.0, 0.0])), DataError),
    ("too few to draw", lambda: weighted(samples(weights=[1.0, 0.0]), replacement=False), ConfigError),
    ("weights of other datasets", lambda: mixture(samples(), weights=[0.5, 0.5]), ConfigError),
    ("a dataset of weight below 0", lambda: mixture(samples(), weights=[0.5, 0.5, -1.0]), ConfigError),
    ("no dataset with weight", lambda: mixture(samples(), weights=[0.0, 0.0, 0.0]), ConfigError),
    ("an empty dataset", lambda: mixture(samples(sizes=[3, 0])), DataError),
    (
        "a dataset without samples in an epoch",
        lambda: mixture(samples(), weights=[0.5, 0.46, 0.04], num_samples=12),
        ConfigError,
    ),
    ("a sample over the budget", lambda: token_budget(samples(lengths=[5, 90], weights=[1, 1]), tokens=64), DataError),
    ("a length of 0", lambda: token_budget(samples(lengths=[5, 0], weights=[1, 1])), DataError),
    ("micro-batches above updates", lambda: token_budget(samples(), tokens=64, micro_tokens=65), ConfigError),
    ("a sample over a micro-batch", lambda: token_budget(samples(), tokens=128, micro_tokens=32), DataError),
    ("no incomplete update to drop", lambda: token_budget(samples(drop_last=True)), ConfigError),
]


@pytest.mark.parametrize(("make", "kind"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_impossible_samplers_are_rejected(make: Callable[[], object], kind: type[AccelRunError]) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert all(problem.fix for problem in caught.value.problems)
