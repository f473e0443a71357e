"""Searches: Optuna proposes each trial from earlier results, which are stored in a journal in the search's folder."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from runner.base.errors import AccelRunError, ConfigError, DataError, Problem
from runner.base.packages import require
from runner.base.text import abbreviate, error_line
from runner.config.request import Request, merge_overrides
from runner.config.schema import did_you_mean
from runner.durable import files
from runner.durable.system_errors import storage_errors
from runner.records.events import Console
from runner.records.sweep_record import Goal
from runner.sweeps.sweep import OPEN, SweepOptions, open_sweep, place_trials, run_trials
from runner.sweeps.sweep_syntax import SearchSpace, compose_all, parse_search_space
from runner.sweeps.trials import Result, Sweep, Trial

JOURNAL = "optuna.journal"


def search(request: Request, options: SweepOptions, *, num_trials: int, budget_s: float = math.inf) -> int:
    """Run trials until their number or the time limit is reached, print a table, and return the exit code.

    The exit code is 0 if at least one trial has a value.

    num_trials  number of trials of the whole search, including those of earlier processes
    budget_s    start no new trial after this many seconds; a running trial is not interrupted
    Runs, signals and resuming work as in a sweep. Raises ConfigError for all invalid range limits before anything is
    started, and later if a finished trial does not have the metric. Raises MissingPackage if Optuna is not installed.
    """
    fixed, axes = parse_search_space(request)
    Console().info(f"search with trials={num_trials}: checking the range limits")  # loading torch takes seconds
    ends = [replace(fixed, overrides=merge_overrides(fixed.overrides, texts)) for texts in endpoint_overrides(axes)]
    configurations = compose_all(ends)
    require("optuna", "search")
    size = math.prod(axis.size for axis in axes)
    if num_trials > size:
        what = f"trials={num_trials}, but there are only {size:.0f} combinations, so some are trained several times"
        Console().warning(f"{what}; accel-run train -m trains each of them once")
    placement = place_trials(configurations, options.together, num_trials)
    with open_sweep("search", fixed, configurations[0], options, axes) as (directory, sweep):
        axes = tuple(axis.as_recorded(sweep.record.space[axis.key]) for axis in axes)
        study = Study(sweep, axes, directory.name, seed=configurations[0].settings.seed)
        sweep.trials = study.load_trials(sweep.trials)
        deadline = time.monotonic() + budget_s
        return run_trials(
            directory, sweep, _StudySource(sweep, study, num_trials, deadline), placement, configurations[0]
        )


def endpoint_overrides(axes: Sequence[SearchSpace]) -> list[list[str]]:
    """Return two lists of overrides: the first value of each key, and the last value of each key."""
    return [[axis.ends[0] for axis in axes], [axis.ends[-1] for axis in axes]]


class Study:
    """Optuna's study in the folder of a search.

    Its sampler is reseeded for each value from seed, trial and key, so that a search that was stopped or killed, even
    between two values of a trial, chooses the same values.
    """

    def __init__(self, sweep: Sweep, axes: Sequence[SearchSpace], name: str, *, seed: int) -> None:
        self._optuna: Any = require("optuna", "search")
        self._axes, self._name, self._seed = axes, name, seed
        self._file = sweep.folder / JOURNAL
        files.AppendLog(self._file).close()  # an incomplete line, left by a crash, would damage the next one
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        journal = self._optuna.storages.journal
        with _journal_errors("open", self._file):
            if (size := files.file_size(self._file)) > _MAX_JOURNAL_BYTES:
                raise ValueError(f"it has {size:,} bytes")
            storage = self._optuna.storages.JournalStorage(journal.JournalFileBackend(str(self._file), _NullLock()))
            direction = {"min": "minimize", "max": "maximize"}[sweep.goal.best_is]
            self._study = self._optuna.create_study(
                storage=storage,
                sampler=self._sampler(0, 0),
                study_name="search",
                direction=direction,
                load_if_exists=True,
            )

    def ask(self) -> Trial:
        """Return a new trial, which is already stored on disk."""
        with _journal_errors("append to", self._file):
            return self._suggest_values(self._study.ask())

    def load_trials(self, recorded: Sequence[Trial]) -> list[Trial]:
        """Return all trials so far; if a kill interrupted the choice of values, the remaining ones are chosen now.

        recorded  the trials in sweep.json
        """
        trials = []
        with _journal_errors("append to", self._file):
            for frozen in self._study.get_trials(deepcopy=False):
                if frozen.state.is_finished():
                    trials.append(self._make_trial(frozen.number, frozen.params))
                    continue
                trials.append(self._suggest_values(self._optuna.trial.Trial(self._study, frozen._trial_id)))
            for trial, stored in zip_longest(recorded, trials[: len(recorded)]):
                if stored is None or trial.words != stored.words:
                    raise ValueError(f"{trial.name} differs from the trial in sweep.json")
        return trials

    def is_reported(self, trial: Trial) -> bool:
        return bool(self._study.get_trials(deepcopy=False)[trial.number - 1].state.is_finished())

    def report_value(self, trial: Trial, value: float | None) -> None:
        """Report the value of a trial to Optuna; None: it failed."""
        state = None if value is not None else self._optuna.trial.TrialState.FAIL
        with _journal_errors("append to", self._file):
            self._study.tell(trial.number - 1, value, state=state)

    def _suggest_values(self, optuna_trial: Any) -> Trial:
        values = {}
        for index, axis in enumerate(self._axes):
            self._study.sampler = self._sampler(optuna_trial.number, index)
            if axis.values:
                texts = [override.partition("=")[2] for override in axis.values]
                values[axis.key] = optuna_trial.suggest_categorical(axis.key, texts)
            elif axis.is_integer:
                low, high, step = int(axis.low), int(axis.high), int(axis.step) or 1
                values[axis.key] = optuna_trial.suggest_int(axis.key, low, high, step=step, log=axis.is_log)
            else:
                values[axis.key] = optuna_trial.suggest_float(
                    axis.key, axis.low, axis.high, step=axis.step or None, log=axis.is_log
                )
        return self._make_trial(optuna_trial.number, values)

    def _make_trial(self, number: int, values: dict[str, Any]) -> Trial:
        overrides = tuple(axis.format_override(values[axis.key]) for axis in self._axes if axis.key in values)
        return Trial(number + 1, f"{self._name}-{number + 1}", overrides)

    def _sampler(self, number: int, index: int) -> Any:
        """Return the sampler for the value at `index` of a trial; independent of draws for earlier values."""
        seed = int(np.random.SeedSequence([self._seed, number, index]).generate_state(1)[0])
        return self._optuna.samplers.TPESampler(seed=seed)


@contextmanager
def _journal_errors(action: str, journal: Path) -> Iterator[None]:
    """Convert system errors to StorageError, and errors from a damaged journal to DataError."""
    try:
        with storage_errors(action, journal):
            yield
    except AccelRunError:
        raise
    except Exception as error:  # any exception type: the reader may fail anywhere in a damaged file
        fix = "restore a copy of it, or use another run=NAME; the results of the trials are in their own folders"
        raise DataError(f"is damaged: {error_line(error)}", where=str(journal), fix=fix) from error


class _NullLock:
    """A lock that does nothing, because the folder's lock excludes other processes and is released after a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class _StudySource:
    """Unfinished trials first, then new trials from Optuna."""

    def __init__(self, sweep: Sweep, study: Study, total: int, deadline: float) -> None:
        self.total = total
        self._sweep, self._study, self._deadline = sweep, study, deadline
        self._remaining = []
        for result in sweep.results():
            if result.state in OPEN and not study.is_reported(result.trial):
                self._remaining.append(result.trial)
            elif not study.is_reported(result.trial):  # the search was killed before it reported the result
                self.ended(result)

    def next(self) -> Trial | None:
        if self._remaining:
            return self._remaining.pop(0)
        if len(self._sweep.trials) >= self.total or time.monotonic() >= self._deadline:
            return None
        self._sweep.trials.append(self._study.ask())
        return self._sweep.trials[-1]

    def ended(self, result: Result) -> None:
        if result.state in OPEN:
            return
        if result.state == "finished" and result.last is None:
            raise _missing_metric_error(result, self._sweep.goal)
        self._study.report_value(result.trial, result.value)


def _missing_metric_error(result: Result, goal: Goal) -> ConfigError:
    known = list(result.metrics)
    what = f"{result.trial.name} has no such metric; it has {abbreviate(known, 8) or 'none'}"
    near = did_you_mean(goal.metric, known)
    fix = (
        f"{near} Repeat the command with another metric= to continue"
        if near
        else "use metric=NAME with one of these metrics"
    )
    return ConfigError(Problem(what, f"metric={goal.metric}", fix))


_MAX_JOURNAL_BYTES = 256 << 20  # a trial has less than a kilobyte for each key
