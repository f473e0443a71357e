"""When the run is saved, and how many checkpoints are kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from runner.base.values import Every, PositiveInt

AUTO_MINUTES = 5.0  # work at risk under `every: auto`


@dataclass
class SavePolicy:
    """Decides after each update whether it is time to save.

    keep      newest checkpoints kept (never fewer than two)
    best      metric whose best checkpoints are kept besides, or None
    keep_best  how many of them
    better    "min" or "max": what is better
    """

    updates: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    keep: int = 3
    best: str | None = None
    keep_best: int = 1
    better: str = "min"
    _last: float = field(default_factory=time.monotonic)

    def due(self, update: int, updates_per_epoch: int) -> bool:
        """Tell whether the checkpoint of this update is wanted, by counting."""
        if self.updates is not None and update % self.updates == 0:
            return True
        return self.epochs is not None and update % (self.epochs * updates_per_epoch) == 0

    def is_late(self) -> bool:
        """Tell whether the time is up; `saved` says that a checkpoint was taken."""
        return self.seconds is not None and time.monotonic() - self._last >= self.seconds

    def saved(self) -> None:
        """Start counting minutes anew."""
        self._last = time.monotonic()

    def is_better(self, value: float, best: float | None) -> bool:
        """Tell whether `value` of the metric is better than the best so far."""
        return best is None or (value < best if self.better == "min" else value > best)


def default(
    *,
    every: PositiveInt | Every = "auto",
    keep: PositiveInt = 3,
    best: str | None = "val/loss",
    keep_best: PositiveInt = 1,
    best_is: Literal["min", "max"] = "min",
) -> SavePolicy:
    """Save from time to time, at the end of each phase, and when stopped.

    every    updates between saves: 200 or 200updates; or 2epochs, 10min; auto: every 5 minutes
    keep     newest checkpoints kept, never fewer than two
    best     metric of the evaluation whose best checkpoints are kept too; null: none
    keep_best  how many of the best are kept
    best_is  min or max: which values of it are better
    """
    policy = SavePolicy(keep=keep, best=best, keep_best=keep_best, better=best_is)
    if every == "auto":
        policy.seconds = 60.0 * AUTO_MINUTES
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
) -> SavePolicy:
    """Save only at the end of each phase and when stopped.

    keep     newest checkpoints kept, never fewer than two
    best     metric of the evaluation whose best checkpoints are kept too; null: none
    keep_best  how many of the best are kept
    best_is  min or max: which values of it are better
    """
    return SavePolicy(keep=keep, best=best, keep_best=keep_best, better=best_is)


def parse_every(every: int | str) -> tuple[float, str]:
    """Return (number, "updates" | "epochs" | "min") of 200, 200updates, 2epochs or 10min."""
    if isinstance(every, int):
        return float(every), "updates"
    found = re.fullmatch(r"([\d.]+)\s*(u|e|m)\w*", every)
    assert found, f"the schema lets nothing else through, but it is {every!r}"
    return float(found[1]), {"u": "updates", "e": "epochs", "m": "min"}[found[2]]


CHECKPOINTS: Mapping[str, Callable[..., SavePolicy]] = {"default": default, "off": off}
