"""Record the updates, the seconds by part and the peak memory of a phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from runner.base.accelerator import get_accelerator
from runner.base.stopwatch import PARTS, Seconds, TimeSnapshot
from runner.engine.evaluation.meter import add_times
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView
from runner.profiling.peak_memory import host_peak_gib, restart_host_peak


class Timekeeping(Hook):
    """Records the time of the phase; the first update of the process is a separate part, because it includes start-up.

    until_first_update  seconds by part until the end of the first update of this process; None before that
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.until_first_update: TimeSnapshot | None = None
        self._updates_before = 0  # updates of earlier processes
        self._seconds_before, self._parts_before = phase.record.seconds, phase.record.parts_s
        self._has_ended = False
        restart_host_peak()
        get_accelerator(phase.parts.world.device).reset_peak_memory()

    def begin(self) -> None:
        self._updates_before = self.phase.position.update

    def update_record(self) -> None:
        """Update the record of the phase."""
        phase, record = self.phase, self.phase.record
        record.reached(phase.position.update)
        record.finished = phase.is_over and phase.closed and phase.hook(Evaluation).is_done
        self._note_time(phase.stopwatch.spent)
        self._note_host_peak(host_peak_gib())
        if peak := get_accelerator(phase.parts.world.device).peak_memory():
            record.peak_device_gib = max(record.peak_device_gib or 0.0, peak.allocated / 2**30)
            record.peak_reserved_gib = max(record.peak_reserved_gib or 0.0, peak.reserved / 2**30)
            self._note_peaks(device=peak.allocated / 2**30, reserved=peak.reserved / 2**30)

    def _note_host_peak(self, gib: float) -> None:
        self.phase.record.peak_host_gib = max(self.phase.record.peak_host_gib, gib)
        self._note_peaks(host=gib)

    def _note_peaks(self, **peaks_gib: float) -> None:
        """Record peaks of this process; the record of the phase may have higher ones from earlier processes."""
        known = self.phase.run.tally.peaks_gib
        known |= {name: max(gib, known.get(name, 0.0)) for name, gib in peaks_gib.items()}

    def end(self) -> None:
        self._end_clock(self.phase.stopwatch.finish)
        peak = torch.tensor([host_peak_gib()], dtype=torch.float64)
        self._note_host_peak(float(self.phase.parts.world.max(peak)))

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            with suppress(Exception):  # the device may be lost; the first error is the one to report
                self.phase.record.reached(self.phase.position.update)
                self._end_clock(self.phase.stopwatch.spent)

    def _end_clock(self, read_seconds: Callable[[], Seconds]) -> None:
        """Add the times of this phase to the clock of the process; only the first call has an effect."""
        if not self._has_ended:
            self._has_ended = True
            parts_s = self._note_time(read_seconds)
            self.phase.run.tally.clock.end(parts_s, self._num_updates)

    def _note_time(self, read_seconds: Callable[[], Seconds]) -> dict[str, float]:
        parts_s = self._parts_s(read_seconds)
        self.phase.record.seconds = self._seconds_before + time.perf_counter() - self.phase.began
        self.phase.record.parts_s = add_times(self._parts_before, parts_s)
        return parts_s

    def _parts_s(self, read_seconds: Callable[[], Seconds]) -> dict[str, float]:
        if self.until_first_update is None or self._num_updates < 2:
            return dict(read_seconds())
        until_first = self.until_first_update()  # read before the total, which then includes it
        first_update = {part: seconds for part, seconds in until_first.items() if part in PARTS}
        rest = {part: seconds - first_update.get(part, 0.0) for part, seconds in read_seconds().items()}
        return {**rest, "first_update": sum(first_update.values())}

    @property
    def _num_updates(self) -> int:
        return self.phase.position.update - self._updates_before
