"""Load balancing: measure each rank's time per update, and find the shares that minimize the slowest rank's time.

A rank's own time for n samples is modeled as t = a + c n (seconds, without waiting for other ranks). The code
uses only + - * / and square roots of Python floats, which all machines round alike, so ranks with the same
times take the same decision without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import median
from typing import Any, NamedTuple

from runner.base.shares import Shares, format_sum, split_proportionally

CLEAR_GAIN = 0.10  # a smaller gain must be found twice in a row
MIN_GAIN_ERRORS = 2.5  # standard errors that a gain must exceed
DRIFT = 0.05  # relative change of a rank's time that counts as a change of speed, if also above 3 standard errors
PROBE_ROUNDS = 3  # repetitions of each probe split, so that the median tolerates one outlier
MAX_BLOCKS = 10  # blocks stored per sample count
MAX_COUNTS = 8  # sample counts stored, the most recent ones
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean: sqrt(pi / 2)
MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, for normal noise
MIN_NOISE = 0.002  # minimum relative noise, because a few measured times may agree by chance


@dataclass(frozen=True)
class RankTiming:
    """Linear time model of a rank: t = fixed_s + per_sample_s x samples, in seconds."""

    fixed_s: float
    per_sample_s: float

    def seconds(self, samples: int) -> float:
        return self.fixed_s + self.per_sample_s * samples


def fastest_shares(total: int, lines: Sequence[RankTiming]) -> Shares:
    """Return the shares of `total` samples that minimize the time of the slowest rank; exact.

    Each rank takes at least 1. Samples are assigned one by one to the rank that finishes first; ties go to the rank
    with fewer samples, then to the lower rank.
    """
    assert len(lines) <= total, total
    start = _bisect_shares(total, lines)
    queue = [(line.seconds(n + 1), n, rank) for rank, (line, n) in enumerate(zip(lines, start, strict=True))]
    heapq.heapify(queue)
    shares = list(start)
    for _ in range(total - sum(shares)):
        _, n, rank = heapq.heappop(queue)
        shares[rank] = n + 1
        heapq.heappush(queue, (lines[rank].seconds(n + 2), n + 1, rank))
    return tuple(shares)


def slowest_seconds(lines: Sequence[RankTiming], shares: Sequence[int]) -> float:
    """Return the seconds of the slowest rank."""
    return max(line.seconds(share) for line, share in zip(lines, shares, strict=True))


@dataclass(frozen=True)
class Decision:
    """A change of shares from the next update on, with its reason.

    old_s   predicted seconds per update before the change
    new_s   predicted seconds per update after the change
    """

    shares: Shares
    old_s: float
    new_s: float
    reason: str


class CountTiming(NamedTuple):
    """Summary of the times of one rank at one sample count: median, number of times, relative standard deviation."""

    samples: int
    seconds: float
    num: int
    noise: float


class UpdateTimes(NamedTuple):
    """Samples and busy seconds of each rank in one update."""

    samples: Shares
    seconds: tuple[float, ...]


class ShareSolver:
    """Decide the shares of `total` samples from the measured times of each rank; the update is the same for any split.

    First, a few unequal splits are tried, so that each rank is timed at two sample counts. Then the shares are
    optimized, again after every `every` updates. They change only if the predicted gain is above `threshold`,
    significant given the noise, and large or found twice. After a change of a rank's speed its old times are
    rescaled.

    start     initial shares; default: as equal as possible
    warm_up   number of first updates whose times are ignored
    """

    def __init__(
        self,
        total: int,
        world_size: int,
        *,
        start: Shares | None = None,
        every: int = 20,
        threshold: float = 0.03,
        warm_up: int = 2,
    ) -> None:
        self.total, self.every, self.threshold, self.warm_up = total, every, threshold, warm_up
        self.ranks = [_Rank() for _ in range(world_size)]
        self.current = start or split_proportionally(total, [1] * world_size)
        assert len(self.current) == world_size, self.current
        assert sum(self.current) == total, self.current
        assert min(self.current) > 0, self.current
        self._warm_up_left = warm_up
        self._is_fitted = False  # whether the lines have been fitted
        splits = [self.current] * 0 if world_size == 1 else probe_splits(total, self.current)
        self._trials: list[Shares] = splits * PROBE_ROUNDS
        self._block: list[UpdateTimes] = []
        self._is_unconfirmed_gain = False  # whether the next solution may confirm a gain

    @property
    def shares(self) -> Shares:
        """Samples per rank for the next update."""
        return self.ahead(0)

    @property
    def lines(self) -> tuple[RankTiming, ...]:
        """Fitted lines of the ranks; empty before the first solution."""
        return tuple(rank.fitted.line for rank in self.ranks) if self._is_fitted else ()

    def ahead(self, num: int) -> Shares:
        """Return the samples per rank `num` updates after the next one, unless a later decision changes them."""
        trial = num - self._warm_up_left
        return self._trials[trial] if 0 <= trial < len(self._trials) else self.current

    def observe(self, seconds: Sequence[float], samples: Sequence[int] | None = None) -> Decision | None:
        """Add the busy seconds of each rank in the last update; return the resulting change, if any.

        samples  samples per rank; None: `shares`. They differ in a smaller last update, or with a split decided earlier
        All ranks must pass the same values.
        """
        times = UpdateTimes(self.shares if samples is None else tuple(samples), tuple(seconds))
        if len(self.ranks) == 1:
            return None
        if self._warm_up_left:
            self._warm_up_left -= 1
            return None
        del self._trials[:1]
        if all(isfinite(time) and time > 0 for time, n in zip(times.seconds, times.samples, strict=True) if n):
            self._block.append(times)
        if self._trials or not self._is_due():
            return None
        block, self._block = self._block, []
        return self._resolve(block) if self._is_fitted else self._solve(block)

    def state(self) -> dict[str, Any]:
        """Return the state for JSON; times of an incomplete block are omitted."""
        return {
            "total": self.total,
            "current": list(self.current),
            "known": self._is_fitted,
            "ranks": [rank.state() for rank in self.ranks],
            "gained": self._is_unconfirmed_gain,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier process, before the first `observe`.

        It is ignored if it belongs to another total or another number of ranks.
        """
        current = tuple(state["current"])
        fits = state["total"] == self.total and len(current) == len(self.ranks)
        if not fits or not state["known"]:
            return
        self.current, self._is_fitted = current, True
        for rank, known in zip(self.ranks, state["ranks"], strict=True):
            rank.load(known)
        self._is_unconfirmed_gain = state["gained"]
        self._trials = []

    def _is_due(self) -> bool:
        if self._is_fitted:
            return len(self._block) >= self.every
        return all(any(times.samples[rank] for times in self._block) for rank in range(len(self.ranks)))

    def _solve(self, block: Sequence[UpdateTimes]) -> Decision:
        for number, rank in enumerate(self.ranks):
            rank.add(median_timings(block, number))
        self._is_fitted = True
        new = fastest_shares(self.total, self.lines)
        old_s, new_s = slowest_seconds(self.lines, self.current), slowest_seconds(self.lines, new)
        if new == self.current or new_s > old_s * (1 - self.threshold):
            reason = f"the ranks are balanced: shares stay {_format_shares(self.current)}, {_ms(old_s)} ms per update"
            return Decision(self.current, old_s, old_s, reason)
        return self._change(new, old_s, new_s, _describe_slow_rank(self.lines, self.total))

    def _resolve(self, block: Sequence[UpdateTimes]) -> Decision | None:
        factors = [rank.add(median_timings(block, number)) for number, rank in enumerate(self.ranks)]
        fits = [rank.fitted for rank in self.ranks]
        new = fastest_shares(self.total, self.lines)
        old_s, new_s = slowest_seconds(self.lines, self.current), slowest_seconds(self.lines, new)
        surely_old = max(rank_fit.seconds(n, -MIN_GAIN_ERRORS) for rank_fit, n in zip(fits, self.current, strict=True))
        surely_new = max(rank_fit.seconds(n, MIN_GAIN_ERRORS) for rank_fit, n in zip(fits, new, strict=True))
        gains = new_s < old_s * (1 - self.threshold) and surely_new < surely_old
        before, self._is_unconfirmed_gain = self._is_unconfirmed_gain, gains
        if gains and (before or new_s < old_s * (1 - CLEAR_GAIN)):
            self._is_unconfirmed_gain = False
            return self._change(
                new, old_s, new_s, _describe_speed_change(factors) or _describe_slow_rank(self.lines, self.total)
            )
        return None

    def _change(self, new: Shares, old_s: float, new_s: float, why: str) -> Decision:
        change = f"shares {_format_shares(self.current)} -> {_format_shares(new)}"
        reason = f"{why}: {change}, {_ms(old_s)} -> {_ms(new_s)} ms per update"
        self.current = new
        return Decision(new, old_s, new_s, reason)


