"""Define the record of a sweep or a search: the content of sweep.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from runner.base.json_converter import INLINE, NOT_STORED
from runner.records.run_record import ProcessRecord


@dataclass(frozen=True)
class Goal:
    """How trials are compared: the last value of a metric, and its direction.

    over  keys of repetitions, such as seed: trials that differ only in these keys are compared by their mean
    """

    metric: str = "val/loss"
    best_is: Literal["min", "max"] = "min"
    over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.best_is} of {self.metric}"

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the finite values; None if there is none."""
        finite = [value for value in values if math.isfinite(value)]
        return (min if self.best_is == "min" else max)(finite) if finite else None


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial, and its result when the file was written.

    words      overrides of the trial
    exit_code  exit code of its last process, once it has exited
    last       last value of the metric of the goal; `best`: the best value of all its evaluations
    job        SLURM job of its last process, JOB_INDEX; None: a process on the machine of the sweep
    """

    number: int
    name: str
    words: tuple[str, ...]
    exit_code: int | None = None
    state: str = ""
    last: float | None = None
    best: float | None = None
    seconds: float | None = None
    job: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """Trials of a sweep or search, and its progress.

    kind      sweep: all combinations; search: trials proposed by Optuna
    fixed     overrides that all trials share; None: unknown
    together  how many trials run concurrently, and why
    space     key -> search range
    runs      override that names another run, such as weights=last -> the override with the folder of that run, as
              found when the sweep started
    process   the process that wrote the file
    wrong     dotted names of values of the wrong type
    """

    kind: Literal["sweep", "search"] = "sweep"
    name: str = ""
    task: str = ""
    task_file: str | None = None
    config_dir: str | None = None
    command: str = ""
    fixed: tuple[str, ...] | None = None
    goal: Goal = field(default_factory=Goal)
    together: str = ""
    space: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, str] = field(default_factory=dict)
    process: ProcessRecord = field(default_factory=ProcessRecord, metadata=INLINE)
    trials: tuple[TrialRecord, ...] | None = None
    wrong: tuple[str, ...] = field(default=(), compare=False, metadata=NOT_STORED)

    @property
    def is_whole(self) -> bool:
        """Return whether all trials and the overrides that they share could be read."""
        is_wrong = any(name.partition(".")[0] in ("trials", "fixed") for name in self.wrong)
        return not is_wrong and self.fixed is not None and self.trials is not None
