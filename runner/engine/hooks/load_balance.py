"""Report a straggler, and with parallelism.shares=speed adapt the shares of the ranks to their measured speed."""

from __future__ import annotations

from collections.abc import Mapping
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


class LoadBalance(Hook):
    """Compares the times of all ranks and writes them to the metrics."""

    name = "shares"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._straggler_detector = StragglerDetector()
        self._num_compared = 0  # number of updates whose times all ranks have reported
        self._seconds: list[tuple[Mapping[str, float], ...]] = []  # seconds by part and rank, since the last row
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
            self._seconds.append(seconds)
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
        columns = {**_mean_ms(self._seconds), **self._idle}
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
        ranks_s = self.phase.run.tally.ranks_s
        for seconds in self._seconds:
            ranks_s[:] = [add_times(*pair) for pair in zip(ranks_s or [{}] * len(seconds), seconds, strict=True)]
        self._seconds.clear()


def _mean_ms(updates: list[tuple[Mapping[str, float], ...]]) -> dict[str, float]:
    """Return column -> mean milliseconds per update, by rank and part."""
    if not updates:
        return {}
    return {
        f"rank{rank}/{part}_ms": 1e3 * sum(update[rank][part] for update in updates) / len(updates)
        for rank in range(len(updates[0]))
        for part in PARTS
        if any(seconds.get(part) for update in updates for seconds in update)
    }
