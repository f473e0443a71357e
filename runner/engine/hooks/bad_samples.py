"""List the samples that were skipped because they could not be read."""

from __future__ import annotations

import itertools

from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.update.loop import StepInfo


class BadSamples(Hook):
    """Writes the bad samples to events.jsonl before each checkpoint, because a resumed run does not read them again."""

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._bad: list[tuple[int, int, str]] = []  # (update, index, reason) of this rank, not written yet

    def after_update(self, step: StepInfo) -> None:
        self._bad += [(step.update, *pair) for pair in step.bad]
        status = self.phase.hook(RankSync).status
        if (step.bad and self.phase.has_one_rank) or (status and status.num_bad):
            self._write_events()

    def flush(self) -> None:
        """Write the remaining bad samples of all ranks; a collective."""
        if not self.phase.has_one_rank:
            self._write_events()

    def end(self) -> None:
        self.flush()

    def _write_events(self) -> None:
        gathered, self._bad = self.phase.parts.world.gather(self._bad), []
        for update, index, reason in sorted(itertools.chain.from_iterable(gathered)):
            self.phase.run.observers.screen.record_event("bad sample", index=index, reason=reason, update=update)
