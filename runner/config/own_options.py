"""Options that a task file or an installed package brings: tables of functions, parsed without executing them.

A table is a literal mapping in the file: `OPTIMIZERS = {"lion": lion}`. As with shipped options, the parameters after
`*` are the keys, and the docstring has their meaning. Code is named by the user alone: by --task, or by installing a
package with entry points.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from runner.base.errors import Problem
from runner.base.paths import shipped
from runner.config.schema import Expression, Signature, read_functions, read_module

# table -> the group of its options, and the parameters that the runner passes
TABLES: Mapping[str, tuple[str, str]] = {
    "OPTIMIZERS": ("optimizer", "parameters"),
    "SCHEDULERS": ("scheduler", "updates"),
}
ENTRY_POINTS = "accel_run.options"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_VALUES = ("true", "false", "null", "nan", "inf")  # an override with one of these is no text


@dataclass(frozen=True)
class OwnOption:
    """An option that is not shipped.

    place    file of the task, or module of the package
    package  name and version of the package; empty for a task file
    """

    group: str
    name: str
    table: str
    place: str
    signature: Signature
    package: str = ""

    @property
    def reference(self) -> str:
        """Return what names the function for `option_table.make`."""
        return f"{self.place}:{self.table}:{self.name}"

    @property
    def origin(self) -> str:
        """Return who brings the option, for the user."""
        return f"the package {self.package} ({self.place})" if self.package else self.place


Options = Mapping[tuple[str, str], OwnOption]


def own_options(task_file: Path | None) -> Options:
    """Return (group, name) -> the options of installed packages and of the task file; broken tables are left out."""
    return {**_of_packages()[0], **(_tables(task_file, str(task_file))[0] if task_file else {})}


def table_problems(task_file: Path | None) -> list[Problem]:
    """Return what is wrong with the tables of the task file and of installed packages."""
    return [*_of_packages()[1], *(_tables(task_file, str(task_file))[1] if task_file else ())]


def by_reference(reference: str) -> OwnOption | None:
    """Return the option with this reference; None if it is no reference of an option."""
    place, table, name = [*reference.rsplit(":", 2), "", ""][:3]
    found = own_options(Path(place) if place.endswith(".py") else None)
    return found.get((TABLES[table][0], name)) if table in TABLES else None


@cache
def _of_packages() -> tuple[Options, tuple[Problem, ...]]:
    """Return the options of installed packages; of two packages with the same option, the first by name has it."""
    from importlib.metadata import entry_points

    found: dict[tuple[str, str], OwnOption] = {}
    problems: list[Problem] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: (each.dist.name if each.dist else "", each)):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.name
        file = _file_of_module(point.module)
        if file is None:
            what = f"names the module {point.module}, which is not installed"
            problems.append(Problem(what, f"package {package}", "reinstall the package, or uninstall it"))
            continue
        options, wrong = _tables(file, point.module, package)
        found = {**options, **found}
        problems += wrong
    return found, tuple(problems)


def _file_of_module(module: str) -> Path | None:
    """Return the file of a module without importing the packages that contain it."""
    path = None
    for count in range(module.count(".") + 1):
        spec = PathFinder.find_spec(".".join(module.split(".")[: count + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


@cache
def _tables(file: Path, place: str, package: str = "") -> tuple[Options, tuple[Problem, ...]]:
    found: dict[tuple[str, str], OwnOption] = {}
    problems: list[Problem] = []
    where = f"package {package}" if package else str(file)
    try:
        functions, assigned = read_functions(file), [*_assigned(read_module(file))]
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        unread = Problem(f"{file} cannot be parsed", where, "reinstall the package, or uninstall it")
        return {}, (unread,) if package else ()  # a task file is reported by read_task
    for table, value in assigned:
        group, given = TABLES[table]
        if not isinstance(value, ast.Dict):
            what = f'{table} must be a literal mapping of names to functions of this file, such as {{"mine": mine}}'
            problems.append(Problem(what, where))
            continue
        for key, function in zip(value.keys, value.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            signature = functions.get(function.id) if isinstance(function, ast.Name) else None
            wrong = _fault_of_entry(group, given, name, signature)
            if wrong:
                entry = ast.unparse(key) if key is not None else "**"
                problems.append(Problem(wrong[0], f"{where}: {table}[{entry}]", wrong[1]))
            elif signature is not None:
                found[group, str(name)] = OwnOption(group, str(name), table, place, signature, package)
    return found, tuple(problems)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the tables that the module assigns, with their values."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name in TABLES:
                yield name, value


def _fault_of_entry(group: str, given: str, name: object, signature: Signature | None) -> tuple[str, str] | None:
    """Return what is wrong with an entry of a table, and what to do about it; None if the entry is valid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _VALUES:
        what = f"the name must be a text of lowercase letters, digits, _ and -, other than {', '.join(_VALUES)}"
        return what, f'use a name such as "my_{group}"'
    if (shipped("conf") / group / f"{name}.yaml").is_file():
        return f"{group}={name} is a shipped option", f'use another name, such as "my_{name}"'
    if signature is None:
        return "must be a function that this file defines", f"define it with def, and {given} as its first argument"
    if len(signature.runner) != 1:
        what = f"the function must take one argument before *, but takes {len(signature.runner)}"
        return what, f"use def {signature.name}({given}, *, ...)"
    for key in signature.keys.values():
        if isinstance(key.default, Expression):
            return f"the default of {key.name} must be a literal, but is {key.default.text}", "write the value itself"
    return None


def forget_packages() -> None:
    """Read the installed packages again at the next use: one was installed or removed in this process."""
    _of_packages.cache_clear()
