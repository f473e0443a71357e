"""Choose a checkpoint of a run: the best, the last, or one by its update."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
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
    Loaded,
    load,
    load_newest,
    newest_first,
    path_of,
    verify,
)
from runner.durable.directory import RunDirectory
from runner.durable.run_identity import uid_of

BEST, LAST = "best", "last"


@dataclass(frozen=True)
class Ranking:
    """The metric by which a run keeps its best checkpoints.

    better  "min" or "max": what is better
    keep    number of best checkpoints
    """

    metric: str | None
    better: str
    keep: int


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint of a run with its labels: best or last, and its metric if it was evaluated."""

    checkpoint: Loaded
    marks: tuple[str, ...] = ()


def is_choice(value: str) -> bool:
    """Return whether `checkpoint=value` names a checkpoint: best, last, 400 or update-0000000400."""
    return value in (BEST, LAST) or _NUMBER.fullmatch(value) is not None


def choose(
    directory: RunDirectory, wanted: str | None, warn: Callable[[str], None] = lambda _: None
) -> ChosenCheckpoint:
    """Return the checkpoint of a run that `wanted` names (see `is_choice`).

    None: the best one if the run tracks a metric, else the last one; damaged ones are skipped.

    warn  called with a message about each skipped checkpoint
    Raises InputMissing if there is no such checkpoint, DataError if it is damaged, both with those that exist.
    """
    newest = load_newest(directory.checkpoints, directory.owner)
    if newest is None:
        raise _none(directory)
    if wanted in (None, LAST):
        for newer in reversed(newest_first(directory.checkpoints)):
            if newer.name > newest.path.name:
                warn(f"{newer.name} is skipped: {'; '.join(verify(newer, directory.owner))}")
    bests = [number for _, number in bests_beside(newest)]
    if wanted in (None, BEST):
        for number in bests:
            found = newest if number == newest.update else _valid(directory, number, warn if wanted is None else None)
            if found is not None:
                return ChosenCheckpoint(found, marks_of(found, newest))
        if wanted == BEST:
            metric = ranking_of(newest.state).metric
            why = f"none was saved for its {metric}" if metric else "checkpoint.best=null: the run tracks no metric"
            raise InputMissing(
                f"there is no best checkpoint: {why}", where=f"run={directory.name}", fix=_offer(directory)
            )
    if wanted in (None, LAST):
        return ChosenCheckpoint(newest, marks_of(newest, newest))
    number = int(wanted.removeprefix(_PREFIX))
    found = _valid(directory, number, None)
    assert found is not None, "without `warn` it raises"
    return ChosenCheckpoint(found, marks_of(found, newest))


def marks(valid: Collection[Path]) -> Mapping[str, tuple[str, ...]]:
    """Return name -> labels of a checkpoint: best or last, and the tracked metric if it was evaluated.

    valid  the valid checkpoints of a run; they are not verified again
    """
    if not valid:
        return {}
    path = max(valid, key=lambda each: each.name)
    newest = Loaded(path, files.read_object(path / MANIFEST), files.read_object(path / STATE))
    if newest.manifest.get("update") != number_in(path):
        return {}
    numbers = {newest.update, *(number for _, number in bests_beside(newest))}
    return {path.name: marks_of(number_in(path), newest) for path in valid if number_in(path) in numbers}


def number_in(path: Path) -> int:
    """Return the update in the name of a checkpoint."""
    return int(path.name.removeprefix(_PREFIX))


def marks_of(checkpoint: Loaded | int, newest: Loaded) -> tuple[str, ...]:
    """Return the labels of a checkpoint in a run whose last one is `newest`.

    checkpoint  the checkpoint, or the number of a best one
    """
    number = checkpoint if isinstance(checkpoint, int) else checkpoint.update
    bests = [(number, value) for value, number in bests_beside(newest)]
    found = [BEST] if bests and bests[0][0] == number else []
    found += [LAST] if number == newest.update else []
    state = newest.state if number == newest.update else None if isinstance(checkpoint, int) else checkpoint.state
    metric = ranking_of(newest.state).metric
    value = dict(bests).get(number, _evaluated(state, metric) if state is not None else None)
    return (*found, *([f"{metric} {format_metric(value)}"] if value is not None else []))


def ranking_of(state: Mapping[str, Any]) -> Ranking:
    """Return how the run of a checkpoint's state ranks its checkpoints."""
    values = as_dict(state.get("values"))
    metric, keep = values.get("checkpoint.best"), values.get("checkpoint.keep_best")
    return Ranking(
        metric if isinstance(metric, str) else None,
        "max" if values.get("checkpoint.best_is") == "max" else "min",
        keep if type(keep) is int and keep > 0 else 1,
    )


