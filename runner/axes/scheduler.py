"""Learning rate schedules: a factor for all learning rates as a function of the number of updates.

Keys that several options share:

warmup        number of updates of linear warm-up; below 1: fraction of all updates
final_factor  learning rate at the end, as a fraction of the peak
gamma         factor per step
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Literal

from runner.base.errors import ConfigError, IncompatibleResume, Problem, TaskFault
from runner.base.values import Count, Factor, Fraction, NonNegative, Part, Positive, PositiveInt
from runner.config.option_table import call_option
from runner.config.value_checks import long_warmup_problem


class Schedule:
    """A learning rate curve, multiplied by a linear warm-up.

    The warm-up goes from 1/warmup at the first update to 1, so that no update has a learning rate of 0.
    """

    metric = "val/loss"  # the metric that `observe` receives

    def __init__(self, curve: Callable[[int], float], warmup: int = 0) -> None:
        self.curve = curve
        self.warmup = warmup

    def factor(self, update: int) -> float:
        """Return the factor for the next update, after `update` updates. Does not change the state."""
        ramp = (update + 1) / self.warmup if update < self.warmup else 1.0
        return ramp * self.curve(update)

    @property
    def is_observing(self) -> bool:
        """True if the curve depends on the metric."""
        return type(self).observe is not Schedule.observe

    def observe(self, metric: float, update: int) -> None:
        """Record a validation metric after `update` updates; every rank must pass the same value."""

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, JSON-serializable."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; raise IncompatibleResume if it belongs to another schedule."""
        if set(state) != set(self.state()):
            found, expected = (", ".join(sorted(keys)) or "nothing" for keys in (state, self.state()))
            raise IncompatibleResume(
                f"the schedule of this run needs the state {expected}, but the checkpoint contains {found}",
                where="scheduler",
                fix="use the scheduler of the checkpoint, or start a new run with resume=fresh",
            )


class Plateau(Schedule):
    """A factor that is reduced when the metric stops improving."""

    def __init__(
        self, warmup: int, *, mode: str, gamma: float, patience: int, threshold: float, cooldown: int, floor: float
    ) -> None:
        super().__init__(lambda _: self.level, warmup)
        self.mode, self.sign = mode, 1.0 if mode == "min" else -1.0
        self.gamma, self.patience, self.threshold = gamma, patience, threshold
        self.cooldown, self.floor = cooldown, floor
        self.level = 1.0
        self.best: float | None = None
        self.num_bad = 0
        self.rest = 0  # observations to ignore after a step

    def observe(self, metric: float, update: int) -> None:
        if update < self.warmup:
            return
        if self._is_better(metric):
            self.best, self.num_bad = metric, 0
        else:
            self.num_bad += 1
        if self.rest > 0:
            self.rest -= 1
            self.num_bad = 0
        if self.num_bad > self.patience:
            self.level = max(self.level * self.gamma, self.floor)
            self.rest, self.num_bad = self.cooldown, 0

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "best": self.best, "num_bad": self.num_bad, "rest": self.rest, **self._ranking()}

    def load(self, state: Mapping[str, Any]) -> None:
        # Older checkpoints do not name the metric.
        super().load({**self._ranking(), **state} if "level" in state else state)
        self.level, self.rest = state["level"], state["rest"]
        # A difference means that `resume_allow` has permitted another metric.
        if all(state.get(key, value) == value for key, value in self._ranking().items()):
            self.best, self.num_bad = state["best"], state["num_bad"]

    def _ranking(self) -> dict[str, str]:
        return {"metric": self.metric, "mode": self.mode}

    def _is_better(self, metric: float) -> bool:
        if self.best is None:
            return math.isfinite(metric)
        # torch multiplies `best` by a factor instead; a negative metric then "improves" by getting slightly worse.
        return self.sign * metric < self.sign * self.best - self.threshold * abs(self.best)


def constant(updates: int, *, warmup: Count | Factor = 0) -> Schedule:
    """Keep the learning rate at its peak."""
    return Schedule(lambda _: 1.0, _warmup(warmup, updates))


def linear(updates: int, *, warmup: Count | Factor = 0.02, final_factor: Fraction = 0.0) -> Schedule:
    """Decay linearly from the end of the warm-up to the last update.

    Source: torch.optim.lr_scheduler.LinearLR.
    """
    start = _warmup(warmup, updates)
    return Schedule(lambda update: _line(1.0, final_factor, _progress(update, start, updates)), start)


def cosine(updates: int, *, warmup: Count | Factor = 0.02, final_factor: Fraction = 0.1) -> Schedule:
    """Decay along half a cosine wave from the end of the warm-up to the last update.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017, without restarts.
    """
    start = _warmup(warmup, updates)
    return Schedule(lambda update: _half_wave(1.0, final_factor, _progress(update, start, updates)), start)