def probe_splits(total: int, base: Sequence[int]) -> list[Shares]:
    """Return splits with at least 1 sample per rank, which give each rank two different counts if possible.

    Every second rank gets about 1.5 times its share, and the others half of theirs; then the reverse. If samples are so
    few that the count of a rank does not change, an additional split favors it. There are at most 6 splits.
    """
    size = len(base)
    more, less = [3 * share for share in base], list(base)
    splits = [
        split_proportionally(total, [more[rank] if rank % 2 == up else less[rank] for rank in range(size)])
        for up in (0, 1)
    ]
    for rank in range(size):
        if len({split[rank] for split in splits}) == 1 and len(splits) < 6:
            weights = [size * share if other == rank else share for other, share in enumerate(base)]
            split = split_proportionally(total, weights)
            splits += [split] if split[rank] != splits[0][rank] else []
    return splits


class _Rank:
    """Known timings of one rank: a few per sample count, newest last, and their noise."""

    def __init__(self) -> None:
        self._timings: dict[int, list[CountTiming]] = {}
        self._noises: list[float] = []
        self._noise = MIN_NOISE
        self.fitted = LineFit(RankTiming(0.0, 0.0), (0.0, 0.0, 0.0))

    def add(self, timings: Sequence[CountTiming]) -> float:
        factor = self._drift(timings) if self._timings and timings else 1.0
        if factor != 1.0:
            self._scale(factor)
        for timing in timings:
            self._timings[timing.samples] = [*self._timings.pop(timing.samples, []), timing][-MAX_BLOCKS:]
        for count in list(self._timings)[:-MAX_COUNTS]:
            del self._timings[count]
        self._noises = [*self._noises, *(timing.noise for timing in timings if timing.num > PROBE_ROUNDS)][-MAX_BLOCKS:]
        self._fit()
        return factor

    def state(self) -> dict[str, Any]:
        flat = [list(timing) for timings in self._timings.values() for timing in timings]
        return {"timings": flat, "noises": self._noises}

    def load(self, state: Mapping[str, Any]) -> None:
        for samples, seconds, num, noise in state["timings"]:
            self._timings.setdefault(samples, []).append(CountTiming(samples, seconds, num, noise))
        self._noises = list(state["noises"])
        self._fit()

    def _fit(self) -> None:
        merged = [_merge(timings) for timings in self._timings.values()]
        self._noise = max(MIN_NOISE, median(self._noises or [timing.noise for timing in merged]))
        self.fitted = fit_line(merged, self._noise)

    def _drift(self, timings: Sequence[CountTiming]) -> float:
        """Return measured over predicted time, or 1.0 if the difference is small or within noise."""
        main = max(timings, key=lambda timing: timing.num)
        predicted = self.fitted.line.seconds(main.samples)
        factor = main.seconds / predicted
        measured = main.seconds * MEDIAN_ERROR * max(main.noise, self._noise) / sqrt(main.num)
        error = sqrt(measured**2 + self.fitted.error(main.samples) ** 2) / predicted
        return factor if abs(factor - 1.0) > max(DRIFT, 3 * error) else 1.0

    def _scale(self, factor: float) -> None:
        for count, timings in self._timings.items():
            old = _merge(timings)
            self._timings[count] = [CountTiming(count, old.seconds * factor, min(old.num, PROBE_ROUNDS), old.noise)]


