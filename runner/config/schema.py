"""Configuration schema, read from function signatures without importing the code.

An axis is a Python file with one function per option. The parameters after `*` are the option's keys: their
annotations are the types, their defaults the default values, their docstring lines the help. The file is parsed, not
imported, so an invalid key is reported before torch is loaded.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from runner.base import values
from runner.base.errors import to_one_line
from runner.base.values import Matches, Range

MAX_SHOWN = 200  # maximum characters of a value in a message
REQUIRED = object()  # sentinel: the key has no default


@dataclass(frozen=True)
class Expression:
    """A default that cannot be evaluated without running the code."""

    text: str


@dataclass(frozen=True)
class Key:
    """A configuration key: its type, default and help text."""

    name: str
    type: Any
    default: Any
    help: str = ""


Keys = Mapping[str, Key]


@dataclass(frozen=True)
class Signature:
    """The signature of an option: `runner` parameters are passed by the runner, `keys` are set by the user."""

    name: str
    runner: tuple[str, ...]
    keys: Mapping[str, Key]
    summary: str


@cache
def read_module(path: Path) -> ast.Module:
    """Parse a Python file. Raises SyntaxError as Python would."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def list_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a Python file, those of outer levels first. Raises SyntaxError as Python would."""
    return tuple(ast.walk(read_module(path)))


@cache
def read_functions(path: Path) -> Mapping[str, Signature]:
    """Return the signatures of a Python file, methods as `Class.method`, without importing it.

    The help text of a key that a function does not describe is taken from the docstring of the file.
    Raises SyntaxError as Python would.
    """
    signatures = {}
    shared = _help_lines(ast.get_docstring(read_module(path)) or "")
    for node in read_module(path).body:
        if isinstance(node, ast.FunctionDef):
            signatures[node.name] = _read_signature(node, shared)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    signatures[f"{node.name}.{member.name}"] = _read_signature(member, shared)
    return signatures


@cache
def read_classes(path: Path) -> Mapping[str, ast.ClassDef]:
    """Return the classes of a Python file by name, without importing it. Raises SyntaxError as Python would."""
    return {node.name: node for node in read_module(path).body if isinstance(node, ast.ClassDef)}


def read_docstring(node: ast.ClassDef) -> tuple[str, Mapping[str, str]]:
    """Return the first line of a class's docstring, and the meanings of keys in it."""
    docstring = ast.get_docstring(node) or ""
    return docstring.split("\n", 1)[0], _help_lines(docstring)


@cache
def settings_types(settings: type) -> Mapping[str, Any]:
    """Return the type of each field of a settings dataclass."""
    return typing.get_type_hints(settings, include_extras=True)


