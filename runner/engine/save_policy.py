"""Decide when to save, how many checkpoints to keep and whether there is time for another."""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from runner.base.values import Every, MirrorURL, NonNegative, Positive, PositiveInt
from runner.durable.checkpoint_choice import Ranking
from runner.durable.checkpoint_writer import Saved

AT_RISK_S = 600.0  # maximum seconds of work at risk with `every: auto`
COST = 0.01  # maximum overhead of saving with `every: auto`, as a fraction of the time, unless AT_RISK_S requires more
SHORTEST_S = 60.0  # minimum seconds between saves with `every: auto`
AGAIN_S = 60.0  # seconds until the next save after a failed one


@dataclass
class SavePolicy:
    """Decide after each update whether to save.

    seconds  between saves; with `is_auto` derived from the cost of saves
    keep     number of newest checkpoints to keep (at least two)
    best     metric whose best checkpoints are also kept, or None
    keep_best  number of best checkpoints to keep
    better   "min" or "max": whether lower or higher values are better
    grace_s  seconds from a stop request to the kill, None if unknown
    mirror   URL of the copies, or None
    mirror_wait_s  longest wait for them at the end of the run
    """

    updates: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    is_auto: bool = False
    keep: int = 3
    best: str | None = None
    keep_best: int = 1
    better: str = "min"
    grace_s: float | None = None
    mirror: str | None = None
    mirror_wait_s: float = 60.0
    _last: float = field(default_factory=time.monotonic)
    _again_at: float | None = None  # retry time after a failed save
    _has_failed: bool = False  # the previous save failed

    @property
    def ranking(self) -> Ranking:
        """The metric that ranks the best checkpoints."""
        return Ranking(self.best, self.better, self.keep_best)

    @property
    def saves_on_the_way(self) -> bool:
        """True if checkpoints are also saved during a phase."""
        return any(wish is not None for wish in (self.updates, self.epochs, self.seconds, self.best))

    def due(self, update: int, updates_per_epoch: int) -> bool:
        """Return True if a checkpoint of this update is due by update count."""
        if self.updates is not None and update % self.updates == 0:
            return True
        return self.epochs is not None and update % (self.epochs * updates_per_epoch) == 0

    def is_late(self) -> bool:
        """Return True if the save interval has elapsed; `saved` resets it."""
        now = time.monotonic()
        is_time = self.seconds is not None and now - self._last >= self.seconds
        return is_time or (self._again_at is not None and now >= self._again_at)

    def saved(self) -> None:
        """Restart the save interval."""
        self._last, self._again_at = time.monotonic(), None

    def ended(self, *, well: bool) -> None:
        """Record the end of a save; a failed save is retried after a minute, but only once in a row."""
        wishes = (self.updates, self.epochs, self.seconds)
        if not well and not self._has_failed and any(wish is not None for wish in wishes):
            self._again_at = time.monotonic() + AGAIN_S
        self._has_failed = not well

    def is_better(self, value: float, best: float | None) -> bool:
        """Return True if `value` of the metric is better than `best`."""
        return best is None or (value < best if self.better == "min" else value > best)

    def adapt(self, cost_s: float, write_s: float, update_s: float) -> str:
        """Set the save interval from the cost of saves; return which limit cannot be met, or "".

        cost_s    training time lost per save, in seconds
        write_s   seconds from the copy until the checkpoint is on disk
        update_s  seconds of an update; saves happen only after an update
        """
        if not self.is_auto:
            return ""
        longest = max(AT_RISK_S - write_s - update_s, SHORTEST_S)
        self.seconds = min(max(cost_s / COST, SHORTEST_S), longest)
        if write_s + update_s + self.seconds > AT_RISK_S:
            return f"a save takes {write_s:.0f} s to be on disk: more than {AT_RISK_S / 60:.0f} min of work are at risk"
        if cost_s > COST * longest:
            return (
                f"a save costs {cost_s:.1f} s of training: every {longest:.0f} s, for at most {AT_RISK_S / 60:.0f} min"
                f" of work at risk, that is {cost_s / longest:.1%} of the time, more than {COST:.0%}"
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
            return f"automatic (overhead below {COST:.0%}, at most {AT_RISK_S / 60:.0f} min of work at risk)"
        if self.seconds is not None:
            return f"every {self.seconds / 60:g} min"
        if self.updates is not None:
            return f"every {self.updates} update{'s' if self.updates > 1 else ''}"
        if self.epochs is not None:
            return f"every {self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        return "at the end of each phase and when stopped"


@dataclass(frozen=True)
class SaveTimes:
    """Cost of the last save: seconds that training was blocked and slowed down, until on disk, and in total."""

    held_s: float
    slowed_s: float
    write_s: float
    total_s: float
    nbytes: int


class SaveCost:
    """Total cost of saves: time blocked, and slowdown of updates during a write."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.num_saves = 0
        self.held_s = self.slowed_s = 0.0  # in total
        self.last: SaveTimes | None = None
        self._plain: deque[float] = deque(maxlen=100)  # seconds of updates without a concurrent write
        self._during: list[float] = []
        self._recent: deque[SaveTimes] = deque(maxlen=3)
        self._held = 0.0  # by the current save
        self._saved: Saved | None = None  # the last one that was recorded

    def updated(self, seconds: float, *, writing: bool) -> None:
        """Record an update, and whether a checkpoint was being written during it."""
        (self._during if writing else self._plain).append(seconds)

    def copied(self, seconds: float) -> None:
        """Record time blocked by a copy of the state that may never be written."""
        self.held_s += seconds

    def held(self, seconds: float, known: float = 0.0) -> None:
        """Record time blocked by a save, of which `known` seconds were already recorded for a copy."""
        self.num_saves += 1
        self.held_s += seconds - known
        self._held = seconds

    def summary(self, total_s: float) -> str:
        """Describe the cost of the checkpoints that a run of `total_s` seconds has written."""
        share = (self.held_s + self.slowed_s) / total_s
        saves = f"{self.num_saves} checkpoint{'s' * (self.num_saves > 1)}"
        text = f"{saves} paused training for {self.held_s:.2f} s in total (overhead {share:.2%})"
        if self.last is None:
            return text
        size, seconds = self.last.nbytes / 1e6, self.last.write_s
        return f"{text}; the last one ({size:,.1f} MB) took {seconds:.2f} s to write"

    def has_budget(self) -> bool:
        """Return True if one more save keeps the total cost within its limit.

        The cost of the first save is unknown, so it is delayed as long as the first scheduled one.
        """
        elapsed = time.monotonic() - self._began
        if not self._recent:
            return elapsed >= SHORTEST_S
        return self.held_s + self.slowed_s + self.cost_s <= COST * elapsed

    def written(self, saved: Saved | None) -> None:
        """Record that no write is running any more, and the last completed save."""
        if saved is None or saved is self._saved:  # this one failed
            self._during.clear()
            return
        self._saved = saved
        slowed = max(0.0, sum(self._during) - len(self._during) * self.update_s) if self._plain else 0.0
        self._during.clear()
        self.slowed_s += slowed
        self.last = SaveTimes(self._held, slowed, saved.write_s, saved.total_s, saved.nbytes)
        self._recent.append(self.last)

    @property
    def update_s(self) -> float:
        """Seconds of an update without a concurrent write, or 0 if unknown."""
        return statistics.median(self._plain) if self._plain else 0.0

    @property
    def cost_s(self) -> float:
        """Training time lost per save in seconds: the median of the last three."""
        return statistics.median(figures.held_s + figures.slowed_s for figures in self._recent)

    def expected_s(self) -> float | None:
        """Return the seconds until a save is on disk: the maximum of the last three, or None before the first."""
        return max((figures.held_s + figures.write_s for figures in self._recent), default=None)

    def state(self) -> list[dict[str, float]]:
        """Return the values for a resumed run."""
        return [asdict(figures) for figures in self._recent]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Restore what `state` returned."""
        self._recent = deque((SaveTimes(**figures) for figures in state), maxlen=3)
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

    every    checkpoint interval in updates: 200 or 200updates; or 2epochs, 10min; auto: overhead below 1 %, every 1 to
             10 min
    keep     number of newest checkpoints to keep, at least two
    best     evaluation metric whose best checkpoints are also kept; null: none
    keep_best  number of best checkpoints to keep
    best_is  min or max: whether lower or higher values are better
    grace_s  seconds between the stop signal and the kill: a checkpoint that would take longer is skipped; null: unknown
    mirror   URL of a folder, such as s3://bucket/runs, to which checkpoints are copied in the background; null: none
    mirror_wait_s  longest wait for copies at the end of the run, in seconds
    """
    policy = off(
        keep=keep, best=best, keep_best=keep_best, best_is=best_is, grace_s=grace_s, mirror=mirror,
        mirror_wait_s=mirror_wait_s,
    )  # fmt: skip
    if every == "auto":
        policy.seconds, policy.is_auto = SHORTEST_S, True
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
    """Save only at the end of each phase and when stopped.

    keep     number of newest checkpoints to keep, at least two
    best     evaluation metric whose best checkpoints are also kept; null: none
    keep_best  number of best checkpoints to keep
    best_is  min or max: whether lower or higher values are better
    grace_s  seconds between the stop signal and the kill: a checkpoint that would take longer is skipped; null: unknown
    mirror   URL of a folder, such as s3://bucket/runs, to which checkpoints are copied in the background; null: none
    mirror_wait_s  longest wait for copies at the end of the run, in seconds
    """
    return SavePolicy(
        keep=keep, best=best, keep_best=keep_best, better=best_is, grace_s=grace_s, mirror=mirror,
        mirror_wait_s=mirror_wait_s,
    )  # fmt: skip


def parse_every(every: int | str) -> tuple[float, str]:
    """Return (number, "updates" | "epochs" | "min") of 200, 200updates, 2epochs or 10min."""
    if isinstance(every, int):
        return float(every), "updates"
    found = re.fullmatch(r"([\d.]+)\s*(u|e|m)\w*", every)
    assert found, f"the schema lets nothing else through, but it is {every!r}"
    return float(found[1]), {"u": "updates", "e": "epochs", "m": "min"}[found[2]]


CHECKPOINTS: Mapping[str, Callable[..., SavePolicy]] = {"default": default, "off": off}
