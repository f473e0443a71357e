"""Parse the tables of options and hooks that a Python file declares, without executing it.

A table of options is a literal mapping, `OPTIMIZERS = {"lion": lion}`; hooks are a literal list of classes,
`HOOKS = [LogImages]`. As with shipped options, the parameters after `*` are the keys, and the docstring describes
them. In some tables, an entry extends a shipped option, as in `PRECISIONS = {"float8": ("bf16", float8)}`, and also has
the keys of that option. Techniques of the benchmark are literal overrides, `TECHNIQUES = {"fast": ["precision=bf16"]}`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from runner.base.errors import Problem
from runner.base.paths import PACKAGE, shipped_path
from runner.config.aliases import PRECISION_NAMES
from runner.config.schema import (
    Expression,
    Key,
    Signature,
    find_nearest,
    list_nodes,
    read_classes,
    read_docstring,
    read_functions,
    read_module,
)


@dataclass(frozen=True)
class OptionTable:
    """A table of options that a task file or a package may define.

    parameters  parameters that the runner passes to a function of the table
    bases       shipped options that an entry must extend; empty: an entry is just a function
    shared      keys that each entry has in common with the shipped option `default`
    """

    group: str
    parameters: tuple[str, ...]
    bases: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


OPTION_TABLES: Mapping[str, OptionTable] = {
    "OPTIMIZERS": OptionTable("optimizer", ("parameters",)),
    "SCHEDULERS": OptionTable("scheduler", ("updates",)),
    "SAMPLERS": OptionTable("sampler", ("samples",)),
    "DATALOADERS": OptionTable("dataloader", ("read", "requests"), shared=("pin_memory", "drop_last", "bad_samples")),
    "PRECISIONS": OptionTable("precision", ("model",), bases=("fp32", "tf32", "bf16", "fp16")),
    "PARALLELISMS": OptionTable("parallelism", ("gradients",), bases=("ddp",)),
}
HOOK_TABLE, HOOK = "HOOKS", "hook"
TECHNIQUE_TABLE, TECHNIQUE = "TECHNIQUES", "technique"
RESERVED_TECHNIQUES = ("step", "all", "init", "reset", "clean", "plots")  # used by `benchmark` itself
_HOOK_FILE = PACKAGE / "engine" / "hooks" / "hook.py"
_HOOK_METHODS = ("begin", "before_step", "after_update", "after_evaluation", "end")  # methods of hooks of a task
ENABLED = "enabled"  # key of every hook
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_RESERVED_NAMES = ("true", "false", "null", "nan", "inf")  # in an override, these values are not parsed as strings
TABLES = {*OPTION_TABLES, HOOK_TABLE, TECHNIQUE_TABLE}


@dataclass(frozen=True)
class CustomOption:
    """An option, a hook, a technique or a task that is not shipped.

    location  file of the task, or module of the package
    package   name and version of the package; empty for a task file
    own       keys of its function; the signature also has those of the shipped option that it extends
    base      shipped option that it extends; empty: none
    content   what a technique declares: its overrides, and the options that it needs; None: not a technique
    hidden    origins of the other definitions of the same name, which are not used
    """

    group: str
    name: str
    table: str
    location: str
    signature: Signature
    package: str = ""
    own: tuple[str, ...] = ()
    base: str = ""
    content: Any = None
    hidden: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """Return the reference to the function for `option_table.call_option`."""
        return f"{self.location}:{self.table}:{self.name}"

    @property
    def origin(self) -> str:
        """Return where the option is defined, for messages."""
        return f"the package {self.package} ({self.location})" if self.package else self.location

    @property
    def choice(self) -> str:
        """Return where the option is defined, and which definitions of the same name it hides, for messages."""
        return self.origin + (f", not from {' or '.join(self.hidden)}" if self.hidden else "")


Options = Mapping[tuple[str, str], CustomOption]
ParsedTables = tuple[Options, tuple[Problem, ...]]


def hook_name(class_name: str) -> str:
    """Return the name of a hook in keys: the name of its class in snake_case."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name)
    return separated.lower().strip("_")


