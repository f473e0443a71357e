"""Parse the tables of options and hooks that a Python file declares, without executing it.

A table of options is a literal mapping, `OPTIMIZERS = {"lion": lion}`; hooks are a literal list of classes,
`HOOKS = [LogImages]`. As with shipped options, the parameters after `*` are the keys, and the docstring describes
them.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from runner.base.errors import Problem
from runner.base.paths import shipped_path
from runner.config.schema import Expression, Key, Signature, read_classes, read_docstring, read_functions, read_module

# table -> the group of its options, and the parameters that the runner passes
OPTION_TABLES: Mapping[str, tuple[str, str]] = {
    "OPTIMIZERS": ("optimizer", "parameters"),
    "SCHEDULERS": ("scheduler", "updates"),
    "SAMPLERS": ("sampler", "samples"),
}
HOOK_TABLE, HOOK = "HOOKS", "hook"
# table -> what to use instead; docs/decisions/0023-tables-that-stay-closed.md has the reasons
CLOSED_TABLES: Mapping[str, str] = {
    "DATALOADERS": "return your own dataset from dataset(split), and set dataloader.KEY",
    "PRECISIONS": "use precision=bf16 precision.keep_fp32=[NAME], or cast inside the model",
    "PARALLELISMS": "use a shipped strategy; CONTRIBUTING.md has the steps to add one",
    "TECHNIQUES": "put NAME.yaml with `overrides: [KEY=VALUE]` into benchmark/technique of the folder of --config-dir",
}
ENABLED = "enabled"  # key of every hook
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_RESERVED_NAMES = ("true", "false", "null", "nan", "inf")  # an override with one of these values is not a text
_TABLES = {*OPTION_TABLES, HOOK_TABLE}


@dataclass(frozen=True)
class CustomOption:
    """An option, a hook or a task that is not shipped.

    location  file of the task, or module of the package
    package   name and version of the package; empty for a task file
    """

    group: str
    name: str
    table: str
    location: str
    signature: Signature
    package: str = ""

    @property
    def reference(self) -> str:
        """Return the reference to the function for `option_table.make`."""
        return f"{self.location}:{self.table}:{self.name}"

    @property
    def origin(self) -> str:
        """Return where the option is defined, for messages."""
        return f"the package {self.package} ({self.location})" if self.package else self.location


Options = Mapping[tuple[str, str], CustomOption]
ParsedTables = tuple[Options, tuple[Problem, ...]]


def hook_name(class_name: str) -> str:
    """Return the name of a hook in keys: the name of its class in snake_case."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name)
    return separated.lower().strip("_")


@cache
def read_tables(file: Path, location: str, package: str = "") -> ParsedTables:
    """Return (group, name) -> the options and hooks of a file, and what is wrong with its tables."""
    where = f"package {package}" if package else str(file)
    try:
        tree, functions, classes = read_module(file), read_functions(file), read_classes(file)
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        unparsed = Problem(f"{file} cannot be parsed", where, "reinstall the package, or uninstall it")
        return {}, (unparsed,) if package else ()  # a task file is reported by read_task
    options: dict[tuple[str, str], CustomOption] = {}
    problems = [*_closed_table_problems(tree, where)]
    for table, value in _find_tables(tree):
        if table == HOOK_TABLE:
            entries = _read_hooks(value, classes, functions, where, problems)
        else:
            entries = _read_options(table, value, functions, where, problems)
        for name, signature in entries:
            group = HOOK if table == HOOK_TABLE else OPTION_TABLES[table][0]
            options[group, name] = CustomOption(group, name, table, location, signature, package)
    return options, tuple(problems)


