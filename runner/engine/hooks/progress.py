"""Display the progress of a phase and the warnings of the monitor."""

from __future__ import annotations

import math

from runner.base.accelerator import get_accelerator
from runner.engine.hooks.hook import Hook
from runner.engine.hooks.metrics import Metrics
from runner.engine.update.loop import StepInfo

FIRST_SAMPLE_S = 0.5  # seconds before the monitor opens NVML, so that this does not slow the first update


class ShowProgress(Hook):
    """Reads the loss from the device only when the display is due."""

    def begin(self) -> None:
        phase, observers = self.phase, self.phase.run.observers
        observers.screen.begin(phase.name, phase.position.update, phase.total, phase.order, phase.parts.task.item)
        observers.monitor.enter_phase(phase.name)
        observers.monitor.start(after_s=FIRST_SAMPLE_S)

    def after_update(self, step: StepInfo) -> None:
        observers = self.phase.run.observers
        if observers.screen.is_due(step.update):
            with self.phase.stopwatch.during("drawing"):
                observers.screen.draw(step.update, self._displayed_values(step), observers.monitor.line())
        observers.screen.show_alerts(observers.monitor.new_alerts())

    def close(self, error: BaseException | None) -> None:
        if error is None:
            self.phase.run.observers.screen.end()

    def _displayed_values(self, step: StepInfo) -> dict[str, float]:
        """Return the displayed values; synchronizes with the device."""
        meter = self.phase.hook(Metrics).meter
        values: dict[str, float] = {}
        if step.loss_sum is not None:
            values["loss"] = float(step.loss_sum) / max(float(step.items), 1e-30)
        if step.lr is not None:
            values["lr"] = step.lr
        if step.grad_norm is not None:
            values["grad_norm"] = float(step.grad_norm)
        if (pace := meter.timed.pace) is not None:
            values["it_per_s"] = pace  # over the same interval as items_per_s
        values["items_per_s"] = meter.timed.throughput or math.nan
        data_wait = meter.data_wait()
        values["data_wait"] = math.nan if data_wait is None else data_wait
        if peak := get_accelerator(self.phase.parts.world.device).peak_memory():
            values["memory_gib"] = peak.allocated / 2**30
        return values
