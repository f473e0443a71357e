"""The state of a training run: its parts, its records and its observers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from runner.base.errors import Exit, StorageError
from runner.base.json_converter import decode_valid, encode
from runner.base.json_values import none_to_nan, replace_nonfinite
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog
from runner.durable.mirror_thread import NoMirror
from runner.durable.safetensors_writer import HostBuffer
from runner.durable.signals import StopRequest
from runner.engine.checkpoints.save_policy import SaveCost
from runner.engine.contract.contract_checks import validate_numbers
from runner.engine.contract.task_loading import task_errors
from runner.engine.evaluation.meter import Row, TimedUpdate, UpdateClock
from runner.engine.parts.assemble import Parts
from runner.engine.process.run_screen import Screen
from runner.engine.process.watchdog import ProgressMark
from runner.engine.sources.training_identity import Hashes
from runner.host.other_load import OtherLoad
from runner.monitor.monitor_thread import NoMonitor
from runner.plan.run_plan import Plan
from runner.profiling.profiler import Profiler
from runner.records.phase_record import PhaseRecord
from runner.trackers.tracker import Tracker


@dataclass(frozen=True)
class Outcome:
    """How a training run ended.

    stopped_by    name of the signal; None if the run finished
    metrics       metrics of the last evaluation
    update        number of the last completed update in its phase
    is_saved      there is a checkpoint of the last update
    is_resumable  there is a checkpoint to resume from
    """

    stopped_by: str | None
    update: int
    metrics: Mapping[str, float]
    is_saved: bool = True
    is_resumable: bool = True

    @property
    def exit_code(self) -> Exit:
        """Return 0 if finished, 75 if stopped with a checkpoint to resume from, else 130."""
        if not self.stopped_by:
            return Exit.DONE
        return Exit.PREEMPTED if self.is_resumable else Exit.INTERRUPTED


@dataclass
class Observers:
    """Receivers of run events: metrics.jsonl contains every row, all others may drop rows."""

    metrics: AppendLog | NoLog
    tracker: Tracker
    monitor: Any
    profiler: Profiler
    screen: Screen

    def write(self, row: Row) -> None:
        """Append a row to metrics.jsonl and queue it for the tracker; non-finite values become None in both.

        If the disk is full, the row is kept in memory, and no checkpoint is saved until it is written.
        """
        row = replace_nonfinite(row)
        self.metrics.write(json.dumps(row))
        try:
            self.metrics.flush()
        except StorageError as error:
            self.screen.warn_once(f"metrics rows cannot be written, and are kept in memory: {error.problems[0]}")
        self.tracker.log(row)


class NoLog:
    """Discard rows, on ranks that do not write metrics.jsonl."""

    pending_length = 0

    def write(self, row: str) -> None:
        """Discard a row."""

    def flush(self) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""


def silent_observers(screen: Screen, profiler: Profiler) -> Observers:
    """Return observers without output, for ranks that do not print."""
    return Observers(NoLog(), Tracker(""), NoMonitor(), profiler, screen)


@dataclass
class RunProgress:
    """Progress of the run, as stored in its checkpoints.

    updates_before  number of updates of the phases before the current one
    records         phase -> its record
    metrics         metrics of the last evaluation
    kept            numbers of the best and the last checkpoints of finished phases
    """

    updates_before: int = 0
    records: dict[str, PhaseRecord] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return the progress for a checkpoint, by key; non-finite numbers become None."""
        state: dict[str, Any] = replace_nonfinite(encode(self))
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any], *, is_own: bool) -> RunProgress:
        """Restore the progress from a checkpoint.

        is_own  the checkpoint is of this run; the list of kept checkpoints of another run is ignored
        """
        records = {name: decode_valid(PhaseRecord, record) for name, record in state["records"].items()}
        for name, record in records.items():
            record.name, record.metrics = name, dict(none_to_nan(record.metrics))
        kept = [int(number) for number in state["kept"]] if is_own else []
        return RunProgress(int(state["updates_before"]), records, none_to_nan(state["metrics"]), kept)


