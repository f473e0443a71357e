"""Statistics of load balancing: the fitted line, its errors, and when a change of speed or a gain counts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from runner.workload.share_solver import (
    MAX_BLOCKS,
    MAX_COUNTS,
    MEDIAN_ERROR,
    PROBE_ROUNDS,
    CountTiming,
    Decision,
    LineFit,
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

CLOSE = allowed(torch.float64, 12, growth=300**2)
EVERY = 4


# ---------------------------------------------------------------- the fit


def timings_of(*points: tuple[int, float, int]) -> list[CountTiming]:
    return [CountTiming(samples, seconds, num, 0.0) for samples, seconds, num in points]


def least_squares(timings: Sequence[CountTiming], noise: float, *, columns: Sequence[int]) -> tuple[Any, Any]:
    """Return the coefficients and the covariance of a relative least-squares fit in powers `columns` of the samples."""
    design = np.array([[timing.samples**power for power in columns] for timing in timings], dtype=np.float64)
    weights = np.diag([timing.num / timing.seconds**2 for timing in timings])
    inverse = np.linalg.inv(design.T @ weights @ design)
    seconds = np.array([timing.seconds for timing in timings])
    return inverse @ design.T @ weights @ seconds, inverse * (MEDIAN_ERROR * noise) ** 2


POINTS = [
    timings_of((8, 3.0, 3), (24, 4.0, 3)),
    timings_of((8, 3.0, 2), (16, 3.6, 20), (24, 4.0, 1), (40, 6.5, 7)),
    timings_of((1, 0.011, 5), (300, 0.4, 9), (150, 0.19, 3)),
]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("timings", POINTS, ids=len)
def test_cost_model_and_errors_equal_weighted_least_squares(timings: list[CountTiming], noise: float) -> None:
    fitted = fit_line(timings, noise)
    (fixed, per_sample), covariance = least_squares(timings, noise, columns=(0, 1))
    assert fitted.line.fixed_s == pytest.approx(fixed, rel=CLOSE)
    assert fitted.line.per_sample_s == pytest.approx(per_sample, rel=CLOSE)
    for samples in (1, 20, 400):
        row = np.array([1.0, samples])
        error = math.sqrt(row @ covariance @ row)
        assert fitted.error(samples) == pytest.approx(error, rel=1e3 * CLOSE)
        predicted = fixed + per_sample * samples
        assert fitted.line.seconds(samples) == pytest.approx(predicted, rel=CLOSE)
        for errors in (-2.5, 0.0, 1.0):
            assert fitted.seconds(samples, errors) == pytest.approx(predicted + errors * error, rel=1e3 * CLOSE)


@pytest.mark.parametrize(
    ("timings", "power"),
    [
        (timings_of((8, 3.0, 3)), 1),
        # a fitted line would have a negative fixed time and a negative time per sample
        (timings_of((8, 1.0, 3), (16, 9.0, 3)), 1),
        (timings_of((8, 3.0, 3), (16, 2.0, 5)), 0),  # and a negative time per sample
    ],
    ids=["one count", "fixed time 0", "time per sample 0"],
)
def test_a_cost_model_with_one_term_fits_this_term(timings: list[CountTiming], power: int) -> None:
    fitted = fit_line(timings, 0.1)
    (coefficient,), ((variance,),) = least_squares(timings, 0.1, columns=(power,))
    expected = RankTiming(coefficient, 0.0) if power == 0 else RankTiming(0.0, coefficient)
    assert fitted.line.fixed_s == pytest.approx(expected.fixed_s, rel=CLOSE)
    assert fitted.line.per_sample_s == pytest.approx(expected.per_sample_s, rel=CLOSE)
    for samples in (1, 20):
        assert fitted.error(samples) == pytest.approx(math.sqrt(variance) * samples**power, rel=CLOSE)


def test_a_variance_made_negative_by_rounding_is_zero() -> None:
    assert LineFit(RankTiming(1.0, 1.0), (-1e-20, 0.0, 0.0)).error(5) == 0.0


def test_times_are_summarized_by_median_and_spread() -> None:
    block = [UpdateTimes((8, 0), (second, 5.0)) for second in (2.0, 2.2, 1.0, 1.9, 9.0)]
    block += [UpdateTimes((16, 4), (4.0, 3.0)), UpdateTimes((16, 4), (4.0, 0.0))]
    first, second = median_timings(block, 0)
    assert (first.samples, first.seconds, first.num) == (8, 2.0, 5)
    assert first.noise == pytest.approx(1.4826 * 0.2 / 2.0, rel=CLOSE)  # deviations 0, 0.2, 1, 0.1, 7
    assert second == CountTiming(16, 4.0, 2, 0.0)
    assert [(timing.samples, timing.num) for timing in median_timings(block, 1)] == [(4, 2)], "0 samples have no time"
    assert median_timings([UpdateTimes((8,), (0.0,))], 0) == [CountTiming(8, 0.0, 1, 0.0)]


# ---------------------------------------------------------------- the fastest shares


def test_no_split_of_few_samples_is_faster_than_the_solution() -> None:
    kinds = [RankTiming(fixed, per_sample) for fixed in (0.0, 1.0) for per_sample in (0.0, 0.5, 3.0)]
    for lines in product(kinds, repeat=2):
        for total in (2, 7):
            shares = fastest_shares(total, lines)
            splits = [(n, total - n) for n in range(1, total)]
            assert shares in splits
            assert slowest_seconds(lines, shares) == min(slowest_seconds(lines, split) for split in splits)


def test_three_ranks_have_the_fastest_shares() -> None:
    lines = [RankTiming(0.0, 1.0), RankTiming(2.0, 1.0), RankTiming(0.0, 4.0)]
    assert fastest_shares(12, lines) == (6, 5, 1)


# ---------------------------------------------------------------- probing


def test_probes_alternate_between_large_and_small_shares() -> None:
    assert probe_splits(32, (16, 16)) == [(24, 8), (8, 24)]
    assert probe_splits(32, (8, 8, 8, 8)) == [(12, 4, 12, 4), (4, 12, 4, 12)]
    assert probe_splits(30, (20, 10)) == [(26, 4), (12, 18)]


def test_few_samples_are_probed_with_up_to_six_splits() -> None:
    splits = probe_splits(3, (1, 1, 1))
    assert splits == [(1, 1, 1)] * 2, "no other split is possible"
    for size in range(2, 12):
        assert len(probe_splits(size + 1, (2, *[1] * (size - 1)))) <= 6
    splits = probe_splits(5, (2, 1, 1, 1))
    assert all(len({split[rank] for split in splits}) == 2 for rank in range(4)), splits


@pytest.mark.parametrize(
    "seconds", [(math.nan, 1.0), (math.inf, 1.0), (0.0, 1.0), (-1.0, 1.0), (1.0, math.inf)], ids=str
)
def test_invalid_times_alone_lead_to_no_decision(seconds: tuple[float, float]) -> None:
    solver = ShareSolver(32, 2, warm_up=0)
    assert [solver.observe(seconds) for _ in range(40)] == [None] * 40
    assert solver.lines == ()


def test_a_decision_needs_a_time_of_each_rank() -> None:
    """A rank need not have a time in each update."""
    solver = ShareSolver(4, 2, warm_up=0, every=EVERY)
    num_probes = len(probe_splits(4, (2, 2))) * PROBE_ROUNDS
    assert [solver.observe((1.0, 0.0), (4, 0)) for _ in range(num_probes + 3)] == [None] * (num_probes + 3)
    assert isinstance(solver.observe((1.0, 1.0), (2, 2)), Decision)


def test_probing_lasts_three_rounds_after_the_warm_up() -> None:
    solver = ShareSolver(32, 2, warm_up=2)
    expected = [(16, 16)] * 2 + [(24, 8), (8, 24)] * 3 + [(16, 16)]
    assert [solver.ahead(number) for number in range(9)] == expected
    decisions = [solver.observe((1.0, 1.0)) for _ in range(8)]
    assert [decision is not None for decision in decisions] == [False] * 7 + [True]


def test_the_first_shares_are_as_equal_as_possible() -> None:
    assert ShareSolver(33, 2).current == (17, 16)


# ---------------------------------------------------------------- settled ranks


def timed_solver(
    per_sample_s: Sequence[float],
    *,
    total: int = 200,
    noise: float = 0.0,
    gained: bool = False,
    counts: Sequence[int] = (50, 150),
    **options: Any,
) -> ShareSolver:
    """Return a solver of ranks without fixed times that it has often timed at these sample counts."""
    size = len(per_sample_s)
    solver = ShareSolver(total, size, every=EVERY, warm_up=0, **options)
    ranks = [
        {"timings": [[count, count * seconds, 1000, noise] for count in counts], "noises": [noise]}
        for seconds in per_sample_s
    ]
    current = [total // size] * size
    solver.load({"total": total, "current": current, "known": True, "ranks": ranks, "gained": gained})
    return solver


def block(solver: ShareSolver, per_sample_s: Sequence[float], samples: Sequence[int] | None = None) -> Decision | None:
    """Observe the updates of a block, of which only the last one may lead to a decision."""
    for number in range(EVERY):
        shares = solver.shares if samples is None else samples
        decision = solver.observe([each * n for each, n in zip(per_sample_s, shares, strict=True)], samples)
        assert decision is None or number == EVERY - 1
    return decision


def test_a_clear_gain_changes_the_shares_immediately() -> None:
    solver = timed_solver([1.0, 1.5])
    decision = block(solver, [1.0, 1.5])
    assert decision is not None
    assert decision.shares == solver.current == (120, 80)
    assert [decision.old_s, decision.new_s] == pytest.approx([150.0, 120.0], rel=CLOSE)
    assert block(solver, [1.0, 1.5]) is None


@pytest.mark.parametrize("gained", [False, True])
def test_a_small_gain_changes_the_shares_if_found_twice(gained: bool) -> None:
    solver = timed_solver([1.0, 1.08], gained=gained)
    decisions = [block(solver, [1.0, 1.08]) for _ in range(3)]
    assert [decision is not None for decision in decisions] == (
        [True, False, False] if gained else [False, True, False]
    )
    assert solver.current == (104, 96)
    assert not solver.state()["gained"]


def test_a_small_gain_that_vanishes_is_not_confirmed_later() -> None:
    solver = timed_solver([1.0, 1.08])
    assert block(solver, [1.0, 1.08]) is None
    assert solver.state()["gained"]
    for _ in range(4):
        assert block(solver, [1.0, 1.0]) is None
    assert not solver.state()["gained"]


@pytest.mark.parametrize(("threshold", "changes"), [(0.03, True), (0.04, False)])
def test_a_gain_below_the_threshold_counts_as_none(threshold: float, changes: bool) -> None:
    solver = timed_solver([1.0, 1.08], threshold=threshold, gained=True)
    assert (block(solver, [1.0, 1.08]) is not None) == changes
    assert not solver.state()["gained"]


def test_a_gain_within_timing_errors_counts_as_none() -> None:
    """With 1000 times of noise 0.4 per count and rank, predictions have an error of 1.6 %; 2.5 errors are 4 %."""
    for noise, changes in ((0.1, True), (0.6, False)):
        solver = timed_solver([1.0, 1.08], noise=noise, gained=True)
        assert (block(solver, [1.0, 1.08]) is not None) == changes, noise


@pytest.mark.parametrize("first", [True, False])
def test_the_first_solution_needs_a_gain_above_the_threshold(first: bool) -> None:
    solver = ShareSolver(200, 2, warm_up=0, threshold=0.03 if first else 0.04)
    for _ in range(6):
        decision = solver.observe([n * each for n, each in zip(solver.shares, (1.0, 1.08), strict=True)])
    assert decision is not None
    assert decision.shares == solver.current == ((104, 96) if first else (100, 100))
    assert decision.old_s == pytest.approx(108.0, rel=CLOSE)
    assert decision.new_s == pytest.approx(104.0 if first else 108.0, rel=CLOSE)
    assert ("->" in decision.reason) == first


# ---------------------------------------------------------------- changes of speed


def rescaled(solver: ShareSolver, rank: int = 1) -> float:
    """Return the factor by which the old time of 150 samples was changed."""
    timings = solver.state()["ranks"][rank]["timings"]
    return next(float(seconds) / 150.0 for samples, seconds, *_ in timings if samples == 150)


@pytest.mark.parametrize(
    ("noise", "factor", "counts"),
    [
        (0.0, 1.04, False), (0.0, 1.06, True), (0.0, 0.96, False), (0.0, 0.94, True),
        (0.1, 1.1, False), (0.1, 1.3, True), (0.1, 0.9, False), (0.1, 0.7, True),
    ],
)  # fmt: skip
def test_a_change_of_speed_must_be_large_and_significant(noise: float, factor: float, counts: bool) -> None:
    """The median of 4 times with noise 0.1 has an error of 0.1 x 1.2533 / 2 = 6.3 %; 3 errors are 19 %."""
    solver = timed_solver([1.0, 1.0], noise=noise)
    block(solver, [1.0, factor])
    assert rescaled(solver) == pytest.approx(factor if counts else 1.0, rel=CLOSE)
    assert rescaled(solver, 0) == 1.0


def test_times_before_a_change_of_speed_have_less_weight() -> None:
    solver = timed_solver([1.0, 1.0])
    block(solver, [1.0, 2.0])
    first, second = solver.state()["ranks"]
    assert [timing[2] for timing in first["timings"]] == [1000, 1000, EVERY]
    assert [timing[2] for timing in second["timings"]] == [PROBE_ROUNDS, PROBE_ROUNDS, EVERY]


def test_speed_is_measured_at_the_most_frequent_sample_count() -> None:
    """One slow update with another sample count is not a change of speed."""
    solver = timed_solver([1.0, 1.0])
    for _ in range(EVERY - 1):
        solver.observe((100.0, 100.0), (100, 100))
    solver.observe((90.0, 440.0), (90, 110))
    assert rescaled(solver) == 1.0
    solver = timed_solver([1.0, 1.0])
    for _ in range(EVERY - 1):
        solver.observe((100.0, 200.0), (100, 100))
    solver.observe((110.0, 90.0), (110, 90))
    assert rescaled(solver) == pytest.approx(2.0, rel=CLOSE)


@pytest.mark.parametrize(
    ("factors", "word"),
    [((1.0, 2.0), "rank 1 became 2.0"), ((0.25, 1.0), "rank 0 became 4.0"), ((2.0, 0.4), "rank 1 became 2.5")],
)
def test_a_decision_names_the_largest_change_of_speed(factors: tuple[float, float], word: str) -> None:
    decision = block(timed_solver([1.0, 1.0]), factors)
    assert decision is not None
    assert word in decision.reason
    assert ("slower" in decision.reason) == (factors == (1.0, 2.0))


# ---------------------------------------------------------------- what is kept


def test_only_the_latest_blocks_and_sample_counts_are_kept() -> None:
    solver = timed_solver([1.0, 1.0], counts=(100,))
    for _ in range(MAX_BLOCKS + 3):
        block(solver, [1.0, 1.0], (100, 100))
    (*_, oldest), newest = solver.state()["ranks"][0]["timings"][0], solver.state()["ranks"][0]["timings"]
    assert len(newest) == MAX_BLOCKS
    assert oldest == 0.0
    for number in range(MAX_COUNTS + 2):
        block(solver, [1.0, 1.0], (99 - number, 101 + number))
    counts = [timing[0] for timing in solver.state()["ranks"][0]["timings"]]
    assert counts == [99 - number for number in range(2, MAX_COUNTS + 2)]


def test_a_sample_count_timed_again_becomes_the_newest() -> None:
    solver = timed_solver([1.0, 1.0], counts=(50, 150))
    block(solver, [1.0, 1.0], (50, 150))
    block(solver, [1.0, 1.0], (100, 100))
    assert [timing[0] for timing in solver.state()["ranks"][0]["timings"]] == [150, 50, 50, 100]


def test_noise_is_estimated_from_blocks_with_several_times() -> None:
    solver = timed_solver([1.0, 1.0])
    seconds = (90.0, 100.0, 110.0, 100.0, 120.0)[:EVERY]
    for each in seconds:
        solver.observe((each, 100.0), (100, 100))
    noises = [rank["noises"] for rank in solver.state()["ranks"]]
    assert noises == [[0.0, pytest.approx(1.4826 * 0.05, rel=CLOSE)], [0.0, 0.0]]
    for _ in range(PROBE_ROUNDS):
        solver.observe((100.0, 100.0), (100, 100))
    solver.observe((50.0, 150.0), (50, 150))
    assert [len(rank["noises"]) for rank in solver.state()["ranks"]] == [2, 2], "there are too few times of each count"
    for _ in range(MAX_BLOCKS):
        block(solver, [1.0, 1.0])
    assert [len(rank["noises"]) for rank in solver.state()["ranks"]] == [MAX_BLOCKS] * 2


def test_the_state_determines_all_decisions() -> None:
    """A solver with the same state takes the same decisions."""
    solver = timed_solver([1.0, 1.08, 1.3], total=300, noise=0.05)
    block(solver, [1.0, 1.1, 1.3])
    state = json.loads(json.dumps(solver.state()))
    again = ShareSolver(300, 3, every=EVERY, warm_up=0)
    again.load(state)
    assert again.state() == state
    assert again.lines == solver.lines
    assert block(again, [1.0, 1.2, 1.3]) == block(solver, [1.0, 1.2, 1.3])


@pytest.mark.parametrize(
    ("other", "fits"),
    [(ShareSolver(200, 2), True), (ShareSolver(201, 2), False), (ShareSolver(200, 3), False)],
)
def test_times_for_other_samples_or_ranks_are_not_used(other: ShareSolver, fits: bool) -> None:
    other.load(timed_solver([1.0, 2.0]).state())
    assert bool(other.lines) == fits
    assert (other.ahead(3) == other.current) == fits


# ---------------------------------------------------------------- reasons


@pytest.mark.parametrize(
    ("per_sample_s", "ratio"),
    [((1.0, 1.04), None), ((1.0, 1.12), "1.12"), ((1.0, 1.2), "1.2"), ((3.0, 1.0), "3.0"), ((1.0, 1.0, 2.0), "2.0")],
    ids=str,
)
def test_the_reason_states_the_ratio_of_slowest_to_fastest_rank(
    per_sample_s: tuple[float, ...], ratio: str | None
) -> None:
    total = 200 * len(per_sample_s)
    decision = block(timed_solver(per_sample_s, total=total, gained=True, threshold=0.001), per_sample_s)
    assert decision is not None
    found = re.search(r"rank (\d) takes ([\d.]+) times", decision.reason)
    assert (found[2] if found else None) == ratio
    if found:
        assert int(found[1]) == max(range(len(per_sample_s)), key=per_sample_s.__getitem__)
    assert ("as rank 0" in decision.reason) == (len(per_sample_s) == 3)


@pytest.mark.parametrize(
    ("scale", "shown"), [(1e-3, "150 -> 120 ms"), (1e-4, "15.0 -> 12.0 ms"), (0.999e-3 / 1.5, "99.9 -> 79.9 ms")]
)
def test_milliseconds_are_printed_with_three_digits(scale: float, shown: str) -> None:
    decision = block(timed_solver([scale, 1.5 * scale]), [scale, 1.5 * scale])
    assert decision is not None
    assert shown in decision.reason
    assert "100+100 -> 120+80" in decision.reason
