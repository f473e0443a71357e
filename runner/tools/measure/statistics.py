"""Compare two variants by interleaved blocks of updates: a ratio, its confidence interval, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
NEGLIGIBLE = 0.01  # smaller changes are no gain, even if they are significant
Verdict = Literal["better", "worse", "no clear change"]


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the baseline: 1.3 is 30 % more updates in the same time.

    low, high  confidence interval
    num        number of rounds
    """

    middle: float
    low: float = 0.0
    high: float = math.inf
    num: int = 0

    @property
    def verdict(self) -> Verdict:
        """Return whether it is faster; "no clear change" if the interval contains 1 or a value close to 1."""
        if self.low > 1 + NEGLIGIBLE:
            return "better"
        if self.high < 1 - NEGLIGIBLE:
            return "worse"
        return "no clear change"

    @property
    def is_narrow(self) -> bool:
        """True if the interval is so narrow that more rounds would add little.

        Only the width counts. Stopping as soon as the interval excludes 1 would inflate false positives, because each
        round is another test.
        """
        return (self.high - self.low) / 2 <= max(NARROW_HALF_WIDTH, NARROW_SHARE_OF_GAIN * abs(self.middle - 1))

    def scale(self, factor: float) -> Ratio:
        """Return the ratio for updates that do `factor` times as much work as the baseline's."""
        return Ratio(self.middle * factor, self.low * factor, self.high * factor, self.num)

    def __str__(self) -> str:
        """Return the change in percent with its interval: `+34 % [31, 37]`."""
        middle, low, high = (100 * (value - 1) for value in (self.middle, self.low, self.high))
        return f"{middle:+.0f} % [{low:.0f}, {high:.0f}]"


@dataclass(frozen=True)
class ProcessSpread:
    """Variation between identical processes; `+` pools two estimates.

    squares  sum of squared deviations of the logarithm of an update's time
    freedom  degrees of freedom
    """

    squares: float
    freedom: float

    def __add__(self, other: ProcessSpread) -> ProcessSpread:
        return ProcessSpread(self.squares + other.squares, self.freedom + other.freedom)

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the logarithm of an update's time between processes."""
        return math.sqrt(self.squares / self.freedom)

    def half_width(self, *processes: float) -> float:
        """Return half the width of the confidence interval of a ratio of means, on a log scale.

        processes  number of processes in each mean
        """
        return student_quantile(self.freedom) * self.sigma * math.sqrt(sum(1 / num for num in processes))


def student_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, accurate to 1 % for at least two degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom == 2:
        return 4.302653  # where the series below is 3 % off
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


Array = np.ndarray[tuple[int], np.dtype[np.float64]]
Blocks = Mapping[int, float]  # round -> milliseconds of an update
Processes = Mapping[int, int]  # round -> number of the process that ran the block


def estimate_process_spread(variants: Sequence[tuple[Blocks, Processes]]) -> ProcessSpread:
    """Estimate the spread between identical processes from the changes at restarts of variants.

    Consecutive rounds with the same processes form a piece. The level of a variant in a piece is the median of its
    distance from the median of all variants. The change of the level at a restart has the variance of two processes
    plus the variance of the two medians. The latter is not subtracted, so the estimate is conservative. Variants with
    few blocks before or after a restart are excluded.
    """
    numbers = sorted(set().union(*(blocks for blocks, _ in variants)) if variants else [])
    pieces: list[list[int]] = []
    last: dict[int, int] = {}
    for number in numbers:
        active = {index: processes[number] for index, (_, processes) in enumerate(variants) if number in processes}
        if not pieces or any(last[index] != process for index, process in active.items() if index in last):
            pieces.append([])
        pieces[-1].append(number)
        last |= active
    squares = freedom = 0.0
    for before, after in pairwise(pieces):
        both = [variant for variant in variants if variant[0].keys() & before and variant[0].keys() & after]
        while True:
            then, now = ([at for at in part if all(at in variant[0] for variant in both)] for part in (before, after))
            if len(both) < 2 or min(len(then), len(now)) >= MIN_BLOCKS:
                break
            both.remove(min(both, key=lambda variant: min(len(variant[0].keys() & part) for part in (before, after))))
        new = sum(processes[then[-1]] != processes[now[0]] for _, processes in both) if len(both) > 1 else 0
        if new:
            changes = _levels(both, now) - _levels(both, then)
            squares += float(np.sum((changes - changes.mean()) ** 2)) / 2
            freedom += new * (1 - 1 / len(both))
    # A process between two restarts contributes to two changes, which lowers the degrees of freedom: the changes are
    # successive differences.
    # Source: von Neumann, Kent, Bellinson and Hart, The mean square successive difference, 1941.
    steps = len(pieces) - 1
    share = 2 * steps / (3 * steps - 1) if steps > 0 else 1.0
    return ProcessSpread(share * squares, share * freedom)


