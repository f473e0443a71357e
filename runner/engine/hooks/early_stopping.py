"""End a phase early when its metric has stopped improving."""

from __future__ import annotations

import math
from typing import Any

from runner.engine.evaluation.evaluate import EvaluationResult
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView


class EarlyStopping(Hook):
    """Ends the phase after `early_stopping.patience` evaluations in a row without improvement."""

    name = "early_stopping"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.settings = phase.planned.early_stopping
        self.best: float | None = None
        self.num_bad = 0
        self._was_over = False  # whether an earlier process already ended the phase

    @property
    def ends_phase(self) -> bool:  # type: ignore[override]
        return self.settings.patience is not None and self.num_bad >= self.settings.patience

    def begin(self) -> None:
        phase, self._was_over = self.phase, self.ends_phase
        screen, evaluation = phase.run.observers.screen, phase.hook(Evaluation)
        if self.ends_phase and phase.position.update < phase.total:
            screen.info(f"{phase.name} is finished: it stopped early at update {phase.position.update}")
        if self.settings.patience is not None and (evaluation.held_out is None or not evaluation.every):
            screen.warn(
                f"early_stopping has no effect in {phase.name}: there are no evaluations before the end of the phase"
            )

    def after_evaluation(self, result: EvaluationResult) -> None:
        name = self.settings.metric
        value = result.measured().get(name)
        if value is None:
            return
        sign = 1.0 if self.settings.best_is == "min" else -1.0
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best - self.settings.min_delta):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad, **self._ranking()}

    def load_state_dict(self, state: Any) -> None:
        # A difference means that `resume_allow` has permitted a different metric. Older checkpoints do not name it.
        if all(state.get(key, value) == value for key, value in self._ranking().items()):
            self.best, self.num_bad = state["best"], int(state["num_bad"])

    def _ranking(self) -> dict[str, str]:
        return {"metric": self.settings.metric, "best_is": self.settings.best_is}

    def end(self) -> None:
        if self.ends_phase and not self._was_over:
            best = "none" if self.best is None else f"{self.best:.4g}"
            self.phase.run.observers.screen.info(
                f"{self.phase.name} stops early at update {self.phase.position.update}: {self.settings.patience}"
                f" evaluations without a better {self.settings.metric} than {best}"
            )