@cache
def read_tables(file: Path, location: str, package: str = "") -> ParsedTables:
    """Return the options and hooks of a file by (group, name), and what is wrong with its tables."""
    where = f"package {package}" if package else str(file)
    try:
        tree, functions, classes = read_module(file), read_functions(file), read_classes(file)
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        unparsed = Problem(f"{file} cannot be parsed", where, "reinstall the package, or uninstall it")
        return {}, (unparsed,) if package else ()  # read_task reports an invalid task file
    options: dict[tuple[str, str], CustomOption] = {}
    problems: list[Problem] = []
    family = _HookFamily(find_local_names(file, ("runner.Hook",)), classes, find_used_names(file))
    for table, value in find_tables(tree):
        group = table_group(table)
        if table == HOOK_TABLE:
            for name, signature in _read_hooks(value, classes, functions, where, problems, family):
                options[group, name] = CustomOption(group, name, table, location, signature, package)
        elif table == TECHNIQUE_TABLE:
            for name, content in _read_techniques(value, where, problems):
                signature = Signature(name, (), {}, " ".join(content["overrides"]))
                options[group, name] = CustomOption(group, name, table, location, signature, package, content=content)
        else:
            for name, signature, base in _read_options(table, value, functions, where, problems):
                keys = {**_inherited_keys(OPTION_TABLES[table], base), **signature.keys}
                full, own = dataclasses.replace(signature, keys=keys), tuple(signature.keys)
                options[group, name] = CustomOption(group, name, table, location, full, package, own, base)
    return options, tuple(problems)


def table_group(table: str) -> str:
    """Return the group of a table's entries; empty for an unknown table."""
    groups = {HOOK_TABLE: HOOK, TECHNIQUE_TABLE: TECHNIQUE}
    return groups.get(table) or (OPTION_TABLES[table].group if table in OPTION_TABLES else "")


def omit_consequences(problems: Sequence[Problem]) -> list[Problem]:
    """Leave out the problems of unknown options if an entry of their group's table is invalid: it may define them."""
    groups = [of.group for table, of in OPTION_TABLES.items() if any(f": {table}[" in each.where for each in problems)]
    unknown = tuple(f"unknown {group};" for group in groups)
    return [problem for problem in problems if not problem.what.startswith(unknown)]


