"""Choose a checkpoint of a run: the best, the last, or one by its update."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, DataError, InputMissing
from runner.base.json_values import as_dict, as_list
from runner.base.text import format_metric
from runner.durable import files
from runner.durable.checkpoint import (
    MANIFEST,
    STATE,
    LoadedCheckpoint,
    checkpoint_path,
    load,
    load_newest,
    newest_first,
    verify,
)
from runner.durable.directory import RunDirectory
from runner.durable.record_files import read_error, read_record
from runner.durable.run_identity import manifest_uid
from runner.durable.run_state import derive_state, resume_command

BEST, LAST = "best", "last"


@dataclass(frozen=True)
class Ranking:
    """The metric by which a run keeps its best checkpoints.

    better  "min" or "max": whether lower or higher values are better
    keep    number of best checkpoints
    """

    metric: str | None
    better: str
    keep: int

    def select(self, values: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
        """Return the best of the (value, number) pairs, best first; of equal values, the one saved first is better."""
        sign = -1.0 if self.better == "max" else 1.0
        return sorted(values, key=lambda pair: (sign * pair[0], pair[1]))[: self.keep]


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint of a run with its labels: best or last, and its metric if it was evaluated."""

    checkpoint: LoadedCheckpoint
    labels: tuple[str, ...] = ()


def is_choice(value: str) -> bool:
    """Return whether `checkpoint=value` names a checkpoint: best, last, 400 or update-0000000400."""
    return value in (BEST, LAST) or _NUMBER.fullmatch(value) is not None


def choose_checkpoint(
    directory: RunDirectory, choice: str | None, warn: Callable[[str], None] = lambda _: None
) -> ChosenCheckpoint:
    """Return the checkpoint of a run that `choice` names (see `is_choice`).

    If `choice` is None, this is the best one if the run tracks a metric, else the last one; damaged ones are skipped.

    warn  called with a message about each skipped checkpoint
    Raises InputMissing if there is no such checkpoint, DataError if it is damaged; both list the existing ones.
    """
    newest = load_newest(directory.checkpoints, directory.owner)
    if newest is None:
        raise _no_checkpoint_error(directory)
    if choice in (None, LAST):
        for newer in reversed(newest_first(directory.checkpoints)):
            if newer.name > newest.path.name:
                warn(f"{newer.name} is skipped: {'; '.join(verify(newer, directory.owner))}")
    bests = [number for _, number in find_best_checkpoints(newest)]
    if choice in (None, BEST):
        for number in bests:
            checkpoint = (
                newest if number == newest.update else _load_valid(directory, number, warn if choice is None else None)
            )
            if checkpoint is not None:
                return ChosenCheckpoint(checkpoint, checkpoint_labels(checkpoint, newest))
        if choice == BEST:
            metric = read_ranking(newest.state).metric
            why = f"none was saved for {metric}" if metric else "the run has checkpoint.best=null"
            raise InputMissing(
                f"there is no best checkpoint: {why}", where=f"run={directory.name}", fix=_list_choices(directory)
            )
    if choice in (None, LAST):
        return ChosenCheckpoint(newest, checkpoint_labels(newest, newest))
    number = int(choice.removeprefix(_PREFIX))
    checkpoint = _load_valid(directory, number, None)
    assert checkpoint is not None, "without `warn` it raises"
    return ChosenCheckpoint(checkpoint, checkpoint_labels(checkpoint, newest))


def label_checkpoints(paths: Collection[Path]) -> Mapping[str, tuple[str, ...]]:
    """Return name -> labels of a checkpoint: best or last, and the tracked metric if it was evaluated.

    paths  the checkpoints of a run; they are not verified, and those without a readable manifest have no labels
    """
    names = (path for path in paths if path.name.removeprefix(_PREFIX).isdecimal())
    paths = [path for path in names if files.read_object(path / MANIFEST).get("update") == update_in_name(path)]
    if not paths:
        return {}
    path = max(paths, key=lambda path: path.name)
    newest = LoadedCheckpoint(path, files.read_object(path / MANIFEST), files.read_object(path / STATE))
    numbers = {newest.update, *(number for _, number in find_best_checkpoints(newest))}
    return {
        path.name: checkpoint_labels(update_in_name(path), newest) for path in paths if update_in_name(path) in numbers
    }


def update_in_name(path: Path) -> int:
    """Return the update in the name of a checkpoint."""
    return int(path.name.removeprefix(_PREFIX))


def checkpoint_labels(checkpoint: LoadedCheckpoint | int, newest: LoadedCheckpoint) -> tuple[str, ...]:
    """Return the labels of a checkpoint in a run whose last one is `newest`.

    checkpoint  the checkpoint, or the number of a best one
    """
    number = checkpoint if isinstance(checkpoint, int) else checkpoint.update
    bests = [(number, value) for value, number in find_best_checkpoints(newest)]
    labels = [BEST] if bests and bests[0][0] == number else []
    labels += [LAST] if number == newest.update else []
    state = newest.state if number == newest.update else None if isinstance(checkpoint, int) else checkpoint.state
    metric = read_ranking(newest.state).metric
    value = dict(bests).get(number, _metric_value(state, metric) if state is not None else None)
    return (*labels, *([f"{metric} {format_metric(value)}"] if value is not None else []))


