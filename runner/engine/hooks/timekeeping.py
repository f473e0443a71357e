"""Keep the record of a phase: updates, seconds by part, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from runner.base.accelerator import get_accelerator
from runner.base.stopwatch import PARTS, Bookmark, Seconds
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.meter import added
from runner.profiling.peak_memory import host_peak_gib, restart_host_peak


class Timekeeping(Hook):
    """Accounts for the time of the phase, the first update of the process apart from the others.

    first  seconds by part until the end of the first update of this process; None before
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.first: Bookmark | None = None
        self._done_before = 0  # updates of earlier processes
        self._seconds_before, self._parts_before = phase.record.seconds, phase.record.parts_s
        self._is_settled = False
        restart_host_peak()
        get_accelerator(phase.parts.world.device).reset_peak_memory()

    def begin(self) -> None:
        self._done_before = self.phase.position.update

    def note(self) -> None:
        """Bring the record up to date."""
        phase, record = self.phase, self.phase.record
        record.reached(phase.position.update)
        record.finished = phase.is_over and phase.closed and phase.hook(Evaluation).is_done
        self._note_time(phase.watch.spent)
        record.peak_host_gib = max(record.peak_host_gib, host_peak_gib())
        if peak := get_accelerator(phase.parts.world.device).peak_memory():
            record.peak_device_gib = max(record.peak_device_gib or 0.0, peak.allocated / 2**30)
            record.peak_reserved_gib = max(record.peak_reserved_gib or 0.0, peak.reserved / 2**30)

    def end(self) -> None:
        self._settle(self.phase.watch.finish)

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            with suppress(Exception):  # the device may be lost; the first error is the one to report
                self.phase.record.reached(self.phase.position.update)
                self._settle(self.phase.watch.spent)

    def _settle(self, seconds_of: Callable[[], Seconds]) -> None:
        """Add the seconds of this phase to those of the process, once."""
        if not self._is_settled:
            self._is_settled = True
            parts_s = self._note_time(seconds_of)
            self.phase.run_.tally.clock.end(parts_s, self._num_done)

    def _note_time(self, seconds_of: Callable[[], Seconds]) -> dict[str, float]:
        parts_s = self._parts_s(seconds_of)
        self.phase.record.seconds = self._seconds_before + time.perf_counter() - self.phase.began
        self.phase.record.parts_s = added(self._parts_before, parts_s)
        return parts_s

    def _parts_s(self, seconds_of: Callable[[], Seconds]) -> dict[str, float]:
        if self.first is None or self._num_done < 2:
            return dict(seconds_of())
        until_first = self.first()  # before the rest, which then includes it
        first = {part: spent for part, spent in until_first.items() if part in PARTS}
        rest = {part: spent - first.get(part, 0.0) for part, spent in seconds_of().items()}
        return {**rest, "first_update": sum(first.values())}

    @property
    def _num_done(self) -> int:
        """Updates of this process in this phase."""
        return self.phase.position.update - self._done_before
