"""Trials of a sweep: state and results read from their runs, and the summary files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from runner.base.errors import Exit
from runner.base.json_numbers import metric_text
from runner.base.process_identity import birth_of
from runner.base.schema import did_you_mean
from runner.base.secret import fit_to_show
from runner.base.text import aligned, is_number, shortened
from runner.durable.directory import SWEEP, RunDirectory, is_name
from runner.durable.files import listed, mapped, read_object, read_rows
from runner.durable.run_state import standing

TABLE = "results.csv"
BEST = "<- best"
State = Literal["waiting", "running", "stopped", "failed", "submitted", "done"]
STOPPED = (Exit.PREEMPTED, Exit.INTERRUPTED)  # the same command resumes the trial; any other code is a failure


@dataclass(frozen=True)
class Trial:
    """One choice of settings.

    name   of its run, which lies in the folder of the sweep
    words  the settings that tell it from the others, as they are typed
    """

    number: int
    name: str
    words: tuple[str, ...]

    @property
    def settings(self) -> dict[str, str]:
        """Return key -> value of what tells it from the others."""
        return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in self.words)}

    @property
    def label(self) -> str:
        """Name and words."""
        return f"{self.name}  {' '.join(self.words)}".rstrip()


@dataclass(frozen=True)
class Goal:
    """How trials are compared: the last value of a metric, and its direction."""

    metric: str = "val/loss"
    best_is: Literal["min", "max"] = "min"

    def __str__(self) -> str:
        return f"{self.best_is} of {self.metric}"

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of those that are finite."""
        known = [value for value in values if math.isfinite(value)]
        return (min if self.best_is == "min" else max)(known) if known else None


@dataclass(frozen=True)
class Result:
    """State and result of a trial.

    exit_code  of its last process, where that is known
    last       the metric at its last evaluation, NaN where that had no items or was not finite; None: no evaluation
    best       the best of all its evaluations
    seconds    of its phases, over all its processes
    metrics    every metric of its last evaluation
    """

    trial: Trial
    state: State
    exit_code: int | None = None
    last: float | None = None
    best: float | None = None
    seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """Return the value used for comparison, None if unfinished or not finite."""
        return self.last if self.state == "done" and self.last is not None and math.isfinite(self.last) else None


