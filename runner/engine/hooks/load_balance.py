"""Report a straggler, and with parallelism.shares=speed adapt the shares of the ranks to their measured speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from runner.base.stopwatch import PARTS
from runner.engine.evaluation.meter import add_times
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.hooks.timekeeping import Timekeeping
from runner.engine.update.loop import StepInfo
from runner.workload.share_solver import Decision
from runner.workload.stragglers import StragglerDetector

MAX_RANKS_IN_ROW = 16  # with more ranks, a row has the minimum, median and maximum over the ranks


class LoadBalance(Hook):
    """Compares the times of all ranks and writes them to the metrics."""

    name = "shares"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._straggler_detector = StragglerDetector()
        self._num_compared = 0  # number of updates whose times all ranks have reported
        self._num_since_row = 0  # number of these updates since the last row, excluding the start-up update
        self._seconds: list[dict[str, float]] = []  # sum over these updates, by rank and part
        self._idle: Mapping[str, float] = {}

    def after_update(self, step: StepInfo) -> None:
        status = self.phase.hook(RankSync).status
        if status is None or not all(status.seconds):
            return
        phase, screen = self.phase, self.phase.run.observers.screen
        seconds = tuple(rank_seconds for rank_seconds in status.seconds if rank_seconds)
        self._num_compared += 1
        is_startup = self._num_compared == 1 and phase.hook(Timekeeping).until_first_update is not None
        if not is_startup:
            self._num_since_row += 1
            self._seconds = _add_ranks(self._seconds, seconds)
        if step.update % phase.run.plan.settings.log_every == 0:
            self._idle = phase.parts.parallel.idle_fractions()
        if not phase.parts.parallel.splits_batch:  # stages of a pipeline have different work
            return
        straggler = self._straggler_detector.observe(seconds, status.samples)
        if straggler:
            screen.warn(str(straggler))
            screen.record_event("slow rank", update=step.update, **asdict(straggler))
        change = phase.shares.observe(step.update, seconds, status.samples)
        if change.decision:
            self._apply(step.update, change.decision)
        if change.reread:
            phase.reread()

    def readings(self) -> dict[str, Any]:
        columns = {**time_columns(self._seconds, self._num_since_row), **self._idle}
        self._add_to_tally()
        return columns

    def state_dict(self) -> dict[str, Any]:
        return self.phase.shares.state()

    def load_state_dict(self, state: Any) -> None:
        self.phase.shares.load(state or {}, self.phase.position.update)

    def close(self, error: BaseException | None) -> None:
        self._add_to_tally()

    def _apply(self, update: int, decision: Decision) -> None:
        phase, screen = self.phase, self.phase.run.observers.screen
        screen.info(decision.reason)
        row = {"shares": list(decision.shares), "old_ms": 1e3 * decision.old_s, "new_ms": 1e3 * decision.new_s}
        columns = {f"balance/{key}": value for key, value in row.items()}
        phase.write_row(columns)
        screen.record_event("shares", update=update, reason=decision.reason, **row)

    def _add_to_tally(self) -> None:
        if self._seconds:
            ranks_s = self.phase.run.tally.ranks_s
            ranks_s[:] = _add_ranks(ranks_s, self._seconds)
        self._num_since_row, self._seconds = 0, []


def _add_ranks(sums: list[dict[str, float]], seconds: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return `sums` plus the times of each rank; an empty list counts as zeros."""
    return [add_times(*pair) for pair in zip(sums or [{}] * len(seconds), seconds, strict=True)]


def time_columns(seconds: Sequence[Mapping[str, float]], num_updates: int) -> dict[str, float]:
    """Return column -> mean milliseconds per update, by part and rank; with many ranks, minimum, median and maximum."""
    parts = [part for part in PARTS if any(rank_seconds.get(part) for rank_seconds in seconds)]
    means = {part: [1e3 * rank_seconds[part] / num_updates for rank_seconds in seconds] for part in parts}
    if len(seconds) > MAX_RANKS_IN_ROW:
        summaries: dict[str, Callable[[list[float]], float]] = {"min": min, "median": statistics.median, "max": max}
        return {f"ranks/{part}_{name}_ms": of(means[part]) for part in parts for name, of in summaries.items()}
    return {f"rank{rank}/{part}_ms": means[part][rank] for rank in range(len(seconds)) for part in parts}
