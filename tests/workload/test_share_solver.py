"""Shares of ranks are optimal, are found from noisy times, and stay stable once found."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.errors import Problem
from runner.base.shares import split_proportionally
from runner.workload.share_solver import (
    Decision,
    RankTiming,
    ShareSolver,
    UpdateTimes,
    fastest_shares,
    fit_line,
    median_timings,
    probe_splits,
    slowest_seconds,
)
from tests.rounding import allowed

lines_of_ranks = st.lists(
    st.builds(RankTiming, st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])),
    min_size=1,
    max_size=3,
)


# ---------------------------------------------------------------- the fitted line


def line_through(points: Iterable[tuple[int, float]]) -> RankTiming:
    """Return the line that the solver fits to (samples, seconds) of the updates of a single rank."""
    block = [UpdateTimes((samples,), (seconds,)) for samples, seconds in points]
    return fit_line(median_timings(block, 0)).line


@given(st.floats(0, 1), st.floats(1e-5, 1), st.sets(st.integers(1, 300), min_size=2, max_size=6))
def test_exact_times_recover_the_linear_cost_model(fixed_s: float, per_sample_s: float, counts: set[int]) -> None:
    line = line_through([(n, fixed_s + per_sample_s * n) for n in sorted(counts)])
    for n in counts:
        assert line.seconds(n) == pytest.approx(
            fixed_s + per_sample_s * n, rel=allowed(torch.float64, 6, growth=300**2)
        )


def test_a_single_sample_count_gives_a_time_per_sample() -> None:
    assert line_through([(8, 2.0), (8, 4.0), (8, 100.0)]) == RankTiming(0.0, 0.5)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1e-4, 1e3)), min_size=1, max_size=20))
def test_no_term_of_the_cost_model_is_negative(points: list[tuple[int, float]]) -> None:
    line = line_through(points)
    assert line.fixed_s >= 0
    assert line.per_sample_s >= 0
    assert line.seconds(1) > 0


def test_outliers_do_not_change_the_cost_model() -> None:
    clean = [(n, 0.002 + 0.001 * n) for n in (8, 16, 24) for _ in range(5)]
    loud = [(n, 40 * seconds) if index % 5 < 2 else (n, seconds) for index, (n, seconds) in enumerate(clean)]
    line = line_through(loud)
    assert line.fixed_s == pytest.approx(0.002)
    assert line.per_sample_s == pytest.approx(0.001)


# ---------------------------------------------------------------- the fastest shares


def every_split(total: int, num_ranks: int) -> list[tuple[int, ...]]:
    return [split for split in product(range(1, total + 1), repeat=num_ranks) if sum(split) == total]


@pytest.mark.slow
@settings(max_examples=300)
@given(lines_of_ranks, st.integers(1, 9))
def test_no_other_split_is_faster_than_the_solution(lines: list[RankTiming], total: int) -> None:
    splits = every_split(total, len(lines))
    if not splits:
        return
    shares = fastest_shares(total, lines)
    assert shares in splits
    assert slowest_seconds(lines, shares) == min(slowest_seconds(lines, split) for split in splits)


@settings(max_examples=50)
@given(
    st.lists(st.builds(RankTiming, st.floats(0, 0.1), st.floats(1e-6, 0.01)), min_size=2, max_size=16),
    st.integers(16, 5000),
)
def test_moving_one_sample_never_helps(lines: list[RankTiming], total: int) -> None:
    shares = fastest_shares(total, lines)
    assert sum(shares) == total
    assert min(shares) >= 1
    slow = max(range(len(lines)), key=lambda rank: lines[rank].seconds(shares[rank]))
    if shares[slow] > 1:
        for rank, line in enumerate(lines):
            assert rank == slow or line.seconds(shares[rank] + 1) >= lines[slow].seconds(shares[slow])


def test_ties_are_broken_by_samples_and_rank() -> None:
    """Fewer samples come first, then the lower rank."""
    assert fastest_shares(7, [RankTiming(0.0, 1.0)] * 3) == (3, 2, 2)
    assert fastest_shares(7, [RankTiming(1.0, 0.0)] * 3) == (3, 2, 2)
    assert fastest_shares(32, [RankTiming(0.0, 1.0), RankTiming(0.0, 3.0)]) == (24, 8)


def test_every_rank_gets_at_least_one_sample() -> None:
    assert fastest_shares(8, [RankTiming(0.0, 1.0), RankTiming(1000.0, 1.0)]) == (7, 1)


# ---------------------------------------------------------------- probing


@pytest.mark.slow
@given(st.integers(2, 8), st.integers(2, 300))
def test_probes_include_every_rank(size: int, total: int) -> None:
    if total < size:
        return
    splits = probe_splits(total, split_proportionally(total, [1] * size))
    assert 2 <= len(splits) <= 6
    for split in splits:
        assert sum(split) == total
        assert min(split) >= 1


@given(st.integers(2, 8), st.integers(0, 300))
def test_ranks_are_measured_at_two_sample_counts_in_6_updates(size: int, more: int) -> None:
    balance = ShareSolver(2 * size + more, size, warm_up=0)
    seen = [balance.ahead(num) for num in range(6)]
    assert all(len({split[rank] for split in seen}) >= 2 for rank in range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_one_spare_sample_suffices_to_probe_few_ranks(size: int) -> None:
    for total in range(size + 1, 3 * size):
        splits = probe_splits(total, split_proportionally(total, [1] * size))
        assert all(len({split[rank] for split in splits}) >= 2 for rank in range(size)), (total, splits)


def test_announced_shares_equal_used_shares() -> None:
    balance = ShareSolver(32, 2, warm_up=2)
    ahead = [balance.ahead(num) for num in range(8)]
    assert ahead[:2] == [(16, 16)] * 2
    dealt = []
    for _ in range(8):
        dealt.append(balance.shares)
        balance.observe((1.0, 1.0))
    assert dealt == ahead


# ---------------------------------------------------------------- simulated ranks


class Ranks:
    """Ranks of known speed with noisy times. A few outliers take three times as long."""

    def __init__(self, lines: Sequence[RankTiming], noise: float = 0.0, seed: int = 0, outliers: float = 0.01) -> None:
        self.lines, self.noise, self.outliers = list(lines), noise, outliers if noise else 0.0
        self.rng = random.Random(seed)

    def take(self, shares: Sequence[int]) -> list[float]:
        return [self._noisy(line.seconds(n)) for line, n in zip(self.lines, shares, strict=True)]

    def _noisy(self, seconds: float) -> float:
        factor = max(0.2, self.rng.gauss(1, self.noise)) if self.noise else 1.0
        return seconds * factor * (3 if self.rng.random() < self.outliers else 1)

    def over_best(self, shares: Sequence[int]) -> float:
        """Return the time of an update relative to that of the best shares; 1.0 is optimal."""
        return slowest_seconds(self.lines, shares) / slowest_seconds(
            self.lines, fastest_shares(sum(shares), self.lines)
        )


def run(balance: ShareSolver, ranks: Ranks, updates: int) -> list[Decision]:
    decisions = []
    for _ in range(updates):
        if decision := balance.observe(ranks.take(balance.shares)):
            decisions.append(decision)
    return decisions


@pytest.mark.parametrize(("slower", "gain"), [(2, 1.4), (3, 1.9)])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.10])
def test_with_a_slower_rank_the_minimum_time_is_reached(slower: int, gain: float, noise: float) -> None:
    """The minimum is reached within 5 %. If a rank is k times slower, equal shares take (1 + k) / 2 times as long."""
    for seed in range(5):
        ranks = Ranks([RankTiming(0.0002, 0.001), RankTiming(0.0002 * slower, 0.001 * slower)], noise, seed)
        balance = ShareSolver(96, 2)
        run(balance, ranks, 200)
        assert ranks.over_best(balance.shares) <= 1.05
        assert slowest_seconds(ranks.lines, (48, 48)) / slowest_seconds(ranks.lines, balance.shares) >= gain


@pytest.mark.parametrize(
    "lines",
    [
        [RankTiming(0.001, 0.001), RankTiming(0.001, 0.0015), RankTiming(0.001, 0.003)],
        [RankTiming(0.01, 0.001), RankTiming(0.01, 0.003)],
        [RankTiming(0.001, 0.001 * (1 + rank % 3)) for rank in range(8)],
    ],
)
def test_more_ranks_and_fixed_times_are_within_5_percent(lines: list[RankTiming]) -> None:
    """The result is compared with the minimum time."""
    for seed in range(5):
        ranks = Ranks(lines, 0.05, seed)
        balance = ShareSolver(128, len(lines))
        run(balance, ranks, 200)
        assert ranks.over_best(balance.shares) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.10])
@pytest.mark.parametrize("slower", [1, 3])
def test_noise_changes_shares_at_most_once_in_500_updates(noise: float, slower: int) -> None:
    for seed in range(10):
        ranks = Ranks([RankTiming(0.0005, 0.001), RankTiming(0.0005 * slower, 0.001 * slower)], noise, seed)
        balance = ShareSolver(64, 2)
        run(balance, ranks, 100)
        assert len(run(balance, ranks, 500)) <= 1


def test_a_gain_below_the_threshold_changes_nothing() -> None:
    ranks = Ranks([RankTiming(0.0, 0.001), RankTiming(0.0, 0.00104)])
    assert fastest_shares(200, ranks.lines) == (102, 98)
    assert {each.shares for each in run(ShareSolver(200, 2), ranks, 100)} == {(100, 100)}
    assert {each.shares for each in run(ShareSolver(200, 2, threshold=0.005), ranks, 100)} == {(102, 98)}


@pytest.mark.slow
def test_a_gain_within_noise_changes_nothing() -> None:
    """With 8 ranks and 20 % noise, some pair of ranks always seems to differ by more than the threshold."""
    changes = 0
    for seed in range(5):
        ranks = Ranks([RankTiming(0.0005, 0.001)] * 8, 0.20, seed)
        balance = ShareSolver(512, 8)
        run(balance, ranks, 200)
        changes += len(run(balance, ranks, 500))
    assert changes <= 5


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.10])
def test_shares_adapt_to_swapped_speeds_within_3_solutions(noise: float) -> None:
    fast, slow = RankTiming(0.0005, 0.001), RankTiming(0.0015, 0.003)
    for seed in range(10):
        ranks = Ranks([fast, slow], noise, seed)
        balance = ShareSolver(64, 2, every=20)
        run(balance, ranks, 207 + seed)
        ranks.lines.reverse()
        assert ranks.over_best(balance.shares) > 2
        decisions = run(balance, ranks, 3 * balance.every)
        assert "became" in decisions[0].reason
        assert ranks.over_best(balance.shares) <= 1.10


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_changed_speed_is_detected_in_both_directions(factor: float) -> None:
    ranks = Ranks([RankTiming(0.0, 0.002)] * 2)
    balance = ShareSolver(64, 2, every=20)
    run(balance, ranks, 200)
    ranks.lines[1] = RankTiming(0.0, 0.002 * factor)
    reason = run(balance, ranks, 3 * balance.every)[0].reason
    assert [float(result) for result in re.findall(r"became ([\d.]+) times", reason)] == [pytest.approx(4.0)]


def test_shares_adapt_to_a_changed_fixed_time() -> None:
    ranks = Ranks([RankTiming(0.0005, 0.001)] * 2, 0.05)
    balance = ShareSolver(128, 2)
    run(balance, ranks, 200)
    ranks.lines[0] = RankTiming(0.02, 0.001)
    run(balance, ranks, 3 * balance.every)
    assert ranks.over_best(balance.shares) <= 1.10


def test_late_splits_and_smaller_updates_cause_no_bias() -> None:
    """Shares take effect two updates after their decision, as with prefetched batches. Every 7th window is smaller."""
    ranks = Ranks([RankTiming(0.0005, 0.001), RankTiming(0.0015, 0.003)], 0.05)
    balance = ShareSolver(64, 2)
    queue = [balance.ahead(0), balance.ahead(1)]
    for number in range(200):
        queue.append(balance.ahead(2))
        shares = queue.pop(0)
        taken = split_proportionally(5, shares) if number % 7 == 6 else shares
        assert not isinstance(taken, Problem)
        balance.observe(ranks.take(taken), taken)
    assert ranks.over_best(balance.shares) <= 1.05


def test_invalid_times_are_ignored() -> None:
    ranks = Ranks([RankTiming(0.0005, 0.001), RankTiming(0.0015, 0.003)])
    balance = ShareSolver(64, 2)
    for number in range(200):
        bad = {5: [float("nan"), 1.0], 6: [0.0, 1.0], 40: [float("inf"), 0.0]}
        balance.observe(bad.get(number, ranks.take(balance.shares)))
    assert ranks.over_best(balance.shares) == pytest.approx(1.0)


# ---------------------------------------------------------------- messages and state


def test_a_decision_has_a_reason_and_a_predicted_gain() -> None:
    decision = run(ShareSolver(32, 2), Ranks([RankTiming(0.0, 0.0004), RankTiming(0.0, 0.0012)]), 8)[0]
    assert decision.shares == (24, 8)
    assert decision.old_s == pytest.approx(0.0192)
    assert decision.new_s == pytest.approx(0.0096)
    for part in ("rank 1", "3.0 times", "16+16 -> 24+8", "19.2 -> 9.6 ms"):
        assert part in decision.reason
    stays = run(ShareSolver(32, 2), Ranks([RankTiming(0.0, 0.0004)] * 2), 8)[0]
    assert stays.shares == (16, 16)
    for part in ("16+16", "6.4 ms"):
        assert part in stays.reason


def test_all_ranks_take_the_same_decision() -> None:
    """All ranks use the same times."""
    first, second = ShareSolver(64, 3), ShareSolver(64, 3)
    ranks = Ranks([RankTiming(0.001, 0.001), RankTiming(0.001, 0.002), RankTiming(0.001, 0.003)], 0.10)
    for _ in range(300):
        assert first.shares == second.shares
        seconds = ranks.take(first.shares)
        assert first.observe(seconds) == second.observe(seconds)


def test_measurements_are_restored_from_a_checkpoint() -> None:
    ranks = Ranks([RankTiming(0.0005, 0.001), RankTiming(0.0015, 0.003)], 0.05)
    balance = ShareSolver(64, 2)
    run(balance, ranks, 110)
    state = json.loads(json.dumps(balance.state(), allow_nan=False))
    again = ShareSolver(64, 2)
    again.load(state)
    assert all(again.ahead(num) == balance.current for num in range(10)), "there must be no new probes"
    assert (again.shares, again.lines) == (balance.shares, balance.lines)
    assert json.loads(json.dumps(again.state())) == state
    ranks.lines.reverse()
    run(again, ranks, 62)
    assert ranks.over_best(again.shares) <= 1.10


@pytest.mark.parametrize("gained", [True, False])
def test_an_unconfirmed_gain_is_restored_from_a_checkpoint(gained: bool) -> None:
    balance, again = ShareSolver(64, 2), ShareSolver(64, 2)
    run(balance, Ranks([RankTiming(0.0005, 0.001), RankTiming(0.0015, 0.003)]), 50)
    state = {**balance.state(), "gained": gained}
    again.load(state)
    assert again.state() == state


@pytest.mark.parametrize("blocks", [0, 1, 5, 12])
def test_a_resumed_solver_decides_like_an_uninterrupted_one(blocks: int) -> None:
    """Times of an incomplete block are not saved, and warm-up starts again, so the test saves at the end of a block."""
    probes, every = 3 * len(probe_splits(64, (32, 32))), 20

    straight = ShareSolver(64, 2, every=every, warm_up=0)
    ranks = Ranks([RankTiming(0.001, 0.001), RankTiming(0.002, 0.002)], 0.05)
    run(straight, ranks, probes + every * blocks)
    resumed = ShareSolver(64, 2, every=every, warm_up=0)
    resumed.load(json.loads(json.dumps(straight.state())))
    for _ in range(30 * every):
        assert resumed.shares == straight.shares
        ranks.lines[0] = RankTiming(0.001, ranks.lines[0].per_sample_s * 1.003)  # rank 0 becomes slower and slower
        seconds = ranks.take(straight.shares)
        assert resumed.observe(seconds) == straight.observe(seconds)
    assert resumed.state() == straight.state()


@pytest.mark.parametrize("other", [ShareSolver(65, 2), ShareSolver(64, 3)])
def test_measurements_of_other_ranks_or_samples_are_not_used(other: ShareSolver) -> None:
    """The number of ranks or samples differs."""
    balance = ShareSolver(64, 2)
    run(balance, Ranks([RankTiming(0.0005, 0.001), RankTiming(0.0015, 0.003)]), 50)
    assert balance.shares == (48, 16)
    before = other.state()
    other.load(balance.state())
    assert other.state() == before
    fresh = ShareSolver(64, 2)
    fresh.load(ShareSolver(64, 2).state())
    assert fresh.ahead(2) != fresh.current, "no times are known yet, so the solver must probe"


def test_one_rank_has_nothing_to_balance() -> None:
    balance = ShareSolver(32, 1)
    assert run(balance, Ranks([RankTiming(0.0, 0.001)]), 100) == []
    assert balance.shares == (32,)