@dataclass
class Sweep:
    """What sweep.json holds; what the trials have reached stands in their own runs, and is read from there.

    kind      sweep: every combination; search: what Optuna asks for
    fixed     the settings that all trials have in common
    together  how many trials run at once, and why
    codes     number of a trial -> exit code of its last process, where that has ended
    settled   number of a trial -> how it stands, where its run was read and changes no more
    space     key -> what a search may choose
    """

    folder: Path
    kind: Literal["sweep", "search"] = "sweep"
    task: str = ""
    fixed: tuple[str, ...] = ()
    task_file: str | None = None
    config_dir: str | None = None
    launcher: str = "local"
    command: str = ""
    goal: Goal = Goal()
    together: str = ""
    space: Mapping[str, str] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    settled: dict[int, Result] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Return what the folder's sweep.json tells; what is missing or damaged there is as if nobody had said it."""
        found = read_object(folder / SWEEP)
        goal = mapped(found.get("goal"))
        trials, codes = [], {}
        for row in listed(found.get("trials")):
            match row:
                case {"number": int(number), "name": str(name), "words": list(words)} if is_name(name):
                    trials.append(Trial(number, name, tuple(map(str, words))))
                    if isinstance(row.get("exit_code"), int):
                        codes[number] = row["exit_code"]
        return cls(
            folder,
            "search" if found.get("kind") == "search" else "sweep",
            str(found.get("task") or ""),
            tuple(map(str, listed(found.get("fixed")))),
            found.get("task_file"),
            found.get("config_dir"),
            str(found.get("launcher") or "local"),
            str(found.get("command") or ""),
            Goal(str(goal.get("metric") or "val/loss"), "max" if goal.get("best_is") == "max" else "min"),
            str(found.get("together") or ""),
            {str(key): str(value) for key, value in mapped(found.get("space")).items()},
            trials,
            codes,
            found,
        )

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing of the sweep.json that was read had to be left out."""
        rows = self.record.get("trials")
        numbers = list(range(1, len(rows) + 1)) if isinstance(rows, list) else None
        return [trial.number for trial in self.trials] == numbers and self.record.get("fixed") == list(self.fixed)

    def results(self) -> list[Result]:
        """Return how every trial stands, in their order."""
        return [self.result(trial) for trial in self.trials]

    def result(self, trial: Trial) -> Result:
        """Return how the trial stands: by its run, and by its exit code where the run could not write it down.

        A run of other settings is none of it: the trial is still to be begun, and the run itself will refuse that.
        """
        if trial.number not in self.settled:
            found = self._read(trial)
            if found.state not in ("done", "failed") or trial.number not in self.codes:  # it may be tried again now
                return found
            self.settled[trial.number] = found
        return self.settled[trial.number]

    def begin(self, trial: Trial) -> bool:
        """How the trial has ended before counts no more; tell whether it had."""
        self.settled.pop(trial.number, None)
        return self.codes.pop(trial.number, None) is not None

    def _read(self, trial: Trial) -> Result:
        folder = self.folder / trial.name
        record, code = read_object(folder / "run.json"), self.codes.get(trial.number)
        if not set(trial.words) <= set(map(str, listed(record.get("overrides")) or trial.words)):
            record = {}
        state = _state(standing(record).word if record else "", code, self.launcher)
        metric = self.goal.metric
        values = [float(row[metric]) for row in read_rows(folder / "metrics.jsonl") if is_number(row.get(metric))]
        metrics = {
            str(name): math.nan if value is None else float(value)  # null: without items, or not finite
            for name, value in mapped(record.get("metrics")).items()
            if value is None or is_number(value)
        }
        last = metrics.get(metric, values[-1] if values else None)
        spent: list[Any] = [mapped(phase).get("seconds") for phase in mapped(record.get("phases")).values()]
        return Result(
            trial,
            state,
            code if code is not None else standing(record).exit_code,
            last,
            self.goal.best([*values, *([] if last is None else [last])]),
            sum(seconds for seconds in spent if is_number(seconds)) or _seconds_of(mapped(record.get("evidence"))),
            metrics,
        )

    def save(self, directory: RunDirectory, state: str) -> list[Result]:
        """sweep.json and results.csv are on disk; return how every trial stands. Raises StorageError."""
        results = self.results()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.record = {
            "kind": self.kind,
            "name": directory.name,
            "state": state,
            "task": self.task,
            "task_file": self.task_file,
            "config_dir": self.config_dir,
            "launcher": self.launcher,
            "command": self.command,
            "fixed": list(self.fixed),
            "goal": asdict(self.goal),
            "together": self.together,
            "space": dict(self.space),
            "pid": os.getpid(),
            "birth": birth_of(os.getpid()),
            "host": socket.gethostname(),
            "started": self.record.get("started", now),
            "written": now,
            "trials": [
                {
                    **asdict(each.trial),
                    "exit_code": self.codes.get(each.trial.number),
                    "state": each.state,
                    "last": _json(each.last),
                    "best": _json(each.best),
                    "seconds": _json(each.seconds),
                }
                for each in results
            ],
        }
        directory.write(SWEEP, json.dumps(self.record, indent=1, allow_nan=False) + "\n")
        directory.write(TABLE, as_csv(results, self.goal))
        return results


def winner(results: Sequence[Result], goal: Goal) -> Result | None:
    """Return the first of the best trials, None where none is through with a finite value."""
    best = goal.best(each.value for each in results if each.value is not None)
    return next((each for each in results if best is not None and each.value == best), None)


def counted(results: Sequence[Result]) -> str:
    """Return the number of trials by state: `3 done, 1 failed`."""
    states = [each.state for each in results]
    return ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states) or "no trials"


def summary(results: Sequence[Result], goal: Goal) -> str:
    """Return a one-line summary: trials by state, and the best one or why there is none."""
    best = winner(results, goal)
    if best is not None:
        return f"{counted(results)}; {goal}: {best.value:.5g}, {best.trial.label}"
    why = without_metric(results, goal) or f"no finished trial has a finite {goal.metric}"
    return f"{counted(results)}; {why}"


def without_metric(results: Sequence[Result], goal: Goal) -> str:
    """Return a sentence where trials have metrics and the one that they are compared by is not among them, else ""."""
    known = list(dict.fromkeys(name for each in results for name in each.metrics))
    if not known or goal.metric in known:
        return ""
    near = did_you_mean(goal.metric, known)
    return f"no trial has {goal.metric}, but {shortened(known, 8)}" + (f"; {near}" if near else "")


def told(result: Result, goal: Goal) -> str:
    """Return in a line how a trial has ended: its state, what it has reached, how long it took."""
    words = [_state_of(result)]
    words += [f"{goal.metric} {metric_text(result.last, 5)}"] if result.last is not None else []
    words += [f"{result.seconds:.1f} s"] if result.seconds is not None else []
    return "  ".join(words)


def rows_of(results: Sequence[Result], goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Return the head of the table of trials and its rows, as words for people; the best one is marked."""
    keys = list(dict.fromkeys(key for each in results for key in each.trial.settings))
    best = winner(results, goal)
    head = ["trial", *keys, "state", goal.metric, "lowest" if goal.best_is == "min" else "highest", "seconds", ""]
    rows = []
    for each in results:
        cells = [each.trial.name, *(_short(each.trial.settings.get(key, "-")) for key in keys), _state_of(each)]
        cells += ["-" if value is None else metric_text(value, 5) for value in (each.last, each.best)]
        cells += ["-" if each.seconds is None else f"{each.seconds:.1f}"]
        rows.append([*cells, BEST if each is best else ""])
    return head, rows


