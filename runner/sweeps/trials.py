"""Trials of a sweep: state and results read from their runs, and the summary files."""

from __future__ import annotations

import csv
import io
import math
import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from runner.base.errors import Exit, SystemLimit
from runner.base.json_converter import decode, encode
from runner.base.json_values import is_number, none_to_nan, to_json
from runner.base.secret import sanitize
from runner.base.text import abbreviate, format_metric, format_table
from runner.config.request import override_key
from runner.config.schema import did_you_mean
from runner.durable.directory import SWEEP, RunDirectory, is_run_name
from runner.durable.files import read_object, read_rows
from runner.durable.record_files import read_record
from runner.durable.run_state import process_state_name
from runner.durable.weight_source import RUN_KEYS
from runner.host.process_tree import process_identity
from runner.launch.job_queue import queued_jobs, read_exit_code
from runner.records.run_record import ProcessRecord, RunRecord
from runner.records.sweep_record import Goal, SweepRecord, TrialRecord

TABLE = "results.csv"
BEST = "<- best"
State = Literal["waiting", "running", "stopped", "failed", "submitted", "finished"]
STOPPED = (Exit.PREEMPTED, Exit.INTERRUPTED)  # the same command resumes the trial; any other nonzero code is a failure


@dataclass(frozen=True)
class Trial:
    """A run of a sweep, and the settings in which it differs from the others.

    name   name of its run, in the folder of the sweep
    words  overrides that differ between trials
    """

    number: int
    name: str
    words: tuple[str, ...]

    @property
    def settings(self) -> dict[str, str]:
        """Return key -> value of the overrides."""
        return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in self.words)}

    @property
    def label(self) -> str:
        """Name and overrides."""
        return f"{self.name}  {' '.join(self.words)}".rstrip()