def settings_keys(settings: type, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a settings dataclass, nested ones with dots."""
    hints = settings_types(settings)
    help_lines = _help_lines(inspect.cleandoc(settings.__doc__ or ""))
    keys: dict[str, Key] = {}
    for field in dataclasses.fields(settings):
        annotation = hints[field.name]
        name = prefix + field.name
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            keys.update(settings_keys(annotation, name + "."))
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        keys[name] = Key(name, annotation, default, help_lines.get(field.name, ""))
    return keys


def default_values(keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the default of each key that has one, as in a YAML file; lists and mappings are copied."""
    return {name: to_yaml_value(key.default) for name, key in keys.items() if key.default is not REQUIRED}


def describe_mismatch(annotation: Any, value: Any) -> str | None:
    """Return a description of the expected type if `value` does not match it, else None."""
    if _matches(annotation, value):
        return None
    if typing.get_origin(annotation) is Mapping and isinstance(value, Mapping):
        names, items = typing.get_args(annotation)
        for key, item in value.items():
            if not _matches(names, key):
                return f"each name must be {describe_type(names)}, but one is {_format_shown(key)}"
            if not _matches(items, item):
                return f"{to_one_line(key, MAX_SHOWN)} must be {describe_type(items)}, but is {_format_shown(item)}"
    return f"must be {describe_type(annotation)}, but is {_format_shown(value)}"


def describe_type(annotation: Any) -> str:
    """Describe a type: `a number above 0, or auto`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        descriptions = [item.description for item in arguments[1:] if isinstance(item, (Range, Matches))]
        return descriptions[0] if descriptions else describe_type(arguments[0])
    if origin is typing.Literal:
        return _join_alternatives([_format_literal(item) for item in arguments])
    if origin in (typing.Union, types.UnionType):
        return _join_alternatives([describe_type(item) for item in arguments])
    if origin is list or annotation is list:
        return "a list" + (f" of {_plural(arguments[0])}" if arguments else "")
    if origin is tuple:
        return f"a list of {_plural(arguments[0]) if Ellipsis in arguments else f'{len(arguments)} values'}"
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return "a mapping"
    return _TYPE_WORDS.get(annotation, str(annotation))


def literal_choices(annotation: Any) -> set[str]:
    """Return the literal strings of a type, e.g. those of `Literal["sum", "mean"] | float`."""
    if typing.get_origin(annotation) is typing.Literal:
        return {item for item in typing.get_args(annotation) if isinstance(item, str)}
    return set().union(*map(literal_choices, typing.get_args(annotation)))


def find_nearest(word: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """Return the most similar known word, or None if none is similar enough: a wrong suggestion is worse than none."""
    if len(word) > MAX_SHOWN:
        return None
    candidates = list(known)
    lowered = {candidate.lower(): candidate for candidate in candidates}
    group, dot, name = word.lower().rpartition(".")
    if dot:  # a long common prefix does not make keys similar
        siblings = {key.removeprefix(f"{group}."): key for key in lowered if key.rpartition(".")[0] == group}
        if close := _find_close(name, siblings, cutoff):
            return lowered[siblings[close]]
        lowered = {key: candidate for key, candidate in lowered.items() if key not in siblings.values()}
        if siblings:  # a similar name in another group has another meaning: evaluate.interval, monitor.interval_s
            candidates = [key for key in candidates if key.rsplit(".", 1)[-1].lower() == name]
    if close := _find_close(word.lower(), lowered, cutoff):
        return lowered[close]
    last_parts = {key.rsplit(".", 1)[-1].lower(): key for key in reversed(candidates)}
    close = _find_close(word.rsplit(".", 1)[-1].lower(), last_parts, max(cutoff, 0.85))
    return last_parts[close] if close else None


def _find_close(word: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return a known word that is one typo away, else the most similar one above the cutoff.

    A word of up to three letters may have the typo anywhere but in the first letter (l4 is not t4, tpu is not cpu);
    one of up to four letters may have only one typo.
    """
    known = list(known)
    one_away = [
        candidate
        for candidate in known
        if _is_one_typo(word, candidate) and (len(word) > 3 or word[:1] in candidate[:2])
    ]
    if one_away:
        cutoff = 0.0
    elif len(word) <= 4:
        return None
    return next(iter(difflib.get_close_matches(word, one_away or known, n=1, cutoff=cutoff)), None)


def _is_one_typo(word: str, other: str) -> bool:
    """Return whether two words differ by one letter: removing at most one letter from each makes them equal."""
    return min(len(word), len(other)) > 1 and not _without_a_letter(word).isdisjoint(_without_a_letter(other))


def _without_a_letter(word: str) -> set[str]:
    return {word, *(word[:index] + word[index + 1 :] for index in range(len(word)))}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" or an empty string."""
    match = find_nearest(word, known)
    return f"did you mean {match}?" if match else ""


_TYPE_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    None: "null",
    type(None): "null",
    Any: "anything",
}
# Names allowed in annotations; `_matches` checks values against them.
_NAMESPACE: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, object, bytes, complex, set)},
    **{name: getattr(values, name) for name in values.__all__},
    "Optional": typing.Optional,
    "Union": typing.Union,
    "List": list,
    "Dict": dict,
    "Tuple": tuple,
}
_TYPING = ("typing", "t")


def _read_signature(node: ast.FunctionDef, shared: Mapping[str, str]) -> Signature:
    """Return the signature of a function; `shared` has the help texts of keys that its docstring does not describe."""
    help_lines = {**shared, **_help_lines(ast.get_docstring(node) or "")}
    keys = {}
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        kind = _evaluate_annotation(argument.annotation)
        value = REQUIRED if default is None else _read_literal(default)
        keys[argument.arg] = Key(argument.arg, kind, value, help_lines.get(argument.arg, ""))
    runner = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
    summary = (ast.get_docstring(node) or "").split("\n", 1)[0]
    return Signature(node.name, runner, keys, summary)


