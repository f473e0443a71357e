"""A training run: go on where it stopped, walk its phases, save, and close it."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner import __version__
from runner.axes.compile import nothing_was_compiled
from runner.axes.dataloader import Fetcher, Loader
from runner.axes.precision import NotFinite
from runner.base import noise
from runner.base.accelerator import accelerator_of
from runner.base.batch import MicroBatch, first_shape
from runner.base.choice import make
from runner.base.errors import (
    AccelRunError,
    DataError,
    Exit,
    IncompatibleResume,
    InputMissing,
    StorageError,
    TaskFault,
)
from runner.base.figures import finite, nan_for_none
from runner.base.generators import random_state, restore_random_state, seed_everything
from runner.base.order import Indices, Order, evenly_spread, seed_of_rank
from runner.base.schema import did_you_mean
from runner.base.slow import Watch
from runner.base.speed import Decision
from runner.base.stopwatch import PARTS, Bookmark, Seconds
from runner.base.task import Progress
from runner.base.words import shortened
from runner.base.world import World
from runner.durable import checkpoint as checkpoints
from runner.durable.checkpoint import Loaded, NoWriter, Snapshot, Writer
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog
from runner.durable.signals import StopRequest
from runner.durable.tensors import Room
from runner.engine import numeric
from runner.engine.additive import check_sum
from runner.engine.advice import watch_shapes
from runner.engine.assemble import Parts
from runner.engine.balance import shares_by
from runner.engine.contract import checked_figures
from runner.engine.council import Council
from runner.engine.evaluate import Measured, evaluate
from runner.engine.evidence import PhaseEvidence
from runner.engine.faults import explain, is_of_task
from runner.engine.identity import Hashes, changed_files, changed_samples, check_lengths, code_of, data_of, described
from runner.engine.kinds import KINDS, Gradients, check_parameters
from runner.engine.loop import Position, StepInfo
from runner.engine.meter import Clock, Meter, Row, Timed, added, as_line
from runner.engine.resume import compare, load_model
from runner.engine.saver import Saver, bests_on_disk
from runner.engine.saving import CHECKPOINTS, Toll
from runner.engine.scarcity import Scarcity
from runner.engine.screen import Screen
from runner.engine.state import understood
from runner.engine.stopping import EarlyStopping
from runner.engine.tasks import explained
from runner.engine.watchdog import CHECKPOINT, DATA, EVALUATION, FINISH, SEARCH, SUMMARY, UPDATE, Pulse
from runner.observe.benchmark import Benchmark
from runner.observe.memory import allocator_metrics, host_peak_gib, restart_host_peak
from runner.observe.monitor import NoMonitor
from runner.observe.profiler import Profiler, Subject
from runner.observe.trackers import Tracker
from runner.plan.plan import PhasePlan, Plan

FIRST_LOOK_S = 0.5  # the monitor opens NVML then: a short first update does not wait for it


@dataclass(frozen=True)
class Outcome:
    """How a training run ended.

    stopped_by    name of the signal, None when the run is finished
    metrics       those of the last evaluation
    is_saved      there is a checkpoint of the last update
    is_resumable  there is a checkpoint to go on from
    """

    stopped_by: str | None
    update: int
    metrics: Mapping[str, float]
    is_saved: bool = True
    is_resumable: bool = True

    @property
    def exit_code(self) -> Exit:
        """0, 75 when it was stopped and goes on from a checkpoint, 130 when there is none."""
        if not self.stopped_by:
            return Exit.DONE
        return Exit.PREEMPTED if self.is_resumable else Exit.INTERRUPTED


@dataclass
class Observers:
    """Who is told what happens: metrics.jsonl is the truth, all others may miss something."""

    metrics: AppendLog | NoLog
    tracker: Tracker
    monitor: Any
    profiler: Profiler
    benchmark: Benchmark
    screen: Screen

    def write(self, row: Row) -> None:
        """Append a row to metrics.jsonl and hand it to the tracker, which gets what the file has: no NaN.

        Where the disk has no room the row waits for it in memory; until then no checkpoint is saved either.
        """
        self.metrics.write(as_line(row))
        try:
            self.metrics.flush()
        except StorageError as error:
            self.screen.warn_once(f"rows of metrics are kept in memory: {error.problems[0]}")
        self.tracker.log(finite(row))


class NoLog:
    """Keeps no rows: what a rank has in the place of metrics.jsonl where another one writes it."""

    promised = 0

    def write(self, row: str) -> None:
        """Forget a row."""

    def flush(self) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""


def silent(screen: Screen, profiler: Profiler) -> Observers:
    """Return observers that see and write nothing, for a rank that does not speak."""
    return Observers(NoLog(), Tracker(""), NoMonitor(), profiler, Benchmark(), screen)


@dataclass
class PhaseRecord:
    """What a phase has done and taken so far, over all processes that worked on it.

    updates, total   made, and wanted; fewer where it was stopped early
    finished         nothing is left to do in it
    seconds          from its beginning to its last save, evaluations included
    parts_s          part -> seconds: starting, first_update, those of updates and those between them
    peak_host_gib    most resident memory of this process; peak_device_gib the most that torch held on the GPU, and
                     peak_reserved_gib the most that it took from the driver for it
    metrics          of its last evaluation, and what a fit found
    """

    kind: str
    updates: int = 0
    total: int = 0
    finished: bool = False
    seconds: float = 0.0
    peak_host_gib: float = 0.0
    peak_device_gib: float | None = None
    peak_reserved_gib: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Tally:
    """What this process has done and seen, for the evidence of the run.

    step_times_ms  of the newest rows
    timed          items and seconds of the updates after the first one
    batch_shapes   of the first tensor of each batch
    num_samples    phase -> samples to learn from
    ranks_s        part of updates -> seconds, for each rank
    """

    num_saves: int = 0
    num_evaluations: int = 0
    num_rows: int = 0
    items_per_update: float | None = None
    step_times_ms: list[float] = field(default_factory=list)
    timed: Timed = field(default_factory=Timed)
    batch_shapes: set[object] = field(default_factory=set)
    num_samples: dict[str, int] = field(default_factory=dict)
    ranks_s: list[dict[str, float]] = field(default_factory=list)


@dataclass
class TrainingRun:
    """A run under way. `train` walks the phases; everything between updates is a method called from `_between`."""

    plan: Plan
    parts: Parts
    directory: RunDirectory
    observers: Observers
    stop: StopRequest
    clock: Clock = field(default_factory=Clock)
    metrics: dict[str, float] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)  # numbers of the best and the last checkpoints of finished phases
    records: dict[str, PhaseRecord] = field(default_factory=dict)
    uid: str | None = None  # of the run, as its checkpoints record it
    tracker_id: str | None = None
    updates_before: int = 0  # those of the phases before the current one
    last_row: Row = field(default_factory=dict)
    state_bytes: tuple[int, int] = (0, 0)  # of the last optimizer: expected, real
    toll: Toll = field(default_factory=Toll)
    rooms: tuple[Room, Room] = field(default_factory=lambda: (Room(), Room()))  # for copies of the state
    dropped: tuple[int, ...] = ()  # ranks without which the run goes on: it is faster so
    pulse: Pulse = field(default_factory=Pulse)  # what the watchdog looks at
    tally: Tally = field(default_factory=Tally)
    changes: list[dict[str, Any]] = field(default_factory=list)  # of code and data, found when the run was resumed
    on_change: Callable[[], None] = lambda: None  # called after one was added
    identifies: bool = False  # code and data are recorded and compared, which measurements need not
    code: Hashes = field(default_factory=dict)  # of the task, as it was when the run began
    edited: list[str] = field(default_factory=list)  # files of it that changed since the checkpoint, not recorded yet
    left: Mapping[str, PhaseEvidence] = field(default_factory=dict)  # by phase, what the process before told at its end

    @property
    def reached(self) -> int:
        """Updates of all phases that are made, saved or not; 0 before the first one of this start."""
        return int(self.pulse.made.value)

    @cached_property
    def baselines(self) -> dict[str, float]:
        """What a trivial model reaches, by the metric of the evaluation beside which it is shown."""
        with explained(self.parts.source, "baselines"):
            baselines = checked_figures(self.parts.task.baselines(), self.parts.task.baselines, self.parts.source)
        return {f"val/{name}": value for name, value in baselines.items()}

    @property
    def num_skipped(self) -> int:
        """Updates that were skipped because a number overflowed."""
        return self.parts.precision.num_skipped()

    def train(self, start: Loaded | None) -> Outcome:
        """Run every phase that is not done yet. `start` is the checkpoint to go on from.

        Raises what the task, the device or the disk make impossible to go on with; the last checkpoint is whole.
        """
        self.identifies = True
        phases = phases_to_walk(self.plan, start, self.directory)
        check_parameters(phases, self.parts.bare)
        self._check_names()
        if self.parts.world.is_first:  # now: what is edited while the run trains is not what it trains with
            self.code = code_of(self.parts.source)
            self.edited = changed_files(start.state.get("code", self.code), self.code) if start else []
        if start is not None:
            with understood(start):
                self._take_over(start)
            if not _goes_on(start, phases[0], self.directory, self.plan):
                self._begin_after(start)
                start = None
        for planned in phases:
            if start is None:  # else the record goes on with the phase
                self.records[planned.name] = PhaseRecord(planned.kind)
            phase = self._begun(planned, start)
            start = None
            try:
                with phase:
                    stopped_by = phase.run()
            except BaseException as error:  # here and not deeper: torch reports a dead worker wherever we happen to be
                with suppress(Exception):  # the error itself must come through
                    phase.break_off()
                shown = phase.explained(error)
                if isinstance(shown, AccelRunError):
                    shown.place = {**phase.place, **shown.place}
                if shown is error:
                    raise
                raise shown from error
            self.last_row, self.state_bytes = phase.meter.last_row or self.last_row, phase.work.state_bytes()
            if stopped_by:
                is_resumable = phase.remains is not None
                return Outcome(stopped_by, phase.position.update, self.metrics, not phase.is_unsaved, is_resumable)
            if not self.observers.profiler.only:
                self.kept += [*(number for _, number in phase.saver.bests), phase.number]
            self.updates_before += phase.position.update
        return Outcome(None, phase.position.update, self.metrics)

    def _begun(self, planned: PhasePlan, start: Loaded | None) -> Phase:
        """Return the phase, ready to make updates. Raises TaskFault where the task raises while it is built."""
        try:
            return Phase(self, planned, start)
        except Exception as error:
            where = f"the beginning of phase {planned.name}"
            shown = explain(error, self.parts.source, where, planned.batch.micro_batch_size)
            if shown is None or shown is error:
                raise
            raise shown from error

    def _check_names(self) -> None:
        """Raise TaskFault where losses or fits hold the name of no phase of that kind: it would never be called."""
        for kind, name_of, named in (
            ("train", "losses", self.parts.task.losses),
            ("fit", "fits", self.parts.task.fits),
        ):
            known = [phase.name for phase in self.plan.phases if phase.kind == kind]
            for name in named:
                if name not in known:
                    raise TaskFault(
                        f"{name_of} has {name}, but the phases of kind {kind} are {', '.join(known) or 'none'}",
                        where=str(self.parts.source),
                        fix=did_you_mean(name, known) or "name it in PHASES",
                    )

    def _take_over(self, start: Loaded) -> None:
        """Take back from a checkpoint what belongs to the whole run."""
        state = start.state
        self.updates_before = state["updates_before"]
        self.metrics = nan_for_none(state["metrics"])
        self.records = {
            name: PhaseRecord(**{**record, "metrics": nan_for_none(record["metrics"])})
            for name, record in state["records"].items()
        }
        if start.path.parent == self.directory.checkpoints:  # else it is another run's, and this one has none yet
            self.kept = [int(number) for number in state["kept"]]
            self.changes = [dict(change) for change in state.get("changes", [])]
            for name, record in self.records.items():
                known = self.left.get(name)
                if known is not None and known.updates == record.updates and (known.seconds or 0.0) > record.seconds:
                    record.seconds, record.parts_s = known.seconds or 0.0, dict(known.parts_s)

    def _begin_after(self, start: Loaded) -> None:
        """Take the model of a finished phase that is not run again; the next one begins with it."""
        load_model(self.parts.bare, start, self.parts.parallel)
        with understood(start):
            self.parts.precision.load(start.state["precision"])
            restore_random_state_of(self.parts.world, start, self.plan.settings.seed)
        self.updates_before += int(start.state["phase_update"])
        if start.path.parent == self.directory.checkpoints:
            self.kept += [*(int(number) for _, number in start.state["bests"]), start.update]


class Phase:
    """One phase: its data, its kind of work and its position, and what happens between its updates."""

    def __init__(self, run: TrainingRun, planned: PhasePlan, start: Loaded | None) -> None:
        self.run_, self.name, self.planned = run, planned.name, planned
        plan, parts = run.plan, run.parts
        self.observers, self.clock, self.pulse = run.observers, run.clock, run.pulse
        self.watch = parts.parallel.watch
        self.watch.begin()
        run.clock.begin()
        self._began = time.perf_counter()
        self.pulse.begin(self.name)
        parts.task.begin_phase(self.name)
        fetcher = parts.fetcher("train")
        run.tally.num_samples[self.name] = len(fetcher)
        fetcher.may_be_empty = parts.world.world_size > 1 and not parts.parallel.in_step
        self.is_alone = parts.world.world_size == 1
        self.scarcity = Scarcity(self)
        is_dealt = parts.parallel.splits_batch and not self.is_alone
        self.order = Order(
            num_samples=len(fetcher),
            global_batch_size=planned.batch.global_batch_size,
            micro_batch_size=planned.batch.largest_pass,
            seed=plan.settings.seed,
            drop_last=planned.kind == "train" and bool(plan.choices["dataloader"].options["drop_last"]),
            shares=planned.batch.shares if is_dealt else (),
            rank=parts.world.rank if is_dealt else 0,
            in_step=parts.parallel.in_step,
            smaller=self.scarcity.smaller,
        )
        self.council = Council(parts.world)
        self.shares = shares_by(plan.choices["parallelism"].options.get("shares"), self.order)
        self.slow = Watch()
        self.bad: list[tuple[int, int, str]] = []  # update, index, reason of samples left out and not told of yet
        self.must_stop = False  # all ranks know it
        if self.order.updates_per_epoch == 0:
            raise DataError(
                f"{len(fetcher)} training samples make no whole update of {planned.batch.global_batch_size}",
                where="dataloader.drop_last=true",
                fix="use dataloader.drop_last=false, or a smaller global_batch_size",
            )
        if planned.batch.global_batch_size > len(fetcher):
            run.observers.screen.warn(
                f"global_batch_size={planned.batch.global_batch_size} is more than the {len(fetcher)} training samples:"
                " every update is a whole epoch"
            )
        self.loader: Loader = parts.loader(fetcher)
        self.held_out, self.held_out_samples = self._held_out()
        self.position = Position(self.name, skipped_before=parts.precision.num_skipped())
        guide = self.scarcity if self.scarcity.is_on else None
        self.work = KINDS[planned.kind](planned, parts, self.order, self.position, guide)
        self.total = self.work.total
        self.stopping = EarlyStopping(planned.early_stopping)
        self.meter = Meter(
            parts.world,
            self.name,
            every=plan.settings.log_every,
            write=self._write,
            readings=self._readings,
            watch=self.watch,
            is_starting=run.observers.screen.first_update_is_due,
        )
        every = planned.evaluate.every if self.work.is_of_use_on_the_way else 0
        self.evaluate_every = max(1, self.total // 10) if every == "auto" else int(every)
        self.evaluated_at = self.saved_at = -1
        self.is_saved_finished = False  # the checkpoint of `saved_at` says that nothing is left to do
        self.num_evaluated = 0  # batches, by this process
        self.is_first = True
        self.closed = False  # the result of the phase is in the model
        self.is_unsaved = False  # there was no time to save its last update
        self._asked_at: float | None = None  # when this rank learned that the run is to stop; `time.monotonic`
        self._told: set[str] = set()  # what is said once
        self.idle: Mapping[str, float] = {}
        self.parts_of_ranks: list[tuple[Mapping[str, float], ...]] = []  # seconds by part, since the last row
        self._num_heard = 0  # updates of which all ranks have told their times
        self.save_is_late = False  # rank 0 says so, and all ranks know it
        self.record = run.records.setdefault(self.name, PhaseRecord(planned.kind))
        self.record.total = self.total
        self._seconds_before, self._parts_before = self.record.seconds, self.record.parts_s
        self._first: Bookmark | None = None  # what was spent until the first update of this process was made
        self._made_before = 0  # updates, by other processes
        self._is_settled = False
        restart_host_peak()
        accelerator_of(parts.world.device).reset_peak()
        if start:
            self._restore(start)
            self._accept_longer(start)
            self.closed = self.closed and self.is_over  # more updates may be wanted than were
        self.total = int(min(self.total, self.position.update + self.observers.profiler.limit))
        self.finite_buffers = numeric.finite_buffers(parts.bare) if self.work.learned else []
        self.saver = self._saver(start)
        self.pulse.writing = self._being_written
        self.data: dict[str, Any] = {}  # by split: what identifies its data set
        if run.identifies:
            self._identify({"train": fetcher} | ({"val": self.held_out.fetcher} if self.held_out else {}), start)

    @property
    def is_over(self) -> bool:
        """True once no update is left to make: all are made, or the metric has stopped getting better."""
        return self.position.update >= self.total or self.stopping.is_due

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        noise.start_pass(None)
        with ExitStack() as stack:  # whatever one of them raises, the others are closed: the writer before its log
            stack.callback(self._close_profiler, quietly=error is not None)
            stack.callback(self.work.release)
            stack.callback(self._close_writer)
            if not isinstance(error, StorageError) and (error is None or isinstance(error, Exception)):
                stack.callback(self._save_held_quietly)
            with suppress(Exception) if error else nullcontext():  # the first error is the cause
                self.loader.close()

    def _close_profiler(self, *, quietly: bool) -> None:
        with suppress(Exception) if quietly else nullcontext():
            self.run_.observers.profiler.close()

    def _save_held_quietly(self) -> None:
        """A run that fails keeps its best checkpoint; what goes wrong with that is not why it fails."""
        with suppress(Exception):
            self._write_held()

    def _close_writer(self) -> None:
        doing, self.pulse.now = self.pulse.now, (CHECKPOINT, self.position.update)
        self.saver.writer.close()
        self.pulse.now = doing  # an error of it is still to be told

    @property
    def place(self) -> dict[str, Any]:
        """Where the run is, for who reads of its end."""
        return {"rank": self.run_.parts.world.rank, "phase": self.name, "update": self.position.update}

    def explained(self, error: BaseException) -> BaseException:
        """Return the error to show for one that ended this phase: itself where nothing more is known."""
        shown = self.in_words(error)
        return error if shown is None else self.scarcity.explained(error, shown)

    def in_words(self, error: BaseException) -> AccelRunError | None:
        """Return what an error of this phase means, None where nothing is known of it."""
        made = self.position.update
        where = f"update {made + 1} of phase {self.name}" if made < self.total else f"the end of phase {self.name}"
        if self.is_evaluating:
            where = f"the evaluation after update {made} of phase {self.name}"
        return explain(error, self.run_.parts.source, where, self.planned.batch.micro_batch_size)

    @property
    def is_evaluating(self) -> bool:
        """True while an evaluation is under way."""
        return self.pulse.now[0] in (EVALUATION, SUMMARY)

    def run(self) -> str | None:
        """Make the updates that are missing; return the signal that stopped them, or None.

        Raises NumericError with the module where the numbers of an update stopped being finite; it is not saved.
        """
        try:
            return self._run()
        except NotFinite as found:
            raise self._where_not_finite(found) from found

    def _where_not_finite(self, found: NotFinite) -> AccelRunError:
        assert isinstance(self.work, Gradients), "a fit has neither loss nor gradients"
        self.loader.close()  # its thread must not read beside this one
        number = self.position.update + (0 if found.late else 1)
        self.pulse.now = (SEARCH, number)  # all samples are read anew, by this process alone
        micros = list(self.order.micros(number - 1, self.shares.of(number - 1)))
        training = self.work.training
        is_applied = found.late and not getattr(training.optimizer, "_step_supports_amp_scaling", False)
        passed = None if found.late else self.feed.last
        update = numeric.Update(self.name, number, micros, self.loader.fetcher, training, is_applied, passed)
        return numeric.named(found, update, self.run_.parts)

    def _run(self) -> str | None:
        was_over = self.is_over
        if self.stopping.is_due:
            self.observers.screen.say(f"{self.name} is finished: it stopped early at update {self.position.update}")
        elif self.is_over:
            made = f"{self.position.update} updates are made; more: updates=N resume_allow=[updates]"
            self.observers.screen.say(f"{self.name} is finished: {made}")
        elif self.position.update == 0:
            for text in self.work.said_first():
                self.observers.screen.say(f"{self.name} {text}")
        if self.stopping.is_on and (self.held_out is None or not self.evaluate_every):
            self.observers.screen.warn(f"early_stopping has no effect in {self.name}: nothing is evaluated on the way")
        for _ in self.updates():
            if self.must_stop or self.is_over:
                break
        self.council.close()
        if not self.is_alone:  # of the last update nobody has heard
            self._list_bad_samples()
        if self.stopping.is_due and not was_over:
            settings = self.planned.early_stopping
            self.observers.screen.say(
                f"{self.name} stops early at update {self.position.update}: {settings.patience} evaluations without a"
                f" better {settings.metric} than {_shown(self.stopping.best)}"
            )
        self.close()
        self._account()
        if self.record.finished and not self.is_unsaved:
            return None
        if self.run_.dropped:
            return "to go on with fewer ranks"
        name = self.run_.stop.requested
        return "as asked" if name is None or self.run_.parts.world.is_watched else name  # ranks hear of it second-hand

    def updates(self) -> Iterator[int]:
        """Make one update after the other, with all that happens between them, and yield their numbers."""
        self.observers.screen.begin(self.name, self.position.update, self.total, self.order)
        for text in () if self.is_over else self.scarcity.said_first():
            self.observers.screen.say(f"{self.name}: {text}")
        self.observers.monitor.enter_phase(self.name)
        self.observers.monitor.start(after_s=FIRST_LOOK_S)
        keeps = self.run_.parts.world.device.type == "cpu"
        self.feed = _Told(self._batches(), self.pulse, self.position, self.run_.tally.batch_shapes, keeps=keeps)
        self.run_.parts.bare.train()
        self._made_before = self.position.update
        self.watch.lap("starting")
        self._updating_since = time.perf_counter()
        self._tell_progress()
        if self._evaluation_is_due():  # the run was stopped in the middle of it
            self._evaluate()
        since: float | None = None  # the first update is not like the others
        self._check_loss()
        fed = self.observers.profiler.begin(self._subject(), self.feed, self.total - self.position.update)
        for step in () if self.is_over else self.work.updates(fed):
            began = time.perf_counter()
            if since is not None:
                self.saver.updated(began - since)
            self._between(step)
            yield step.update
            since = time.perf_counter()

    def _check_loss(self) -> None:
        """Raise TaskFault where the loss is no sum, before the first update of a phase.

        A resumed phase is not checked again: a trained loss differs more between samples than at the start, and a
        deviation that was within the tolerance must not stop a run after hours.
        """
        parts = self.run_.parts
        is_sharded = parts.parallel.in_step and parts.parallel.splits_batch
        if self.position.update or self.is_over:
            return
        if not isinstance(self.work, Gradients) or not parts.task.loss_is_additive:
            return
        if is_sharded and self.held_out is None:  # the whole model may never be on one device
            return
        check_sum(parts, self.work.task_loss, self.feed.peek())
        self.watch.lap("starting")
        self._updating_since = time.perf_counter()

    def _subject(self) -> Subject:
        run = self.run_
        return Subject(
            phase=self.name,
            folder=f"{self.name}/" if len(run.plan.selected) > 1 else "",
            model=run.parts.bare,
            device=run.parts.world.device,
            ranks=run.parts.world.world_size,
            is_of_task=partial(is_of_task, source=run.parts.source),
            settle=self.council.settle,
        )

    # ------------------------------------------------------------ between updates

    def _between(self, step: StepInfo) -> None:
        observers, update = self.observers, step.update
        self.pulse.made.value = self.number
        self._tell_progress()
        self.meter(step)
        self._heed(step)
        if self.is_first:
            self._after_the_first_of_the_phase()
        if observers.screen.first_update_is_due:
            self._after_the_first_update(step)
        if observers.screen.due(update):
            with self.watch.during("drawing"):
                observers.screen.draw(update, self._values(step), observers.monitor.line())
        observers.screen.tell(observers.monitor.news())
        if self._evaluation_is_due():
            self._evaluate()
        is_due = self.save_is_late or self.saver.policy.due(update, self.order.updates_per_epoch)
        if is_due and not self.is_over and not self.must_stop:  # the last one is `close`'s
            self.save()
        observers.profiler(update)
        observers.benchmark(update)
        self.pulse.done.add(UPDATE)

    def _heed(self, step: StepInfo) -> None:
        """Tell the other ranks how it stands, and learn how they do: what follows is the same on all of them."""
        if self.is_alone:
            self.must_stop = self.must_stop or self.run_.stop.requested is not None
            self.save_is_late = self.saver.is_late()
            if step.bad:
                self.bad += [(step.update, *pair) for pair in step.bad]
                self._list_bad_samples()
            return
        lap = self.watch.last
        self.bad += [(step.update, *pair) for pair in step.bad]
        word = self.council.hear(
            stop=self.run_.stop.requested is not None,
            save=self.run_.parts.world.is_first and self.saver.is_late(),
            num_bad=len(step.bad),
            seconds=lap.seconds if lap else None,
            samples=self.shares.made(lap.update)[self.order.rank] if lap else 0,
        )
        # What is heard is of the update before: it was late then, and may have been saved since.
        self.save_is_late = word is not None and word.save and step.update - 1 > self.saved_at
        if word is None:
            return
        self.must_stop = self.must_stop or word.stop
        if self.must_stop and self._asked_at is None:
            self._asked_at = time.monotonic()
        if word.num_bad:
            self._list_bad_samples()
        if all(word.seconds):
            self._compare_ranks(step.update, tuple(there for there in word.seconds if there), word.samples)

    def _compare_ranks(self, update: int, seconds: tuple[Mapping[str, float], ...], samples: tuple[int, ...]) -> None:
        """Name who holds the others up, and deal the next updates as it is fastest, where that was asked for."""
        self._num_heard += 1
        if self._first is None or self._num_heard > 1:  # the first update of the process is start-up
            self.parts_of_ranks.append(seconds)
        if update % self.run_.plan.settings.log_every == 0:
            self.idle = self.run_.parts.parallel.idle()
        if not self.order.shares:  # stages of a pipeline have unlike work
            return
        found = self.slow.observe(seconds, samples)
        if found:
            self.observers.screen.warn(str(found))
            self.observers.screen.event("slow rank", update=update, **asdict(found))
        change = self.shares.observe(update, seconds, samples)
        if change.decision:
            self._follow_decision(update, change.decision)
        if change.reread:
            self._reread()

    def begin_again(self, smaller: tuple[tuple[int, int], ...]) -> None:
        """The update under way begins again: its samples come once more, in passes as `Order` takes `smaller`."""
        self.order = replace(self.order, smaller=smaller)
        self._reread()
        self._tell_progress()

    def _reread(self) -> None:
        """Batches come from the update under way on; those that were read ahead are forgotten."""
        self.loader.close()
        self.feed.batches, self.feed.last = self._batches(), None

    def _follow_decision(self, update: int, decision: Decision) -> None:
        self.observers.screen.say(decision.reason)
        row = {"shares": list(decision.shares), "old_ms": 1e3 * decision.old_s, "new_ms": 1e3 * decision.new_s}
        self._write({"update": update, "phase": self.name, **{f"balance/{key}": row[key] for key in row}})
        self.observers.screen.event("shares", update=update, reason=decision.reason, **row)
        if decision.drop and self.run_.parts.world.is_watched and not self.is_over:
            self.run_.dropped = decision.drop
            self.must_stop = True

    def _list_bad_samples(self) -> None:
        told, self.bad = self.run_.parts.world.gather(self.bad), []
        for update, index, reason in sorted(row for there in told for row in there):
            self.observers.screen.event("bad sample", index=index, reason=reason, update=update)

    def _tell_progress(self) -> None:
        update = self.position.update
        epoch = update / self.order.updates_per_epoch
        self.run_.parts.task.begin_update(Progress(self.name, update, self.total, epoch))

    def _after_the_first_of_the_phase(self) -> None:
        self.is_first = False
        of_ranks = self.run_.parts.world.gather(self.work.missed())
        missed = of_ranks[0]
        if self.run_.parts.parallel.splits_batch:  # what one rank's samples do not reach those of another may
            missed = [name for name in missed if all(name in there for there in of_ranks)]
        if missed and self.position.update == 1:  # after a resumption the first update may have other samples
            self.observers.screen.warn(f"no gradient reached {shortened(missed)} in the first update of {self.name}")

    def _after_the_first_update(self, step: StepInfo) -> None:
        """What must not delay the first update begins now."""
        self._first = self.watch.bookmark()
        spent = time.perf_counter() - self._updating_since
        self.observers.screen.first_update(step.update, spent, self.run_.parts.attention, self.work.attention)
        compiled = self.run_.plan.choices["compile"]
        if compiled.function != "off" and nothing_was_compiled():
            why = "call the model itself in loss, as in model(x): torch.compile compiles that call"
            self.observers.screen.warn(f"compile={compiled.name}: nothing was compiled; {why}")
        self.meter.restart_clock()
        with self.watch.during("starting"):
            self._start_the_rest()

    def _start_the_rest(self) -> None:
        gc.enable()  # off while everything was imported and built, see cli.py
        gc.freeze()  # what is there now lives as long as the run
        self.observers.tracker.start()
        if self.run_.tracker_id is not None:
            self.observers.tracker.replay(self.run_.directory.metrics)
        parts = self.run_.parts
        of_model = sum(tensor.nbytes for tensor in parts.bare.state_dict().values())
        # Of each tensor the last cache line is filled up: 1 % is more than that takes.
        nbytes = int(1.01 * (of_model + self.work.state_bytes()[0]))
        self.saver.prepare(nbytes, parts.world.device)

    def _values(self, step: StepInfo) -> dict[str, float]:
        """Return what the screen shows; waits for the device, so only when something is drawn."""
        row = self.meter.last_row
        values: dict[str, float] = {}
        if step.loss_sum is not None:
            values["loss"] = float(step.loss_sum) / max(float(step.items), 1e-30)
        if step.lr is not None:
            values["lr"] = step.lr
        if step.grad_norm is not None:
            values["grad_norm"] = float(step.grad_norm)
        values["items_per_s"] = row.get("perf/items_per_s") or math.nan
        data_wait = self.meter.data_wait()
        values["data_wait"] = math.nan if data_wait is None else data_wait
        device = self.run_.parts.world.device
        if peak := accelerator_of(device).peak():
            values["memory_gib"] = peak.allocated / 2**30
        return values

    def _readings(self) -> dict[str, Any]:
        """Return what belongs into a row besides the loss: loss scale, memory of torch, what the monitor saw."""
        parts = self.run_.parts
        found: dict[str, Any] = {**parts.precision.values(), **self.observers.monitor.row()}
        found |= {**_mean_ms(self.parts_of_ranks), **self.idle}
        self._add_ranks()
        device = parts.world.device
        if statistics := accelerator_of(device).statistics():
            found |= allocator_metrics(statistics)
        return found

    def _write(self, row: Row) -> None:
        with self.watch.during("logging"):
            self.run_.tally.num_rows += 1
            self.observers.write(row)

    def _evaluation_is_due(self) -> bool:
        """Tell whether the evaluation of this update is missing; that of the last one is `close`'s."""
        update = self.position.update
        is_on_time = self.evaluate_every > 0 and update > 0 and update % self.evaluate_every == 0
        return is_on_time and update < self.total and self.evaluated_at != update

    def _evaluate(self) -> None:
        if self.held_out is None or self.evaluated_at == self.position.update:
            return
        with self.watch.during("evaluation"), self.observers.profiler.aside():
            self._evaluate_on(self.held_out)

    def _evaluate_on(self, held_out: Loader) -> None:
        self.pulse.now = (EVALUATION, self.position.update)
        self.meter.flush()
        parts = self.run_.parts
        parts.parallel.check_buffers()
        measured = evaluate(
            parts.task, parts.model, held_out, parts.prefetch, parts.precision, parts.parallel,
            self.held_out_samples, self.scarcity.sizes, self.run_.plan.settings.seed, parts.source,
            self._evaluation_must_stop, self._all_is_measured,
        )  # fmt: skip
        self.scarcity.after_evaluation()
        self.pulse.done.add(SUMMARY)
        self.pulse.now = (UPDATE, self.position.update)
        if measured is None:  # asked to stop: the resumed run makes this evaluation
            self.must_stop = True
            return
        self.evaluated_at = self.position.update
        found = Measured(
            {f"val/{name}": value for name, value in measured.metrics.items()},
            tuple(f"val/{name}" for name in measured.empty),
        )
        metrics, known = found.metrics, found.known()
        self.run_.metrics = metrics
        self.run_.tally.num_evaluations += 1
        self._write({"update": self.position.update, "phase": self.name, **metrics})
        self.record.metrics |= metrics
        self.work.observe(known)
        self.stopping.observe(known)
        self._finish_work()  # this evaluation may be the last one, and a best one: its checkpoint must know
        if self.stopping.is_on:
            self._warn_of_unknown("early_stopping.metric", self.planned.early_stopping.metric, metrics)
        self.observers.screen.evaluated(self.position.update, metrics, found.empty)
        bad = [name for name, value in known.items() if not math.isfinite(value)]
        if bad:
            self.observers.screen.warn(f"not finite at update {self.position.update}: {', '.join(bad)}")
        self.keep_if_best(metrics)

    def _evaluation_must_stop(self) -> bool:
        """Tell whether somebody asked to stop; asked before each batch, so that each has its time."""
        if self.num_evaluated:
            self.pulse.done.add(EVALUATION)
        self.num_evaluated += 1
        self.pulse.now = (EVALUATION, self.position.update)
        return self.run_.stop.requested is not None

    def _all_is_measured(self) -> None:
        self.pulse.now = (SUMMARY, self.position.update)

    def keep_if_best(self, metrics: Mapping[str, float]) -> None:
        """Save or hold the state of this update if `checkpoint.best` is among `metrics` and one of the best."""
        name = self.saver.policy.best
        if name is None:
            return
        if name not in metrics:
            self.saver.policy.best = None
            self._warn_of_unknown("checkpoint.best", name, metrics)
            return
        value = metrics[name]
        if not self.run_.parts.world.from_first(self.saver.is_best(value)):  # who writes knows which saves failed
            return
        if self.saved_at == self.position.update:  # the run was stopped in the middle of this evaluation
            self.saver.join(value, self.number)
        elif self._is_followed() and self.run_.parts.world.from_first(self.saver.has_no_budget()):
            with self.watch.during("saving"), self.observers.profiler.aside():
                self._hold(value)
        else:
            self.save(value)

    def _warn_of_unknown(self, key: str, name: str, metrics: Mapping[str, float]) -> None:
        if name not in metrics:
            near = did_you_mean(name, metrics)
            self.observers.screen.warn(
                f"{key}={name}: the evaluation has no such metric; it has {', '.join(metrics)}"
                + (f"; {near}" if near else "")
            )

    def save(self, value: float | None = None) -> str | None:
        """Start writing the state of this update; return None, or why it is not written.

        value  of `checkpoint.best`, where it is saved as one of the best
        """
        # Stopped in its last evaluation, a run was saved before it was finished: who goes on from it must know.
        anew = self.saved_at == self.position.update and self.record.finished and not self.is_saved_finished
        if self.saved_at == self.position.update and not anew:
            return None
        too_late = self._too_late_to_save()
        if too_late:
            return too_late
        with self.watch.during("saving"), self.observers.profiler.aside():
            self._save_now(value, anew=anew)
        return None

    def _save_now(self, value: float | None, *, anew: bool) -> None:
        self.pulse.now = (CHECKPOINT, self.position.update)
        self._check_place()
        if not self.is_alone:  # who goes on from here does not read the samples of this update again
            self._list_bad_samples()
        is_waited_for = self._is_followed()
        self.saver.save(
            self.number, self.snapshot, value=value, kept=self._kept, is_waited_for=is_waited_for, anew=anew
        )
        self.run_.tally.num_saves += 1
        self.saved_at, self.is_saved_finished = self.position.update, self.record.finished
        self.pulse.now = (UPDATE, self.position.update)

    def _is_followed(self) -> bool:
        """Tell whether another update is to follow; the last one is saved in any case."""
        return not self.is_over and not self.must_stop

    def _hold(self, value: float) -> None:
        """Keep this moment as the best checkpoint in the memory of rank 0, which writes it later."""
        self.pulse.now = (CHECKPOINT, self.position.update)
        if not self.is_alone:  # as for a save: a run that resumes from it does not read these samples again
            self._list_bad_samples()
        if self.run_.parts.world.is_first:
            self.saver.hold(self.number, self.snapshot, value=value, kept=self._kept)
        else:  # the ranks gather it together
            self.saver.room.clear()
            self.snapshot()
        self.pulse.now = (UPDATE, self.position.update)

    def _write_held(self) -> None:
        """Write the best checkpoint that is still in memory, unless only the last save is done in time."""
        held = self.saver.held
        if held is None:
            return
        self.saver.count_written()
        too_late = self.saver.why_too_late(self.run_.stop.requested_at or self._asked_at, num_saves=2)
        if too_late:
            self.observers.screen.warn(f"the best checkpoint, of update {held.number}, is lost: {too_late}")
            self.saver.held = None
            return
        self.pulse.now = (CHECKPOINT, self.position.update)
        self._check_place()
        with self.watch.during("saving"):
            self.saver.write_held()

    def _check_place(self) -> None:
        """See that the run directory is still there and ours; raises as `RunDirectory.check_place` does."""
        if self.run_.parts.world.is_first:
            self.run_.directory.check_place(self.observers.screen.warn_once)

    def _saver(self, start: Loaded | None) -> Saver:
        run, choice = self.run_, self.run_.plan.choices["checkpoint"]
        policy = make(CHECKPOINTS, choice.function, **choice.options)
        writer: Writer | NoWriter = NoWriter()
        if run.parts.world.is_first:
            writer = Writer(
                run.directory.checkpoints,
                keep_last=max(2, policy.keep),
                on_retry=lambda error: run.observers.screen.warn(f"the save is tried again: {error}"),
                on_failure=lambda error: run.observers.screen.warn(f"the checkpoint was not saved: {error}"),
                sync_first=run.observers.metrics.sync,
                check=self._check_finite,
            )
        is_ours = start is not None and start.path.parent == run.directory.checkpoints
        on_disk = start.update if start is not None and is_ours else None
        bests = bests_on_disk(start, policy) if start is not None and is_ours else []
        return Saver(policy, writer, run.toll, run.rooms, run.observers.screen, on_disk, bests)

    def _being_written(self) -> tuple[int, object] | None:
        """Return the update whose checkpoint is on its way to the disk, and what changes while the disk moves."""
        under_way = self.saver.writer.under_way
        return (under_way[0] - self.run_.updates_before, under_way) if under_way else None

    @property
    def remains(self) -> int | None:
        """The number of the newest checkpoint of this run, None where it has none."""
        newest = self.saver.remains()
        return max(self.run_.kept, default=None) if newest is None else newest

    def _too_late_to_save(self) -> str | None:
        """Return why a save that would not be done before the end by force is not begun, None where there is time."""
        if self.saver.policy.grace_s is None:
            return None
        self.saver.count_written()
        found: str | None = self.run_.parts.world.from_first(
            self.saver.why_too_late(self.run_.stop.requested_at or self._asked_at)
        )
        return found

    def _say_what_remains(self, reason: str) -> None:
        remains = self.remains
        if remains is None:
            self.observers.screen.warn(f"{reason}; there is no checkpoint yet: the same command begins at update 0")
            return
        name = checkpoints.path_of(self.run_.directory.checkpoints, remains).name
        self.observers.screen.warn(f"{reason}; {name} remains, {self.number - remains} updates after it are repeated")

    def close(self) -> None:
        """End the phase: evaluate and save what is still to be, and wait until it is on disk."""
        if self.is_over:
            self.meter.close_window()
            self._finish_work()
            self._evaluate()
        self._note()
        if self.observers.profiler.only:
            self.observers.metrics.sync()
            self.observers.screen.end()
            return
        self._write_held()
        too_late = self.save()
        if too_late:
            self.is_unsaved = True
            self._say_what_remains(too_late)
        self.pulse.now = (CHECKPOINT, self.position.update)
        with self.watch.during("saving"):
            self.observers.metrics.sync()
            if self.saver.remains() != self.number and not too_late:
                raise self.saver.writer.failures[-1]
        self.observers.screen.end()

    def _finish_work(self) -> None:
        """Once no update is left to make, put the result into the model; once only, resumed or not."""
        if not self.is_over or self.closed:
            return
        self.pulse.now = (FINISH, self.position.update)
        found = {f"{self.planned.kind}/{name}": value for name, value in self.work.close().items()}
        self.closed = True
        self.pulse.now = (UPDATE, self.position.update)
        if found:
            self.record.metrics |= found
            self._write({"update": self.position.update, "phase": self.name, **found})
            self.observers.screen.evaluated(self.position.update, found)

    # ------------------------------------------------------------ what a checkpoint holds

    def snapshot(self) -> Snapshot:
        """Return the state of this update in host memory. A collective: every rank calls it, rank 0 has all of it."""
        parts, plan = self.run_.parts, self.run_.plan
        parts.precision.num_skipped()  # raises where an update was not finite: such weights are never saved
        meter = self.meter.state()
        work, numbers = self.work.state(self.saver.room.copy)
        self._note()
        random, rest = random_state(parts.world.device)
        of_ranks = parts.world.gather([{name: tensor.tolist() for name, tensor in random.items()}, rest])
        parts.parallel.check_buffers()
        values = plan.values()
        state = {
            "phase": self.name,
            "phase_update": self.position.update,
            "epoch": self.position.update / self.order.updates_per_epoch,
            "updates_before": self.run_.updates_before,
            "total": self.total,
            **numbers,
            "early_stopping": self.stopping.state(),
            "records": finite({name: asdict(record) for name, record in self.run_.records.items()}),
            "closed": self.closed,
            "kept": self.run_.kept,
            "precision": parts.precision.state(),
            "meter": meter,
            "saving": self.run_.toll.state(),
            "random": rest,
            "random_of_ranks": [there for _, there in of_ranks[1:]],
            "shares": self.shares.state(),
            "bests": self.saver.bests,
            "evaluated_at": self.evaluated_at,
            "skipped_before": self.position.skipped_before,
            "metrics": finite(self.run_.metrics),
            "values": values,
            "data": self.data,
            "code": self.run_.code,
            "changes": self.run_.changes,
        }
        facts = {
            "epoch": self.position.update // self.order.updates_per_epoch,
            "samples": self.order.samples_before(self.position.update),
            "phase": self.name,
            "world_size": parts.world.world_size,
            "precision": plan.choices["precision"].name,
            "versions": {"accel-run": __version__, "torch": torch.__version__, "numpy": np.__version__},
            "config_hash": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(),
            "run_id": self.run_.directory.name,
            "run_uid": self.run_.uid,
            "wandb_id": self.observers.tracker.id,
            "metrics_bytes": self.observers.metrics.promised,  # they are on disk before the checkpoint has its name
        }
        tensors = {"model": parts.parallel.whole(parts.bare.state_dict(), self.saver.room.copy), **work}
        for rank, (generators, _) in enumerate(of_ranks):
            stem = checkpoints.rank_stem("random", rank) if rank else "random"
            tensors[stem] = {name: torch.tensor(state, dtype=torch.uint8) for name, state in generators.items()}
        return Snapshot(self.number, tensors, state, facts)

    def _check_finite(self, snapshot: Snapshot) -> None:
        """Raise NumericError where what was learned is not finite: a loss sees only what it reaches."""
        learned = [(name, snapshot.tensors["model"][name]) for name in self.work.learned]
        held = snapshot.tensors.get("optimizer", {}).items() if learned else ()
        where = f"phase {self.name}, update {snapshot.state['phase_update']}"
        numeric.must_be_finite([*learned, *held], where)
        model = snapshot.tensors["model"]
        gathered = [(name, model[name]) for name in self.finite_buffers if name in model]
        numeric.must_be_finite(gathered, where, numeric.GATHERED)

    def _note(self) -> None:
        """Bring the record of this phase up to date."""
        self.record.updates = self.position.update
        evaluated = self.held_out is None or self.evaluated_at == self.position.update
        self.record.finished = self.is_over and self.closed and evaluated
        self._note_time(self.watch.spent)
        self.record.peak_host_gib = max(self.record.peak_host_gib, host_peak_gib())
        device = self.run_.parts.world.device
        if peak := accelerator_of(device).peak():
            self.record.peak_device_gib = max(self.record.peak_device_gib or 0.0, peak.allocated / 2**30)
            self.record.peak_reserved_gib = max(self.record.peak_reserved_gib or 0.0, peak.reserved / 2**30)

    def _note_time(self, seconds_of: Callable[[], Seconds]) -> dict[str, float]:
        """Bring the times of the record up to date; return the seconds of this process in this phase by part."""
        parts_s = self._parts_s(seconds_of)
        self.record.seconds = self._seconds_before + time.perf_counter() - self._began
        self.record.parts_s = added(self._parts_before, parts_s)
        return parts_s

    def _parts_s(self, seconds_of: Callable[[], Seconds]) -> dict[str, float]:
        """Return the seconds by part, the first update of the process apart from those that are like each other."""
        if self._first is None or self.num_made < 2:
            return dict(seconds_of())
        until_first = self._first()  # before the rest, which then knows of it
        first = {part: spent for part, spent in until_first.items() if part in PARTS}
        rest = {part: spent - first.get(part, 0.0) for part, spent in seconds_of().items()}
        return {**rest, "first_update": sum(first.values())}

    @property
    def num_made(self) -> int:
        """Updates that this process has made in this phase."""
        return self.position.update - self._made_before

    def _account(self) -> None:
        """The phase is over: what it took and what was seen is on the accounts of the run."""
        self._settle(self._note_time(self.watch.finish))

    def break_off(self) -> None:
        """The phase has failed: what it took until then is on the accounts; nothing is waited for."""
        self.record.updates = self.position.update
        self._settle(self._note_time(self.watch.spent))

    def _settle(self, parts_s: Seconds) -> None:
        if self._is_settled:  # it came to its end, and failed after that
            return
        self._is_settled = True
        self.clock.end(parts_s, self.num_made - ("first_update" in parts_s))
        self._add_ranks()
        tally, meter = self.run_.tally, self.meter
        tally.step_times_ms += meter.step_times_ms
        tally.timed += meter.timed
        tally.items_per_update = meter.items_seen / self.position.update if self.position.update else None

    def _add_ranks(self) -> None:
        """What the ranks told of themselves is added up."""
        ranks_s = self.run_.tally.ranks_s
        for seconds in self.parts_of_ranks:
            ranks_s[:] = [added(*pair) for pair in zip(ranks_s or [{}] * len(seconds), seconds, strict=True)]
        self.parts_of_ranks.clear()

    def _restore(self, start: Loaded) -> None:
        parts = self.run_.parts
        with understood(start):
            self._put_back(start, parts)

    def _identify(self, fetchers: Mapping[str, Fetcher], start: Loaded | None) -> None:
        """Record the data sets of this phase, and compare them and the code with those of the checkpoint.

        Raises IncompatibleResume on all ranks for a data set of another length. Code and samples that have changed may
        be meant, as a corrected line is: rank 0 warns and records them.
        """
        if start is not None and self.is_over:  # nothing is trained: the data may be gone
            self.data = dict(start.state.get("data", {}))
            return
        before = start.state.get("data", {}) if start else {}
        check_lengths(before, {split: {"samples": len(fetcher)} for split, fetcher in fetchers.items()})
        if not self.run_.parts.world.is_first:
            return
        self.pulse.now = (DATA, self.position.update + 1)
        self.data = data_of(fetchers, self.loader)
        edited, self.run_.edited = self.run_.edited, []
        self._note_change(edited, changed_samples(before, self.data, fetchers, self.loader))

    def _note_change(self, edited: list[str], samples: list[str]) -> None:
        if not edited and not samples:
            return
        update = self.position.update
        change = {"phase": self.name, "update": update, "files": edited, "samples": samples}
        self.observers.screen.warn(
            f"changed since the checkpoint from which {self.name} continues at update {update}:"
            f" {described(edited, samples)}. The run uses the changed version, and run.json records it"
        )
        self.observers.screen.event("changed", **change)
        self.run_.changes.append(change)
        self.run_.on_change()

    def _accept_longer(self, start: Loaded) -> None:
        """A checkpoint with more updates than requested ends the phase where it is: updates cannot be taken back."""
        made = self.position.update
        if made > self.total:
            self.observers.screen.warn(
                f"{self.name} already has {made} updates in {start.path.name}, and {self.total} were requested:"
                " no update is trained"
            )
            self.total = self.record.total = made

    def _put_back(self, start: Loaded, parts: Parts) -> None:
        load_model(parts.bare, start, parts.parallel)
        self.work.load(start)
        self.stopping.load(start.state["early_stopping"])
        self.closed = bool(start.state["closed"])
        parts.precision.load(start.state["precision"])
        self.meter.load(start.state["meter"])
        self.position.update = int(start.state["phase_update"])
        self.position.skipped_before = int(start.state["skipped_before"])
        self.evaluated_at = int(start.state["evaluated_at"])
        self.shares.load(start.state.get("shares", {}), self.position.update)
        self.run_.toll.load(start.state.get("saving", []))
        if start.path.parent == self.run_.directory.checkpoints:  # else it is another run's, and this one has none yet
            self.saved_at = self.position.update
            self.is_saved_finished = bool(start.state["records"][self.name]["finished"])
        # Last, for building the parts drew from the generators too.
        restore_random_state_of(parts.world, start, self.run_.plan.settings.seed)

    @property
    def number(self) -> int:
        """The number of the checkpoint of this moment: updates of all phases so far."""
        return self.run_.updates_before + self.position.update

    def _kept(self) -> tuple[Path, ...]:
        """Return the checkpoints that are kept whatever their age: the best ones, and those of earlier phases."""
        numbers = [*(number for _, number in self.saver.bests), *self.run_.kept]
        return tuple(checkpoints.path_of(self.run_.directory.checkpoints, number) for number in numbers)

    # ------------------------------------------------------------ what it is made of

    def _held_out(self) -> tuple[Loader | None, Indices]:
        """Return the reader and the samples of the evaluation; (None, []) for a task without validation data."""
        if self.observers.profiler.only:
            return None, evenly_spread(0, None)
        try:
            fetcher = self.run_.parts.fetcher("val")
        except NotImplementedError:
            return None, []
        return Loader(fetcher), evenly_spread(len(fetcher), self.planned.evaluate.samples)

    def _batches(self) -> Iterator[MicroBatch]:
        keys = self.order.from_update(self.position.update, self.shares.of)
        batches = self.run_.parts.prefetch(iter(self.loader.batches(keys)), self.watch.lap)
        if self.run_.plan.choices["backend"].name == "fast":
            batches = watch_shapes(batches, self.observers.screen.warn)
        return batches


