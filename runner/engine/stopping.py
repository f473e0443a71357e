"""When a phase ends before its last update: its metric has stopped getting better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runner.base.settings import EarlyStoppingSettings


class EarlyStopping:
    """Watches one metric of the evaluations; `is_due` once `patience` of them in a row brought nothing."""

    def __init__(self, settings: EarlyStoppingSettings) -> None:
        self.settings = settings
        self.best: float | None = None
        self.num_bad = 0

    @property
    def is_on(self) -> bool:
        """True where the user or the task gave a patience."""
        return self.settings.patience is not None

    @property
    def is_due(self) -> bool:
        """True once the phase should end."""
        return self.settings.patience is not None and self.num_bad >= self.settings.patience

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation; one that lacks the metric counts for nothing."""
        value = metrics.get(self.settings.metric)
        if value is None:
            return
        sign = 1.0 if self.settings.best_is == "min" else -1.0
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best - self.settings.min_delta):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self.best, self.num_bad = state["best"], int(state["num_bad"])