def _levels(variants: Sequence[tuple[Blocks, Processes]], rounds: Sequence[int]) -> Array:
    logs = np.log(np.maximum([[blocks[number] for number in rounds] for blocks, _ in variants], MIN_MS))
    return np.asarray(np.median(logs - np.median(logs, axis=0), axis=1), dtype=np.float64)


def effective_processes(processes: Sequence[int]) -> float:
    """Return the effective number of processes, given the process of each block (inverse Simpson index)."""
    counts = np.unique(processes, return_counts=True)[1]
    return float(counts.sum() ** 2 / np.sum(counts**2))


def paired_ratio(
    baseline_ms: Sequence[float], other_ms: Sequence[float], seed: int = 0, half_width: float = 0.0
) -> Ratio:
    """Return the speed of the other variant relative to the baseline, from blocks of the same rounds.

    A temporary slowdown of the machine affects both blocks of a round and cancels in their ratio; the median ignores
    rounds in which it affected only one. The interval is a smoothed bootstrap of the median (Silverman and Young,
    Biometrika 1987): with ten rounds, a plain bootstrap takes only ten values and is too narrow. With fewer than
    MIN_BOOTSTRAP_ROUNDS rounds, Student's interval is used.

    half_width  half the width of the confidence interval due to variation between processes, on a log scale
    """
    assert len(baseline_ms) == len(other_ms) > 0, "blocks are paired by round"
    logs = np.log(np.asarray(baseline_ms, dtype=np.float64) / np.asarray(other_ms, dtype=np.float64))
    middle = float(np.median(logs))
    if len(logs) < 3:  # the spread is unknown
        return Ratio(float(np.exp(middle)), 0.0, float("inf"), len(logs))
    if len(logs) < MIN_BOOTSTRAP_ROUNDS:
        t_half = STUDENT_QUANTILES[len(logs)] * float(np.std(logs, ddof=1)) / len(logs) ** 0.5
        mean = float(np.mean(logs))
        return _widen(middle, mean - t_half, mean + t_half, half_width, len(logs))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(logs)])))
    resampled = logs[rng.integers(0, len(logs), (RESAMPLES, len(logs)))]
    low, high = np.quantile(logs, [0.25, 0.75])
    sigma = float((high - low) / 1.349)  # a robust estimate of the standard deviation
    bandwidth = 0.5 * sigma * len(logs) ** -0.2
    resampled = resampled + bandwidth * rng.standard_normal(resampled.shape)
    resampled.sort(axis=1)  # three times as fast as np.median of each row, and the same numbers
    medians = (resampled[:, (len(logs) - 1) // 2] + resampled[:, len(logs) // 2]) / 2
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return _widen(middle, float(low), float(high), half_width, len(logs))


def _widen(middle: float, low: float, high: float, half_width: float, num: int) -> Ratio:
    """Return the ratio of these logarithms, with the interval widened by an independent uncertainty."""
    center = (low + high) / 2
    total = math.hypot((high - low) / 2, half_width)
    return Ratio(math.exp(middle), math.exp(center - total), math.exp(center + total), num)


# Spread that is assumed before any restart was measured: 1 %, with the weight of four degrees of freedom.
PRIOR_SPREAD = ProcessSpread(squares=4 * 0.01**2, freedom=4)
PRIOR_HALF_WIDTH = PRIOR_SPREAD.half_width(1, 1)  # for two variants with one process each
MIN_BLOCKS = 3  # blocks of a process that define its level
MIN_MS = 1e-6  # a clock with low resolution may report 0
MIN_BOOTSTRAP_ROUNDS = 6
STUDENT_QUANTILES = {3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of the t distribution, by the number of values
NARROW_HALF_WIDTH = 0.02  # absolute half width of a narrow interval
NARROW_SHARE_OF_GAIN = 0.1  # half width relative to the change, because +200 % need not be known to 2 %
