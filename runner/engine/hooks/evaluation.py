"""Evaluate on the validation data every `evaluate.every` updates, and at the end of a phase."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from runner.base.order import Indices, spread_evenly
from runner.base.task import Task
from runner.base.text import abbreviate
from runner.config.schema import did_you_mean
from runner.console.run_summary import MAX_METRICS
from runner.engine.checkpoints.save_policy import parse_every
from runner.engine.checks.metric_names import find_metric_names
from runner.engine.evaluation.evaluate import EvaluationResult, evaluate
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.metrics import Metrics
from runner.engine.hooks.oom import OutOfMemory
from runner.engine.process.watchdog import EVALUATION, SUMMARY
from runner.engine.update.loop import StepInfo
from runner.loading.fetcher import Fetcher

MAX_METRIC_SAMPLES = 32  # limit of the checks before the first update, because `evaluate` may be slow


class Evaluation(Hook):
    """Evaluates the task's metrics; the other hooks receive them in `after_evaluation`.

    held_out      the validation data; None for a task without validation data
    samples       indices of the samples that are evaluated
    evaluated_at  update of the last evaluation; -1: none yet
    """

    name = "evaluated_at"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.held_out, self.samples = self._open_held_out()
        self.evaluated_at = -1
        self._has_metrics = False  # an evaluation of the phase is complete in this process

    @cached_property
    def every(self) -> int:
        """Updates between evaluations; 0: only at the end."""
        work, setting = self.phase.work, self.phase.planned.evaluate.every
        every = setting if work.has_interim_evaluation else 0
        if every == "auto":
            return max(1, work.total // 10)
        number, unit = parse_every(every)
        return int(number) * (self.phase.order.updates_per_epoch if unit == "epochs" else 1)

    @property
    def is_done(self) -> bool:
        """True if the evaluation of this update is complete, or not required."""
        return self.held_out is None or self.evaluated_at == self.phase.position.update

    @property
    def first_samples(self) -> list[int]:
        """Indices of the samples for checks before the first update."""
        return list(self.samples[: min(self.phase.planned.batch.micro_batch_size, MAX_METRIC_SAMPLES)])

    def begin(self) -> None:
        self._check_settings()
        if self._is_due():  # the run was stopped during this evaluation
            self._evaluate()

    def _check_settings(self) -> None:
        """Warn before the first update if a setting names a metric that the evaluation of a batch does not have.

        This is not an error, because `evaluate` may return a metric for some batches only. After an evaluation,
        `_warn_unknown` knows all metrics.
        """
        phase, task = self.phase, self.phase.parts.task
        if phase.position.update or phase.is_over or not phase.work.has_interim_evaluation:
            return
        settings = _metric_settings(phase)
        if self.held_out is None:
            for key in settings if not phase.run.observers.profiler.only else ():
                if key != "early_stopping.metric":  # EarlyStopping has its own warning
                    phase.run.observers.screen.warn(f"{key} has no effect in {phase.name}: there is no validation data")
            return
        if type(task).evaluate is Task.evaluate and type(task).summarize is Task.summarize and not task.objectives:
            settings = {key: name for key, name in settings.items() if name != "val/loss"}
        if not settings or not self.first_samples:
            return
        names = find_metric_names(phase.parts, phase.loader.for_evaluation(self.held_out), self.first_samples)
        if names is not None:
            for key, name in settings.items():
                if not names.may_have(name):
                    warn_unknown_metric(phase, key, name, names.known, of="the evaluation of a batch")

    def after_update(self, step: StepInfo) -> None:
        if self._is_due():
            self._evaluate()

    def end(self) -> None:
        if self.phase.is_over:
            self.phase.finish_work()
            self._evaluate()

    def state_dict(self) -> int:
        return self.evaluated_at

    def load_state_dict(self, state: Any) -> None:
        self.evaluated_at = int(state)

    def _open_held_out(self) -> tuple[Fetcher | None, Indices]:
        run = self.phase.run
        if run.observers.profiler.only:
            return None, spread_evenly(0, None)
        try:
            fetcher = run.parts.splits.fetcher("val")
        except NotImplementedError:
            return None, []
        return fetcher, spread_evenly(len(fetcher), self.phase.planned.evaluate.samples)

    def _is_due(self) -> bool:
        """Return whether to evaluate after this update; `end` evaluates the last one."""
        update = self.phase.position.update
        is_on_time = self.every > 0 and update > 0 and update % self.every == 0
        return is_on_time and update < self.phase.total and self.evaluated_at != update

    def _evaluate(self) -> None:
        if self.held_out is not None and not self.is_done:
            with self.phase.stopwatch.during("evaluation"), self.phase.run.observers.profiler.exclude():
                self._run_evaluation(self.held_out)

    def _run_evaluation(self, held_out: Fetcher) -> None:
        phase, run, parts = self.phase, self.phase.run, self.phase.parts
        update, oom = phase.position.update, phase.hook(OutOfMemory)
        phase.is_evaluating = True
        with ExitStack() as stack:
            stack.enter_context(phase.progress_mark.doing(EVALUATION, update))
            phase.hook(Metrics).meter.flush()
            parts.parallel.check_buffers()
            for hook in phase.hooks:
                stack.enter_context(hook.during_evaluation())
            measured = evaluate(
                parts,
                phase.loader.for_evaluation(held_out),
                self.samples,
                oom.sizes,
                on_batch=lambda: phase.progress_mark.advance_batch(EVALUATION, update),  # its timeout is per batch
                should_stop=lambda: run.stop.requested is not None,
                on_last_batch=lambda: phase.progress_mark.advance(SUMMARY, update),
            )
        oom.report_evaluation_reductions()
        phase.progress_mark.completed_kinds.add(SUMMARY)
        phase.is_evaluating = False  # an error leaves it True, so that its report names the evaluation
        if measured is None:  # stopped: the resumed run repeats this evaluation
            phase.interrupt()
            return
        self.evaluated_at = update
        result = EvaluationResult(
            {f"val/{name}": value for name, value in measured.metrics.items()},
            tuple(f"val/{name}" for name in measured.empty),
        )
        run.progress.metrics = result.metrics
        run.tally.num_evaluations += 1
        phase.write_row(result.metrics)
        phase.record.metrics |= result.metrics
        # Baselines do not affect the order, because computing them here could change the random numbers of training.
        run.observers.screen.show_metrics(update, result.metrics, result.empty, phase.planned.deciding_metrics)
        non_finite = [name for name, value in result.measured().items() if not math.isfinite(value)]
        if non_finite:
            names = abbreviate(non_finite, MAX_METRICS)
            run.observers.screen.warn(f"metrics are not finite at update {update}: {names}")
        self._warn_unknown(result)
        phase.work.observe(result.measured())
        for hook in phase.hooks:
            hook.after_evaluation(result)

    def _warn_unknown(self, result: EvaluationResult) -> None:
        """Warn once if a setting names a metric that the evaluation does not have."""
        settings = {} if self._has_metrics else _metric_settings(self.phase)
        self._has_metrics = True
        for key, name in settings.items():
            if name not in result.metrics:
                warn_unknown_metric(self.phase, key, name, result.metrics)


def _metric_settings(phase: PhaseView) -> dict[str, str]:
    """Return the settings in use that name a metric, except the default of checkpoint.best, which a task may lack."""
    best, stopping = phase.planned.best, phase.planned.early_stopping
    early = {"early_stopping.metric": stopping.metric} if stopping.patience is not None else {}
    return {
        **(
            {"checkpoint.best": best.metric}
            if best.metric and best.is_chosen and best.metric not in early.values()
            else {}
        ),
        **early,
        **phase.work.observed_metrics(),
    }


def warn_unknown_metric(
    phase: PhaseView, key: str, name: str, metrics: Iterable[str], of: str = "the evaluation"
) -> None:
    """Warn if a setting names a metric that an evaluation does not have."""
    text = f"{key}={name}: {of} has no such metric; it has {abbreviate([*metrics], MAX_METRICS)}"
    suggestion = did_you_mean(name, metrics)
    phase.run.observers.screen.warn(f"{text}; {suggestion}" if suggestion else text)
