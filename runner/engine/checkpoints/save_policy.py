"""Decide when to save a checkpoint and how many to keep, and measure what saving costs.

Keys that several options share:

keep           number of newest checkpoints to keep; at least two are always kept
best           evaluation metric whose best checkpoints are also kept (default: that of early_stopping); null: none
keep_best      number of best checkpoints to keep
best_is        min or max: whether lower or higher values are better
grace_s        seconds between the stop signal and the kill: a checkpoint that would take longer is skipped; null:
               unknown
mirror         URL of a folder, such as s3://bucket/runs, to which checkpoints are copied in the background; null: none
mirror_wait_s  longest wait for copies at the end of the run, in seconds
"""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from runner.base.text import format_bytes
from runner.base.values import Every, MirrorURL, NonNegative, Positive, PositiveInt
from runner.durable.checkpoint_choice import Ranking
from runner.durable.checkpoint_writer import SavedCheckpoint

MAX_AT_RISK_S = 600.0  # maximum seconds of work at risk with `every: auto`
MAX_OVERHEAD = 0.01  # maximum fraction of time spent on saving with `every: auto`; MAX_AT_RISK_S takes precedence
MIN_INTERVAL_S = 60.0  # minimum seconds between saves with `every: auto`
RETRY_S = 60.0  # seconds until the next save after a failed one


@dataclass
class SavePolicy:
    """Decide after each update whether to save. The fields `keep` to `mirror_wait_s` are keys of the options.

    updates  number of updates between saves, or None
    epochs   number of epochs between saves, or None
    seconds  seconds between saves, or None; with `is_auto`, derived from the cost of saves
    """

    updates: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    is_auto: bool = False
    keep: int = 3
    best: str | None = None
    keep_best: int = 1
    best_is: str = "min"
    grace_s: float | None = None
    mirror: str | None = None
    mirror_wait_s: float = 60.0
    _last_saved: float = field(default_factory=time.monotonic)
    _retry_at: float | None = None  # retry time after a failed save
    _previous_failed: bool = False  # the previous save failed

    @property
    def ranking(self) -> Ranking:
        """The metric that ranks the best checkpoints."""
        return Ranking(self.best, self.best_is, self.keep_best)

    @property
    def saves_during_phase(self) -> bool:
        """True if checkpoints are also saved during a phase."""
        return any(interval is not None for interval in (self.updates, self.epochs, self.seconds, self.best))

    def is_due(self, update: int, updates_per_epoch: int) -> bool:
        """Return True if a checkpoint of this update is due by update count."""
        if self.updates is not None and update % self.updates == 0:
            return True
        return self.epochs is not None and update % (self.epochs * updates_per_epoch) == 0

    def is_due_by_time(self) -> bool:
        """Return True if the save interval or the delay before a retry has elapsed; `restart_interval` resets both."""
        now = time.monotonic()
        has_elapsed = self.seconds is not None and now - self._last_saved >= self.seconds
        return has_elapsed or (self._retry_at is not None and now >= self._retry_at)

    def restart_interval(self) -> None:
        """Restart the save interval."""
        self._last_saved, self._retry_at = time.monotonic(), None

    def record_result(self, *, has_succeeded: bool) -> None:
        """Record the result of a save. A failed save is retried after a minute, unless the previous one failed, too."""
        intervals = (self.updates, self.epochs, self.seconds)
        if not has_succeeded and not self._previous_failed and any(interval is not None for interval in intervals):
            self._retry_at = time.monotonic() + RETRY_S
        self._previous_failed = not has_succeeded

    def is_better(self, value: float, best: float | None) -> bool:
        """Return True if `value` of the metric is better than `best`."""
        return best is None or (value < best if self.best_is == "min" else value > best)

    def adapt(self, cost_s: float, write_s: float, update_s: float) -> str:
        """Set the save interval from the cost of saves; return which limit cannot be met, or "".

        cost_s    training time lost per save, in seconds
        write_s   seconds from the copy until the checkpoint is on disk
        update_s  seconds per update; saves happen only between updates
        """
        if not self.is_auto:
            return ""
        longest = max(MAX_AT_RISK_S - write_s - update_s, MIN_INTERVAL_S)
        self.seconds = min(max(cost_s / MAX_OVERHEAD, MIN_INTERVAL_S), longest)
        if write_s + update_s + self.seconds > MAX_AT_RISK_S:
            minutes = MAX_AT_RISK_S / 60
            return (
                f"writing a checkpoint to disk takes {write_s:.0f} s, so more than {minutes:.0f} min of work are at"
                " risk"
            )
        if cost_s > MAX_OVERHEAD * longest:
            return (
                f"checkpoint overhead is {cost_s / longest:.1%}, above {MAX_OVERHEAD:.0%}: each save costs"
                f" {cost_s:.1f} s of training time, and one is due every {longest:.0f} s, so that at most"
                f" {MAX_AT_RISK_S / 60:.0f} min of work are at risk"
            )
        return ""

    @property
    def advice(self) -> str:
        """Return what to do when checkpoints are requested faster than the disk can write them."""
        if not self.is_auto:
            return "use checkpoint.every=auto, or save less often"
        return "use output_root=DIR on a faster disk"

    def __str__(self) -> str:
        if self.is_auto:
            return (
                f"automatic (overhead of periodic saves below {MAX_OVERHEAD:.0%}, at most"
                f" {MAX_AT_RISK_S / 60:.0f} min of work at risk)"
            )
        if self.seconds is not None:
            return f"every {self.seconds / 60:g} min"
        if self.updates is not None:
            return f"every {self.updates} update{'s' if self.updates > 1 else ''}"
        if self.epochs is not None:
            return f"every {self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        return "at the end of each phase and when stopped"


