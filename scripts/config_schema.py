"""Generate the JSON schema of configuration files for editors, from the signatures that define the settings."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from runner.base.values import Matches, Range
from runner.config.options import AXES, find_signature, list_options
from runner.config.schema import REQUIRED, Expression, Key, settings_keys, to_yaml_value
from runner.config.settings import MAIN_KEYS, Settings

Schema = dict[str, Any]
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}  # ${KEY} may stand for any value


def config_schema() -> Schema:
    """Return the schema of a file with keys of all groups; `definitions` has the schemas of the files of each group."""
    groups = {group: _group(group) for group in AXES}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "configuration of accel-run",
        **_object(_tree(settings_keys(Settings))),
        "definitions": groups,
    } | {
        "properties": {
            "defaults": {"type": "array"},
            **_tree(settings_keys(Settings)),
            **{group: {"$ref": f"#/definitions/{group}"} for group in AXES},
            **{free: {"type": ["object", "null"]} for free in ("task", "inference", "phase", "hardware")},
        }
    }


def _group(group: str) -> Schema:
    """Return the schema of a group's files: a key may have any type that an option of the group declares for it."""
    found: dict[str, list[Key]] = {}
    for option in list_options(group):
        signature = find_signature(group, option)
        for name, key in (signature.keys if signature else {}).items():
            found.setdefault(name, []).append(key)
    known = {name: _any_of([_key(key) for key in keys]) for name, keys in found.items()}
    option = {
        "enum": list_options(group),
        "description": "the option of which this file is a variant, if the file is not named after an option",
    }
    return _object({"defaults": {"type": "array"}, "option": option, **known}) | {"type": ["object", "null"]}


def _tree(keys: Mapping[str, Key]) -> dict[str, Schema]:
    """Return the properties of dotted keys, with an object per prefix."""
    found: dict[str, Schema] = {}
    for name, key in keys.items():
        head, _, rest = name.partition(".")
        if rest:
            found.setdefault(head, _object({}))["properties"][rest] = _key(key)
        else:
            found[name] = _key(key)
    for short, full in MAIN_KEYS.items():  # weights: FILE is short for weights: {source: FILE}
        found[short] = _any_of([found[short], _key(keys[full])])
    return found


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _key(key: Key) -> Schema:
    found = {"description": key.help} if key.help else {}
    if key.default is not REQUIRED and not isinstance(key.default, Expression):
        found |= {"default": to_yaml_value(key.default)}
    return _any_of([type_schema(key.type), _REFERENCE]) | found


def type_schema(annotation: Any) -> Schema:
    """Return the schema of the values that a type of settings accepts."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        found = type_schema(arguments[0])
        for item in arguments[1:]:
            found |= _range(item) if isinstance(item, Range) else {}
            found |= {"pattern": f"^(?:{item.pattern})$"} if isinstance(item, Matches) else {}
        return found
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return _any_of([type_schema(each) for each in arguments])
    if origin in (list, tuple) or annotation in (list, tuple):
        items = [each for each in arguments if each is not Ellipsis]
        return {"type": "array"} | ({"items": _any_of([type_schema(each) for each in items])} if items else {})
    if isinstance(origin or annotation, type) and issubclass(origin or annotation, Mapping):
        return {"type": "object"} | ({"additionalProperties": type_schema(arguments[1])} if arguments else {})
    return {"type": _PLAIN[annotation]} if annotation in _PLAIN else {}


def _range(limits: Range) -> Schema:
    found = {}
    if limits.low > float("-inf"):
        found["minimum" if limits.low_allowed else "exclusiveMinimum"] = limits.low
    if limits.high < float("inf"):
        found["maximum" if limits.high_allowed else "exclusiveMaximum"] = limits.high
    return found


def _any_of(schemas: list[Schema]) -> Schema:
    """Return one schema for several alternatives, without repeats."""
    single = [each for number, each in enumerate(schemas) if each not in schemas[:number]]
    return single[0] if len(single) == 1 else {"anyOf": single}
