"""The base class of a hook, and what a hook sees of the phase under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from runner.axes.dataloader import Loader
from runner.base.batch import MicroBatch
from runner.base.errors import AccelRunError
from runner.base.order import Order
from runner.base.stopwatch import Stopwatch
from runner.base.task import Task
from runner.durable.checkpoint import Loaded
from runner.engine.assemble import Parts
from runner.engine.balance import FixedShares
from runner.engine.evaluate import EvaluationResult
from runner.engine.feed import Feed
from runner.engine.loop import Position, StepInfo
from runner.engine.media import histogram_of, images_of, number_of
from runner.engine.phase_kinds import PhaseKind
from runner.engine.run import TrainingRun
from runner.engine.watchdog import ProgressMark
from runner.plan.run_plan import PhasePlan
from runner.records.phase_record import PhaseRecord

AnyHook = TypeVar("AnyHook", bound="Hook")


class Wants(NamedTuple):
    """What one process wants after an update because of a signal or a clock, which the other ranks do not see.

    Decisions that follow from the number of the update or from metrics are the same on all ranks: a hook takes them
    itself. Wants are exchanged, and take effect one update later where there are several ranks.

    Args:
        stop: end the phase after this update; it resumes from its checkpoint.
        save: write a checkpoint.
    """

    stop: bool = False
    save: bool = False


class PhaseView:
    """What hooks see of a phase. They read its attributes, and change it only through its methods.

    Attributes:
        run_: the run with its plan, parts and observers.
        planned: settings of this phase.
        start: the checkpoint it resumes from, or None.
        position: number of updates done; `total` is the number after which the phase ends.
        order: which samples an update has; `shares`: how they are split over the ranks.
        work: gradients or statistics. Hooks are built before it, so `__init__` of a hook must not read it.
        feed: micro-batches as they are read; `batches`: what the updates take, which a hook may wrap in `begin`.
        record: what run.json keeps of the phase.
        closed: the result of the phase is in the model.
        must_stop: the phase ends after the update under way, on all ranks.
        update_s: seconds the last update took; None for the first one of the process.
    """

    run_: TrainingRun
    name: str
    planned: PhasePlan
    start: Loaded | None
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
    watch: Stopwatch
    pulse: ProgressMark
    closed = must_stop = False
    update_s: float | None = None
    hooks: tuple[Hook, ...] = ()

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

        A tensor with one element is read, which waits for the device. Of several ranks, the first one writes.
        Raises TypeError for what is no number, ValueError for the names update and phase.
        """
        row = {name: number_of(name, value) for name, value in values.items()}
        self.run_.observers.write({"update": self.position.update, "phase": self.name, **row})

    def log_images(self, name: str, images: Tensor) -> None:
        """Send images to the tracker: (B, C, H, W), (C, H, W) or (H, W), C of 1 or 3; floats in [0, 1], or uint8.

        Waits for the device. Raises ValueError for other shapes.
        """
        self._log_media(name, lambda: images_of(images))

    def log_text(self, name: str, text: str) -> None:
        """Send a text to the tracker."""
        self._log_media(name, lambda: {"kind": "text", "text": text})

    def log_histogram(self, name: str, values: Tensor, *, bins: int = 64) -> None:
        """Send a histogram of the finite elements to the tracker. Waits for the device."""
        self._log_media(name, lambda: histogram_of(values, bins))

    def _log_media(self, name: str, encoded: Callable[[], Mapping[str, Any]]) -> None:
        if self.parts.world.is_first:
            row = {"update": self.position.update, "phase": self.name, name: encoded()}
            self.run_.observers.tracker.log(row)

    def hook(self, kind: type[AnyHook]) -> AnyHook:
        """Return the hook of this class."""
        return self._by_kind[kind]  # type: ignore[return-value]

    @cached_property
    def _by_kind(self) -> dict[type[Hook], Hook]:
        return {type(hook): hook for hook in self.hooks}

    def hooks_with(self, name: str) -> list[Hook]:
        """Return the hooks that define this method or attribute; the others need not be asked after each update."""
        return [hook for hook in self.hooks if getattr(type(hook), name) is not getattr(Hook, name)]

    @cached_property
    def _may_end(self) -> list[Hook]:
        return self.hooks_with("ends_phase")

    @property
    def parts(self) -> Parts:
        """Model, data and strategy of the run."""
        return self.run_.parts

    @property
    def is_alone(self) -> bool:
        """True where there is one rank."""
        return self.parts.world.world_size == 1

    @property
    def is_over(self) -> bool:
        """True once no update is left: all are done, or a hook ends the phase early."""
        return self.position.update >= self.total or any(hook.ends_phase for hook in self._may_end)

    @property
    def number(self) -> int:
        """Number of a checkpoint of this update: updates of all phases so far."""
        return self.run_.progress.updates_before + self.position.update

    def stop(self) -> None:
        """End the phase after the update under way; every rank calls it for the same update."""
        self.must_stop = True

    def reread(self) -> None:
        """Read the batches from the update under way on again; those read ahead are dropped."""
        raise NotImplementedError

    def begin_again(self, smaller: tuple[tuple[int, int], ...]) -> None:
        """Restart the update under way with the same samples, in micro-batches as `Order` takes `smaller`."""
        raise NotImplementedError

    def finish_work(self) -> None:
        """Put the result into the model once no update is left; only the first call has an effect."""
        raise NotImplementedError

    def in_words(self, error: BaseException) -> AccelRunError | None:
        """Return what an error of this phase means, or None."""
        raise NotImplementedError


class Hook:
    """Something that happens between updates. Every method has a default that does nothing.

    A hook is built with its phase, loads its state where the run resumes, and then gets `begin`, `after_update` and
    `after_evaluation`, `end` once no update follows, and `close` in any case. On several ranks every rank has the same
    hooks in the same order, so collectives inside them match.

    Attributes:
        name: key of its state in a checkpoint; empty: it has none.
        ends_phase: the phase is over before its last update; must be the same on all ranks.
    """

    name = ""
    ends_phase = False

    def __init__(self, phase: PhaseView) -> None:
        self.phase = phase

    def begin(self) -> None:
        """Called before the first update of this process, after the state is loaded."""

    def after_update(self, step: StepInfo) -> None:
        """Called after each update. Tensors of `step` are on the device: reading one waits for it."""

    def wants(self) -> Wants:
        """Return what this process wants; called once after each update."""
        return Wants()

    def readings(self) -> Mapping[str, Any]:
        """Return columns for the row of metrics.jsonl that is written now."""
        return {}

    def during_evaluation(self) -> AbstractContextManager[object]:
        """Return a context for the forward passes of an evaluation."""
        return nullcontext()

    def after_evaluation(self, found: EvaluationResult) -> None:
        """Called on all ranks with the same metrics."""

    def state_dict(self) -> Any:
        """Return what a checkpoint must hold: JSON-able values, and tensors as values of a dictionary."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned; None for a checkpoint without it."""

    def on_error(self, error: BaseException) -> AccelRunError | None:
        """Return the error to show for one that ended the phase, or None if nothing is known of it."""
        return None

    def end(self) -> None:
        """Called once no update follows: the phase is over, or stops here."""

    def close(self, error: BaseException | None) -> None:
        """Release what is held, also after an error, which is then the one to report."""

    @staticmethod
    def load_for_use(parts: Parts, checkpoint: Loaded) -> None:
        """Change the model for inference and export, after the weights of the checkpoint are loaded."""