class LineFit(NamedTuple):
    """A line and its covariance matrix: variance of the fixed time, covariance, variance of the time per sample."""

    line: RankTiming
    covariance: tuple[float, float, float]

    def error(self, samples: int) -> float:
        """Return the standard error of the predicted seconds."""
        fixed, both, per_sample = self.covariance
        return sqrt(max(0.0, fixed + 2 * both * samples + per_sample * samples**2))

    def seconds(self, samples: int, errors: float) -> float:
        """Return the predicted seconds plus `errors` standard errors."""
        return self.line.seconds(samples) + errors * self.error(samples)


def fit_line(timings: Sequence[CountTiming], noise: float = 0.0) -> LineFit:
    """Fit a line to the seconds for each number of samples by least squares of the relative errors.

    Fixed and per-sample time are never negative. With a single number of samples, the fixed time is 0.
    """
    weights = [timing.num / max(timing.seconds, 1e-12) ** 2 for timing in timings]
    pairs = list(zip(weights, timings, strict=True))
    w = sum(weights)
    wn = sum(weight * timing.samples for weight, timing in pairs)
    wnn = sum(weight * timing.samples**2 for weight, timing in pairs)
    wt = sum(weight * timing.seconds for weight, timing in pairs)
    wnt = sum(weight * timing.samples * timing.seconds for weight, timing in pairs)
    mean = wn / w
    spread = sum(weight * (timing.samples - mean) ** 2 for weight, timing in pairs)
    variance = (MEDIAN_ERROR * noise) ** 2
    if len(timings) > 1:
        per_sample = sum(weight * (timing.samples - mean) * timing.seconds for weight, timing in pairs) / spread
        fixed = wt / w - per_sample * mean
        if per_sample < 0:
            return LineFit(RankTiming(wt / w, 0.0), (variance / w, 0.0, 0.0))
        if fixed >= 0:
            covariance = (variance * wnn / (w * spread), -variance * mean / spread, variance / spread)
            return LineFit(RankTiming(fixed, per_sample), covariance)
    return LineFit(RankTiming(0.0, wnt / wnn), (0.0, 0.0, variance / wnn))