def read_ranking(state: Mapping[str, Any]) -> Ranking:
    """Return how a run ranks its checkpoints, given the state in one of them."""
    values = as_dict(state.get("values"))
    own, keep = as_dict(state.get("ranking")), values.get("checkpoint.keep_best")  # earlier versions wrote no ranking
    metric, better = (
        own.get(key, values.get(default))
        for key, default in (("metric", "checkpoint.best"), ("best_is", "checkpoint.best_is"))
    )
    return Ranking(
        metric if isinstance(metric, str) else None,
        "max" if better == "max" else "min",
        keep if type(keep) is int and keep > 0 else 1,
    )


def find_best_checkpoints(newest: LoadedCheckpoint, ranking: Ranking | None = None) -> list[tuple[float, int]]:
    """Return (value, number) of the best checkpoints up to `newest`, best first, for the phase of `newest`.

    The state of `newest` does not list a best checkpoint that was held in memory and written later, so every older
    checkpoint of the phase is checked. One that was saved with another ranking is ranked by the value of this ranking's
    metric that it recorded.

    ranking  None: the run's own ranking, from the state of `newest`
    """
    ranking = ranking or read_ranking(newest.state)
    folder = newest.path.parent
    values = _read_bests(newest.update, newest.state, newest.state, ranking)
    for number, state in _read_earlier_states(newest):
        found = _read_bests(number, state, newest.state, ranking)
        values |= {key: value for key, value in found.items() if key == number}
    existing = [
        (value, number)
        for number, value in values.items()
        if number == newest.update or files.exists(checkpoint_path(folder, number))
    ]
    return ranking.select(existing)


def _read_earlier_states(newest: LoadedCheckpoint) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, state) of each older checkpoint of the same run in the folder of `newest`; none is verified."""
    for path in newest_first(newest.path.parent):
        if path.name >= newest.path.name:
            continue
        if manifest_uid(files.read_object(path / MANIFEST)) in (None, manifest_uid(newest.manifest)):
            yield int(path.name.removeprefix("update-")), files.read_object(path / STATE)


def _read_bests(
    number: int, state: Mapping[str, Any], newest_state: Mapping[str, Any], ranking: Ranking
) -> dict[int, float]:
    """Return number -> value of the best checkpoints in the state of checkpoint `number`; empty in another phase.

    If the run ranked its checkpoints in another way at that time, as `resume` allows, only this checkpoint is known.
    """
    if state.get("phase") != newest_state.get("phase"):
        return {}
    earlier = read_ranking(state)
    if (earlier.metric, earlier.better) != (ranking.metric, ranking.better):
        own = _metric_value(state, ranking.metric)
        return {} if own is None or math.isnan(own) else {number: own}
    try:
        values_by_number = {int(number): float(value) for value, number in as_list(state.get("bests"))}
        return {number: value for number, value in values_by_number.items() if 0 <= number < 10**_NUM_DIGITS}
    except (TypeError, ValueError, OverflowError):  # the state of an unverified checkpoint may be damaged
        return {}


def _metric_value(state: Mapping[str, Any], metric: str | None) -> float | None:
    value = as_dict(state.get("metrics")).get(metric or "")
    is_own = state.get("evaluated_at") == state.get("phase_update")
    return value if is_own and isinstance(value, float) else None


def _load_valid(directory: RunDirectory, number: int, warn: Callable[[str], None] | None) -> LoadedCheckpoint | None:
    """Return the checkpoint of this number, None if it is missing or damaged.

    warn  called with a message if it is damaged; None: raise an error instead of returning None
    """
    path = checkpoint_path(directory.checkpoints, number)
    if not files.exists(path):
        if warn is not None:
            return None
        raise InputMissing(f"there is no {path.name}", where=f"run={directory.name}", fix=_list_choices(directory))
    problems = verify(path, directory.owner)
    if not problems:
        return load(path)
    what = f"{path.name} is damaged: {'; '.join(problems)}"
    if warn is None:
        raise DataError(what, where=f"run={directory.name}", fix=_list_choices(directory))
    warn(f"{path.name} is skipped: {'; '.join(problems)}")
    return None


def _list_choices(directory: RunDirectory) -> str:
    paths = newest_first(directory.checkpoints)[::-1]
    valid = [path for path in paths if not verify(path, directory.owner)]
    labels = label_checkpoints(valid)
    choices = [
        str(update_in_name(path)) + (f" ({', '.join(labels[path.name])})" if path.name in labels else "")
        for path in valid
    ]
    damaged = [str(update_in_name(path)) for path in paths if path not in valid]
    text = f"use checkpoint=N, where N is one of {', '.join(choices)}"
    return text + (f"; damaged: {', '.join(damaged)}" if damaged else "")


def _no_checkpoint_error(directory: RunDirectory) -> AccelRunError:
    location = str(directory.checkpoints)
    if directory.checkpoints.is_dir() and any(directory.checkpoints.iterdir()):
        fix = f"use accel-run status run={directory.name} to see why"
        return DataError("no checkpoint of this run is valid", where=location, fix=fix)
    record, error = read_record(directory.path), read_error(directory.path)
    state = derive_state(record).word
    what, fix = f"this run has no checkpoint yet ({state})", f"resume it with: {resume_command(record)}"
    if state == "failed" and error is not None:
        what = f"this run failed before its first checkpoint: {error.cause}"
        location, fix = error.where or location, f"fix the error, then {fix}"
    return InputMissing(what, where=location, fix=_FIXES.get(state, fix))


_FIXES = {
    "unknown": "train it first: accel-run train",
    "running": "wait until it has saved a checkpoint",
}
_PREFIX = "update-"
_NUM_DIGITS = 10
_NUMBER = re.compile(rf"({_PREFIX})?\d{{1,{_NUM_DIGITS}}}", re.ASCII)
