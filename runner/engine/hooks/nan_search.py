"""Find the module in which the values of an update became non-finite."""

from __future__ import annotations

from runner.axes.precision import NotFinite
from runner.base.errors import AccelRunError
from runner.engine import non_finite
from runner.engine.hooks.hook import Hook
from runner.engine.phase_kinds import GradientPhase
from runner.engine.watchdog import SEARCH


class NanSearch(Hook):
    """Repeats a non-finite update, checking each module; the phase then ends without a save."""

    def on_error(self, error: BaseException) -> AccelRunError | None:
        if not isinstance(error, NotFinite):
            return None
        phase = self.phase
        assert isinstance(phase.work, GradientPhase), "a fit has neither loss nor gradients"
        phase.loader.close()  # its worker threads must not read concurrently
        number = phase.position.update + (0 if error.late else 1)
        phase.progress_mark.now = (SEARCH, number)  # all samples are read again by this process
        micros = list(phase.order.micro_batches(number - 1, phase.shares.of(number - 1)))
        training = phase.work.training
        is_applied = error.late and not getattr(training.optimizer, "_step_supports_amp_scaling", False)
        last_batch = None if error.late else phase.feed.last
        update = non_finite.ReplayedUpdate(
            phase.name, number, micros, phase.loader.fetcher, training, is_applied, last_batch
        )
        return non_finite.locate_error(error, update, phase.parts)
