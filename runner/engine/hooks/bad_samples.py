"""List the samples that were skipped because they could not be read."""

from __future__ import annotations

from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.loop import StepInfo


class BadSamples(Hook):
    """Writes the bad samples of all ranks to events.jsonl before a checkpoint: a resumed run does not reread them."""

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._bad: list[tuple[int, int, str]] = []  # (update, index, reason) of this rank, not listed yet

    def after_update(self, step: StepInfo) -> None:
        self._bad += [(step.update, *pair) for pair in step.bad]
        status = self.phase.hook(RankSync).status
        if (step.bad and self.phase.has_one_rank) or (status and status.num_bad):
            self._list()

    def flush(self) -> None:
        """List the remaining bad samples of all ranks; a collective."""
        if not self.phase.has_one_rank:
            self._list()

    def end(self) -> None:
        self.flush()

    def _list(self) -> None:
        of_ranks, self._bad = self.phase.parts.world.gather(self._bad), []
        for update, index, reason in sorted(row for there in of_ranks for row in there):
            self.phase.run_.observers.screen.record_event("bad sample", index=index, reason=reason, update=update)