def table(results: Sequence[Result], goal: Goal, columns: int = 0) -> list[str]:
    """Return the table of trials as lines for a terminal of so many columns, 0 for none."""
    head, rows = rows_of(results, goal)
    lines = [[fit_to_show(cell).replace("\n", " ") for cell in row] for row in (head, *rows)]
    return aligned(lines, gives_way=("seconds", head[-3]), columns=columns)


def as_csv(results: Sequence[Result], goal: Goal) -> str:
    """Return the table for other programs: a row per trial, a column per changed key and per metric."""
    keys = list(dict.fromkeys(key for each in results for key in each.trial.settings))
    metrics = list(dict.fromkeys(name for each in results for name in each.metrics if name != goal.metric))
    best = winner(results, goal)
    told = io.StringIO()
    writer = csv.writer(told, lineterminator="\n")
    head = ["trial", "name", *keys, "state", "exit_code", "seconds", goal.metric, f"{goal.metric} {goal.best_is}"]
    writer.writerow([*head, *metrics, "is_best"])
    for each in results:
        cells = [each.trial.number, each.trial.name, *(each.trial.settings.get(key, "") for key in keys)]
        cells += [each.state, each.exit_code, each.seconds, _json(each.last), _json(each.best)]
        writer.writerow([*cells, *(_json(each.metrics.get(name)) for name in metrics), int(each is best)])
    return told.getvalue()


def _state(word: str, code: int | None, launcher: str) -> State:
    """Return the state of a trial from that of its run, "" where there is none, and from its last exit code."""
    if word == "finished":
        return "done"
    if word == "running":
        return "running"
    if word == "failed" or code not in (None, 0, *STOPPED):
        return "failed"
    if word:
        return "stopped"
    return "submitted" if code == 0 and launcher != "local" else "waiting"


def _state_of(result: Result) -> str:
    is_known = result.state == "failed" and result.exit_code is not None
    return f"{result.state} ({result.exit_code})" if is_known else result.state


def _seconds_of(evidence: Mapping[str, Any]) -> float | None:
    """Return how long the last process of a run took that was not through."""
    seconds: Any = evidence.get("seconds")
    return float(seconds) if is_number(seconds) else None


def _json(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _short(text: str) -> str:
    """Return a value as it has room in a table."""
    try:
        number = float(text)
    except ValueError:
        return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
    return text if len(text) <= 8 else f"{number:.4g}"


_ORDER: tuple[State, ...] = ("done", "running", "submitted", "stopped", "failed", "waiting")
_LETTERS = 32