@dataclass(frozen=True)
class SaveTimes:
    """Cost of a save.

    held_s    seconds for which it blocked training
    slowed_s  seconds by which the concurrent write slowed updates down
    write_s   seconds until the checkpoint was on disk
    total_s   seconds until the checkpoints that it replaces were removed
    nbytes    size of its tensors
    """

    held_s: float
    slowed_s: float
    write_s: float
    total_s: float
    nbytes: int


class SaveCost:
    """Total cost of saves: the time that training was blocked, and the slowdown of updates during a write."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.num_saves = 0
        self.held_s = self.slowed_s = 0.0  # in total
        self.last: SaveTimes | None = None
        self._undisturbed_s: deque[float] = deque(maxlen=100)  # seconds of updates without a concurrent write
        self._during_write_s: list[float] = []
        self._recent: deque[SaveTimes] = deque(maxlen=3)
        self._pause_s = 0.0  # seconds for which the current save blocked training
        self._last_recorded: SavedCheckpoint | None = None

    def record_update(self, seconds: float, *, writing: bool) -> None:
        """Record an update, and whether a checkpoint was being written during it."""
        (self._during_write_s if writing else self._undisturbed_s).append(seconds)

    def record_copy(self, seconds: float) -> None:
        """Record the time that training was blocked by a copy of the state, which may never be written."""
        self.held_s += seconds

    def record_pause(self, seconds: float, counted_s: float = 0.0) -> None:
        """Record the time that training was blocked by a save; `counted_s` of it is already recorded as a copy."""
        self.num_saves += 1
        self.held_s += seconds - counted_s
        self._pause_s = seconds

    def summary(self, total_s: float) -> str:
        """Describe the cost of the checkpoints that a run has written in `total_s` seconds."""
        share = (self.held_s + self.slowed_s) / total_s
        saves = f"{self.num_saves} checkpoint{'s' * (self.num_saves > 1)}"
        text = f"{saves} paused training for {self.held_s:.2f} s in total (overhead {share:.2%})"
        if self.last is None:
            return text
        return f"{text}; the last one ({format_bytes(self.last.nbytes)}) took {self.last.write_s:.2f} s to write"

    def has_budget(self) -> bool:
        """Return True if one more save keeps the total cost within its limit.

        The cost of the first save is unknown, so it waits for MIN_INTERVAL_S.
        """
        elapsed = time.monotonic() - self._started
        if not self._recent:
            return elapsed >= MIN_INTERVAL_S
        return self.held_s + self.slowed_s + self.cost_s <= MAX_OVERHEAD * elapsed

    def record_write(self, saved: SavedCheckpoint | None) -> None:
        """Record the end of a write; `saved` is the last completed save."""
        if saved is None or saved is self._last_recorded:  # the current save failed
            self._during_write_s.clear()
            return
        self._last_recorded = saved
        slowed = (
            max(0.0, sum(self._during_write_s) - len(self._during_write_s) * self.update_s)
            if self._undisturbed_s
            else 0.0
        )
        self._during_write_s.clear()
        self.slowed_s += slowed
        self.last = SaveTimes(self._pause_s, slowed, saved.write_s, saved.total_s, saved.nbytes)
        self._recent.append(self.last)

    @property
    def update_s(self) -> float:
        """Seconds of an update without a concurrent write, or 0 if unknown."""
        return statistics.median(self._undisturbed_s) if self._undisturbed_s else 0.0

    @property
    def cost_s(self) -> float:
        """Training time lost per save in seconds: the median of the last three."""
        return statistics.median(times.held_s + times.slowed_s for times in self._recent)

    def expected_s(self) -> float | None:
        """Return the seconds until a save is on disk: the maximum of the last three, or None before the first."""
        return max((times.held_s + times.write_s for times in self._recent), default=None)

    def state(self) -> list[dict[str, float]]:
        """Return the costs of the last saves, for a resumed run."""
        return [asdict(times) for times in self._recent]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Restore what `state` returned."""
        self._recent = deque((SaveTimes(**times) for times in state), maxlen=3)
        self.last = self._recent[-1] if self._recent else None


