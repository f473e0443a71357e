"""Statistics of interleaved blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from runner.tools.measure.comparison_result import Block, ComparisonResult, Variant, VariantResult
from runner.tools.measure.statistics import (
    CONFIDENCE,
    ProcessSpread,
    Ratio,
    effective_processes,
    estimate_process_spread,
    paired_ratio,
    student_quantile,
)
from tests.rounding import allowed

Draw = Callable[[np.random.Generator, int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def quiet(rng: np.random.Generator, num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return rng.normal(0.0, 0.03, num)


def spiky(rng: np.random.Generator, num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return noise in which another process delays one block in seven."""
    return rng.normal(0.0, 0.01, num) + (rng.random(num) < 0.15) * rng.exponential(0.3, num)


def simulated(seed: int, num: int, gain: float, noise: Draw) -> Ratio:
    """Return the ratio of two settings on a machine whose speed drifts, with independent noise for each block."""
    rng = np.random.default_rng(seed)
    speed = np.cumsum(rng.normal(0.0, 0.05, num))
    slow, fast = (np.exp(speed + noise(rng, num)) for _ in range(2))
    return paired_ratio((10 * gain * slow).tolist(), (10 * fast).tolist(), seed)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("noise", [quiet, spiky])
@pytest.mark.parametrize("num", [6, 10, 20])
def test_confidence_intervals_have_their_coverage(num: int, noise: Draw) -> None:
    result = [simulated(seed, num, 1.3, noise) for seed in range(400)]

    share = np.mean([ratio.low <= 1.3 <= ratio.high for ratio in result])

    assert 0.90 <= share <= 0.98, f"{share} instead of {CONFIDENCE}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("noise", [quiet, spiky])
@pytest.mark.parametrize("num", [3, 4, 5])
def test_the_interval_of_few_rounds_is_wide(num: int, noise: Draw) -> None:
    """A trial that the budget ends early must not seem more certain. Heavy tails may make the interval too wide."""
    result = [simulated(seed, num, 1.3, noise) for seed in range(400)]

    assert np.mean([ratio.low <= 1.3 <= ratio.high for ratio in result]) >= 0.92
    assert all(ratio.low <= ratio.middle <= ratio.high for ratio in result)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("noise", [quiet, spiky])
def test_a_gain_of_30_percent_is_detected(noise: Draw) -> None:
    planted = [simulated(seed, 15, 1.3, noise) for seed in range(40)]
    nothing = [simulated(seed, 15, 1.0, noise) for seed in range(100)]

    assert sum(ratio.verdict == "better" for ratio in planted) >= 38
    assert sum(ratio.verdict == "no clear change" for ratio in nothing) >= 95


def test_a_slowdown_is_detected() -> None:
    assert simulated(0, 15, 0.8, quiet).verdict == "worse"


def test_drift_of_the_machine_does_not_widen_the_interval() -> None:
    """A slowdown of both settings cancels in the ratio of a round."""
    rng = np.random.default_rng(0)
    speed = np.exp(np.cumsum(rng.normal(0.0, 0.3, 12)))

    result = paired_ratio((13 * speed).tolist(), (10 * speed).tolist())

    assert result.middle == pytest.approx(1.3)
    assert result.high - result.low <= allowed(torch.float64, 12, growth=4)  # log, mean, exp, quantile


def test_the_same_blocks_give_the_same_interval() -> None:
    assert simulated(3, 8, 1.1, spiky) == simulated(3, 8, 1.1, spiky)


def test_two_blocks_give_no_estimate_of_the_spread() -> None:
    result = paired_ratio([10.0, 10.0], [5.0, 5.0])

    assert result.middle == pytest.approx(2.0)
    assert result.verdict == "no clear change"
    assert not result.is_narrow


def test_only_the_width_of_the_interval_ends_the_rounds() -> None:
    assert Ratio(1.0, 0.99, 1.01, 9).is_narrow
    assert not Ratio(1.5, 1.2, 1.8, 9).is_narrow, "an interval that excludes 1 may be wide"
    assert Ratio(3.0, 2.85, 3.15, 9).is_narrow, "a factor of three need not be known within 2 %"


def test_a_significant_but_tiny_change_counts_as_no_change() -> None:
    assert Ratio(1.005, 1.004, 1.006, 60).verdict == "no clear change"


def test_a_ratio_is_formatted_as_a_change_in_percent() -> None:
    assert str(Ratio(1.34, 1.31, 1.37, 20)) == "+34 % [31, 37]"
    assert str(Ratio(0.9, 0.88, 0.93, 20)) == "-10 % [-12, -7]"


