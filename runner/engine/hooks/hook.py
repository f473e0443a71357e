"""Base class of hooks, and the view of the phase that hooks receive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.errors import AccelRunError
from runner.base.order import Order
from runner.base.stopwatch import Stopwatch
from runner.base.task import Task
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.evaluation.evaluate import EvaluationResult, evaluation_mode
from runner.engine.evaluation.media import encode_histogram, encode_images, parse_number
from runner.engine.feed import Feed
from runner.engine.parts.assemble import Parts
from runner.engine.parts.phase_kinds import PhaseKind
from runner.engine.process.watchdog import ProgressMark
from runner.engine.run import TrainingRun
from runner.engine.update.balance import FixedShares
from runner.engine.update.loop import Position, StepInfo
from runner.loading.loaders import Loader
from runner.plan.run_plan import PhasePlan
from runner.records.phase_record import PhaseRecord

AnyHook = TypeVar("AnyHook", bound="Hook")


class Wants(NamedTuple):
    """Requests of one process after an update that depend on a signal or a clock, which other ranks do not see.

    Decisions that depend only on the number of the update or on metrics are the same on all ranks, so a hook takes
    them itself. Requests are merged over ranks, and take effect one update later if there are several ranks.

    Args:
        stop: stop the run after this update; it resumes in this phase.
        save: write a checkpoint.
    """

    stop: bool = False
    save: bool = False


class PhaseView:
    """What hooks see of a phase: they read its attributes, and change the phase only through its methods.

    Attributes:
        run: the run with its plan, parts and observers.
        planned: settings of this phase.
        start: the checkpoint from which the phase resumes, or None.
        position: number of completed updates; `total` is the number after which the phase ends.
        order: the samples of each update; `shares` split them over the ranks.
        work: training with gradients, or a fit of statistics. Hooks are constructed before it, so `__init__` of a hook
            must not read it.
        feed: micro-batches as they are read; updates take them from `batches`, which a hook may wrap in `begin`.
        record: the record of the phase in run.json.
        closed: the result of the phase has been stored in the model.
        is_evaluating: an evaluation is running, or has ended the phase with an error.
        must_stop: the run stops after the current update, on all ranks; it resumes in this phase.
        is_ended: a hook called `stop`, in this process or before the checkpoint from which the phase resumes.
        was_ended: a hook called `stop` before the checkpoint from which the phase resumes.
        update_s: seconds of the last update; None for the first one of the process.
    """

    run: TrainingRun
    name: str
    planned: PhasePlan
    start: LoadedCheckpoint | None
    began: float
    total: int
    position: Position
    order: Order
    shares: FixedShares
    loader: Loader
    work: PhaseKind
    feed: Feed
    batches: Iterator[MicroBatch]
    record: PhaseRecord
    stopwatch: Stopwatch
    progress_mark: ProgressMark
    closed = must_stop = is_ended = was_ended = is_evaluating = False
    update_s: float | None = None
    hooks: tuple[Hook, ...] = ()
    _is_in_evaluation_mode = False

    @property
    def model(self) -> nn.Module:
        """The task's model on the device."""
        return self.parts.bare

    @property
    def task(self) -> Task:
        """The task of the run."""
        return self.parts.task

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Write numbers to metrics.jsonl and the tracker, with the number of the update.

        Reading a tensor synchronizes with the device. Only rank 0 writes.
        Raises TypeError for a value that is not a number or a tensor with one element, ValueError for the names
        update and phase.
        """
        self.write_row({name: parse_number(name, value) for name, value in values.items()})

    def write_row(self, columns: Mapping[str, Any]) -> None:
        """Write a row for the current update to metrics.jsonl and the tracker; `columns` may name another `update`."""
        with self.stopwatch.during("logging"):
            self.run.tally.num_rows += 1
            self.run.observers.write({"update": self.position.update, "phase": self.name, **columns})

    def log_images(self, name: str, images: Tensor) -> None:
        """Send images to the tracker: (B, C, H, W), (C, H, W) or (H, W), C of 1 or 3; floats in [0, 1], or uint8.

        Synchronizes with the device. Raises ValueError for other shapes.
        """
        self._log_media(name, lambda: encode_images(images))

    def log_text(self, name: str, text: str) -> None:
        """Send text to the tracker."""
        self._log_media(name, lambda: {"kind": "text", "text": text})

    def log_histogram(self, name: str, values: Tensor, *, bins: int = 64) -> None:
        """Send a histogram of the finite elements to the tracker. Synchronizes with the device."""
        self._log_media(name, lambda: encode_histogram(values, bins))

    def _log_media(self, name: str, encode: Callable[[], Mapping[str, Any]]) -> None:
        if self.parts.world.is_first:
            row = {"update": self.position.update, "phase": self.name, name: encode()}
            self.run.observers.tracker.log(row)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Use `model` as in an evaluation, for example to log samples of averaged weights. Every rank must enter it.

        The model has the weights of evaluations, such as the average of averaging=ema, and is in eval mode, without
        gradients, in the precision of the run. The random generators have the seed of the run. On exit, weights, modes,
        buffers and generators are restored. A nested call has no effect.
        """
        if self._is_in_evaluation_mode:  # hooks swap weights in place: a second swap would restore the training weights
            yield
            return
        parts = self.parts
        self._is_in_evaluation_mode = True
        try:
            with ExitStack() as stack:
                for hook in self.hooks:
                    stack.enter_context(hook.during_evaluation())
                stack.enter_context(evaluation_mode(parts, parts.plan.settings.seed))
                stack.enter_context(parts.parallel.gather_parameters(parts.model))
                stack.enter_context(parts.precision.forward())
                yield
        finally:
            self._is_in_evaluation_mode = False

    def hook(self, hook_class: type[AnyHook]) -> AnyHook:
        """Return the hook of this class."""
        return self._hooks_by_class[hook_class]  # type: ignore[return-value]

    @cached_property
    def _hooks_by_class(self) -> dict[type[Hook], Hook]:
        return {type(hook): hook for hook in self.hooks}

    def hooks_with(self, name: str) -> list[Hook]:
        """Return the hooks that define this method or attribute; others need not be called after each update."""
        return [hook for hook in self.hooks if getattr(type(hook), name) is not getattr(Hook, name)]

    @cached_property
    def _ending_hooks(self) -> list[Hook]:
        return self.hooks_with("ends_phase")

    @property
    def parts(self) -> Parts:
        """Model, data and strategy of the run."""
        return self.run.parts

    @property
    def has_one_rank(self) -> bool:
        """Whether there is only one rank."""
        return self.parts.world.world_size == 1

    @property
    def is_over(self) -> bool:
        """Whether no update is left: all are complete, or a hook ends the phase early."""
        update = self.position.update
        is_ended = self.is_ended and update > 0  # a call of `stop` before the first update takes effect after it
        return update >= self.total or is_ended or any(hook.ends_phase for hook in self._ending_hooks)

    @property
    def number(self) -> int:
        """Number of a checkpoint of this update: completed updates of all phases."""
        return self.run.progress.updates_before + self.position.update

    def stop(self) -> None:
        """End the phase after the current update, as if it were the last one. Intended for hooks of a task.

        Every rank must call it for the same update.
        """
        self.is_ended = True

    def interrupt(self) -> None:
        """Stop the run after the current update; it resumes in this phase. Every rank must call it for this update."""
        self.must_stop = True

    def reread(self) -> None:
        """Read the batches again from the current update on; prefetched ones are dropped."""
        raise NotImplementedError

    def restart_update(self, smaller: tuple[tuple[int, int], ...]) -> None:
        """Restart the current update with the same samples; `smaller` limits the micro-batches, see `Order.smaller`."""
        raise NotImplementedError

    def finish_work(self) -> None:
        """Store the result of the phase in the model if no update is left; only the first call has an effect."""
        raise NotImplementedError

    def explain_error(self, error: BaseException) -> AccelRunError | None:
        """Translate an error of this phase for the user; None if its cause is unknown."""
        raise NotImplementedError


