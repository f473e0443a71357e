"""All samples are assigned to shares, no rank exceeds its cap, and impossible settings are reported."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.errors import Problem
from runner.base.shares import (
    RankShare,
    distribute_samples,
    equal_shares,
    fixed_shares,
    format_equation,
    format_lines,
    format_sum,
    rank_shares,
    rank_slices,
    split_proportionally,
)
from tests.suggestions import suggested

weights_of_ranks = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 1e12)), min_size=1, max_size=9).filter(any)
some_shares = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


def invalid(shares: tuple[int, ...] | Problem) -> Problem:
    assert isinstance(shares, Problem)
    return shares


# ---------------------------------------------------------------- proportional


@pytest.mark.slow
@given(st.integers(0, 5000), weights_of_ranks)
def test_all_samples_are_assigned_and_used_ranks_get_one(total: int, weights: list[float]) -> None:
    shares = split_proportionally(total, weights)
    taking = [rank for rank, weight in enumerate(weights) if weight > 0]
    assert sum(shares) == total
    assert all(share == 0 for rank, share in enumerate(shares) if rank not in taking)
    if total >= len(taking):
        assert all(shares[rank] >= 1 for rank in taking)


@pytest.mark.slow
@given(st.integers(0, 500), weights_of_ranks)
def test_ranks_with_a_weight_get_a_sample_if_possible(total: int, weights: list[float]) -> None:
    shares = split_proportionally(total, weights)
    taking = [rank for rank, weight in enumerate(weights) if weight > 0]
    assert sum(shares) == total
    if total >= len(taking):
        assert all(shares[rank] >= 1 for rank in taking)


@given(st.integers(9, 2000), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_shares_are_within_one_sample_of_the_proportion(total: int, weights: list[int]) -> None:
    quotas = [total * weight / sum(weights) for weight in weights]
    shares = split_proportionally(total, weights)
    if min(quotas) >= 1:
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))


def test_remaining_samples_go_to_the_largest_remainders() -> None:
    """In case of a tie, the lower rank gets the sample."""
    assert split_proportionally(32, (11, 8)) == (19, 13)  # exact shares 18.53 and 13.47
    assert split_proportionally(10, (1, 1, 1)) == (4, 3, 3)
    assert split_proportionally(11, (1, 1, 1)) == (4, 4, 3)
    assert split_proportionally(3, (0.1, 0.1)) == (2, 1)
    assert split_proportionally(1, (1, 2, 2)) == (0, 1, 0)
    assert split_proportionally(10, (1000, 1, 0, 1)) == (8, 1, 0, 1)


# ---------------------------------------------------------------- smaller last updates


@given(some_shares, st.data())
def test_samples_of_a_smaller_update_are_distributed(shares: list[int], data: st.DataObject) -> None:
    """No rank exceeds its share."""
    num_samples = data.draw(st.integers(0, sum(shares)))
    parts = distribute_samples(num_samples, shares)
    assert sum(parts) == num_samples
    assert all(part <= share for part, share in zip(parts, shares, strict=True))
    if num_samples == sum(shares):
        assert parts == tuple(shares)


@given(some_shares, st.integers(0, 400))
def test_slices_are_consecutive_and_cover_the_update(shares: list[int], num_samples: int) -> None:
    cuts = rank_slices(num_samples, shares)
    seen = [sample for start, stop in cuts for sample in range(start, stop)]
    assert seen == list(range(num_samples))
    assert tuple(stop - start for start, stop in cuts) == distribute_samples(num_samples, shares)


def test_a_rank_may_get_no_samples_of_a_small_update() -> None:
    assert distribute_samples(1, (19, 13)) == (1, 0)
    assert rank_slices(1, (19, 13)) == ((0, 1), (1, 1))
    assert distribute_samples(2, (1, 1, 1)) == (1, 1, 0)
    assert distribute_samples(0, (19, 13)) == (0, 0)


# ---------------------------------------------------------------- shares set by the user


def test_user_defined_shares_are_counts_or_proportions() -> None:
    assert fixed_shares((19, 13), 2, 32) == (19, 13)
    assert fixed_shares((5, 3), 2, 32) == (20, 12)
    assert fixed_shares((11, 8), 2, 32) == (19, 13)
    assert fixed_shares((1000, 1), 2, 2) == (1, 1)
    assert fixed_shares((7,), 1, 32) == (32,)
    assert equal_shares(3, 32) == (11, 11, 10)


@pytest.mark.parametrize(
    ("shares", "world_size", "total", "where", "instead"),
    [
        ((5, 3, 2), 2, 32, "parallelism.shares=[5,3,2]", "parallelism.world_size=3"),
        ((5,), 2, 32, "parallelism.shares=[5]", "parallelism.world_size=1"),
        ((), 2, 32, "parallelism.shares=[]", "parallelism.world_size=1"),
        ((32, 0), 2, 32, "parallelism.shares=[32,0]", "parallelism.world_size=1"),
        ((16, -1, 16), 3, 32, "parallelism.shares=[16,-1,16]", "parallelism.world_size=2"),
        ((0, 0), 2, 32, "parallelism.shares=[0,0]", "parallelism.world_size=1"),
        ((1, 1, 1, 1), 4, 3, "global_batch_size=3", "parallelism.world_size=3 global_batch_size=4"),
    ],
)
def test_impossible_shares_are_reported_with_a_fix(
    shares: tuple[int, ...], world_size: int, total: int, where: str, instead: str
) -> None:
    result = invalid(fixed_shares(shares, world_size, total))
    assert (result.where, suggested(result.fix)) == (where, instead.split())


@given(st.lists(st.integers(-2, 40), max_size=5), st.integers(1, 5), st.integers(1, 40))
def test_accepted_shares_match_ranks_and_batch_size(shares: list[int], world_size: int, total: int) -> None:
    taken = fixed_shares(shares, world_size, total)
    good = len(shares) == world_size <= total and min(shares, default=0) > 0
    assert isinstance(taken, Problem) != good
    if not isinstance(taken, Problem):
        assert (len(taken), sum(taken)) == (world_size, total)
        assert min(taken) >= 1


# ---------------------------------------------------------------- the table


def rows_of(shares: tuple[int, ...], micro: int | None) -> tuple[RankShare, ...]:
    size = len(shares)
    return rank_shares(shares, ["cpu"] * size, [None] * size, [micro] * size)


def test_the_equation_is_one_line_and_columns_are_aligned(screen: Callable[..., None]) -> None:
    eight = (24, 23, 22, 21, 20, 19, 18, 17)
    messages = [((19, 13), None), ((19, 13), 8), ((16,) * 4, 8), ((3, 0), 8), (eight, 8)]
    devices, memory = ["NVIDIA GeForce GTX 1080 Ti", "cpu"], [11 * 2**30, None]
    rows = format_lines(rank_shares((19, 13), devices, memory, [8, None]))
    screen("\n".join([*(format_equation(rows_of(shares, micro)) for shares, micro in messages), "", *rows]))


@pytest.mark.parametrize(("size", "micro"), list(product((1, 2, 3, 8, 64), (None, 8))))
def test_the_equation_is_never_longer_than_a_line(size: int, micro: int | None) -> None:
    line = format_equation(rows_of(tuple(range(100, 100 + size)), micro))
    assert len(line) <= 120
    assert "\n" not in line


@given(some_shares, st.integers(1, 50))
def test_micro_batches_of_a_rank_add_up_to_its_share(shares: list[int], micro: int) -> None:
    for row in rows_of(tuple(shares), micro):
        assert sum(row.passes) == row.share
        assert all(0 < samples <= micro for samples in row.passes)
        assert all(samples == row.micro_batch_size for samples in row.passes[:-1])


def test_shares_of_many_ranks_are_shown_as_a_range() -> None:
    assert format_sum((5, 3)) == "5 + 3"
    assert format_sum([3, 9] * 32) == "64 ranks, 3 to 9 each"