def in_processes(seed: int, num_cells: int, lives: int, sigma: float, noise: Draw, each: int = 8) -> ComparisonResult:
    """Return identical variants, of which each process is slightly faster or slower in all of its blocks."""
    rng = np.random.default_rng(seed)
    speed = np.cumsum(rng.normal(0.0, 0.05, each * lives))
    cells = []
    for at in range(num_cells):
        own = np.repeat(rng.normal(0.0, sigma, lives), each)
        blocks = 10 * np.exp(speed + own + noise(rng, each * lives))
        cells.append(
            VariantResult(
                Variant(f"variant {at}"),
                {n: Block(ms, process=1 + 100 * at + n // each) for n, ms in enumerate(blocks.tolist())},
            )
        )
    return ComparisonResult(cells, "interleaved")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("noise", [quiet, spiky])
@pytest.mark.parametrize("num_cells", [2, 5])
@pytest.mark.parametrize(
    ("sigma", "lives", "each"),
    [(0.01, 1, 8), *itertools.product([0.005, 0.014], [2, 4], [8]), (0.005, 5, 20), (0.014, 5, 20)],
)
def test_the_interval_includes_the_spread_between_processes(
    sigma: float, lives: int, each: int, num_cells: int, noise: Draw
) -> None:
    result = [
        trials.ratio(trials.variants[1])
        for trials in (in_processes(seed, num_cells, lives, sigma, noise, each) for seed in range(200))
    ]

    assert np.mean([ratio.low <= 1 <= ratio.high for ratio in result if ratio]) >= 0.92
    assert np.mean([ratio.verdict == "no clear change" for ratio in result if ratio]) >= 0.97


@pytest.mark.slow
def test_ignoring_process_spread_makes_intervals_too_narrow() -> None:
    made = [in_processes(seed, 5, 2, 0.014, spiky) for seed in range(200)]
    for trials in made:
        for cell in trials.variants:
            cell.blocks = {number: Block(block.ms) for number, block in cell.blocks.items()}
    result = [trials.ratio(trials.variants[1]) for trials in made]

    assert np.mean([ratio.low <= 1 <= ratio.high for ratio in result if ratio]) < 0.8


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("lives", [2, 3, 6])
@pytest.mark.parametrize("num_cells", [2, 3, 9])
def test_a_known_spread_between_processes_is_estimated_correctly(num_cells: int, lives: int) -> None:
    still: Draw = lambda rng, num: rng.normal(0.0, 1e-4, num)  # noqa: E731
    result = [in_processes(seed, num_cells, lives, 0.02, still).measured_spread for seed in range(300)]

    total = ProcessSpread(sum(each.squares for each in result), sum(each.freedom for each in result))
    assert total.sigma == pytest.approx(0.02, rel=0.12)
    variances = np.array([each.sigma**2 for each in result]) / total.sigma**2
    assert 2 / np.var(variances) == pytest.approx(result[0].freedom, rel=0.5), "degrees of freedom match the variance"


def test_process_spread_is_unknown_without_restarts() -> None:
    assert in_processes(0, 4, 1, 0.02, quiet).measured_spread == ProcessSpread(0.0, 0.0)
    assert estimate_process_spread([]) == ProcessSpread(0.0, 0.0)


def test_the_interval_is_valid_if_only_some_variants_restart() -> None:
    """One of three variants keeps its process. The spread is estimated from the two that restart."""
    squares = freedom = 0.0
    for seed in range(300):
        trials = in_processes(seed, 3, 2, 0.02, lambda rng, num: rng.normal(0.0, 1e-4, num))
        kept = trials.variants[2]
        rng = np.random.default_rng(seed)
        speed = np.exp(np.cumsum(rng.normal(0.0, 0.05, 16)))
        kept.blocks = {number: Block(10 * float(speed[number]), process=7) for number in range(16)}
        squares += trials.measured_spread.squares
        freedom += trials.measured_spread.freedom

    assert ProcessSpread(squares, freedom).sigma == pytest.approx(0.02, rel=0.12)


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (4, 2.776), (6, 2.447), (12, 2.179), (60, 2.000)])
def test_quantiles_of_the_t_distribution_match_published_tables(freedom: float, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.01)


def test_an_interrupted_round_keeps_earlier_rounds() -> None:
    trials = in_processes(0, 3, 2, 0.02, quiet)
    whole = trials.measured_spread
    trials.variants[0].blocks[16] = Block(10.0, process=2)

    assert trials.measured_spread == whole


def test_a_variant_with_few_blocks_is_ignored() -> None:
    trials = in_processes(0, 4, 2, 0.02, quiet)
    three = ComparisonResult(trials.variants[:3], "interleaved").measured_spread
    for number in range(10, 16):
        del trials.variants[3].blocks[number]

    assert trials.measured_spread == three


def test_a_block_of_zero_duration_is_ignored() -> None:
    trials = in_processes(0, 3, 2, 0.01, quiet)
    trials.variants[1].blocks[3] = Block(0.0, process=101)

    assert trials.spread.sigma < 0.1


def test_a_process_with_few_blocks_counts_less() -> None:
    assert effective_processes([1, 1, 2, 2]) == 2
    assert effective_processes([1, 1, 1, 1]) == 1
    assert effective_processes([1, 1, 1, 2]) == pytest.approx(1.6)