@dataclass(frozen=True)
class Result:
    """State and result of a trial.

    exit_code  exit code of its last process, if known
    last       value of the compared metric at the last evaluation; NaN: no items, or not finite; None: no evaluation
    best       best value of the compared metric over all evaluations
    seconds    total time of its phases, over all its processes
    metrics    all metrics of its last evaluation
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
        return self.last if self.state == "finished" and self.last is not None and math.isfinite(self.last) else None


@dataclass(frozen=True)
class Combination:
    """Trials that differ only in repetitions, such as seeds or folds; without repetitions, a single trial.

    settings  key -> value of their other settings that differ between trials
    """

    settings: Mapping[str, str]
    results: Sequence[Result]

    @property
    def values(self) -> list[float]:
        """Return the values of the trials that have one."""
        return [result.value for result in self.results if result.value is not None]

    @property
    def mean(self) -> float:
        """Return the mean of the values, NaN if there are none."""
        return statistics.mean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Return the sample standard deviation of the values (n - 1), NaN if there are fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def count(self) -> str:
        """Return how many of its trials have a value: `2 of 3`."""
        return f"{len(self.values)} of {len(self.results)}"


@dataclass
class Sweep:
    """A sweep and its trials; results are read from the run directories of the trials.

    record   content of sweep.json
    codes    trial number -> exit code of its last process, once it has exited
    jobs     trial number -> SLURM job of its last process
    earlier  content of sweep.json before this process changed it
    """

    folder: Path
    record: SweepRecord = field(default_factory=SweepRecord)
    trials: list[Trial] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    earlier: SweepRecord = field(default_factory=SweepRecord)
    jobs: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._final_results: dict[int, Result] = {}  # number -> result of trials whose run no longer changes

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Read sweep.json of the folder; missing or damaged entries are omitted."""
        found = decode(SweepRecord, read_object(folder / SWEEP))
        rows = [row for row in found.value.trials or () if is_run_name(row.name)]
        record = replace(found.value, wrong=found.wrong)
        trials = [Trial(row.number, row.name, row.words) for row in rows]
        jobs = {row.number: row.job for row in rows if row.job is not None}
        ended = {number: code for number, job in jobs.items() if (code := read_exit_code(folder, job)) is not None}
        codes = {row.number: row.exit_code for row in rows if row.exit_code is not None}
        return cls(folder, record, trials, ended | codes, record, jobs)

    @property
    def is_intact(self) -> bool:
        """Return whether the sweep.json that was read is intact: no entry was omitted."""
        numbers = list(range(1, len(self.record.trials or ()) + 1))
        return self.record.is_whole and [trial.number for trial in self.trials] == numbers

    @property
    def goal(self) -> Goal:
        """How trials are compared."""
        return self.record.goal

    def results(self) -> list[Result]:
        return [self.result(trial) for trial in self.trials]

    def result(self, trial: Trial) -> Result:
        """Return the state and result of the trial, from its run, or from its exit code if the run has no record.

        A run of this name with other settings is ignored: the trial is waiting, and starting it will fail.
        """
        if trial.number not in self._final_results:
            found = self._read(trial)
            # Not final: the run is active, or another process may be retrying the trial.
            if found.state not in ("finished", "failed") or trial.number not in self.codes:
                return found
            self._final_results[trial.number] = found
        return self._final_results[trial.number]

    def is_live(self) -> bool:
        """Return whether the command or a trial is running; a job counts only while it is in the queue of SLURM."""
        live = {result.trial.number for result in self.results() if result.state in ("running", "submitted")}
        # The command submits the next trial of a search some time after the last job has left the queue.
        if process_state_name(self.record.process) == "running" or not live <= self.jobs.keys():
            return True
        if self.folder.stat().st_uid != os.getuid():  # squeue lists the jobs of this user only
            return bool(live)
        try:
            return not live.isdisjoint(queued_jobs(self.folder) if live else ())
        except SystemLimit:  # the queue is not known on this machine, or the controller does not respond
            return True

    def forget_process(self, trial: Trial) -> bool:
        """Forget the last process of a trial that is about to restart; return whether its exit code was known."""
        self.jobs.pop(trial.number, None)
        self._final_results.pop(trial.number, None)
        return self.codes.pop(trial.number, None) is not None

    def _read(self, trial: Trial) -> Result:
        folder = self.folder / trial.name
        record, code = read_record(folder), self.codes.get(trial.number)
        # The run of a SLURM job records launcher=local, not the trial's launcher; a damaged record has no overrides.
        words = [word for word in trial.words if not is_launcher_override(word)]
        words = [_without_folder(self.record.runs.get(word, word)) for word in words]
        if not set(words) <= set(map(_without_folder, record.origin.overrides or words)):
            record = RunRecord()
        state = _derive_state(
            process_state_name(record.process) if record.is_known else "", code, self.jobs.get(trial.number)
        )
        metric = self.goal.metric
        values = [float(row[metric]) for row in read_rows(folder / "metrics.jsonl", metric) if is_number(row[metric])]
        metrics = none_to_nan(record.result.metrics)
        last = metrics.get(metric, values[-1] if values else None)
        seconds = sum(phase.seconds for phase in record.result.phases.values())
        if not seconds and record.evidence is not None:  # an unfinished run records only the time of its last process
            seconds = record.evidence.seconds or 0.0
        return Result(
            trial,
            state,
            code if code is not None else record.process.exit_code,
            last,
            self.goal.best([*values, *([] if last is None else [last])]),
            seconds or None,
            metrics,
        )

    def save(self, directory: RunDirectory, state: str) -> list[Result]:
        """Write sweep.json and results.csv; return the result of every trial. Raises StorageError."""
        results = self.results()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        process = ProcessRecord(
            state=state,
            pid=os.getpid(),
            birth=process_identity(os.getpid()),
            host=socket.gethostname(),
            started=self.record.process.started or now,
        )
        trials = tuple(
            TrialRecord(
                **vars(result.trial),
                exit_code=self.codes.get(result.trial.number),
                state=result.state,
                last=result.last,
                best=result.best,
                seconds=result.seconds,
                job=self.jobs.get(result.trial.number),
            )
            for result in results
        )
        self.record = replace(self.record, name=directory.name, process=process, trials=trials)
        means = {"combinations": encode_combinations(results, self.goal)} if self.goal.over else {}
        directory.write(SWEEP, to_json(encode(self.record) | means, 1))
        directory.write(TABLE, to_csv(results, self.goal))
        return results


def is_repetition(key: str) -> bool:
    """Return whether trials that differ only in this key repeat the same experiment: a seed or a fold."""
    return key.rpartition(".")[2] in ("seed", "fold")


