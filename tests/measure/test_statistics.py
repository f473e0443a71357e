"""Laws of what is concluded from blocks that took turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runner.measure.statistics import CONFIDENCE, Ratio, paired

Draw = Callable[[np.random.Generator, int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def quiet(rng: np.random.Generator, num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return rng.normal(0.0, 0.03, num)


def spiky(rng: np.random.Generator, num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One block in seven is hit by another process."""
    return rng.normal(0.0, 0.01, num) + (rng.random(num) < 0.15) * rng.exponential(0.3, num)


def simulated(seed: int, num: int, gain: float, noise: Draw) -> Ratio:
    """Return the ratio of two settings on a machine whose speed wanders, each block with noise of its own."""
    rng = np.random.default_rng(seed)
    speed = np.cumsum(rng.normal(0.0, 0.05, num))
    slow, fast = (np.exp(speed + noise(rng, num)) for _ in range(2))
    return paired((10 * gain * slow).tolist(), (10 * fast).tolist(), seed)


@pytest.mark.parametrize("noise", [quiet, spiky])
@pytest.mark.parametrize("num", [6, 10, 20])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(num: int, noise: Draw) -> None:
    found = [simulated(seed, num, 1.3, noise) for seed in range(400)]

    share = np.mean([ratio.low <= 1.3 <= ratio.high for ratio in found])

    assert 0.90 <= share <= 0.98, f"{share} instead of {CONFIDENCE}"


@pytest.mark.parametrize("noise", [quiet, spiky])
@pytest.mark.parametrize("num", [3, 4, 5])
def test_the_interval_of_few_rounds_is_as_wide_as_they_leave_it_open(num: int, noise: Draw) -> None:
    """That the budget ends a trial early makes it no surer; heavy tails may make it wider than need be."""
    found = [simulated(seed, num, 1.3, noise) for seed in range(400)]

    assert np.mean([ratio.low <= 1.3 <= ratio.high for ratio in found]) >= 0.92
    assert all(ratio.low <= ratio.middle <= ratio.high for ratio in found)


@pytest.mark.parametrize("noise", [quiet, spiky])
def test_a_gain_of_a_third_is_found_and_no_gain_is_not(noise: Draw) -> None:
    planted = [simulated(seed, 15, 1.3, noise) for seed in range(40)]
    nothing = [simulated(seed, 15, 1.0, noise) for seed in range(100)]

    assert sum(ratio.verdict == "better" for ratio in planted) >= 38
    assert sum(ratio.verdict == "no clear change" for ratio in nothing) >= 95


def test_what_is_slower_is_found_to_be() -> None:
    assert simulated(0, 15, 0.8, quiet).verdict == "worse"


def test_a_wandering_machine_does_not_widen_the_interval() -> None:
    """The quotient within a round knows nothing of what slows both of it down."""
    rng = np.random.default_rng(0)
    speed = np.exp(np.cumsum(rng.normal(0.0, 0.3, 12)))

    found = paired((13 * speed).tolist(), (10 * speed).tolist())

    assert found.middle == pytest.approx(1.3)
    assert found.high - found.low < 1e-9


def test_the_same_blocks_give_the_same_interval() -> None:
    assert simulated(3, 8, 1.1, spiky) == simulated(3, 8, 1.1, spiky)


def test_two_blocks_say_nothing_of_a_spread() -> None:
    found = paired([10.0, 10.0], [5.0, 5.0])

    assert found.middle == pytest.approx(2.0)
    assert found.verdict == "no clear change"
    assert not found.is_narrow


def test_rounds_end_by_the_width_of_the_interval_alone() -> None:
    assert Ratio(1.0, 0.99, 1.01, 9).is_narrow
    assert not Ratio(1.5, 1.2, 1.8, 9).is_narrow, "it leaves 1 out, and is wide"
    assert Ratio(3.0, 2.85, 3.15, 9).is_narrow, "threefold need not be known to two percent"


def test_a_change_that_is_sure_but_tiny_is_no_change() -> None:
    assert Ratio(1.005, 1.004, 1.006, 60).verdict == "no clear change"


def test_a_ratio_reads_as_a_change_in_percent() -> None:
    assert str(Ratio(1.34, 1.31, 1.37, 20)) == "+34 % [31, 37]"
    assert str(Ratio(0.9, 0.88, 0.93, 20)) == "-10 % [-12, -7]"