class _Told:
    """Batches, of which the watchdog is told.

    shapes  those of the first tensor of each batch are added here
    shape   that of the last one
    last    what was given last, where it is kept: on a CPU, where numbers are looked at in the update they are of
    """

    def __init__(
        self, batches: Iterator[MicroBatch], pulse: Pulse, position: Position, shapes: set[object], *, keeps: bool
    ) -> None:
        self.batches, self.pulse, self.position = batches, pulse, position
        self.shapes, self.keeps, self.last = shapes, keeps, None
        self.shape: object = None

    def __iter__(self) -> _Told:
        return self

    def peek(self) -> MicroBatch:
        """Return the next batch, which stays the next one."""
        self.pulse.now = (DATA, self.position.update + 1)
        first = next(self.batches)
        self.batches = chain([first], self.batches)
        self.pulse.now = (UPDATE, self.position.update + 1)
        return first

    def __next__(self) -> MicroBatch:
        self.pulse.now = (DATA, self.position.update + 1)
        batch = next(self.batches)
        self.pulse.done.add(DATA)
        self.pulse.now = (UPDATE, self.position.update + 1)
        self.last = batch.batch if self.keeps else None
        self.shape = first_shape(batch.batch)
        self.shapes.add(self.shape)
        noise.start_pass(batch.samples)  # here and not around the loss: backward passes may compute it again
        return batch


