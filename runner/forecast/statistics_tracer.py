"""Trace a phase that fits statistics: its state, its batches, and what adding a batch to the state allocates."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from runner.base.noise import without_samples
from runner.base.task import Progress
from runner.engine.parts.phase_kinds import StatisticsPhase
from runner.engine.update.loop import Position
from runner.forecast.fake_mode import record_layers
from runner.forecast.phase_tracer import NUM_UPDATES, PhaseTracer, find_peak
from runner.plan.memory_trace import ComputeCost, Traced


class StatisticsTracer(PhaseTracer):
    """Trace one phase of kind fit with one micro-batch size.

    Batches and state are real, so that operations may depend on their values. The results of the statistics are not
    computed: `Fit.finish` needs values of the weights that a trace does not have.
    """

    def trace(self) -> Traced:
        """Trace two updates and return their demand, without the time, which depends on the data loader."""
        with ExitStack() as stack:
            order, fetcher = self._open_phase()
            stack.enter_context(self.fake_run)
            stack.enter_context(record_layers(self.recorder, self.parts.bare))
            stack.enter_context(without_samples())
            self.recorder.kind = "statistics"
            position = Position(self.phase.name)
            self.work = StatisticsPhase(self.phase, self.parts, order, position)
            self.recorder.kind = "temporary"
            batches = self._prefetch(self._read(order, fetcher))
            stack.enter_context(self.fake_run.without_values())
            for _ in range(min(NUM_UPDATES, self.work.total)):
                self.parts.task.begin_update(Progress(self.phase.name, position.update, NUM_UPDATES, 0.0))
                self.recorder.convolved.clear()
                next(self.work.updates(batches))
                self.convolved.append(set(self.recorder.convolved))
                self.before_batch()
                self.after_update()
            self._check_traceable()
            return self._make_statistics()

    def _make_statistics(self) -> Traced:
        events, why_not = tuple(self.recorder.events), self._why_not()
        peak = find_peak(events, self.recorder.blocks)
        return Traced(
            phase=self.phase.name,
            micro_batch_size=self.phase.batch.micro_batch_size,
            accumulation_steps=self.phase.batch.accumulation_steps,
            peak=peak,
            events=events,
            layers=(),
            blocks=(),
            work=ComputeCost(),
            step=ComputeCost(),
            model=dataclasses.replace(
                self._measure_model(), shapes_repeat=all(shapes == self.convolved[0] for shapes in self.convolved)
            ),
            without_gradients_bytes=peak.total,
            is_exact=not why_not,
            why_not=why_not,
        )

    def before_batch(self) -> None:
        """Record the state, to which the previous micro-batch has been added."""
        for value in self.work.gathered.values():
            self.recorder.record_tensor(value, "statistics")
