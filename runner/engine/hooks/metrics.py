"""Write a row of metrics every `log_every` updates."""

from __future__ import annotations

from typing import Any

from runner.base.accelerator import get_accelerator
from runner.engine.evaluation.meter import Meter
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.update.loop import StepInfo
from runner.profiling.peak_memory import allocator_metrics


class Metrics(Hook):
    """Collects losses, norms and speed; other hooks add columns with `readings`."""

    name = "meter"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        run = phase.run
        self.meter = Meter(
            run.parts.world,
            phase.name,
            every=run.plan.settings.log_every,
            write=phase.write_row,
            readings=lambda: [hook.readings() for hook in phase.hooks],
            stopwatch=phase.stopwatch,
            is_starting=not run.has_started,
            locate=lambda: phase.work.location,
        )

    def after_update(self, step: StepInfo) -> None:
        self.meter(step)

    def readings(self) -> dict[str, Any]:
        parts = self.phase.parts
        columns = {**self.phase.work.precision_values(), **self.phase.run.observers.monitor.row()}
        statistics = get_accelerator(parts.world.device).memory_stats()
        return columns | (allocator_metrics(statistics) if statistics else {})

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state()

    def load_state_dict(self, state: Any) -> None:
        self.meter.load(state)

    def end(self) -> None:
        if self.phase.is_over:
            self.meter.close_window()

    def close(self, error: BaseException | None) -> None:
        tally, meter = self.phase.run.tally, self.meter
        if meter.timed.updates:
            tally.timed, tally.step_times_ms = meter.timed, [*meter.step_times_ms]
        # After a stop, updates after the last row are not counted.
        tally.items_per_update = meter.items_seen / meter.last_row["update"] if meter.last_row else None