def restore_random_state_of(world: World, start: Loaded, seed: int) -> None:
    """Put the generators back to where this rank left them; a rank that was not there begins a sequence of its own."""
    stem, rest = "random", start.state["random"]
    if not world.is_first:
        stem, there = checkpoints.rank_stem("random", world.rank), start.state.get("random_of_ranks", [])
        if stem not in start.stems:
            seed_everything(seed_of_rank(seed, world.rank, start.update))
            return
        rest = there[world.rank - 1]
    restore_random_state(start.tensors(stem), rest, world.device)


def phases_to_walk(plan: Plan, start: Loaded | None, directory: RunDirectory) -> list[PhasePlan]:
    """Return the phases to run: that of the checkpoint where it is selected, then the selected ones not yet finished.

    What another run has finished counts for what a phase needs; phases that are named run anew in this one.
    Raises IncompatibleResume where the phase of the checkpoint is neither selected nor finished, or nothing is left;
    InputMissing where a phase needs another that is neither finished nor comes before it.
    """
    selected, names = list(plan.selected), [phase.name for phase in plan.phases]
    finished: set[str] = set()
    if start is not None:
        current = start.state["phase"]
        if current not in names:
            raise IncompatibleResume(
                f"the checkpoint is of phase {current}, which the task does not have",
                where="phases",
                fix="take the task the run was trained with, or start anew with another run=NAME",
            )
        finished = {name for name, record in start.state["records"].items() if record["finished"]}
        is_selected = current in [phase.name for phase in selected]
        if not is_selected and current not in finished:
            made, total = start.state["phase_update"], start.state["total"]
            raise IncompatibleResume(
                f"phase {current} is not finished: {made} of {total} updates",
                where="phases",
                fix=f"use phases=[{current}]",
            )
        is_named_anew = _is_named_anew(plan, start, directory)
        coming = [phase for phase in selected if is_named_anew or phase.name not in finished]
        if is_selected and not (is_named_anew and current in finished):
            coming = [phase for phase in selected if phase.name == current] + [
                phase for phase in coming if phase.name != current
            ]
        if not coming:
            raise IncompatibleResume(
                f"{', '.join(phase.name for phase in selected)} of this run is finished already", where="phases",
                fix="start anew with another run=NAME",
            )  # fmt: skip
        selected = coming
    there = set(finished)
    for phase in selected:
        missing = [name for name in phase.needs if name not in there]
        if missing:
            wanted = _with_needs(plan, phase.name) - there
            first = ",".join(name for name in names if name in wanted)
            raise InputMissing(
                f"phase {phase.name} needs {', '.join(missing)}, which run {directory.name} has not finished",
                where="phases",
                fix=f"use phases=[{first}], or resume=RUN that has finished it",
            )
        there.add(phase.name)
    return selected


