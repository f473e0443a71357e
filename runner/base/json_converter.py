"""Convert frozen dataclasses to JSON objects and back; damaged values are replaced by their defaults, if any."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
# Metadata of a field that holds a dataclass: the keys of that dataclass are stored in the enclosing object.
INLINE: Mapping[str, Any] = {"json": "inline"}
NOT_STORED: Mapping[str, Any] = {"json": "not stored"}


@dataclass(frozen=True)
class Decoded(Generic[T]):
    """A dataclass read from JSON.

    wrong  dotted names of values of the wrong type, which were replaced by their defaults or left out
    """

    value: T
    wrong: tuple[str, ...] = ()


def decode(kind: type[T], tree: Mapping[str, Any]) -> Decoded[T]:
    """Decode a JSON object to the dataclass `kind`.

    Missing values get their defaults, and unknown keys are ignored. A value of the wrong type is replaced by its
    default and listed in `wrong`, and so is an inner object whose keys are all unknown. In mappings and lists of
    objects, only the invalid entries are left out; other lists are valid or invalid as a whole.

    Raises TypeError if a value without a default is missing or of the wrong type.
    """
    wrong: list[str] = []
    return Decoded(_decode_object(kind, tree, "", wrong), tuple(wrong))


def decode_valid(kind: type[T], tree: Mapping[str, Any]) -> T:
    """Decode a JSON object to the dataclass `kind`; it must be valid.

    Raises ValueError if a value is of the wrong type, TypeError if one without a default is missing.
    """
    decoded = decode(kind, tree)
    if decoded.wrong:
        raise ValueError(f"{kind.__name__} has unreadable values: {', '.join(decoded.wrong)}")
    return decoded.value


def encode(value: Any) -> Any:
    """Return the value as JSON-serializable data; dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        content: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            if field.metadata == INLINE:
                content.update(encode(getattr(value, field.name)))
            elif field.metadata != NOT_STORED:
                content[field.name] = encode(getattr(value, field.name))
        return content
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def _decode_object(kind: type[Any], tree: Mapping[str, Any], lead: str, wrong: list[str]) -> Any:
    values = {}
    for field, hint in _stored_fields(kind):  # type: ignore[arg-type]
        if field.metadata == INLINE:
            values[field.name] = _decode_object(hint, tree, lead, wrong)
        elif field.name in tree:
            value = _decode_value(hint, tree[field.name], f"{lead}{field.name}", wrong)
            if value is not _INVALID:
                values[field.name] = value
    return kind(**values)


@functools.cache
def _stored_fields(kind: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind) if field.metadata != NOT_STORED]


@functools.cache
def _json_keys(kind: type[Any]) -> frozenset[str]:
    stored = _stored_fields(kind)  # type: ignore[arg-type]
    inline = [_json_keys(hint) for field, hint in stored if field.metadata == INLINE]
    return frozenset(field.name for field, _ in stored if field.metadata != INLINE).union(*inline)


def _decode_value(hint: Any, value: Any, name: str, wrong: list[str]) -> Any:
    """Convert a JSON value to the type `hint`; return _INVALID, and add `name` to `wrong`, if it does not match."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(inner, value, name, wrong)
    if origin is Literal and value in inner:
        return value
    if origin in (tuple, list) and isinstance(value, list | tuple):
        faults: list[str] = []
        rows = [_decode_value(inner[0], row, f"{name}.{number}", faults) for number, row in enumerate(value)]
        wrong += faults
        if dataclasses.is_dataclass(inner[0]) or all(row is not _INVALID for row in rows):
            return origin(row for row in rows if row is not _INVALID)
        return _INVALID
    if origin in (Mapping, dict) and isinstance(value, dict):
        pairs = {str(key): _decode_value(inner[1], item, f"{name}.{key}", wrong) for key, item in value.items()}
        return {key: item for key, item in pairs.items() if item is not _INVALID}
    decoded = _decode_scalar(hint, value, name, wrong) if origin is None else _INVALID
    if decoded is _INVALID:
        wrong.append(name)
    return decoded


def _decode_union(hints: tuple[Any, ...], value: Any, name: str, wrong: list[str]) -> Any:
    """Convert a value to the first type of a union that it matches.

    If there is only one type besides None, the names in `wrong` are those of its inner values, not of the union.
    """
    members = [hint for hint in hints if hint is not type(None)]
    if value is None and len(members) < len(hints):
        return None
    for hint in members:
        faults: list[str] = []
        decoded = _decode_value(hint, value, name, faults)
        if decoded is not _INVALID or len(members) == 1:
            wrong += faults
            return decoded
    wrong.append(name)
    return _INVALID


def _decode_scalar(hint: Any, value: Any, name: str, wrong: list[str]) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        if value and not _json_keys(hint) & value.keys():  # type: ignore[arg-type]
            return _INVALID
        try:
            return _decode_object(hint, value, f"{name}.", wrong)  # type: ignore[arg-type]
        except TypeError:  # a value without default is missing or invalid
            return _INVALID
    if hint is float and type(value) in (int, float):
        return float(value) if abs(value) <= _LARGEST and math.isfinite(value) else _INVALID
    if hint is int:
        return value if type(value) is int and abs(value) < 2**63 else _INVALID
    return value if type(value) is hint else _INVALID


_INVALID = object()
_LARGEST = 1.7976931348623157e308  # largest float64; JSON allows integers of any size