def default(
    *,
    every: PositiveInt | Every = "auto",
    keep: PositiveInt = 3,
    best: str | None = "val/loss",
    keep_best: PositiveInt = 1,
    best_is: Literal["min", "max"] = "min",
    grace_s: Positive | None = None,
    mirror: MirrorURL | None = None,
    mirror_wait_s: NonNegative = 60.0,
) -> SavePolicy:
    """Save periodically, at the end of each phase, and when stopped.

    every    checkpoint interval: 200 or 200updates, 2epochs or 10min; auto: every 1 to 10 min, overhead below 1 %
    """
    policy = off(
        keep=keep, best=best, keep_best=keep_best, best_is=best_is, grace_s=grace_s, mirror=mirror,
        mirror_wait_s=mirror_wait_s,
    )  # fmt: skip
    if every == "auto":
        policy.seconds, policy.is_auto = MIN_INTERVAL_S, True
        return policy
    number, unit = parse_every(every)
    if unit == "updates":
        policy.updates = int(number)
    elif unit == "epochs":
        policy.epochs = int(number)
    else:
        policy.seconds = 60.0 * number
    return policy


def off(
    *,
    keep: PositiveInt = 2,
    best: str | None = None,
    keep_best: PositiveInt = 1,
    best_is: Literal["min", "max"] = "min",
    grace_s: Positive | None = None,
    mirror: MirrorURL | None = None,
    mirror_wait_s: NonNegative = 60.0,
) -> SavePolicy:
    """Save only at the end of each phase and when stopped."""
    return SavePolicy(
        keep=keep, best=best, keep_best=keep_best, best_is=best_is, grace_s=grace_s, mirror=mirror,
        mirror_wait_s=mirror_wait_s,
    )  # fmt: skip


def parse_every(every: int | str) -> tuple[float, str]:
    """Parse 200, 200updates, 2epochs or 10min into (number, unit), where unit is "updates", "epochs" or "min"."""
    if isinstance(every, int):
        return float(every), "updates"
    parsed = re.fullmatch(r"([\d.]+)\s*(u|e|m)\w*", every)
    assert parsed, f"the schema rejects other values, but it is {every!r}"
    return float(parsed[1]), {"u": "updates", "e": "epochs", "m": "min"}[parsed[2]]


CHECKPOINTS: Mapping[str, Callable[..., SavePolicy]] = {"default": default, "off": off}