def bests_beside(start: Loaded, ranking: Ranking | None = None) -> list[tuple[float, int]]:
    """Return (value, number) of the best checkpoints up to `start`, best first, for the phase of `start`.

    A best checkpoint that was held in memory may have been written after `start` was saved, which then does not list
    it. So every older checkpoint of the phase is checked. Values of another metric are ignored.

    ranking  None: that of the run itself
    """
    ranking = ranking or ranking_of(start.state)
    folder = start.path.parent
    found = _own_bests(start.state, start.state, ranking)
    for number, state in _states_before(start):
        found |= {key: value for key, value in _own_bests(state, start.state, ranking).items() if key == number}
    there = [
        (value, number)
        for number, value in found.items()
        if number == start.update or files.exists(path_of(folder, number))
    ]
    return sorted(there, reverse=ranking.better == "max")[: ranking.keep]


def _states_before(start: Loaded) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, state) of each older checkpoint of its run beside `start`, unverified."""
    for other in newest_first(start.path.parent):
        if other.name >= start.path.name:
            continue
        if uid_of(files.read_object(other / MANIFEST)) in (None, uid_of(start.manifest)):
            yield int(other.name.removeprefix("update-")), files.read_object(other / STATE)


def _own_bests(state: Mapping[str, Any], start: Mapping[str, Any], ranking: Ranking) -> dict[int, float]:
    """Return number -> value of the best checkpoints in a state; none if they belong to another phase or metric."""
    values = as_dict(state.get("values"))
    wanted = {"checkpoint.best": ranking.metric, "checkpoint.best_is": ranking.better}
    if state.get("phase") != start.get("phase") or any(values.get(key, is_) != is_ for key, is_ in wanted.items()):
        return {}
    try:
        found = {int(number): float(value) for value, number in as_list(state.get("bests"))}
        return {number: value for number, value in found.items() if 0 <= number < 10**_NUM_DIGITS}
    except (TypeError, ValueError, OverflowError):  # of a checkpoint that was not validated
        return {}


def _evaluated(state: Mapping[str, Any], metric: str | None) -> float | None:
    """Return the metric of exactly this checkpoint, None if the last evaluation is that of an earlier update."""
    value = as_dict(state.get("metrics")).get(metric or "")
    is_own = state.get("evaluated_at") == state.get("phase_update")
    return value if is_own and isinstance(value, float) else None


def _valid(directory: RunDirectory, number: int, warn: Callable[[str], None] | None) -> Loaded | None:
    """Return the checkpoint of this number; if it is missing or damaged, warn and return None, or raise."""
    path = path_of(directory.checkpoints, number)
    if not files.exists(path):
        if warn is not None:
            return None
        raise InputMissing(f"there is no {path.name}", where=f"run={directory.name}", fix=_offer(directory))
    problems = verify(path, directory.owner)
    if not problems:
        return load(path)
    what = f"{path.name} is damaged: {'; '.join(problems)}"
    if warn is None:
        raise DataError(what, where=f"run={directory.name}", fix=_offer(directory))
    warn(f"{path.name} is skipped: {'; '.join(problems)}")
    return None


def _offer(directory: RunDirectory) -> str:
    """Return the checkpoints that exist, as values of `checkpoint=`."""
    paths = newest_first(directory.checkpoints)[::-1]
    valid = [path for path in paths if not verify(path, directory.owner)]
    known = marks(valid)
    shown = [
        str(number_in(path)) + (f" ({', '.join(known[path.name])})" if path.name in known else "") for path in valid
    ]
    damaged = [str(number_in(path)) for path in paths if path not in valid]
    text = f"use checkpoint=N with one of: {', '.join(shown)}"
    return text + (f"; damaged: {', '.join(damaged)}" if damaged else "")


def _none(directory: RunDirectory) -> AccelRunError:
    where = str(directory.checkpoints)
    if directory.checkpoints.is_dir() and any(directory.checkpoints.iterdir()):
        fix = f"accel-run status run={directory.name}"
        return DataError("no checkpoint of this run is valid", where=where, fix=fix)
    return InputMissing("this run has no checkpoint yet", where=where, fix="train it first: accel-run train")


_PREFIX = "update-"
_NUM_DIGITS = 10
_NUMBER = re.compile(rf"({_PREFIX})?\d{{1,{_NUM_DIGITS}}}", re.ASCII)
