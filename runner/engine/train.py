"""A training run: go on where it stopped, walk its phases, save, and close it."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner import __version__
from runner.axes.dataloader import Loader
from runner.axes.optimizer import OPTIMIZERS, export_state, import_state
from runner.axes.scheduler import SCHEDULERS, Schedule
from runner.base.batch import MicroBatch
from runner.base.choice import make
from runner.base.errors import ConfigError, DataError, Exit, IncompatibleResume, NumericError, Problem
from runner.base.order import Indices, Order, evenly_spread
from runner.base.schema import did_you_mean
from runner.durable import checkpoint as checkpoints
from runner.durable.checkpoint import Loaded, Snapshot, Writer
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog
from runner.durable.signals import StopRequest
from runner.engine.advice import watch_shapes
from runner.engine.assemble import Parts, random_state, restore_random_state
from runner.engine.evaluate import evaluate
from runner.engine.faults import explain
from runner.engine.loop import Position, StepInfo, Training, train_updates
from runner.engine.meter import Clock, Meter, Row, as_line
from runner.engine.resume import compare, load_model
from runner.engine.saving import CHECKPOINTS, SavePolicy
from runner.engine.screen import Screen
from runner.engine.tasks import CheckedLoss
from runner.observe.benchmark import Benchmark
from runner.observe.profiler import Profiler
from runner.observe.trackers import Tracker
from runner.plan.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """How a training run ended.

    stopped_by  name of the signal, None when the run is finished
    metrics     those of the last evaluation
    """

    stopped_by: str | None
    update: int
    metrics: Mapping[str, float]

    @property
    def exit_code(self) -> Exit:
        """0, or 75 when it was saved and stopped."""
        return Exit.PREEMPTED if self.stopped_by else Exit.DONE


@dataclass
class Observers:
    """Who is told what happens: metrics.jsonl is the truth, all others may miss something."""

    metrics: AppendLog
    tracker: Tracker
    monitor: Any
    profiler: Profiler
    benchmark: Benchmark
    screen: Screen

    def write(self, row: Row) -> None:
        """Append a row to metrics.jsonl and hand it to the tracker."""
        self.metrics.write(as_line(row))
        self.metrics.flush()
        self.tracker.log(row)


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
    bests: list[tuple[float, int]] = field(default_factory=list)  # (metric, number) of the best checkpoints, best first
    tracker_id: str | None = None
    updates_before: int = 0  # those of the phases before the current one
    total: int = 0  # updates of the last phase
    last_row: Row = field(default_factory=dict)

    @property
    def num_skipped(self) -> int:
        """Updates that were skipped because a number overflowed."""
        return self.parts.precision.num_skipped()

    def train(self, start: Loaded | None) -> Outcome:
        """Run every phase that is not done yet. `start` is the checkpoint to go on from.

        Raises what the task, the device or the disk make impossible to go on with; the last checkpoint is whole.
        """
        names = self._phases_from(start)
        self.updates_before = start.state["updates_before"] if start else 0
        for name in names:
            phase = Phase(self, name, start)
            start = None
            try:
                with phase:
                    stopped_by = phase.run()
            except Exception as error:  # here and not deeper: torch reports a dead worker wherever we happen to be
                shown = phase.explained(error)
                if shown is error:
                    raise
                raise shown from error
            self.optimizer, self.total, self.last_row = phase.training.optimizer, phase.total, phase.meter.last_row
            if stopped_by:
                return Outcome(stopped_by, phase.position.update, self.metrics)
            self.updates_before += phase.total
            self.bests = []  # another phase has another loss
        return Outcome(None, phase.position.update, self.metrics)

    def _phases_from(self, start: Loaded | None) -> list[str]:
        """Return the phases to walk: that of the checkpoint first, then the selected ones after it.

        Raises IncompatibleResume where a selected phase lies before the checkpoint, or its own is neither selected nor
        finished.
        """
        names, known = self.phase_names(), list(self.parts.task.losses)
        if start is None:
            return names
        current, made, total = (start.state[key] for key in ("phase", "phase_update", "total"))
        if current not in known:
            raise IncompatibleResume(
                f"the checkpoint is of phase {current}, which the task does not have", where="phases"
            )
        later = [name for name in names if known.index(name) > known.index(current)]
        if current not in names and made < total:
            raise IncompatibleResume(
                f"phase {current} is not finished: {made} of {total} updates",
                where="phases",
                fix=f"say phases=[{current}]",
            )
        if current not in names and not later:
            raise IncompatibleResume(
                f"the run is in phase {current} already, and {', '.join(names)} came before it", where="phases",
                fix="start anew with another run=NAME",
            )  # fmt: skip
        return [current, *later]

    def phase_names(self) -> list[str]:
        """Return the phases to run, in the task's order. Raises ConfigError for one the task does not have."""
        known = list(self.parts.task.losses)
        wanted = known if self.plan.settings.phases is None else self.plan.settings.phases
        if not wanted:
            raise ConfigError(
                Problem("names no phase", "phases=[]", f"say phases=[{known[0]}], or phases=null for all")
            )
        problems = [
            Problem(f"the task has no phase {name}; phases: {', '.join(known)}", "phases", did_you_mean(name, known))
            for name in wanted
            if name not in known
        ]
        if problems:
            raise ConfigError(problems)
        return [name for name in known if name in wanted]