def find_name_error(group: str, name: object) -> tuple[str, str] | None:
    """Return what is wrong with the name of an option, and what to do about it; None if it is valid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
        what = (
            f"the name must be a string of lowercase letters, digits, _ and -, other than {', '.join(_RESERVED_NAMES)}"
        )
        return what, f'use a name such as "my_{group}"'
    if (shipped_path("conf") / group / f"{name}.yaml").is_file():
        return f"{group}={name} is a shipped option", f'use another name, such as "my_{name}"'
    return None


def _find_tables(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name in _TABLES:
                yield name, value


def _closed_table_problems(tree: ast.Module, where: str) -> Iterator[Problem]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if (
                name in CLOSED_TABLES
            ):
                what = f"{name} is not a table of a task: open ones are {', '.join(sorted(_TABLES))}"
                yield Problem(what, where, CLOSED_TABLES[name])


def find_changed_tables(values: Mapping[str, Any], options: Options) -> Iterator[str]:
    """Yield the tables that have another number of entries in an executed module than when it was parsed.

    values  variables of the module
    """
    for table in sorted(_TABLES):
        num_parsed = sum(option.table == table for option in options.values())
        if len(values.get(table, ())) != num_parsed:
            yield table


def _read_options(
    table: str, value: ast.expr, functions: Mapping[str, Signature], where: str, problems: list[Problem]
) -> Iterator[tuple[str, Signature]]:
    group, first_parameter = OPTION_TABLES[table]
    if not isinstance(value, ast.Dict):
        what = f'{table} must be a literal mapping of names to functions of this file, such as {{"mine": mine}}'
        problems.append(Problem(what, where))
        return
    for key, function in zip(value.keys, value.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        signature = functions.get(function.id) if isinstance(function, ast.Name) else None
        error = find_name_error(group, name) or _find_function_error(first_parameter, signature)
        if error:
            entry = ast.unparse(key) if key is not None else "**"
            problems.append(Problem(error[0], f"{where}: {table}[{entry}]", error[1]))
        elif signature is not None:
            yield str(name), signature


def _find_function_error(first_parameter: str, signature: Signature | None) -> tuple[str, str] | None:
    if signature is None:
        return (
            "must be a function that this file defines",
            f"define it with def, and {first_parameter} as its first argument",
        )
    if len(signature.runner) != 1:
        what = f"the function must take one argument before *, but takes {len(signature.runner)}"
        return what, f"use def {signature.name}({first_parameter}, *, ...)"
    return _find_key_error(signature)


def _find_key_error(signature: Signature) -> tuple[str, str] | None:
    for key in signature.keys.values():
        if isinstance(key.default, Expression):
            return f"the default of {key.name} must be a literal, but is {key.default.text}", "write the value itself"
    return None


def _read_hooks(
    value: ast.expr,
    classes: Mapping[str, ast.ClassDef],
    functions: Mapping[str, Signature],
    where: str,
    problems: list[Problem],
) -> Iterator[tuple[str, Signature]]:
    if not isinstance(value, (ast.List, ast.Tuple)):
        what = f"{HOOK_TABLE} must be a literal list of classes of this file, such as [LogImages]"
        problems.append(Problem(what, where))
        return
    names: set[str] = set()
    for entry in value.elts:
        hook_class = classes.get(entry.id) if isinstance(entry, ast.Name) else None
        name = hook_name(hook_class.name) if hook_class else ""
        signature = _find_constructor(hook_class, classes, functions) if hook_class else None
        error = _find_hook_error(hook_class, signature)
        if not error and name in names:
            error = f"the hook {name} is listed twice", "remove one of them, or rename its class"
        if error:
            problems.append(Problem(error[0], f"{where}: {HOOK_TABLE}[{ast.unparse(entry)}]", error[1]))
        elif signature is not None:
            yield name, signature
        names.add(name)


def _find_constructor(
    kind: ast.ClassDef, classes: Mapping[str, ast.ClassDef], functions: Mapping[str, Signature]
) -> Signature:
    """Return the constructor of a class, or of its first base in the same file that has one.

    The meanings of keys may be in the docstring of the constructor or of the class.
    """
    constructor = functions.get(f"{kind.name}.__init__")
    if constructor is None:
        bases = [classes[base.id] for base in kind.bases if isinstance(base, ast.Name) and base.id in classes]
        inherited = [_find_constructor(base, classes, functions) for base in bases if base is not kind]
        constructor = next(iter(inherited), Signature(kind.name, ("self", "phase"), {}, ""))
    summary, meanings = read_docstring(kind)
    keys = {
        name: dataclasses.replace(key, help=key.help or meanings.get(name, ""))
        for name, key in constructor.keys.items()
    }
    return dataclasses.replace(constructor, name=kind.name, keys=keys, summary=summary or constructor.summary)


def _find_hook_error(kind: ast.ClassDef | None, signature: Signature | None) -> tuple[str, str] | None:
    if kind is None or signature is None:
        return "must be a class that this file defines", "class LogImages(runner.Hook): ..."
    if not kind.bases:
        return "must be a subclass of runner.Hook", f"class {kind.name}(runner.Hook): ..."
    if len(signature.runner) != 2:
        what = f"the constructor must take self and phase before *, but takes {', '.join(signature.runner)}"
        return what, "def __init__(self, phase, *, every: int = 500): super().__init__(phase)"
    if ENABLED in signature.keys:
        return f"{ENABLED} is a key of every hook", "choose another name for this parameter"
    return _find_key_error(signature)


def hook_keys(hook: CustomOption) -> dict[str, Key]:
    """Return the keys of a hook by their full name. Hooks of packages are off until they are enabled."""
    prefix = f"{HOOK}.{hook.name}."
    enabled = Key(prefix + ENABLED, bool, not hook.package, f"use this hook: {hook.signature.summary or hook.name}")
    return {enabled.name: enabled, **{prefix + key.name: key for key in hook.signature.keys.values()}}
