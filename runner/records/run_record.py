"""Define the record of a run: the content of run.json, and of error.json if it failed.

Every command reads a run through `RunRecord`. A missing or damaged file, a file of a newer version, and values of the
wrong type are handled alike: values that cannot be read are unknown, and `problem` and `wrong` report them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from runner.base.errors import Problem
from runner.base.json_converter import INLINE, NOT_STORED, decode, encode
from runner.base.json_values import is_number, parse_object
from runner.base.stopwatch import THROUGHPUT
from runner.records.evidence import Evidence
from runner.records.phase_record import PhaseRecord

VERSION = 2  # files of version 1 do not state it; they have the same keys


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """The command that started the run, or resumed it last.

    overrides  settings on its command line; None: unknown
    folder     working directory, to which relative paths refer
    """

    task: str | None = None
    task_file: str | None = None
    config_dir: str | None = None
    folder: str | None = None
    overrides: tuple[str, ...] | None = None
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """The last process of the run (rank 0): where it ran, and how it ended.

    state          running, done, preempted, interrupted or failed; a sweep can also be submitted
    birth          boot ID and start time of the process, by which a reused `pid` is detected
    started_by     SLURM job, Ray job or parent process that started it; restarted ranks have the same one
    metrics_bytes  size of metrics.jsonl when it started; rows before that are of earlier processes
    """

    state: str | None = None
    exit_code: int | None = None
    pid: int | None = None
    birth: str | None = None
    host: str | None = None
    started_by: str | None = None
    started: str | None = None
    ended: str | None = None
    metrics_bytes: int = 0

    def started_since(self, began: float) -> bool:
        """Return whether it started at `began` (seconds since 1970) or later; `started` is cut to milliseconds."""
        try:
            return datetime.fromisoformat(self.started or "").timestamp() >= began - 0.001
        except (ValueError, OverflowError):
            return False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of the run, recorded when a process ends without error.

    metrics    metrics of the last evaluation; None: the metric had no items, or is not finite
    baselines  metric -> value of a trivial model
    """

    update: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, PhaseRecord] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdoptedCheckpoint:
    """A checkpoint of another run from which the user allowed this run to resume."""

    uid: str
    checkpoint: str | None = None
    time: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run; None or empty means unknown.

    names       all names that the run has had
    uid         identifier of the run, see durable/run_identity.py
    tracker_id  identifier of its rows in the tracker
    changes     changes of code and data found when the run was resumed
    problem     why the file could not be read completely; empty if it could
    wrong       dotted names of values of the wrong type
    """

    version: int = VERSION
    name: str | None = None
    names: tuple[str, ...] = ()
    uid: str | None = None
    adopted: tuple[AdoptedCheckpoint, ...] = ()
    origin: RunOrigin = field(default_factory=RunOrigin, metadata=INLINE)
    process: ProcessRecord = field(default_factory=ProcessRecord, metadata=INLINE)
    tracker_id: str | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    result: RunResult = field(default_factory=RunResult, metadata=INLINE)
    evidence: Evidence | None = None
    problem: str = field(default="", compare=False, metadata=NOT_STORED)
    wrong: tuple[str, ...] = field(default=(), compare=False, metadata=NOT_STORED)

    @classmethod
    def decode(cls, content: bytes | None, clean: Callable[[Any], Any] | None = None) -> RunRecord:
        """Return the record in the content of a run.json. Never raises.

        content  None if there is no such file
        clean    applied to the JSON object first, for example to redact it
        """
        tree = parse_object(content) if content is not None else None
        if tree is None:
            return cls(problem="is missing" if content is None else "is damaged")
        decoded = decode(cls, clean(tree) if clean else tree)
        problem = f"has unreadable values: {', '.join(decoded.wrong[:4])}" if decoded.wrong else ""
        if decoded.value.version > VERSION:
            problem = (
                f"was written by a newer accel-run (format {decoded.value.version}), whose added values are not shown"
            )
        return replace(decoded.value, problem=problem, wrong=decoded.wrong)

    @property
    def current_evidence(self) -> Evidence | None:
        """The measurements if they cover the last process; None if they are still those of an earlier process."""
        attempt = self.evidence.attempt if self.evidence is not None else None
        # Earlier versions did not record the attempt.
        is_current = self.process.state != "running" if attempt is None else attempt == self.process.started
        return self.evidence if is_current else None

    def throughput(self, last_row: Mapping[str, Any]) -> float | None:
        """Return the items per second of the run, as shown on every screen and page, or None if unknown.

        last_row  the newest row with `THROUGHPUT` of the last process, used while that process has no evidence
        """
        value: Any = last_row.get(THROUGHPUT)
        of_row = float(value) if is_number(value) and math.isfinite(value) else None
        current, last = (found.items_per_s if found else None for found in (self.current_evidence, self.evidence))
        return next((figure for figure in (current, of_row, last) if figure is not None), None)

    def num_updates(self, phase: str, last_row: Mapping[str, Any]) -> Any:
        """Return the completed updates of a phase, which may be more than those of its last row of metrics."""
        reached = self.result.phases.get(phase)  # empty until the last process has ended
        return reached.updates if reached is not None else last_row.get("update")

    @property
    def is_known(self) -> bool:
        """Whether anything could be read."""
        return self != RunRecord()

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = encode(self)
        return content | {"version": VERSION}


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """Error of a failed attempt: the content of error.json.

    place             rank, phase, update and samples; unknown ones are missing
    reached           completed updates of all phases, saved or not; 0: unknown
    updates_repeated  updates after the last checkpoint, which a resumed run repeats
    attempt           `started` of the process
    seconds           time from its start to the error
    """

    cause: str = ""
    where: str = ""
    fix: str = ""
    problems: tuple[Problem, ...] = ()
    exit_code: int | None = None
    place: Mapping[str, Any] = field(default_factory=dict)
    last_checkpoint: str | None = None
    reached: int = 0
    updates_repeated: int = 0
    traceback: str = ""
    attempt: str | None = None
    time: str | None = None
    seconds: float | None = None

    @classmethod
    def decode(cls, content: bytes | None, clean: Callable[[Any], Any] | None = None) -> ErrorRecord | None:
        """Return the error in the content of an error.json; None if there is none that can be read. Never raises.

        clean  applied to the JSON object first, for example to redact it
        """
        tree = parse_object(content) if content is not None else None
        return decode(cls, clean(tree) if clean else tree).value if tree else None

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = encode(self)
        return content