def _evaluate_annotation(annotation: ast.expr | None) -> Any:
    """Return the type, or Any for a user-defined one, which the function itself must check."""
    try:
        return _read_type(annotation) if annotation is not None else Any
    except Exception:  # an invalid combination of types may raise anything
        return Any


def _read_type(node: ast.expr) -> Any:
    """Evaluate an annotation that uses names of `_NAMESPACE` only; no code of the file is executed.

    `plan` and shell completion parse task files that the user has not yet decided to execute.
    """
    if isinstance(node, ast.Constant):
        return _read_type(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else _check_none(node)
    if isinstance(node, ast.Name):
        return _NAMESPACE[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _TYPING:
        return _NAMESPACE[node.attr]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _read_type(node.left) | _read_type(node.right)
    if isinstance(node, ast.Subscript):
        base = _read_type(node.value)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        read = ast.literal_eval if base is typing.Literal else _read_item
        return base[tuple(map(read, items)) if len(items) > 1 or base is tuple else read(items[0])]
    raise ValueError(f"{ast.unparse(node)} is not a type")


def _read_item(node: ast.expr) -> Any:
    """Return an item in the brackets of a type: another type, an ellipsis, a range or a pattern."""
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return Ellipsis
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Range", "Matches"):
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return _NAMESPACE[node.func.id](*map(ast.literal_eval, node.args), **named)
    return _read_type(node)


def _check_none(node: ast.Constant) -> None:
    if node.value is not None:
        raise ValueError(f"{node.value!r} is not a type")


def _read_literal(default: ast.expr) -> Any:
    try:
        return ast.literal_eval(default)
    except (ValueError, TypeError):  # not a literal, or an invalid one such as {[]: 1}
        return Expression(ast.unparse(default))


def to_yaml_value(value: Any) -> Any:
    """Return a default as in a YAML file: tuples become lists, and nothing is shared with the signature."""
    return [to_yaml_value(item) for item in value] if isinstance(value, (list, tuple)) else copy.deepcopy(value)


def _help_lines(docstring: str) -> dict[str, str]:
    """Parse `name  meaning` lines, with their indented continuation lines, from a dedented docstring."""
    meanings: dict[str, str] = {}
    current = ""
    for line in docstring.splitlines():
        name, gap, meaning = line.partition("  ")
        if gap and name.isidentifier():
            current, meanings[name] = name, meaning.strip()
        elif current and line.startswith(" "):
            meanings[current] += " " + line.strip()
        else:
            current = ""
    return meanings


def _matches(annotation: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is typing.Annotated:
        ranges = [item for item in arguments[1:] if isinstance(item, (Range, Matches))]
        return _matches(arguments[0], value) and all(item.allows(value) for item in ranges)
    if origin is typing.Literal:
        return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(item, value) for item in arguments)
    if origin is list or annotation is list:
        return isinstance(value, list) and all(_matches(arguments[0], item) for item in value if arguments)
    if origin is tuple:
        fixed = arguments[:-1] if arguments[-1:] == (Ellipsis,) else arguments
        if len(fixed) != len(arguments):
            return isinstance(value, (list, tuple)) and all(_matches(fixed[0], item) for item in value)
        return isinstance(value, (list, tuple)) and len(value) == len(fixed) and all(map(_matches, fixed, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        names, items = arguments
        return isinstance(value, Mapping) and all(_matches(names, key) and _matches(items, value[key]) for key in value)
    if annotation in (None, type(None)):
        return value is None
    if annotation is float:
        # Integers above the largest float, infinities and NaN cannot be used in arithmetic.
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def _join_alternatives(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"{', '.join(alternatives[:-1])} or {alternatives[-1]}"


def _plural(annotation: Any) -> str:
    return {int: "integers", float: "numbers", str: "strings"}.get(annotation, "values")


def _format_literal(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_shown(value: Any) -> str:
    return (
        f'"{to_one_line(value, MAX_SHOWN)}"'
        if isinstance(value, str)
        else to_one_line(_format_literal(value), MAX_SHOWN)
    )
