"""Convert frozen dataclasses to JSON objects and back; damaged input becomes unknown values, never an exception."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
INLINE: Mapping[str, Any] = {"json": "inline"}  # metadata of a field: its fields are keys of the enclosing object
NOT_STORED: Mapping[str, Any] = {"json": "not stored"}


@dataclass(frozen=True)
class Decoded(Generic[T]):
    """A dataclass read from JSON.

    wrong  dotted names of the values of a wrong type; they have their defaults
    """

    value: T
    wrong: tuple[str, ...] = ()


def decode(kind: type[T], tree: Mapping[str, Any]) -> Decoded[T]:
    """Return the dataclass `kind` in a JSON object.

    Missing values have their defaults, and unknown keys are ignored; an inner object with unknown keys only is of a
    wrong type. A value of a wrong type has its default and is
    listed in `wrong`. Entries of mappings, and rows of lists of objects, are judged one by one; other lists as a whole.

    Raises TypeError if a value without default is missing or of a wrong type.
    """
    wrong: list[str] = []
    return Decoded(_object(kind, tree, "", wrong), tuple(wrong))


def decode_valid(kind: type[T], tree: Mapping[str, Any]) -> T:
    """Return the dataclass `kind` in a JSON object that must be complete.

    Raises ValueError if a value is of a wrong type, TypeError if one without default is missing.
    """
    found = decode(kind, tree)
    if found.wrong:
        raise ValueError(f"{kind.__name__} has unreadable values: {', '.join(found.wrong)}")
    return found.value


def encode(value: Any) -> Any:
    """Return the value as JSON-serializable data; dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for each in dataclasses.fields(value):
            if each.metadata == INLINE:
                found.update(encode(getattr(value, each.name)))
            elif each.metadata != NOT_STORED:
                found[each.name] = encode(getattr(value, each.name))
        return found
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def _object(kind: type[Any], tree: Mapping[str, Any], lead: str, wrong: list[str]) -> Any:
    found = {}
    for each, hint in _stored_fields(kind):  # type: ignore[arg-type]
        if each.metadata == INLINE:
            found[each.name] = _object(hint, tree, lead, wrong)
        elif each.name in tree:
            value = _value(hint, tree[each.name], f"{lead}{each.name}", wrong)
            if value is not _WRONG:
                found[each.name] = value
    return kind(**found)


@functools.cache
def _stored_fields(kind: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(each, hints[each.name]) for each in dataclasses.fields(kind) if each.metadata != NOT_STORED]


@functools.cache
def _keys_of(kind: type[Any]) -> frozenset[str]:
    """Return the keys of the JSON object of a dataclass."""
    stored = _stored_fields(kind)  # type: ignore[arg-type]
    inline = [_keys_of(hint) for each, hint in stored if each.metadata == INLINE]
    return frozenset(each.name for each, _ in stored if each.metadata != INLINE).union(*inline)


def _value(hint: Any, value: Any, name: str, wrong: list[str]) -> Any:
    """Convert a JSON value to the type `hint`; return _WRONG, and add `name` to `wrong`, if it does not match."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, name, wrong)
    if origin is Literal and value in inner:
        return value
    if origin in (tuple, list) and isinstance(value, list | tuple):
        faults: list[str] = []
        rows = [_value(inner[0], row, f"{name}.{number}", faults) for number, row in enumerate(value)]
        wrong += faults
        if dataclasses.is_dataclass(inner[0]) or all(row is not _WRONG for row in rows):
            return origin(row for row in rows if row is not _WRONG)
        return _WRONG
    if origin in (Mapping, dict) and isinstance(value, dict):
        pairs = {str(key): _value(inner[1], item, f"{name}.{key}", wrong) for key, item in value.items()}
        return {key: item for key, item in pairs.items() if item is not _WRONG}
    found = _scalar(hint, value, name, wrong) if origin is None else _WRONG
    if found is _WRONG:
        wrong.append(name)
    return found


def _one_of(hints: tuple[Any, ...], value: Any, name: str, wrong: list[str]) -> Any:
    """Convert to the first type of a union that matches; the faults of the only type besides None are kept."""
    known = [hint for hint in hints if hint is not type(None)]
    if value is None and len(known) < len(hints):
        return None
    for hint in known:
        faults: list[str] = []
        found = _value(hint, value, name, faults)
        if found is not _WRONG or len(known) == 1:
            wrong += faults
            return found
    wrong.append(name)
    return _WRONG


def _scalar(hint: Any, value: Any, name: str, wrong: list[str]) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        if value and not _keys_of(hint) & value.keys():  # type: ignore[arg-type]
            return _WRONG
        try:
            return _object(hint, value, f"{name}.", wrong)  # type: ignore[arg-type]
        except TypeError:  # a value without default
            return _WRONG
    if hint is float and type(value) in (int, float):
        return float(value) if abs(value) <= _LARGEST and math.isfinite(value) else _WRONG
    if hint is int:
        return value if type(value) is int and abs(value) < 2**63 else _WRONG
    return value if type(value) is hint else _WRONG


_WRONG = object()
_LARGEST = 1.7976931348623157e308  # float64: an integer of 400 digits is no number of a run
