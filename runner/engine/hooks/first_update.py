"""Check loss and metrics before the first update, and afterwards start components that must not delay it."""

from __future__ import annotations

import gc
import time
from itertools import chain

from torch import nn

from runner.axes.compile import nothing_was_compiled
from runner.base.errors import TaskFault
from runner.base.task import Task
from runner.base.text import abbreviate
from runner.engine.checks.additivity_check import (
    BatchReader,
    check_coupled_loss,
    check_loss_is_sum,
    check_metrics_are_sums,
)
from runner.engine.checks.batch_dependence import describe_calls
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.metrics import Metrics
from runner.engine.hooks.timekeeping import Timekeeping
from runner.engine.parts.frozen_base import select_saved_state
from runner.engine.parts.phase_kinds import GradientPhase
from runner.engine.update.loop import StepInfo
from runner.host.gc_pause import end_pause
from runner.tensors.module_buffers import list_buffers
from runner.tensors.optimizer_state import export_state


class FirstUpdate(Hook):
    """Runs checks and start-up work around the first update of a phase or of the process."""

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._is_first = True
        self._has_named_untrained = False
        self._start = 0.0
        self._saved_buffers: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
        # Printed after the first update: if the loss also raises there, its error is reported only once.
        self._skipped_note = ""

    def begin(self) -> None:
        self._saved_buffers = _list_saved_buffers(self.phase.parts.bare)
        self._check_loss()
        self._check_metrics()
        self._start = time.perf_counter()

    def _check_loss(self) -> None:
        """Raise TaskFault if the loss is not a sum.

        A resumed phase is not checked again: after training, the loss varies more between samples, and a deviation that
        was within the tolerance at the start must not stop a run after hours.
        """
        phase, parts = self.phase, self.phase.parts
        if phase.position.update or phase.is_over:
            return
        if not isinstance(phase.work, GradientPhase) or not parts.task.loss_is_additive:
            return
        read = BatchReader(phase.loader, parts.prefetch)
        if not phase.work.is_additive:
            check_coupled_loss(parts, phase.feed.peek(), read)
            phase.stopwatch.lap("starting")
            return
        if parts.parallel.gathers_model and phase.hook(Evaluation).held_out is None:
            reason = (
                "it would gather the whole model, which may not fit on a device, and no evaluation of this run gathers"
                " it"
            )
        else:
            results = [
                check_loss_is_sum(parts, loss, phase.feed.peek(), read) for loss in phase.work.task_losses.values()
            ]
            reason = next((result.reason for result in results if result.reason), "")
            for warning in filter(None, (result.warning for result in results)):
                phase.run.observers.screen.warn(f"{phase.name}: {warning}")
            phase.stopwatch.lap("starting")
        if reason:
            self._skipped_note = (
                f"{phase.name}: the check that loss() returns a sum was skipped: {reason}. loss() must return the"
                ' sum over the items of a batch, such as with reduction="sum", and the number of items'
            )

    def _check_metrics(self) -> None:
        """Raise TaskFault if `evaluate` returns means. The default method returns the loss, already checked."""
        phase, parts = self.phase, self.phase.parts
        evaluation = phase.hook(Evaluation)
        indices = evaluation.first_samples
        if phase.position.update or phase.is_over or evaluation.held_out is None or not indices:
            return
        if not isinstance(phase.work, GradientPhase) or type(parts.task).evaluate is Task.evaluate:
            return
        loader = phase.loader.for_evaluation(evaluation.held_out)
        for reason, names in check_metrics_are_sums(parts, loader, indices).items():
            phase.run.observers.screen.info(
                f"{phase.name}: the check that metrics are sums was skipped for {', '.join(names)} ({reason})"
            )
        phase.stopwatch.lap("starting")

    def after_update(self, step: StepInfo) -> None:
        if not self._has_named_untrained:
            self._warn_untrained_gradients()
        if self._is_first:
            self._is_first = False
            if self._skipped_note:
                self.phase.run.observers.screen.info(self._skipped_note)
            self._refuse_added_buffers()
            self._refuse_optimizer_state()
            self._warn_missing_gradients()
            if note := describe_calls(self.phase.work.batch_dependent, self.phase.run.plan.batch):
                self.phase.run.observers.screen.info(f"{self.phase.name}: {note}")
        if not self.phase.run.has_started:
            self.phase.run.has_started = True
            self._finish_startup(step)

    def _refuse_added_buffers(self) -> None:
        """Raise TaskFault, on every rank, if checkpoints would have buffers or shapes that a rebuilt model lacks."""
        parts = self.phase.parts
        added = {name for name, _ in _list_saved_buffers(parts.bare) - self._saved_buffers}
        if not any(parts.world.gather(bool(added))):
            return
        # Call state_dict on all ranks, because its hooks may run collectives, but only if needed: it may be slow.
        saved = sorted(added & select_saved_state(parts).keys())
        names = sorted({*chain(*parts.world.gather(saved))})
        if names:
            key = names[0].rpartition(".")[2]
            raise TaskFault(
                "the first update adds buffers to the model or changes their shape, so checkpoints could not be loaded:"
                f" {abbreviate(names)}",
                where=str(parts.source),
                fix="register each in __init__ with its final shape, or with persistent=False:"
                f' self.register_buffer("{key}", torch.zeros(...))',
            )

    def _refuse_optimizer_state(self) -> None:
        """Raise TaskFault if the state that the first step has created contains a value that cannot be stored."""
        if isinstance(self.phase.work, GradientPhase):
            for training in self.phase.work.trainings.values():
                export_state(training.optimizer)

    def _warn_missing_gradients(self) -> None:
        parts = self.phase.parts
        reached: dict[str, bool] = {}
        # Each stage of a pipeline has only some of the parameters.
        for of_rank in parts.world.gather(self.phase.work.first_gradients()):
            for name, has_gradient in of_rank.items():  # a parameter may have a gradient on other ranks only
                reached[name] = reached.get(name, False) or has_gradient
        missed = [name for name, has_gradient in reached.items() if not has_gradient]
        if missed and self.phase.position.update == 1:  # after a resume, the first update has other samples
            self.phase.run.observers.screen.warn(
                f"no gradient reached {abbreviate(missed)} in the first update of {self.phase.name}"
            )

    def _warn_untrained_gradients(self) -> None:
        """Warn once, not only after the first update: a task may enable gradients during the phase."""
        untrained = self.phase.work.untrained_with_gradient
        if untrained:
            self._has_named_untrained = True
            self.phase.run.observers.screen.warn(
                f"gradients reach parameters that phase {self.phase.name} does not train: {abbreviate(untrained)}. The"
                " optimizer has the parameters that require gradients when the phase starts: to unfreeze some of them"
                " later, freeze them in begin_update, not in __init__"
            )

    def _finish_startup(self, step: StepInfo) -> None:
        phase, run = self.phase, self.phase.run
        phase.hook(Timekeeping).until_first_update = phase.stopwatch.snapshot()
        seconds = time.perf_counter() - self._start
        run.observers.screen.show_first_update(step.update, seconds, run.parts.attention, phase.work.attention)
        run.tally.num_workers = phase.loader.num_workers
        if phase.loader.decision:
            run.observers.screen.info(phase.loader.decision)
        compiled = run.plan.choices["compile"]
        if not compiled.uses("off") and nothing_was_compiled():
            why = "call the model itself in loss, as in model(x): torch.compile compiles that call"
            run.observers.screen.warn(f"compile={compiled.name}: nothing was compiled; {why}")
        phase.hook(Metrics).meter.restart_clock()
        gc.freeze()  # objects that exist now live as long as the run, so the collector need not scan them
        end_pause()
        run.observers.tracker.start()
        if run.provenance.tracker_id is not None:
            run.observers.tracker.replay(run.directory.metrics)
        phase.hook(Checkpointing).prepare()


def _list_saved_buffers(model: nn.Module) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the buffers that checkpoints contain, unless a state_dict hook leaves them out."""
    buffers = [(ref.name, ref.tensor) for ref in list_buffers(model) if ref.is_saved]
    return frozenset((name, tuple(tensor.shape)) for name, tensor in buffers if tensor is not None)
