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
NEGLIGIBLE = 0.01  # a smaller change does not matter, however certain
Verdict = Literal["better", "worse", "no clear change"]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a setting is as the baseline: 1.3 is 30 % more updates in the same time.

    low, high  confidence interval of the true ratio
    num        rounds that it was computed from
    """

    middle: float
    low: float = 0.0
    high: float = math.inf
    num: int = 0

    @property
    def verdict(self) -> Verdict:
        """Return whether it is faster; unclear if the interval contains 1 or almost."""
        if self.low > 1 + NEGLIGIBLE:
            return "better"
        if self.high < 1 - NEGLIGIBLE:
            return "worse"
        return "no clear change"

    @property
    def is_narrow(self) -> bool:
        """True if more rounds would add little: the interval is narrow for what it decides.

        Only the width counts. Stopping as soon as the interval excludes 1 would find changes where there are none: each
        look is another chance of a false positive.
        """
        return (self.high - self.low) / 2 <= max(NARROW, NARROW_OF_GAIN * abs(self.middle - 1))

    def scaled(self, factor: float) -> Ratio:
        """Return the ratio if an update of it does `factor` times as much."""
        return Ratio(self.middle * factor, self.low * factor, self.high * factor, self.num)

    def __str__(self) -> str:
        """Return the change in percent with its interval: `+34 % [31, 37]`."""
        middle, low, high = (100 * (value - 1) for value in (self.middle, self.low, self.high))
        return f"{middle:+.0f} % [{low:.0f}, {high:.0f}]"


@dataclass(frozen=True)
class ProcessSpread:
    """Variation between identical processes: a sum of squares of logarithms.

    freedom  degrees of freedom; each adds the variance of one process. Two spreads are pooled by `+`
    """

    squares: float
    freedom: float

    def __add__(self, other: ProcessSpread) -> ProcessSpread:
        return ProcessSpread(self.squares + other.squares, self.freedom + other.freedom)

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the logarithm of an update's time between processes."""
        return math.sqrt(self.squares / self.freedom)

    def half(self, *processes: float) -> float:
        """Return half the width of the interval of a ratio of means over these numbers of processes, as a logarithm."""
        return student(self.freedom) * self.sigma * math.sqrt(sum(1 / num for num in processes))


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, within 1 % from three degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
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


def between(variants: Sequence[tuple[Blocks, Processes]]) -> ProcessSpread:
    """Return the spread between processes, by what changes when variants restart.

    Rounds with the same processes form a piece: each variant's level in it is the median of its distance from the
    others. When a variant continues in another process, its level changes by the variance of two processes, and by the
    noise of medians, which stays in: rather too wide than too narrow. Variants with few blocks before or after a
    restart are left out of it.
    """
    numbers = sorted(set().union(*(blocks for blocks, _ in variants)) if variants else [])
    pieces: list[list[int]] = []
    last: dict[int, int] = {}
    for number in numbers:
        playing = {at: made[number] for at, (_, made) in enumerate(variants) if number in made}
        if not pieces or any(last[at] != process for at, process in playing.items() if at in last):
            pieces.append([])
        pieces[-1].append(number)
        last |= playing
    squares = freedom = 0.0
    for before, after in pairwise(pieces):
        both = [each for each in variants if each[0].keys() & before and each[0].keys() & after]
        while True:
            then, now = ([at for at in part if all(at in each[0] for each in both)] for part in (before, after))
            if len(both) < 2 or min(len(then), len(now)) >= LEAST_BLOCKS:
                break
            both.remove(min(both, key=lambda each: min(len(each[0].keys() & part) for part in (before, after))))
        new = sum(made[then[-1]] != made[now[0]] for _, made in both) if len(both) > 1 else 0
        if new:
            changes = _levels(both, now) - _levels(both, then)
            squares += float(np.sum((changes - changes.mean()) ** 2)) / 2
            freedom += new * (1 - 1 / len(both))
    # A process in the middle is in two changes: these are the degrees of freedom of successive differences.
    # Source: von Neumann, Kent, Bellinson and Hart, The mean square successive difference, 1941.
    steps = len(pieces) - 1
    share = 2 * steps / (3 * steps - 1) if steps > 0 else 1.0
    return ProcessSpread(share * squares, share * freedom)