def step(
    updates: int, *, warmup: Count | Factor = 0, every: PositiveInt | Part = 0.3, gamma: Positive = 0.1
) -> Schedule:
    """Multiply the learning rate by gamma at regular intervals, counted from the first update.

    every   updates between steps; below 1: fraction of all updates
    Source: torch.optim.lr_scheduler.StepLR.
    """
    interval = _interval("every", every, updates)
    return Schedule(lambda update: gamma ** (update // interval), _warmup(warmup, updates))


def multistep(
    updates: int,
    *,
    warmup: Count | Factor = 0,
    milestones: list[PositiveInt | Part] = [0.5, 0.75],  # noqa: B006 - read as schema
    gamma: Positive = 0.1,
) -> Schedule:
    """Multiply the learning rate by gamma at each milestone.

    milestones  numbers of updates after which to step; below 1: fractions of all updates
    Source: torch.optim.lr_scheduler.MultiStepLR.
    """
    marks = sorted(_interval("milestones", mark, updates) for mark in milestones)
    return Schedule(lambda update: gamma ** bisect_right(marks, update), _warmup(warmup, updates))


def one_cycle(
    updates: int,
    *,
    warmup: Count | Factor = 0.3,
    start_factor: Fraction = 0.04,
    final_factor: Fraction = 4e-6,
    anneal: Literal["cos", "linear"] = "cos",
) -> Schedule:
    """Increase from a small learning rate to the peak, then decay to almost zero at the last update.

    warmup        updates until the peak; below 1: fraction of all updates
    start_factor  learning rate at the first update, as a fraction of the peak
    final_factor  learning rate at the last update, as a fraction of the peak
    anneal        cos: half a cosine wave for both parts; linear: a straight line
    Source: Smith and Topin, Super-Convergence, 2017; torch.optim.lr_scheduler.OneCycleLR, learning rate only.
    """
    top = max(0, _warmup(warmup, updates) - 1)  # the update at the peak
    between = _half_wave if anneal == "cos" else _line

    def curve(update: int) -> float:
        if update < top:
            return between(start_factor, 1.0, update / top)
        return between(1.0, final_factor, _progress(update, top, updates - 1))

    return Schedule(curve)


def plateau(
    updates: int,
    *,
    warmup: Count | Factor = 0,
    metric: str = "val/loss",
    mode: Literal["min", "max"] = "min",
    gamma: Factor = 0.1,
    patience: Count = 10,
    threshold: NonNegative = 1e-4,
    cooldown: Count = 0,
    floor: Fraction = 0.0,
) -> Schedule:
    """Multiply the learning rate by gamma when the validation metric stops improving.

    warmup     number of updates of linear warm-up, in which the metric is ignored; below 1: fraction of all updates
    metric     evaluation metric to monitor, such as val/loss
    mode       min: a smaller metric is better; max: a larger one
    patience   consecutive evaluations without improvement before a step
    threshold  an evaluation is an improvement if its metric beats the best by more than this fraction of the best
    cooldown   number of evaluations to ignore after a step
    floor      lower bound of the learning rate, as a fraction of the peak
    Source: torch.optim.lr_scheduler.ReduceLROnPlateau, threshold_mode "rel".
    """
    schedule = Plateau(
        _warmup(warmup, updates),
        mode=mode,
        gamma=gamma,
        patience=patience,
        threshold=threshold,
        cooldown=cooldown,
        floor=floor,
    )
    schedule.metric = metric
    return schedule


def warm_restarts(
    updates: int,
    *,
    warmup: Count | Factor = 0,
    period: PositiveInt | Part = 0.1,
    growth: PositiveInt = 2,
    final_factor: Fraction = 0.0,
) -> Schedule:
    """After the warm-up, decay repeatedly along half a cosine wave, restarting at the peak each time.

    period        updates of the first wave; below 1: fraction of all updates
    growth        length of each wave relative to the previous one
    final_factor  learning rate at the end of each wave, as a fraction of the peak
    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017.
    """
    start = _warmup(warmup, updates)
    first = _interval("period", period, updates)

    def curve(update: int) -> float:
        position, length = max(0, update - start), first
        while position >= length and growth > 1:
            position, length = position - length, length * growth
        return _half_wave(1.0, final_factor, position % length / length)

    return Schedule(curve, start)


def wsd(
    updates: int,
    *,
    warmup: Count | Factor = 0.02,
    decay: PositiveInt | Part = 0.2,
    final_factor: Fraction = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """Warm-up, stable, decay: decay only at the end, so that a run can be extended from a checkpoint before the decay.

    decay         updates of the final decay, at most all updates after the warm-up; below 1: fraction of all updates
    shape         shape of the decay: a straight line, half a cosine wave, or 1 minus the square root
    Source: Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, NeurIPS 2024.
    """
    start = _warmup(warmup, updates)
    begin = max(start, updates - _interval("decay", decay, updates))

    def curve(update: int) -> float:
        progress = _progress(update, begin, updates)
        if shape == "cosine":
            return _half_wave(1.0, final_factor, progress)
        return _line(1.0, final_factor, math.sqrt(progress) if shape == "sqrt" else progress)

    return Schedule(curve, start)


def inverse_sqrt(updates: int, *, warmup: Count | Factor = 0.02) -> Schedule:
    """Decay with the inverse square root of the update number after the warm-up, whatever the length of the run.

    Source: Vaswani et al., Attention Is All You Need, NeurIPS 2017, section 5.3; scaled so that lr is the peak.
    """
    start = _warmup(warmup, updates)
    peak = max(1, start)
    return Schedule(lambda update: math.sqrt(peak / max(peak, update + 1)), start)


def polynomial(
    updates: int, *, warmup: Count | Factor = 0.02, power: Positive = 2.0, final_factor: Fraction = 0.0
) -> Schedule:
    """Decay, after the warm-up, with a power of the remaining fraction of updates.

    power         1: a straight line; above 1: faster decay at first
    Source: torch.optim.lr_scheduler.PolynomialLR.
    """
    start = _warmup(warmup, updates)
    return Schedule(lambda update: _line(final_factor, 1.0, (1.0 - _progress(update, start, updates)) ** power), start)


_CURVE_FIX = "return a function such as lambda update: 0.99**update"


def build_schedule(function: str, updates: int, options: Mapping[str, Any]) -> Schedule:
    """Build the schedule of the option `function`, which returns a Schedule, or a function from update to factor.

    Raises TaskFault if the result is neither a Schedule nor a function of the update that returns valid factors.
    """
    schedule: object = call_option(SCHEDULERS, function, updates, **options)
    if isinstance(schedule, Schedule):
        return schedule
    if callable(schedule):
        _check_factors(schedule, updates, function)
        return Schedule(schedule)
    what = f"must return a function from the number of updates to a factor, but returned {type(schedule).__name__}"
    raise TaskFault(what, where=function, fix=_CURVE_FIX)


def _check_factors(curve: Callable[[int], float], updates: int, function: str) -> None:
    """Check the factors of about 1,000 updates at most, calling the function twice for the first of them."""
    factors: dict[int, float] = {}
    for update in (*range(0, max(1, updates), max(1, updates // 1000)), 0):
        try:
            factor = float(curve(update))
        except Exception as error:
            what = f"the schedule raised {type(error).__name__} for update {update}: {error}"
            raise TaskFault(what, where=function, fix=_CURVE_FIX) from error
        if not (math.isfinite(factor) and factor >= 0.0):
            what = f"the factor must be a number of at least 0, but is {factor} for update {update}"
            raise TaskFault(what, where=function, fix=_CURVE_FIX)
        if factors.setdefault(update, factor) != factor:
            what = f"the factor must depend only on the update, but is {factors[update]} and then {factor} for update 0"
            raise TaskFault(what, where=function, fix="do not count calls: a resumed run starts at another update")


def _warmup(value: float, updates: int) -> int:
    warmup = _count(value, updates)
    if warmup > updates:
        raise ConfigError(long_warmup_problem(warmup, updates, "scheduler.warmup"))
    return warmup


def _interval(name: str, value: float, updates: int) -> int:
    if value <= 0:
        raise ConfigError(Problem(f"must be above 0, but is {value}", f"scheduler.{name}"))
    return _count(value, updates)


def _count(value: float, updates: int) -> int:
    """Convert a fraction of all updates to a number of updates, at least 1; 0 and values from 1 on are not changed."""
    return int(value) if value >= 1 or value == 0 else max(1, round(value * updates))


def _progress(update: int, start: int, end: int) -> float:
    """Return the progress of `update` from `start` to `end`: 0 before, 1 after."""
    return min(1.0, max(0, update - start) / max(1, end - start))


def _line(start: float, end: float, progress: float) -> float:
    return start + (end - start) * progress


def _half_wave(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * progress)) / 2.0


SCHEDULERS: Mapping[str, Callable[..., Schedule]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "step": step,
    "multistep": multistep,
    "one_cycle": one_cycle,
    "plateau": plateau,
    "warm_restarts": warm_restarts,
    "wsd": wsd,
    "inverse_sqrt": inverse_sqrt,
    "polynomial": polynomial,
}
