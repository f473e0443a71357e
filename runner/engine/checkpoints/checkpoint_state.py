"""Validate state.json of a checkpoint before restoring from it; a valid checksum does not guarantee its content."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch

from runner.base.errors import AccelRunError, DataError
from runner.base.json_converter import decode
from runner.distributed.peer_loss import is_peer_loss
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.checkpoints.save_policy import SaveTimes
from runner.records.phase_record import PhaseRecord
from runner.tensors.step_counters import is_changed_number, is_number

Predicate = Callable[[Any], bool]


def check_state(start: LoadedCheckpoint) -> LoadedCheckpoint:
    """Return the checkpoint after validating every field of its state. Raises DataError for the first invalid one."""
    state = start.state
    problem = next(_find_invalid(state, _STATE), None) or next(_find_invalid(state, _OPTIONAL, is_optional=True), None)
    if problem is None:
        if state["phase"] not in state["records"]:
            problem = "records must have the phase of the checkpoint"
        elif state["updates_before"] + state["phase_update"] != start.update:
            problem = "updates_before and phase_update must sum to the update of the checkpoint"
        elif not _is_count(start.manifest.get("metrics_bytes")):
            problem = "the manifest's metrics_bytes must be a number of bytes"
    if problem is not None:
        raise _invalid_state(start, problem)
    return start


@contextmanager
def convert_state_errors(start: LoadedCheckpoint) -> Iterator[None]:
    """Convert exceptions raised while restoring state to DataError, because components do not validate their state."""
    try:
        yield
    except (AccelRunError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        if is_peer_loss(error):
            raise
        reason = (str(error) or "no reason given").splitlines()[0][:200]
        raise _invalid_state(start, f"{type(error).__name__}: {reason}") from error


def _invalid_state(start: LoadedCheckpoint, reason: str) -> DataError:
    return DataError(
        f"its state cannot be restored: {reason}",
        where=str(start.path),
        fix="the files are intact, but accel-run did not write this state; use another checkpoint, or resume=fresh",
    )


def _find_invalid(
    state: Mapping[str, Any], fields: Mapping[str, Predicate], *, is_optional: bool = False
) -> Iterator[str]:
    for name, predicate in fields.items():
        if name not in state:
            if not is_optional:
                yield f"{name} is missing"
        elif not predicate(state[name]):
            yield f"{name} has an invalid value of type {type(state[name]).__name__}"


def _is_below(limit: int) -> Predicate:
    return lambda value: type(value) is int and 0 <= value < limit


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_a(kind: type) -> Predicate:
    return lambda value: isinstance(value, kind)


def _or_none(predicate: Predicate) -> Predicate:
    return lambda value: value is None or predicate(value)


def _list_of(predicate: Predicate) -> Predicate:
    return lambda value: isinstance(value, list) and all(map(predicate, value))


def _mapping_of(predicate: Predicate) -> Predicate:
    return lambda value: isinstance(value, dict) and all(map(predicate, value.values()))


def _has_fields(fields: Mapping[str, Predicate]) -> Predicate:
    return lambda value: isinstance(value, dict) and next(_find_invalid(value, fields), None) is None


def _is_best(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_number(value[0]) and _is_update(value[1])


def _is_schedule(value: Any) -> bool:
    """Return whether all values are numbers or None, except the metric and the mode of a plateau schedule."""
    return isinstance(value, dict) and all(
        _is_text(item) if name in ("metric", "mode") else _or_none(_is_number)(item) for name, item in value.items()
    )


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= _REQUIRED_RECORD_FIELDS and not decode(PhaseRecord, value).wrong


def _is_random(value: Any) -> bool:
    """Return whether these are valid states of NumPy's and Python's generators; NumPy would accept any position."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in ("numpy", "python")):
        return False
    numpy, python = value["numpy"], value["python"]
    return (
        len(numpy) == 5 and numpy[0] == "MT19937" and _list_of(_is_uint32)(numpy[1]) and len(numpy[1]) == _MT_SIZE
        and type(numpy[2]) is int and 0 <= numpy[2] <= _MT_SIZE and numpy[3] in (0, 1) and _is_number(numpy[4])
        and len(python) == 3 and python[0] == 3 and _list_of(_is_uint32)(python[1]) and len(python[1]) == _MT_SIZE + 1
        and python[1][-1] <= _MT_SIZE and _or_none(_is_number)(python[2])
    )  # fmt: skip


_is_count, _is_update, _is_uint32 = _is_below(1 << 53), _is_below(10**10), _is_below(1 << 32)
_is_text, _is_mapping, _is_flag = _is_a(str), _is_a(dict), _is_a(bool)
_TIME_FIELDS = tuple(field.name for field in fields(SaveTimes))


def _are_optimizer_numbers(value: Any) -> bool:
    """Return whether `export_state` may have returned these numbers; they may include containers of a parameter."""
    return isinstance(value, dict) and all(
        is_number(item) or (isinstance(item, (list, dict)) and not is_changed_number(name))
        for name, item in value.items()
    )


_MT_SIZE = 624  # number of 32-bit words of the state of a Mersenne Twister
_REQUIRED_RECORD_FIELDS = {"kind", "updates", "total", "finished", "seconds", "metrics"}  # in records of all versions
_STATE: Mapping[str, Predicate] = {
    "phase": _is_text,
    "phase_update": _is_update,
    "epoch": _is_number,
    "updates_before": _is_update,
    "total": _is_update,
    "early_stopping": _has_fields({"best": _or_none(_is_number), "num_bad": _is_update}),
    "records": _mapping_of(_is_record),
    "closed": _is_flag,
    "kept": _list_of(_is_update),
    "precision": _is_mapping,
    "meter": _has_fields(
        {
            "losses": _list_of(_is_number),
            "items": _list_of(_is_number),
            "items_seen": _is_number,
            "update": _or_none(_is_update),
            "lr": _or_none(_is_number),
            "grad_norm": _or_none(_is_number),
        }
    ),
    "random": _is_random,
    "bests": _list_of(_is_best),
    "evaluated_at": lambda value: value == -1 or _is_update(value),
    "skipped_before": _is_update,
    "metrics": _mapping_of(_or_none(_is_number)),
    "values": _is_mapping,
}
_DATA = {"samples": _is_count, "hashes": _mapping_of(_is_text)}
_CHANGE = {"phase": _is_text, "update": _is_update, "files": _list_of(_is_text), "samples": _list_of(_is_text)}
_OPTIONAL: Mapping[str, Predicate] = {
    "ended": _is_flag,
    "trained": _list_of(_is_text),
    "data": _mapping_of(_has_fields(_DATA)),
    "code": _mapping_of(_is_text),
    "changes": _list_of(_has_fields(_CHANGE)),
    "random_of_ranks": _list_of(_is_random),
    "saving": _list_of(_has_fields(dict.fromkeys(_TIME_FIELDS, _is_amount))),
    "shares": _is_mapping,
    "forward_state": _has_fields({"frozen": _list_of(_is_text)}),
    "optimizer": _has_fields({"optimizer": _is_text, "numbers": _are_optimizer_numbers}),
    "schedule": _is_schedule,
}