def _with_needs(plan: Plan, name: str) -> set[str]:
    """Return a phase and all that it needs, and what these need."""
    phase = plan.phase(name)
    assert phase is not None, "PHASES names only phases of its own"
    return {name}.union(*(_with_needs(plan, other) for other in phase.needs))


def _is_named_anew(plan: Plan, start: Loaded, directory: RunDirectory) -> bool:
    """Tell whether the user names phases to be made in this run with the model of another."""
    return plan.settings.phases is not None and start.path.parent != directory.checkpoints


def _goes_on(start: Loaded, first: PhasePlan, directory: RunDirectory, plan: Plan) -> bool:
    """Tell whether the first phase goes on from the checkpoint; else it begins with its model."""
    is_finished = start.state["records"][start.state["phase"]]["finished"]
    return bool(start.state["phase"] == first.name) and not (is_finished and _is_named_anew(plan, start, directory))


def check_resume(plan: Plan, start: Loaded, say: Callable[[str], None]) -> None:
    """Say what differs from the checkpoint. Raises IncompatibleResume where it may not.

    Of the keys of phases only those of the phase that goes on count: the others are over, or have not begun.
    """
    current = start.state["phase"]
    goes_on = current if current in [phase.name for phase in plan.selected] else None
    before, now = (
        {key: value for key, value in values.items() if not key.startswith("phase.") or key.split(".", 2)[1] == goes_on}
        for values in (start.state["values"], json.loads(json.dumps(plan.values())))
    )
    for difference in compare(before, now, plan.settings.resume_allow, start.state["phase_update"]):
        if difference.key not in _UNSAID:
            say(f"differs from the checkpoint: {difference}")


def _mean_ms(updates: list[tuple[Mapping[str, float], ...]]) -> dict[str, float]:
    """Return rank and part -> mean milliseconds of an update."""
    if not updates:
        return {}
    return {
        f"rank{rank}/{part}_ms": 1e3 * sum(update[rank][part] for update in updates) / len(updates)
        for rank in range(len(updates[0]))
        for part in PARTS
        if any(there.get(part) for update in updates for there in update)
    }


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


_UNSAID = ("run", "resume", "resume_allow", "output_root", "device")