def median_timings(block: Sequence[UpdateTimes], rank: int) -> list[CountTiming]:
    """Return the median and the spread of the rank's seconds for each number of samples."""
    times_by_count: dict[int, list[float]] = {}
    for seen in block:
        times_by_count.setdefault(seen.samples[rank], []).append(seen.seconds[rank])
    timings = []
    for count, times in times_by_count.items():
        if not count:
            continue
        center = median(times)
        off = median(abs(time - center) for time in times) / center if center > 0 else 0.0
        timings.append(CountTiming(count, center, len(times), MAD_TO_SIGMA * off))
    return timings


def _merge(timings: Sequence[CountTiming]) -> CountTiming:
    num = sum(timing.num for timing in timings)
    seconds = sum(timing.num * timing.seconds for timing in timings) / num
    return CountTiming(timings[0].samples, seconds, num, median(timing.noise for timing in timings))


def _bisect_shares(total: int, lines: Sequence[RankTiming]) -> list[int]:
    """Return how many samples each rank completes by a common time, found by bisection so that few samples remain."""
    low, high = 0.0, max(line.seconds(total) for line in lines)
    best = [1] * len(lines)
    for _ in range(64):
        middle = (low + high) / 2
        shares = [max(1, _samples_by(middle, line, total)) for line in lines]
        if sum(shares) <= total:
            low, best = middle, shares
        else:
            high = middle
    return best


def _samples_by(seconds: float, line: RankTiming, total: int) -> int:
    if line.seconds(total) <= seconds:
        return total
    if line.fixed_s > seconds or line.per_sample_s <= 0:
        return 0
    num = min(total, int((seconds - line.fixed_s) / line.per_sample_s))
    return num - 1 if line.seconds(num) > seconds else num  # the division may round up


def _describe_slow_rank(lines: Sequence[RankTiming], total: int) -> str:
    share = max(1, total // len(lines))
    times = [line.seconds(share) for line in lines]
    slow, fast = times.index(max(times)), times.index(min(times))
    ratio = times[slow] / times[fast] if times[fast] > 0 else 1.0
    if ratio < 1.05:
        return "the ranks take about the same per sample"
    than = "" if len(lines) == 2 else f" as rank {fast}"
    return f"rank {slow} takes {ratio:.{1 if ratio >= 1.15 else 2}f} times as long{than} per sample"


def _describe_speed_change(factors: Sequence[float]) -> str:
    most = max(range(len(factors)), key=lambda rank: (max(factors[rank], 1 / factors[rank]), -rank))
    factor = factors[most]
    if factor == 1.0:
        return ""
    ratio = max(factor, 1 / factor)
    digits = 1 if ratio >= 1.15 else 2
    return f"rank {most} became {ratio:.{digits}f} times {'slower' if factor > 1 else 'faster'}"


def _format_shares(shares: Shares) -> str:
    return format_sum(shares).replace(" + ", "+")


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