class Hook:
    """Code that runs between updates. Every method has a default that does nothing.

    A hook is constructed with its phase and loads its state if the run resumes. Then `begin`, `before_step`,
    `after_update` and `after_evaluation` are called. `end` is called once no update follows, and `close` in any case.
    All ranks have the same hooks in the same order, so collectives inside them match.

    Attributes:
        name: key of the hook's state in a checkpoint; empty for a hook without state.
        ends_phase: True ends the phase before its last update; must be the same on all ranks.
    """

    name = ""
    ends_phase = False

    def __init__(self, phase: PhaseView) -> None:
        self.phase = phase

    def begin(self) -> None:
        """Called before the first update of this process, after the state is loaded."""

    def before_step(self, parameters: Mapping[str, nn.Parameter], objective: str) -> None:
        """Called before each optimizer step, without autograd; may change `grad` of the parameters.

        Gradients are those of the update: summed over micro-batches and ranks, divided by the number of items, and
        clipped. The logged norm is the one before clipping. Gradients must be changed in the same way on every rank.
        Reading a tensor synchronizes with the device.
        Called once per update, and again if the update is repeated after an out-of-memory error.

        Args:
            parameters: trained parameters of the objective by their names in the model; `grad` may be None. With fsdp
                they are DTensors, of which this rank holds a shard; with a pipeline, those of this rank's stage.
                If float16 overflowed, gradients are not finite, and the step will be skipped.
            objective: name of the objective; "" for a single loss.
        """

    def after_update(self, step: StepInfo) -> None:
        """Called after each update. Tensors of `step` are on the device; reading one synchronizes with it."""

    def wants(self) -> Wants:
        """Return the requests of this process; called once after each update."""
        return Wants()

    def readings(self) -> Mapping[str, Any]:
        """Return columns for the current row of metrics.jsonl: numbers, tensors with one element, or None.

        Their names must differ from all other columns of the row, including those of other hooks.
        """
        return {}

    def during_evaluation(self) -> AbstractContextManager[object]:
        """Return a context for the forward passes of an evaluation."""
        return nullcontext()

    def after_evaluation(self, result: EvaluationResult) -> None:
        """Called on all ranks with the same metrics."""

    def state_dict(self) -> Any:
        """Return the state for a checkpoint: JSON-serializable values, and tensors as values of a dictionary."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned. `state` is None if the checkpoint has no state of this hook."""

    def on_error(self, error: BaseException) -> AccelRunError | None:
        """Return the error to report if `error` ended the phase, or None if its cause is unknown."""
        return None

    def end(self) -> None:
        """Called once no update follows: the phase is over or stopped."""

    def close(self, error: BaseException | None) -> None:
        """Release resources. Called even after an error, which takes precedence over errors raised here."""

    @staticmethod
    def load_for_inference(parts: Parts, checkpoint: LoadedCheckpoint) -> None:
        """Prepare the model for evaluation, inference and export, after the weights of the checkpoint are loaded.

        Args:
            parts: `parts.bare` is the model, `parts.task` the task.
            checkpoint: the state of this hook is `checkpoint.state[name]`, and its tensors `checkpoint.tensors(name)`.
                The name of a hook of a task file is its key in the configuration: `hook.log_fit` for LogFit.
        """