def combine_repetitions(results: Sequence[Result], goal: Goal) -> list[Combination]:
    """Group the trials that differ only in repetitions; without repetitions, each trial is a group."""
    groups: dict[object, Combination] = {}
    for result in results:
        settings = {key: value for key, value in result.trial.settings.items() if key not in goal.over}
        # The trials of a search can have equal settings.
        key = tuple(settings.items()) if goal.over else result.trial.number
        groups[key] = Combination(settings, [*(groups[key].results if key in groups else ()), result])
    return list(groups.values())


def find_best(results: Sequence[Result], goal: Goal) -> Combination | None:
    """Return the combination with the best mean, the first one if several are equal; None if none has a value.

    A mean over fewer trials than others, because some failed or have not finished, is not compared.
    """
    combinations = combine_repetitions(results, goal)
    most = max((len(combination.values) for combination in combinations), default=0)
    comparable = [combination for combination in combinations if len(combination.values) == most]
    best = goal.best(combination.mean for combination in comparable)
    return next((combination for combination in comparable if combination.mean == best), None)


def count_states(results: Sequence[Result]) -> str:
    """Return the number of trials by state: `3 finished, 1 failed`."""
    states = [result.state for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states) or "no trials"


def format_summary(results: Sequence[Result], goal: Goal) -> str:
    """Return a one-line summary: trials by state, and the best one or why there is none."""
    best = find_best(results, goal)
    if best is not None:
        return f"{count_states(results)}; {format_best(best, goal)}"
    why = explain_missing_metric(results, goal) or f"no finished trial has a finite {goal.metric}"
    return f"{count_states(results)}; {why}"


def format_best(best: Combination, goal: Goal) -> str:
    """Return a one-line description of the best trial, or of the combination with the best mean."""
    if not goal.over:
        return f"{goal}: {best.mean:.5g}, {best.results[0].trial.label}"
    what = f"mean of {goal.metric} over {', '.join(goal.over)}"
    settings = [f"{key}={value}" for key, value in best.settings.items()]
    what = f"{goal.best_is} of the {what}" if settings else what  # otherwise there is only one combination
    spread = f"standard deviation {_format_value(best.std, 3)}, {best.count} trials"
    return ", ".join([f"{what}: {best.mean:.5g} ({spread})", *([" ".join(settings)] if settings else [])])


def explain_missing_metric(results: Sequence[Result], goal: Goal) -> str:
    """Return a message if trials have metrics, but not the one used for comparison; else ""."""
    known = list(dict.fromkeys(name for result in results for name in result.metrics))
    if not known or goal.metric in known:
        return ""
    suggestion = did_you_mean(goal.metric, known)
    available = f"no trial reports {goal.metric}; available metrics: {abbreviate(known, 8)}"
    return f"{available}; {suggestion}" if suggestion else available


def format_result(result: Result, goal: Goal) -> str:
    """Format the outcome of a trial in one line: state, metric and duration."""
    parts = [_format_state(result)]
    parts += [f"{goal.metric} {format_metric(result.last, 5)}"] if result.last is not None else []
    parts += [f"{result.seconds:.1f} s"] if result.seconds is not None else []
    return "  ".join(parts)


