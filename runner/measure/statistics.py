"""What can be said of two settings whose blocks of updates took turns: a ratio, its interval, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
NEGLIGIBLE = 0.01  # a change of less is not worth a word, however sure it is
Verdict = Literal["better", "worse", "no clear change"]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a setting is as the baseline: 1.3 is 30 % more updates in the same time.

    low, high  the interval that holds the true ratio with CONFIDENCE
    num        rounds that it was found from
    """

    middle: float
    low: float
    high: float
    num: int

    @property
    def verdict(self) -> Verdict:
        """Tell whether it is faster; where the interval reaches to 1, or as good as, nobody knows."""
        if self.low > 1 + NEGLIGIBLE:
            return "better"
        if self.high < 1 - NEGLIGIBLE:
            return "worse"
        return "no clear change"

    @property
    def is_narrow(self) -> bool:
        """True where more rounds would say little more: the interval is narrow for what it decides.

        It looks at the width alone. To stop as soon as the interval leaves 1 out would find changes where there are
        none: each look is another chance to be wrong.
        """
        return (self.high - self.low) / 2 <= max(NARROW, NARROW_OF_GAIN * abs(self.middle - 1))

    def __str__(self) -> str:
        """Return the change in percent with its interval: `+34 % [31, 37]`."""
        middle, low, high = (100 * (value - 1) for value in (self.middle, self.low, self.high))
        return f"{middle:+.0f} % [{low:.0f}, {high:.0f}]"


def paired(baseline_ms: Sequence[float], other_ms: Sequence[float], seed: int = 0) -> Ratio:
    """Return how many times as fast the other is, by blocks of the same round.

    What slows the machine down for a while slows both of a round, so their quotient knows nothing of it; the median
    knows nothing of the rounds in which it hit only one. The interval is that of the bootstrap of the median, each
    resampled median smoothed by the noise of one (Silverman and Young, Biometrika 1987): with ten rounds the plain
    one can take ten values only, and is too short. Fewer than FEW rounds have no quartiles to speak of: there the
    interval is Student's, whose quantiles know how little is known of the spread.
    """
    assert len(baseline_ms) == len(other_ms) > 0, "blocks of a round belong together"
    logs = np.log(np.asarray(baseline_ms, dtype=np.float64) / np.asarray(other_ms, dtype=np.float64))
    middle = float(np.median(logs))
    if len(logs) < 3:  # nothing can be said of a spread
        return Ratio(float(np.exp(middle)), 0.0, float("inf"), len(logs))
    if len(logs) < FEW:
        half = STUDENT[len(logs)] * float(np.std(logs, ddof=1)) / len(logs) ** 0.5
        mean = float(np.mean(logs))
        return Ratio(float(np.exp(middle)), float(np.exp(mean - half)), float(np.exp(mean + half)), len(logs))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(logs)])))
    drawn = logs[rng.integers(0, len(logs), (RESAMPLES, len(logs)))]
    width = 0.5 * _sigma(logs) * len(logs) ** -0.2
    drawn = drawn + width * rng.standard_normal(drawn.shape)
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(np.exp(middle)), float(np.exp(low)), float(np.exp(high)), len(logs))


def _sigma(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return the standard deviation of what is normal among the values, by their quartiles."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float((high - low) / 1.349)


FEW = 6
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of the t distribution, by the number of values
NARROW = 0.02  # half the width of an interval that is narrow enough in any case
NARROW_OF_GAIN = 0.1  # or in relation to the change: +200 % need not be known to 2 %
