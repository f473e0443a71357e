"""Record which code and data a run was trained with, and warn if they have changed since its checkpoint."""

from __future__ import annotations

from typing import Any

from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.process.watchdog import DATA
from runner.engine.sources.training_identity import (
    changed_samples,
    check_lengths,
    check_sampler,
    describe_changes,
    fingerprint_data,
)


class DataChanges(Hook):
    """Compares datasets by length and by hashes of samples.

    A dataset of a different length is rejected on all ranks. Other changes to code and samples may be intended, such as
    a bug fix: rank 0 warns about them and records them.
    """

    name = "data"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._data: dict[str, Any] = {}  # split -> length and hashes of its dataset

    def state_dict(self) -> dict[str, Any]:
        return self._data

    def load_state_dict(self, state: Any) -> None:
        self._data = dict(state or {})

    def begin(self) -> None:
        phase, provenance, old = self.phase, self.phase.run.provenance, self._data
        if not provenance.is_compared:
            return
        if phase.start is not None and phase.is_over:  # no update is left, and the data may no longer exist
            return
        held_out = phase.hook(Evaluation).held_out
        fetchers = {"train": phase.loader.fetcher} | ({"val": held_out} if held_out else {})
        self._data = {}
        check_lengths(old, {split: {"samples": len(fetcher)} for split, fetcher in fetchers.items()})
        content = phase.order.update_sampler.content
        check_sampler(old.get("train", {}).get("sampler", content), content)
        if not phase.parts.world.is_first:
            return
        with phase.progress_mark.doing(DATA, phase.position.update + 1):
            self._data, varying = fingerprint_data(fetchers, phase.loader)
            self._data["train"]["sampler"] = content
            changed = changed_samples(old, self._data, fetchers, phase.loader)
        if varying:
            self.phase.run.observers.screen.warn(
                f"samples of split {' and '.join(varying)} differ between two reads with the same seed, so they depend"
                " on other state, such as a generator of the dataset. They can change with the number of workers, and"
                " a resumed run does not reproduce them. Draw random numbers from the global generators of torch, NumPy"
                " or Python, or from runner.sample_rng(seed, epoch, index)"
            )
        edited, provenance.edited = provenance.edited, []
        self._report(edited, changed)

    def _report(self, edited: list[str], samples: list[str]) -> None:
        if not edited and not samples:
            return
        phase, run = self.phase, self.phase.run
        update = phase.position.update
        change = {"phase": phase.name, "update": update, "files": edited, "samples": samples}
        run.observers.screen.warn(
            f"code or data has changed since {phase.name} was saved at update {update}:"
            f" {describe_changes(edited, samples)}. The run uses the new version, and run.json records the change"
        )
        run.observers.screen.record_event("changed", **change)
        run.provenance.changes.append(change)
        run.provenance.on_change()
