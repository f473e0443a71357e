"""Searches: Optuna proposes each trial from earlier results, which its journal in the folder stores."""

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
from runner.records.sweep_record import Goal
from runner.sweeps.packing import packed
from runner.sweeps.sweep import OPEN, SweepRequest, must_be_plannable, opened, walk
from runner.sweeps.sweep_syntax import SearchSpace, composed, read_space
from runner.sweeps.trials import Result, Sweep, Trial

JOURNAL = "optuna.journal"


def search(request: Request, wish: SweepRequest, *, num_trials: int, budget_s: float = math.inf) -> int:
    """Run trials until the number of trials or the time limit is reached, and print a table; 0 if one has a value.

    num_trials  of the whole search, including those of earlier processes
    budget_s    start no new trial after this many seconds; a running trial is not interrupted
    Runs, signals and resuming work as in a sweep. Raises ConfigError for all invalid range ends before anything is
    started, and later if a finished trial does not have the metric; MissingPackage.
    """
    fixed, axes = read_space(request)
    ends = [replace(fixed, overrides=merge_overrides(fixed.overrides, words)) for words in corners(axes)]
    configurations = composed(ends)
    require("optuna", "search")
    must_be_plannable(configurations)
    packing = packed(configurations, wish.together)
    with opened("search", fixed, configurations[0], wish, axes) as (directory, found):
        study = Study(found, axes, directory.name, seed=configurations[0].settings.seed)
        found.trials = study.trials(found.trials)
        until = time.monotonic() + budget_s
        return walk(directory, found, _Asking(found, study, num_trials, until), packing, configurations[0])


def corners(axes: Sequence[SearchSpace]) -> list[list[str]]:
    """Return the settings with the first choice of each key, and with the last of each."""
    return [[axis.ends[0] for axis in axes], [axis.ends[-1] for axis in axes]]


class Study:
    """Optuna's study in the folder of a search. Its sampler is seeded again for each value, by seed, trial and key.

    So a search that was stopped or killed, even between two values of a trial, chooses the same values.
    """

    def __init__(self, found: Sweep, axes: Sequence[SearchSpace], name: str, *, seed: int) -> None:
        self._optuna: Any = require("optuna", "search")
        self._axes, self._name, self._seed = axes, name, seed
        self._file = found.folder / JOURNAL
        files.AppendLog(self._file).close()  # an incomplete line, left by a crash, would damage the next one
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        journal = self._optuna.storages.journal
        with _at("open", self._file):
            if (size := files.file_size(self._file)) > _JOURNAL_BYTES:
                raise ValueError(f"it has {size:,} bytes")
            storage = self._optuna.storages.JournalStorage(journal.JournalFileBackend(str(self._file), _Held()))
            direction = {"min": "minimize", "max": "maximize"}[found.goal.best_is]
            self._study = self._optuna.create_study(
                storage=storage,
                sampler=self._sampler(0, 0),
                study_name="search",
                direction=direction,
                load_if_exists=True,
            )

    def ask(self) -> Trial:
        """Return a new trial, which is already stored on disk."""
        with _at("append to", self._file):
            return self._chosen(self._study.ask())

    def trials(self, known: Sequence[Trial]) -> list[Trial]:
        """Return all trials so far; if a kill interrupted the choice of values, the remaining ones are chosen now.

        known  the trials in sweep.json
        """
        found = []
        with _at("append to", self._file):
            for frozen in self._study.get_trials(deepcopy=False):
                if frozen.state.is_finished():
                    found.append(self._named(frozen.number, frozen.params))
                    continue
                found.append(self._chosen(self._optuna.trial.Trial(self._study, frozen._trial_id)))
            for trial, asked in zip_longest(known, found[: len(known)]):
                if asked is None or trial.words != asked.words:
                    raise ValueError(f"{trial.name} differs from the trial in sweep.json")
        return found

    def is_told(self, trial: Trial) -> bool:
        """Return whether the result was reported to Optuna."""
        return bool(self._study.get_trials(deepcopy=False)[trial.number - 1].state.is_finished())

    def tell(self, trial: Trial, value: float | None) -> None:
        """Report the value of a trial to Optuna; None: it failed."""
        state = None if value is not None else self._optuna.trial.TrialState.FAIL
        with _at("append to", self._file):
            self._study.tell(trial.number - 1, value, state=state)

    def _chosen(self, asked: Any) -> Trial:
        values = {}
        for place, axis in enumerate(self._axes):
            self._study.sampler = self._sampler(asked.number, place)
            if axis.values:
                words = [word.partition("=")[2] for word in axis.values]
                values[axis.key] = asked.suggest_categorical(axis.key, words)
            elif axis.is_whole:
                low, high, step = int(axis.low), int(axis.high), int(axis.step) or 1
                values[axis.key] = asked.suggest_int(axis.key, low, high, step=step, log=axis.is_log)
            else:
                values[axis.key] = asked.suggest_float(
                    axis.key, axis.low, axis.high, step=axis.step or None, log=axis.is_log
                )
        return self._named(asked.number, values)

    def _named(self, number: int, values: dict[str, Any]) -> Trial:
        words = tuple(axis.word(values[axis.key]) for axis in self._axes if axis.key in values)
        return Trial(number + 1, f"{self._name}-{number + 1}", words)

    def _sampler(self, number: int, place: int) -> Any:
        """Return the sampler for the value at `place` of a trial; independent of draws for earlier values."""
        seed = int(np.random.SeedSequence([self._seed, number, place]).generate_state(1)[0])
        return self._optuna.samplers.TPESampler(seed=seed)


@contextmanager
def _at(action: str, journal: Path) -> Iterator[None]:
    """Convert system errors to StorageError, and errors from a damaged journal to DataError."""
    try:
        with storage_errors(action, journal):
            yield
    except AccelRunError:
        raise
    except Exception as error:  # any exception type: the content of the file decides where the reader fails
        fix = "restore a copy of it, or use another run=NAME; the results of the trials are in their own folders"
        raise DataError(f"is damaged: {error_line(error)}", where=str(journal), fix=fix) from error


class _Held:
    """A lock that does nothing: the lock of the folder already excludes other processes, and is released on a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class _Asking:
    """Unfinished trials first, then new trials from Optuna."""

    def __init__(self, found: Sweep, study: Study, total: int, until: float) -> None:
        self.total = total
        self._found, self._study, self._until = found, study, until
        self._left = []
        for each in found.results():
            if each.state in OPEN and not study.is_told(each.trial):
                self._left.append(each.trial)
            elif not study.is_told(each.trial):  # killed before its result was reported
                self.ended(each)

    def next(self) -> Trial | None:
        if self._left:
            return self._left.pop(0)
        if len(self._found.trials) >= self.total or time.monotonic() >= self._until:
            return None
        self._found.trials.append(self._study.ask())
        return self._found.trials[-1]

    def ended(self, result: Result) -> None:
        if result.state in OPEN:
            return
        if result.state == "done" and result.last is None:
            raise _no_metric(result, self._found.goal)
        self._study.tell(result.trial, result.value)


def _no_metric(result: Result, goal: Goal) -> ConfigError:
    """Return the error for a finished trial without the metric."""
    known = list(result.metrics)
    what = f"{result.trial.name} has no such metric; it has {abbreviate(known, 8) or 'none'}"
    near = did_you_mean(goal.metric, known)
    fix = f"{near} Repeat the command with another metric= to continue" if near else "use metric=NAME with one of them"
    return ConfigError(Problem(what, f"metric={goal.metric}", fix))


_JOURNAL_BYTES = 256 << 20  # a trial has less than a kilobyte for each key
