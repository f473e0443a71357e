"""Trace a phase that fits statistics: its state, its batches, and what adding a batch to the state allocates."""

from __future__ import annotations

from runner.base.noise import without_samples
from runner.base.task import Progress
from runner.engine.parts.phase_kinds import StatisticsPhase
from runner.engine.update.loop import Position
from runner.forecast.fake_mode import record_layers
from runner.forecast.phase_tracer import NUM_UPDATES, PhaseTracer
from runner.plan.memory_trace import Traced


class StatisticsTracer(PhaseTracer):
    """Trace one phase of kind fit with one micro-batch size.

    Batches and state are real, so that operations may depend on their values. The final statistics are not computed,
    because `Fit.finish` needs the values of the weights, which a trace does not have.
    """

    def trace(self) -> Traced:
        """Trace two updates and return their memory use, but not their time, which depends on the data loader."""
        order, fetcher = self._open_phase()
        with self.fake_run, record_layers(self.recorder, self.parts.bare), without_samples():
            self.recorder.kind = "statistics"
            position = Position(self.phase.name)
            self.work = StatisticsPhase(self.phase, self.parts, order, position)
            self.recorder.kind = "temporary"
            batches = self._prefetch(self._read(order, fetcher))
            with self.fake_run.without_values():
                for _ in range(min(NUM_UPDATES, self.work.total)):
                    self.parts.task.begin_update(Progress(self.phase.name, position.update, NUM_UPDATES, 0.0))
                    self.recorder.convolved.clear()
                    next(self.work.updates(batches))
                    self.convolved.append(set(self.recorder.convolved))
                    self.before_batch()
                    self.after_update()
            self._check_traceable()
            return self._make_result()

    def before_batch(self) -> None:
        """Record the state, to which the previous micro-batch has been added."""
        for value in self.work.gathered.values():
            self.recorder.record_tensor(value, "statistics")