@dataclass
class Provenance:
    """Identity of the run, and the code and data of its training.

    uid          identifier of the run, as in its checkpoints
    tracker_id   identifier of the run in the tracker; None unless the run was resumed
    is_compared  whether changes to code and data since the checkpoint are detected; False in measurements
    code         hashes of the task's files at the start of the run
    edited       task files that changed since the checkpoint and are not yet in `changes`
    changes      changes to code and data that were found on resume
    on_change    called after a change has been added to `changes`
    """

    uid: str | None = None
    tracker_id: str | None = None
    is_compared: bool = False
    code: Hashes = field(default_factory=dict)
    edited: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    on_change: Callable[[], None] = lambda: None


@dataclass
class Tally:
    """Measurements of this process, which end up in the evidence of the run.

    load           CPU use of other processes since the start
    timed          items and seconds of the last phase, excluding the first update of this process
    step_times_ms  step times in the newest rows of the last phase
    peaks_gib      peak memory: "host", for the rank with the highest peak; on a GPU also "device", and "reserved" by
                   the allocator
    num_workers    data workers that were started; None before the first update
    batch_shapes   shapes of the first tensor of each batch
    ranks_s        for each rank, part of an update -> total seconds
    last_row       newest row of metrics.jsonl
    state_bytes    size of the optimizer state of the last phase in bytes: expected, actual
    """

    clock: UpdateClock = field(default_factory=UpdateClock)
    load: OtherLoad = field(default_factory=OtherLoad)
    timed: TimedUpdate = field(default_factory=TimedUpdate)
    num_saves: int = 0
    num_evaluations: int = 0
    num_rows: int = 0
    items_per_update: float | None = None
    step_times_ms: list[float] = field(default_factory=list)
    peaks_gib: dict[str, float] = field(default_factory=dict)
    num_workers: int | None = None
    batch_shapes: set[object] = field(default_factory=set)
    ranks_s: list[dict[str, float]] = field(default_factory=list)
    last_row: Row = field(default_factory=dict)
    state_bytes: tuple[int, int] = (0, 0)


@dataclass
class ForwardNames:
    """Names of parameters and buffers that forward passes have changed so far.

    frozen   frozen parameters that are treated as buffers
    buffers  non-persistent buffers that checkpoints include
    """

    frozen: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)


@dataclass
class TrainingRun:
    """State of a training run.

    save_cost      time spent on checkpoints, over all phases
    host_buffers   host memory for two copies of the state: the one being written and the next one
    progress_mark  current operation, which the watchdog reads
    forward_state  names of parameters and buffers that forward passes change
    mirror         copies checkpoints to object storage
    has_started    this process has completed an update
    """

    plan: Plan
    parts: Parts
    directory: RunDirectory
    observers: Observers
    stop: StopRequest
    progress: RunProgress = field(default_factory=RunProgress)
    provenance: Provenance = field(default_factory=Provenance)
    tally: Tally = field(default_factory=Tally)
    save_cost: SaveCost = field(default_factory=SaveCost)
    host_buffers: tuple[HostBuffer, HostBuffer] = field(default_factory=lambda: (HostBuffer(), HostBuffer()))
    progress_mark: ProgressMark = field(default_factory=ProgressMark)
    forward_state: ForwardNames = field(default_factory=ForwardNames)
    mirror: NoMirror = field(default_factory=NoMirror)
    has_started: bool = False

    @property
    def num_updates(self) -> int:
        """Number of completed updates of all phases, saved or not; 0 until this process has completed one."""
        return int(self.progress_mark.num_updates.value)

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Baseline metrics of a trivial model, shown next to the evaluation's metric of the same name."""
        with task_errors(self.parts.source, "baselines()"):
            baselines = validate_numbers(self.parts.task.baselines(), self.parts.task.baselines, self.parts.source)
        return {f"val/{name}": value for name, value in baselines.items()}

    @property
    def num_skipped(self) -> int:
        """Number of optimizer steps skipped because of overflow, over all objectives."""
        return self.parts.precision.total_skipped()
