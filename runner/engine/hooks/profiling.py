"""Hook that runs the profiler of a run."""

from __future__ import annotations

from functools import partial

from runner.engine.contract.error_diagnosis import is_task_file
from runner.engine.hooks.hook import Hook
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.update.loop import StepInfo
from runner.profiling.instruments import Subject


class Profiling(Hook):
    """Reports each completed update to the profiler. It runs after all other hooks."""

    def begin(self) -> None:
        phase, run = self.phase, self.phase.run
        subject = Subject(
            phase=phase.name,
            folder=f"{phase.name}/" if len(run.plan.selected) > 1 else "",
            model=run.parts.bare,
            device=run.parts.world.device,
            ranks=run.parts.world.world_size,
            is_task_file=partial(is_task_file, source=run.parts.source),
            settle=phase.hook(RankSync).exchange.settle,
        )
        phase.batches = run.observers.profiler.begin(subject, phase.feed, phase.total - phase.position.update)

    def after_update(self, step: StepInfo) -> None:
        self.phase.run.observers.profiler(step.update)

    def close(self, error: BaseException | None) -> None:
        self.phase.run.observers.profiler.close()