def _levels(variants: Sequence[tuple[Blocks, Processes]], rounds: Sequence[int]) -> Array:
    logs = np.log(np.maximum([[blocks[number] for number in rounds] for blocks, _ in variants], LEAST_MS))
    return np.asarray(np.median(logs - np.median(logs, axis=0), axis=1), dtype=np.float64)


def effective_processes(made: Sequence[int]) -> float:
    """Return the number of processes with equally many blocks that is equivalent to those of these blocks."""
    counts = np.unique(made, return_counts=True)[1]
    return float(counts.sum() ** 2 / np.sum(counts**2))


def paired(baseline_ms: Sequence[float], other_ms: Sequence[float], seed: int = 0, half: float = 0.0) -> Ratio:
    """Return how many times as fast the other is, by blocks of the same round.

    A temporary slowdown of the machine affects both blocks of a round, so their quotient does not contain it, and the
    median ignores rounds in which it affected only one. The interval is a bootstrap of the median, each resampled
    median smoothed by the noise of one (Silverman and Young, Biometrika 1987): with ten rounds a plain one can take
    only ten values and is too short. With fewer than FEW rounds, Student's interval is used.

    half  half of the width of another interval, as a logarithm: of what is the same in all blocks of a process
    """
    assert len(baseline_ms) == len(other_ms) > 0, "blocks are paired by round"
    logs = np.log(np.asarray(baseline_ms, dtype=np.float64) / np.asarray(other_ms, dtype=np.float64))
    middle = float(np.median(logs))
    if len(logs) < 3:  # the spread is unknown
        return Ratio(float(np.exp(middle)), 0.0, float("inf"), len(logs))
    if len(logs) < FEW:
        own = STUDENT[len(logs)] * float(np.std(logs, ddof=1)) / len(logs) ** 0.5
        mean = float(np.mean(logs))
        return _widened(middle, mean - own, mean + own, half, len(logs))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(logs)])))
    drawn = logs[rng.integers(0, len(logs), (RESAMPLES, len(logs)))]
    width = 0.5 * _sigma(logs) * len(logs) ** -0.2
    drawn = drawn + width * rng.standard_normal(drawn.shape)
    drawn.sort(axis=1)  # three times as fast as np.median of each row, and the same numbers
    medians = (drawn[:, (len(logs) - 1) // 2] + drawn[:, len(logs) // 2]) / 2
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return _widened(middle, float(low), float(high), half, len(logs))


def _widened(middle: float, low: float, high: float, half: float, num: int) -> Ratio:
    """Return the ratio of these logarithms, with the uncertainty of two independent causes."""
    centre, own = (low + high) / 2, (high - low) / 2
    both = math.hypot(own, half)
    return Ratio(math.exp(middle), math.exp(centre - both), math.exp(centre + both), num)


def _sigma(values: Array) -> float:
    """Return the standard deviation of the values without outliers, by their quartiles."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float((high - low) / 1.349)


# Assumed before any restart, with the weight of four degrees of freedom.
USUAL = ProcessSpread(squares=4 * 0.01**2, freedom=4)
ONE_EACH = USUAL.half(1, 1)  # for two variants with one process each
LEAST_BLOCKS = 3  # of a process, to know its level
LEAST_MS = 1e-6  # by the clock, a block may have taken no time
FEW = 6
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of the t distribution, by the number of values
NARROW = 0.02  # half the width of an interval that is always narrow enough
NARROW_OF_GAIN = 0.1  # or in relation to the change: +200 % need not be known to 2 %