def trial_rows(results: Sequence[Result], goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of trials, formatted for display; the best one is marked.

    Repetitions are not marked, because only their means are compared.
    """
    keys = list(dict.fromkeys(key for result in results for key in result.trial.settings))
    best = find_best(results, goal)
    head = ["trial", *keys, "state", goal.metric, "lowest" if goal.best_is == "min" else "highest", "seconds", ""]
    rows = []
    for result in results:
        cells = [
            result.trial.name,
            *(_shorten(result.trial.settings.get(key, "-")) for key in keys),
            _format_state(result),
        ]
        cells += ["-" if value is None else format_metric(value, 5) for value in (result.last, result.best)]
        cells += ["-" if result.seconds is None else f"{result.seconds:.1f}"]
        rows.append([*cells, BEST if best and result in best.results and not goal.over else ""])
    return head, rows


def combination_rows(results: Sequence[Result], goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of means over repetitions, formatted for display; the best one is marked."""
    combinations, best = combine_repetitions(results, goal), find_best(results, goal)
    keys = list(dict.fromkeys(key for combination in combinations for key in combination.settings))
    head = [*keys, "trials", f"mean of {goal.metric} over {', '.join(goal.over)}", "standard deviation", ""]
    rows = [
        [
            *(_shorten(combination.settings.get(key, "-")) for key in keys),
            combination.count,
            _format_value(combination.mean, 5),
            _format_value(combination.std, 3),
            BEST if combination == best and len(combinations) > 1 else "",
        ]
        for combination in combinations
    ]
    return head, rows


def format_trial_table(results: Sequence[Result], goal: Goal, columns: int = 0) -> list[str]:
    """Format the tables of trials and of means for a terminal of `columns` columns; 0: unlimited."""
    head, rows = trial_rows(results, goal)
    lines = format_table(_make_printable([head, *rows]), droppable=("seconds", head[-3]), columns=columns)
    if goal.over:
        head, rows = combination_rows(results, goal)
        lines += ["", *format_table(_make_printable([head, *rows]))]
    return lines


def to_csv(results: Sequence[Result], goal: Goal) -> str:
    """Return the results as CSV: one row per trial, one column per varied key and per metric.

    With repetitions, each row also has the mean and the standard deviation over the repetitions of its trial.
    """
    keys = list(dict.fromkeys(key for result in results for key in result.trial.settings))
    metrics = list(dict.fromkeys(name for result in results for name in result.metrics if name != goal.metric))
    best = find_best(results, goal)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["trial", "name", *keys, "state", "exit_code", "seconds", goal.metric, f"{goal.metric} {goal.best_is}"]
    head += [f"{goal.metric} {name}" for name in ("mean", "std", "count")] if goal.over else []
    writer.writerow([*head, *metrics, "is_best"])
    combinations = {
        result.trial.number: combination
        for combination in combine_repetitions(results, goal)
        for result in combination.results
    }
    for result in results:
        cells = [result.trial.number, result.trial.name, *(result.trial.settings.get(key, "") for key in keys)]
        cells += [
            result.state,
            result.exit_code,
            result.seconds,
            _finite_or_none(result.last),
            _finite_or_none(result.best),
        ]
        combination = combinations[result.trial.number]
        means = [_finite_or_none(combination.mean), _finite_or_none(combination.std), len(combination.values)]
        cells += means if goal.over else []
        cells += [_finite_or_none(result.metrics.get(name)) for name in metrics]
        writer.writerow([*cells, int(combination == best)])
    return text.getvalue()


def encode_combinations(results: Sequence[Result], goal: Goal) -> list[dict[str, Any]]:
    """Return the means over repetitions as JSON-serializable data: one object per combination of the other settings."""
    best = find_best(results, goal)
    return [
        {
            "settings": dict(combination.settings),
            "trials": [result.trial.number for result in combination.results],
            "count": len(combination.values),
            "mean": _finite_or_none(combination.mean),
            "std": _finite_or_none(combination.std),
            "is_best": combination == best,
        }
        for combination in combine_repetitions(results, goal)
    ]


def is_launcher_override(override: str) -> bool:
    """Return whether the override selects where a trial runs, or with which resources."""
    return override_key(override).partition(".")[0] == "launcher"


def _without_folder(override: str) -> str:
    """Return the override with only the name of another run or file, whose folder may have been moved."""
    key, _, value = override.partition("=")
    return f"{key}={Path(value.strip(_QUOTES)).name}" if key in RUN_KEYS else override


def _derive_state(run_state: str, code: int | None, job: str | None) -> State:
    """Derive the state of a trial from that of its run (empty without a run), its last exit code and its SLURM job."""
    if run_state == "finished":
        return "finished"
    # A job with an exit code has ended, even if its record says running: it was killed on another machine.
    if run_state == "running" and (code is None or job is None):
        return "running"
    if job is not None and code is None:  # it waits in the queue, perhaps to resume the run
        return "submitted"
    if run_state == "failed" or code not in (None, 0, *STOPPED):
        return "failed"
    return "stopped" if run_state else "waiting"


def _format_state(result: Result) -> str:
    is_known = result.state == "failed" and result.exit_code is not None
    return f"{result.state} ({result.exit_code})" if is_known else result.state


def _format_value(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else format_metric(value, digits)


def _make_printable(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[sanitize(cell).replace("\n", " ") for cell in row] for row in rows]


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shorten(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return text if len(text) <= _MAX_CELL_WIDTH else f"{text[: _MAX_CELL_WIDTH - 1]}…"
    return text if len(text) <= 8 else f"{number:.4g}"


_ORDER: tuple[State, ...] = ("finished", "running", "submitted", "stopped", "failed", "waiting")
_MAX_CELL_WIDTH = 32
_QUOTES = "'\""
