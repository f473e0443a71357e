"""Read the literals and signatures of a task file without executing it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.foreign_methods import FOREIGN_METHODS
from runner.base.paths import PACKAGE
from runner.base.secret_refusal import secret_problems
from runner.base.text import first_line
from runner.config.custom_tables import (
    HOOK_TABLE,
    TABLES,
    find_changed_tables,
    find_local_names,
    find_tables,
    find_used_names,
    hook_methods,
    read_tables,
)
from runner.config.inference_keys import inference_keys
from runner.config.options import list_options, shipped_tasks, task_source
from runner.config.phases import DeclaredPhase, parse_phases
from runner.config.request import Request
from runner.config.schema import (
    REQUIRED,
    Expression,
    Keys,
    did_you_mean,
    find_nearest,
    list_nodes,
    read_functions,
    read_module,
)

_TASK_CONTRACT = PACKAGE / "base" / "task.py"
_TASK_CLASSES = (
    "runner.Task", "runner.base.task.Task",
    "runner.adapters.lightning.LightningTask", "runner.adapters.transformers.TransformersTask",
)  # fmt: skip
_LITERALS = ("SETTINGS", "SIZES", "PHASES")
_Method = tuple[ast.ClassDef, ast.FunctionDef]


@dataclass(frozen=True)
class TaskFile:
    """Declarations of a task file: the keys of `build` and `predict`, and its literals.

    label       name of this source in messages: `task gpt`
    objectives  OBJECTIVES, if it is a literal; checked when the task is loaded
    notes       warnings about names that the runner does not read, but that look like typos of names that it reads
    """

    source: Path
    label: str
    build: Keys = field(default_factory=dict)
    predict: Keys = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[DeclaredPhase, ...] = ()
    objectives: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_task(name: str, request: Request, resolve_size: Callable[[Any], str], problems: list[Problem]) -> TaskFile:
    """Return the declarations of the task file, without executing it; SIZES of the selected size override SETTINGS.

    name          task selected by the configuration files and the command line
    resolve_size  function from the default of task.size to the size in use
    """
    source = task_source(name, request.task_file)
    label = f"task {request.task_file.name if request.task_file else name}"
    if not request.task_file and name not in list_options("task", request.config_dir):
        return TaskFile(source, label)  # Hydra reports the unknown task
    try:
        functions, tree = read_functions(source), read_module(source)
    except (SyntaxError, RecursionError, MemoryError, ValueError, OSError) as error:
        problems.append(_explain_unreadable(error, name, source))
        return TaskFile(source, label)
    if "build" not in functions:
        problems.append(
            Problem("has no function build()", str(source), "define it; accel-run new my_task.py writes an example")
        )
        return TaskFile(source, label)
    methods = [*_find_task_methods(source)]
    problems += [*_find_foreign_methods(methods, source), *_find_batches_of_predict(methods, source)]
    build = functions["build"].keys
    predict = inference_keys(source)
    for argument, key in [*build.items(), *predict.items()]:
        if isinstance(key.default, Expression):
            what = f"the default of {argument} must be a literal, such as 64 or 'text', but is {key.default.text}"
            problems.append(Problem(what, str(source), "use None or a literal, and compute the value in build"))
    settings, sizes, phases = (_read_literal(tree, name, source, problems) for name in _LITERALS)
    default_values = {
        f"{prefix}.{name}": key.default
        for prefix, keys in (("task", build), ("inference", predict))
        for name, key in keys.items()
        if key.default is not REQUIRED and not isinstance(key.default, Expression)
    }
    # Checked before the defaults are written to config.yaml and plan.json.
    secrets = [secret_problems(values, source.name) for values in (default_values, settings, sizes, phases)]
    if any(secrets):
        raise ConfigError(chain.from_iterable(secrets))
    size_settings = sizes.get(resolve_size(build["size"].default if "size" in build else ""))
    settings = {**settings, **(size_settings if isinstance(size_settings, dict) else {})}
    phase_settings = {key: value for key, value in settings.items() if key.startswith("phase.") and key.count(".") > 1}
    for incomplete in {"phase", *(f"phase.{name}" for name in phases)} & set(settings):
        problems.append(Problem("must be written in full: phase.NAME.KEY", f"SETTINGS[{incomplete!r}]"))
        del settings[incomplete]
    declared_phases = parse_phases(phases, phase_settings, source.name, problems)
    names = [phase.name for phase in declared_phases]
    for setting in phase_settings:
        phase = setting.split(".")[1]
        if phase not in names:
            problems.append(Problem("PHASES has no such phase", f"SETTINGS[{setting!r}]", did_you_mean(phase, names)))
    run_settings = {key: value for key, value in settings.items() if key not in phase_settings}
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name("OBJECTIVES")], value=ast.List() | ast.Tuple() | ast.Set() | ast.Constant()
            ):
                what = "OBJECTIVES must be a mapping of names to objectives"
                example = 'OBJECTIVES = {"generator": {"trains": ["generator"]}}'
                problems.append(Problem(what, f"{source}:{node.lineno}", example))
    notes = tuple(_find_misspelled_names(tree, methods, source))
    return TaskFile(source, label, build, predict, run_settings, declared_phases, read_objectives(source), notes)


def _explain_unreadable(error: Exception, name: str, source: Path) -> Problem:
    if isinstance(error, SyntaxError):
        return Problem(f"is not valid Python, line {error.lineno}: {error.msg}", str(source), "fix that line")
    if isinstance(error, (RecursionError, MemoryError)):  # MemoryError: the parser's stack is exhausted
        return Problem("is nested too deeply for Python's parser", str(source), "simplify its expressions")
    if isinstance(error, OSError):  # a file of the user's folder selects a task that does not exist
        available = ", ".join(folder.name for folder in shipped_tasks())
        what = f"there is no such task; must be one of {available} ({source}: {error.strerror})"
        return Problem(what, f"task={name}", "use --task FILE for your own task")
    return Problem(f"is not a Python file: {error}", str(source), "use --task FILE.py")


def find_changed_declarations(values: Mapping[str, Any], source: Path) -> Iterator[str]:
    """Yield the declarations whose values after execution differ from the parsed ones, which are those in use.

    values  variables of the executed file
    """
    tree = read_module(source)
    for name in _LITERALS:
        if values.get(name, {}) != _read_literal(tree, name, source, []):
            yield name
    options, _ = read_tables(source, str(source))
    yield from find_changed_tables(values, options)


def read_objectives(file: Path) -> Mapping[str, Any]:
    """Return the OBJECTIVES of a task file; empty if it is not a literal mapping, or the file cannot be read."""
    try:
        return _read_literal(read_module(file), "OBJECTIVES", file, [])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def _read_literal(tree: ast.Module, name: str, source: Path, problems: list[Problem]) -> Mapping[str, Any]:
    assignments: list[tuple[ast.expr, int]] = []
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and getattr(target, "id", "") == name and node.value:
            assignments.append((node.value, node.lineno))
    if not assignments:
        return {}
    value, line = assignments[-1]
    if len(assignments) > 1:
        problems.append(Problem(f"{name} is assigned twice", f"{source}:{line}", "combine all entries in one mapping"))
    if _is_literal(value) and isinstance(mapping := ast.literal_eval(value), dict):
        return mapping
    problems.append(_explain_not_literal(name, value, source))
    return {}


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _explain_not_literal(name: str, value: ast.expr, source: Path) -> Problem:
    what = f"{name} must be a literal mapping of keys to values"
    if isinstance(value, ast.Dict):
        containers = (ast.Dict, ast.List, ast.Tuple, ast.Set)
        for node in ast.walk(value):
            if isinstance(node, ast.expr) and not isinstance(node, containers) and not _is_literal(node):
                fix = "write the value itself, because the file is read without executing it"
                return Problem(f"{what}, but contains {first_line(ast.unparse(node))}", f"{source}:{node.lineno}", fix)
    return Problem(what, str(source), f'write {name} = {{"key": value}}')


def _find_misspelled_names(tree: ast.Module, methods: Iterable[_Method], source: Path) -> Iterator[str]:
    """Yield a note for each table or method of a Task whose name looks like a typo and is not used in the file."""
    used = find_used_names(source)
    tables = {*_LITERALS, "OBJECTIVES", *TABLES}
    members = [name.partition(".")[2] for name in read_functions(_TASK_CONTRACT) if name.startswith("Task.")]
    declared = [
        (target.id, node.lineno, tables)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Dict, ast.List, ast.Tuple))
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    declared += [(member.name, member.lineno, {*members}) for _, member in methods]
    hooks = {
        node.id
        for table, value in find_tables(tree)
        if table == HOOK_TABLE
        for node in ast.walk(value)
        if isinstance(node, ast.Name)
    }
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in hooks]
    for member in (member for kind in classes for member in kind.body if isinstance(member, ast.FunctionDef)):
        declared.append((member.name, member.lineno, {*hook_methods()}))
    for name, line, known in declared:
        nearest = None if name in known or name in used or name.startswith("__") else find_nearest(name, known, 0.85)
        if nearest:
            yield f"{source.name}:{line}: {name} is not read by accel-run: did you mean {nearest}?"


def _find_foreign_methods(methods: Iterable[_Method], source: Path) -> Iterator[Problem]:
    """Yield a problem for each of FOREIGN_METHODS in a class that derives from Task, unless the file itself uses it."""
    found = [(node, member) for node, member in methods if member.name in FOREIGN_METHODS]
    used = find_used_names(source) if found else set()
    for node, member in found:
        if member.name not in used:
            what = f"accel-run never calls {node.name}.{member.name}, a method of another framework"
            yield Problem(what, f"{source}:{member.lineno}", FOREIGN_METHODS[member.name])


def _find_batches_of_predict(methods: Iterable[_Method], source: Path) -> Iterator[Problem]:
    """Yield a problem for each `predict(model, batch)`, as in other trainers: the runner passes a generator."""
    for node, member in methods:
        names = [argument.arg for argument in (*member.args.posonlyargs, *member.args.args)]
        if member.name == "predict" and len(names) == 3 and "batch" in names[2]:
            what = f"{node.name}.predict receives a random number generator, not a batch"
            yield Problem(what, f"{source}:{member.lineno}", f"define predict_batch({', '.join(names[1:])})")


def _find_task_methods(source: Path) -> Iterator[_Method]:
    """Yield (class, method) for the classes that derive from Task, directly or through other classes of the file.

    Classes that also have a base in another file are left out: this base may call methods that its subclasses define.
    """
    nodes = list_nodes(source)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bound = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)} | {one.name for one in classes}
    tasks = find_local_names(source, _TASK_CLASSES) | ({"Task"} - bound)  # an unbound `Task`: from runner import *
    mixins = {"object"}  # classes of this file that derive only from such classes
    for node in sorted(classes, key=lambda node: node.lineno):
        bases = {ast.unparse(base) for base in node.bases}
        if bases & tasks and bases <= tasks | mixins:
            tasks.add(node.name)
            yield from ((node, member) for member in node.body if isinstance(member, ast.FunctionDef))
        elif bases <= mixins:
            mixins.add(node.name)