class Phase:
    """One phase: its data, optimizer, schedule and position, and what happens between its updates."""

    def __init__(self, run: TrainingRun, name: str, start: Loaded | None) -> None:
        self.run_, self.name = run, name
        plan, parts = run.plan, run.parts
        self.observers, self.clock = run.observers, run.clock
        fetcher = parts.fetcher("train")
        self.order = Order(
            num_samples=len(fetcher),
            global_batch_size=plan.batch.global_batch_size,
            micro_batch_size=plan.batch.micro_batch_size,
            seed=plan.settings.seed,
            drop_last=bool(plan.choices["dataloader"].options["drop_last"]),
        )
        if self.order.updates_per_epoch == 0:
            raise DataError(
                f"{len(fetcher)} training samples make no whole update of {plan.batch.global_batch_size}",
                where="dataloader.drop_last=true",
                fix="say dataloader.drop_last=false, or a smaller global_batch_size",
            )
        if plan.batch.global_batch_size > len(fetcher):
            run.observers.screen.warn(
                f"global_batch_size={plan.batch.global_batch_size} is more than the {len(fetcher)} training samples:"
                " every update is a whole epoch"
            )
        self.total = plan.updates or math.ceil((plan.epochs or 1) * self.order.updates_per_epoch)
        self.loader: Loader = parts.loader(fetcher)
        self.held_out, self.held_out_samples = self._held_out()
        self.position = Position(name, skipped_before=parts.precision.num_skipped())
        # A compiled model is not watched: torch.compile and a dispatch mode do not go together.
        watch = plan.choices["compile"].name == "off"
        self.loss = CheckedLoss(parts.task.losses[name], str(parts.source), watch=watch)
        self.training = self._training()
        self.schedule: Schedule = self.training.schedule
        self.policy: SavePolicy = make(
            CHECKPOINTS, plan.choices["checkpoint"].function, **plan.choices["checkpoint"].options
        )
        self.meter = Meter(
            parts.world,
            name,
            every=plan.settings.log_every,
            write=run.observers.write,
            readings=self._readings,
            clock=run.clock,
            overflow_is_skipped=plan.choices["precision"].function == "fp16",
        )
        every = plan.settings.evaluate.every
        self.evaluate_every = max(1, self.total // 10) if every == "auto" else int(every)
        self.evaluated_at = self.saved_at = -1
        self._on_disk: int | None = None
        if start:
            self._restore(start)
        self.writer = Writer(
            run.directory.checkpoints,
            keep_last=max(2, self.policy.keep),
            on_failure=lambda error: run.observers.screen.warn(f"the checkpoint was not saved: {error}"),
        )

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(RuntimeError) if error else nullcontext():  # a dead worker is reported again when it is closed
            self.loader.close()
        self.writer.close()
        self.run_.observers.profiler.close()

    def explained(self, error: Exception) -> Exception:
        """Return the error to show for one that ended this phase: itself where nothing more is known."""
        made = self.position.update
        where = f"update {made + 1} of phase {self.name}" if made < self.total else f"the end of phase {self.name}"
        return explain(error, self.run_.parts.source, where, self.run_.plan.batch.micro_batch_size) or error

    def run(self) -> str | None:
        """Make the updates that are missing; return the signal that stopped them, or None."""
        if self.position.update >= self.total:
            self.observers.screen.say(
                f"{self.name} is finished: {self.total} updates are made; more: updates=N resume_allow=[updates]"
            )
        for _ in self.updates():
            if self.run_.stop.requested:
                break
        began = time.perf_counter()
        self._close()
        self.clock.hooks += time.perf_counter() - began
        return self.run_.stop.requested if self.position.update < self.total else None

    def updates(self) -> Iterator[int]:
        """Make one update after the other, with all that happens between them, and yield their numbers."""
        self.observers.screen.begin(self.name, self.position.update, self.total, self.order)
        self.observers.monitor.enter_phase(self.name)
        batches = self._batches()
        self.run_.parts.bare.train()
        self.clock.starting = time.perf_counter() - self.clock.started - self.clock.data - self.clock.hooks
        if self._evaluation_is_due():  # the run was stopped in the middle of it
            self._evaluate()
        for step in train_updates(self.training, batches, self.total):
            began = time.perf_counter()
            self._between(step)
            self.clock.hooks += time.perf_counter() - began
            yield step.update

    # ------------------------------------------------------------ between updates

    def _between(self, step: StepInfo) -> None:
        observers, update = self.observers, step.update
        self.meter(step)
        if observers.screen.first_update_is_due:
            self._after_the_first_update(step)
        for index, reason in step.bad:
            observers.screen.event("bad sample", index=index, reason=reason, update=update)
        if observers.screen.due(update):
            observers.screen.draw(update, self._values(step), observers.monitor.line())
        if self._evaluation_is_due():
            self._evaluate()
        if update < self.total and self.policy.due(update, self.order.updates_per_epoch):  # the last one is `_close`'s
            self._save()
        observers.profiler(update)
        observers.benchmark(update)

    def _after_the_first_update(self, step: StepInfo) -> None:
        """What must not delay the first update begins now: the tracker and the monitor."""
        spent = time.perf_counter() - self.clock.started - self.clock.starting
        self.observers.screen.first_update(step.update, spent, self.run_.parts.attention, self.loss.attention)
        self.meter.restart_clock()
        gc.enable()  # off while everything was imported and built, see cli.py
        gc.freeze()  # what is there now lives as long as the run
        self.observers.tracker.start()
        if self.run_.tracker_id is not None:
            self.observers.tracker.replay(self.run_.directory.metrics)
        self.observers.monitor.start()

    def _values(self, step: StepInfo) -> dict[str, float]:
        """Return what the screen shows; waits for the device, so only when something is drawn."""
        row = self.meter.last_row
        values = {"loss": float(step.loss_sum) / max(float(step.items), 1e-30), "lr": step.lr}
        if step.grad_norm is not None:
            values["grad_norm"] = float(step.grad_norm)
        values["items_per_s"] = row.get("perf/items_per_s") or math.nan
        values["data_wait"] = row.get("perf/data_wait", math.nan)
        device = self.run_.parts.world.device
        if device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return values

    def _readings(self) -> dict[str, Any]:
        """Return what belongs into a row besides the loss: loss scale, memory of torch, what the monitor saw."""
        parts = self.run_.parts
        found: dict[str, Any] = {**parts.precision.values(), **self.observers.monitor.latest()}
        device = parts.world.device
        if device.type == "cuda":
            found["memory/allocated_gib"] = torch.cuda.memory_allocated(device) / 2**30
            found["memory/reserved_gib"] = torch.cuda.memory_reserved(device) / 2**30
            found["memory/peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return found

    def _evaluation_is_due(self) -> bool:
        """Tell whether the evaluation of this update is missing; that of the last one is `_close`'s."""
        update = self.position.update
        is_on_time = self.evaluate_every > 0 and update > 0 and update % self.evaluate_every == 0
        return is_on_time and update < self.total and self.evaluated_at != update

    def _evaluate(self) -> None:
        if self.held_out is None or self.evaluated_at == self.position.update:
            return
        began = time.perf_counter()
        self.meter.flush()
        parts = self.run_.parts
        measured = evaluate(
            parts.task, parts.model, self.held_out, parts.prefetch, parts.precision, parts.world,
            self.held_out_samples, self.run_.plan.batch.micro_batch_size, lambda: self.run_.stop.requested is not None,
        )  # fmt: skip
        if measured is None:  # asked to stop: the resumed run makes this evaluation
            return
        self.evaluated_at = self.position.update
        metrics = {f"val/{name}": value for name, value in measured.items()}
        self.run_.metrics = metrics
        self.observers.write({"update": self.position.update, "phase": self.name, **metrics})
        if self.schedule.metric in metrics:
            self.schedule.observe(metrics[self.schedule.metric], self.position.update)
        self.observers.screen.evaluated(self.position.update, metrics)
        self.clock.evaluation += time.perf_counter() - began
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            self.observers.screen.warn(f"not finite at update {self.position.update}: {', '.join(bad)}")
        self._keep_if_best(metrics)

    def _keep_if_best(self, metrics: Mapping[str, float]) -> None:
        name = self.policy.best
        if name is None:
            return
        if name not in metrics:
            self.policy.best = None
            near = did_you_mean(name, metrics)
            self.observers.screen.warn(
                f"checkpoint.best={name}: the evaluation has no such metric, so no best checkpoint is kept; it has "
                + ", ".join(metrics) + (f"; {near}" if near else "")
            )  # fmt: skip
            return
        bests, value = self.run_.bests, metrics[name]
        full = len(bests) >= self.policy.keep_best
        if math.isfinite(value) and self.policy.is_better(value, bests[-1][0] if full else None):
            ranked = sorted([*bests, (value, self._number)], reverse=self.policy.better == "max")
            self.run_.bests = ranked[: self.policy.keep_best]
            self._save()

    def _save(self) -> None:
        if self.saved_at == self.position.update:
            return
        began = time.perf_counter()
        snapshot = self._snapshot()
        self.saved_at = self.position.update
        self.writer.submit(snapshot, best=self._bests())
        self.policy.saved()
        self.clock.saving += time.perf_counter() - began

    def _close(self) -> None:
        finished = self.position.update >= self.total
        if finished:
            self.meter.close_window()
            skipped = self.run_.num_skipped - self.position.skipped_before
            if skipped >= self.total:
                raise NumericError(
                    f"every update of phase {self.name} was skipped: gradients overflowed float16, nothing was learned",
                    where="precision=fp16",
                    fix="say precision.init_scale=1024, or precision=bf16 or fp32",
                )
            self._evaluate()
        self._save()
        self.observers.metrics.flush(sync=True)
        acknowledged = self.writer.wait()
        if (acknowledged if acknowledged is not None else self._on_disk) != self._number:
            raise self.writer.failures[-1]
        self.observers.screen.end()

    # ------------------------------------------------------------ what a checkpoint holds

    def _snapshot(self) -> Snapshot:
        parts, plan = self.run_.parts, self.run_.plan
        meter = self.meter.state()  # raises where the loss is not finite: such weights are never saved
        optimizer, numbers = export_state(self.training.optimizer)
        random, rest = random_state(parts.world.device)
        values = plan.values()
        state = {
            "phase": self.name,
            "phase_update": self.position.update,
            "updates_before": self.run_.updates_before,
            "total": self.total,
            "optimizer": numbers,
            "schedule": self.schedule.state(),
            "precision": parts.precision.state(),
            "meter": meter,
            "random": rest,
            "bests": self.run_.bests,
            "evaluated_at": self.evaluated_at,
            "skipped_before": self.position.skipped_before,
            "metrics": self.run_.metrics,
            "values": values,
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
            "wandb_id": self.observers.tracker.id,
            "metrics_bytes": self.observers.metrics.length,
        }
        copied = checkpoints.snapshot_tensors
        tensors = {"model": copied(parts.bare.state_dict()), "optimizer": copied(optimizer), "random": copied(random)}
        return Snapshot(self._number, tensors, state, facts)

    def _restore(self, start: Loaded) -> None:
        parts = self.run_.parts
        load_model(parts.bare, start)
        import_state(self.training.optimizer, start.tensors("optimizer"), start.state["optimizer"])
        self.schedule.load(start.state["schedule"])
        parts.precision.load(start.state["precision"])
        self.meter.load(start.state["meter"])
        self.run_.metrics = dict(start.state["metrics"])
        self.position.update = int(start.state["phase_update"])
        self.position.skipped_before = int(start.state["skipped_before"])
        self.evaluated_at = int(start.state["evaluated_at"])
        if start.path.parent == self.run_.directory.checkpoints:  # else it is another run's, and this one has none yet
            self.run_.bests = [(float(value), int(number)) for value, number in start.state["bests"]]
            self.saved_at, self._on_disk = self.position.update, start.update
        # Last, for building the parts drew from the generators too.
        restore_random_state(start.tensors("random"), start.state["random"], parts.world.device)

    @property
    def _number(self) -> int:
        """The number of the checkpoint of this moment: updates of all phases so far."""
        return self.run_.updates_before + self.position.update

    def _bests(self) -> tuple[Path, ...]:
        return tuple(checkpoints.path_of(self.run_.directory.checkpoints, number) for _, number in self.run_.bests)

    # ------------------------------------------------------------ what it is made of

    def _training(self) -> Training:
        plan, parts = self.run_.plan, self.run_.parts
        named = [(name, weight) for name, weight in parts.bare.named_parameters() if weight.requires_grad]
        optimizer = make(OPTIMIZERS, plan.choices["optimizer"].function, named, **plan.choices["optimizer"].options)
        schedule = make(SCHEDULERS, plan.choices["scheduler"].function, self.total, **plan.choices["scheduler"].options)
        return Training(
            position=self.position,
            model=parts.model,
            loss=self.loss,
            parameters=[weight for _, weight in named],
            optimizer=optimizer,
            schedule=schedule,
            precision=parts.precision,
            parallel=parts.parallel,
            per_item=1.0 / (min(plan.batch.global_batch_size, self.order.num_samples) * parts.task.items_per_sample),
            max_grad_norm=plan.settings.max_grad_norm,
        )

    def _held_out(self) -> tuple[Loader | None, Indices]:
        """Return the reader and the samples of the evaluation; (None, []) for a task without validation data."""
        try:
            fetcher = self.run_.parts.fetcher("val")
        except NotImplementedError:
            return None, []
        return Loader(fetcher), evenly_spread(len(fetcher), self.run_.plan.settings.evaluate.samples)

    def _batches(self) -> Iterator[MicroBatch]:
        keys = self.order.from_update(self.position.update)
        batches = self.run_.parts.prefetch(iter(self.loader.batches(keys)))
        if self.run_.plan.choices["backend"].name == "fast":
            batches = watch_shapes(batches, self.observers.screen.warn)
        return _Timed(batches, self.clock)


class _Timed:
    """Batches, with the seconds spent waiting for them on the clock."""

    def __init__(self, batches: Iterator[MicroBatch], clock: Clock) -> None:
        self.batches, self.clock = batches, clock

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> MicroBatch:
        began = time.perf_counter()
        batch = next(self.batches)
        self.clock.data += time.perf_counter() - began
        return batch


def check_resume(plan: Plan, start: Loaded, say: Callable[[str], None]) -> None:
    """Say what differs from the checkpoint. Raises IncompatibleResume where it may not."""
    now = json.loads(json.dumps(plan.values()))
    for difference in compare(start.state["values"], now, plan.settings.resume_allow):
        if difference.key not in _UNSAID:
            say(f"differs from the checkpoint: {difference}")


_UNSAID = ("run", "resume", "resume_allow", "output_root", "device")