def find_name_error(group: str, name: object) -> tuple[str, str] | None:
    """Return what is wrong with the name of an option, and what to do about it; None if it is valid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
        what = (
            "the name must be a string of lowercase letters, digits, _ and - that starts with a letter, other than"
            f" {', '.join(_RESERVED_NAMES)}"
        )
        return what, f'use a name such as "my_{group}"'
    folder = shipped_path("conf") / ("benchmark/technique" if group == TECHNIQUE else group)
    if (folder / f"{name}.yaml").is_file() or (group == "precision" and name in PRECISION_NAMES):
        return f"{group}={name} is a shipped option", f'use another name, such as "my_{name}"'
    if group == TECHNIQUE and name in RESERVED_TECHNIQUES:
        return f"{name} is an argument of accel-run benchmark", f'use another name, such as "my_{name}"'
    return None


def find_tables(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name in TABLES:
                yield name, value


def find_changed_tables(values: Mapping[str, Any], options: Options) -> Iterator[str]:
    """Yield the tables whose number of entries in the executed module differs from that in the parsed file.

    values  variables of the module
    """
    for table in sorted(TABLES):
        num_parsed = sum(option.table == table for option in options.values())
        if len(values.get(table, ())) != num_parsed:
            yield table


def _read_options(
    table: str, value: ast.expr, functions: Mapping[str, Signature], where: str, problems: list[Problem]
) -> Iterator[tuple[str, Signature, str]]:
    """Yield the name, the function and the extended option of each valid entry."""
    declared = OPTION_TABLES[table]
    if not isinstance(value, ast.Dict):
        what = f"{table} must be a literal mapping of names to functions of this file"
        problems.append(Problem(what, where, f"{table} = {_example(declared)}"))
        return
    for key, entry in zip(value.keys, value.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        base, function = _split_entry(entry)
        signature = functions.get(function.id) if isinstance(function, ast.Name) else None
        error = find_name_error(declared.group, name) or _find_entry_error(declared, base, signature)
        if error:
            shown = ast.unparse(key) if key is not None else "**"
            problems.append(Problem(error[0], f"{where}: {table}[{shown}]", error[1]))
        elif signature is not None:
            yield str(name), signature, base


def _split_entry(entry: ast.expr) -> tuple[str, ast.expr]:
    """Return the extended option and the function of an entry."""
    match entry:
        case ast.Tuple(elts=[ast.Constant(value=str(base)), function]):
            return base, function
    return "", entry


def _example(table: OptionTable) -> str:
    return f'{{"mine": ("{table.bases[-1]}", mine)}}' if table.bases else '{"mine": mine}'


def _find_entry_error(table: OptionTable, base: str, signature: Signature | None) -> tuple[str, str] | None:
    parameters = ", ".join(table.parameters)
    if table.bases and base not in table.bases:
        what = f"must be a pair of the option that it extends ({' or '.join(table.bases)}) and a function of this file"
        return what, f"use e.g. {_example(table)}"
    if signature is None or bool(base) != bool(table.bases):
        return "must be a function that this file defines", f"define it with def mine({parameters}, *, ...)"
    if len(signature.runner) != len(table.parameters):
        count, many = len(table.parameters), "arguments" if len(table.parameters) > 1 else "argument"
        what = f"the function must take {count} {many} before *, but takes {len(signature.runner)}"
        return what, f"use def {signature.name}({parameters}, *, ...)"
    taken = [key for key in signature.keys if key in _inherited_keys(table, base)]
    if taken:
        return f"{taken[0]} is already a key of this option", "rename this parameter"
    return _find_key_error(signature)


def _inherited_keys(table: OptionTable, base: str) -> Mapping[str, Key]:
    """Return the keys that an entry has besides those of its function."""
    if not base and not table.shared:
        return {}
    keys = read_functions(PACKAGE / "axes" / f"{table.group}.py")[base or "default"].keys
    return keys if base else {name: keys[name] for name in table.shared}


def _read_techniques(value: ast.expr, where: str, problems: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        entries = ast.literal_eval(value)
    except (ValueError, TypeError):  # TypeError: a key that is not hashable
        entries = None
    if not isinstance(entries, dict):
        example = f'{TECHNIQUE_TABLE} = {{"mine": ["precision=bf16"]}}'
        problems.append(Problem(f"{TECHNIQUE_TABLE} must be a literal mapping of names to overrides", where, example))
        return
    for name, entry in entries.items():
        content = {"overrides": entry} if isinstance(entry, (list, tuple)) else entry
        error = find_name_error(TECHNIQUE, name) or find_technique_error(content)
        if error:
            problems.append(Problem(error[0], f"{where}: {TECHNIQUE_TABLE}[{name!r}]", error[1]))
        else:
            yield name, content


def find_technique_error(content: Any) -> tuple[str, str] | None:
    """Return what is wrong with the content of a technique, and an example; None if it is valid."""
    if not isinstance(content, dict) or not content.keys() <= {"overrides", "needs"} or "overrides" not in content:
        keys = "overrides, a list of key=value; it may also contain needs, a mapping of group to option"
        return f"must contain {keys}", "as in overrides: [precision=bf16]"
    overrides, needs = content["overrides"], content.get("needs") or {}
    if not isinstance(overrides, (list, tuple)) or not all(isinstance(item, str) and "=" in item for item in overrides):
        return "the value of overrides must be a list of key=value", "use e.g. [precision=bf16]"
    if not isinstance(needs, dict) or not all(isinstance(part, str) for pair in needs.items() for part in pair):
        return "the value of needs must be a mapping of group to option", "use e.g. {optimizer: adamw}"
    return None


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
    family: _HookFamily,
) -> Iterator[tuple[str, Signature]]:
    """Yield the name and the constructor of each valid hook."""
    if not isinstance(value, (ast.List, ast.Tuple)):
        what = f"{HOOK_TABLE} must be a literal list of classes of this file, such as [LogImages]"
        problems.append(Problem(what, where))
        return
    names: set[str] = set()
    for entry in value.elts:
        hook_class = classes.get(entry.id) if isinstance(entry, ast.Name) else None
        name = hook_name(hook_class.name) if hook_class else ""
        signature = _find_constructor(hook_class, classes, functions) if hook_class else None
        error = _find_hook_error(hook_class, signature) or (hook_class and _find_uncalled(hook_class, family))
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
        return "must be a class that this file defines", "define class LogImages(runner.Hook): ..."
    if not kind.bases:
        return "must be a subclass of runner.Hook", f"use class {kind.name}(runner.Hook): ..."
    if len(signature.runner) != 2:
        what = f"the constructor must take self and phase before *, but takes {', '.join(signature.runner)}"
        return what, "use def __init__(self, phase, *, every: int = 500): super().__init__(phase)"
    if ENABLED in signature.keys:
        return f"{ENABLED} is already a key of every hook", "rename this parameter"
    return _find_key_error(signature)


class _HookFamily(NamedTuple):
    """Names in a file that show which code can call the methods of its hooks.

    bases    names by which this file refers to runner.Hook
    classes  classes of this file by name
    used     names that this file reads
    """

    bases: Collection[str]
    classes: Mapping[str, ast.ClassDef]
    used: Collection[str]

    def is_complete(self, kind: ast.ClassDef) -> bool:
        """Return whether no other file can call methods of the class.

        Its bases must be runner.Hook or classes of this file, because a base class of another file may call methods
        that its subclasses define. Its methods must not pass `self` on.
        """
        nodes = [*ast.walk(kind)]
        attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        passes_self = any(
            isinstance(node, ast.Name) and node.id == "self" and id(node) not in attributes for node in nodes
        )
        bases = [ast.unparse(base) for base in kind.bases]
        return (
            not passes_self
            and all(
                base in self.bases
                or (base in self.classes and self.classes[base] is not kind and self.is_complete(self.classes[base]))
                for base in bases
            )
            and bool(bases)
        )


def find_local_names(file: Path, qualified: Collection[str]) -> set[str]:
    """Return the names by which a file can refer to these classes of other modules, according to its imports.

    qualified  names of the classes with their modules, such as runner.Hook
    """
    found: set[str] = set()
    for node in list_nodes(file):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                imported = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                rests = [full.removeprefix(imported) for full in qualified if f"{full}.".startswith(f"{imported}.")]
                found |= {f"{alias.asname or alias.name}{rest}" for rest in rests}
    return found


def find_used_names(file: Path) -> set[str]:
    """Return the attributes, variables and strings that a file reads: a method may be called through any of them."""
    nodes = list_nodes(file)
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return used | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def hook_methods() -> list[str]:
    """Return the methods of runner.Hook."""
    return [name.partition(".")[2] for name in read_functions(_HOOK_FILE) if name.startswith("Hook.")]


def _find_uncalled(kind: ast.ClassDef, family: _HookFamily) -> tuple[str, str] | None:
    """Return an error for a method that is never called: an `on_...` of other frameworks, or a misspelled method."""
    if not family.is_complete(kind):
        return None
    methods = hook_methods()
    for member in (member for member in kind.body if isinstance(member, ast.FunctionDef)):
        # A decorator may register a method; Python calls methods such as __iter__.
        may_be_called = member.decorator_list or member.name.startswith("__") or member.name in family.used
        if not may_be_called and member.name not in methods:
            nearest = find_nearest(member.name, methods)
            if nearest or member.name.startswith("on_"):
                fix = f"did you mean {nearest}?" if nearest else f"a hook has {', '.join(_HOOK_METHODS)}"
                return f"{kind.name}.{member.name}, line {member.lineno}, is never called", fix
    return None


def hook_keys(hook: CustomOption) -> dict[str, Key]:
    """Return the keys of a hook by their full name. Hooks of packages are off until they are enabled."""
    prefix = f"{HOOK}.{hook.name}."
    enabled = Key(prefix + ENABLED, bool, not hook.package, f"use this hook: {hook.signature.summary or hook.name}")
    return {enabled.name: enabled, **{prefix + key.name: key for key in hook.signature.keys.values()}}
