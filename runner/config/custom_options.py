"""Options, hooks and tasks defined by a task file or an installed package, found without executing their code.

Only code that the user chose is run: by --task, or by installing a package with entry points.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from runner.base.errors import Problem
from runner.config.custom_tables import (
    HOOK,
    CustomOption,
    Options,
    ParsedTables,
    find_name_error,
    read_tables,
    table_group,
)
from runner.config.schema import list_nodes, read_classes, read_functions, read_module

TABLE_ENTRY_POINTS = ("accel_run.options", "accel_run.hooks")  # entry points that name a module with tables
TASK_ENTRY_POINTS = "accel_run.tasks"  # entry points that name a module with `build`
TASK = "task"


def find_custom_options(task_file: Path | None) -> Options:
    """Return (group, name) -> definitions of installed packages and of the task file; broken tables are omitted."""
    return _merge(read_tables(task_file, str(task_file))[0] if task_file else {}, _read_packages()[0])


def find_custom_hooks(task_file: Path | None) -> list[CustomOption]:
    """Return the hooks in the order in which they run: first hooks of packages, then hooks of the task file."""
    return [option for (group, _), option in find_custom_options(task_file).items() if group == HOOK]


def table_problems(task_file: Path | None) -> list[Problem]:
    """Return what is wrong with the tables of the task file and of installed packages."""
    return [*_read_packages()[1], *(read_tables(task_file, str(task_file))[1] if task_file else ())]


def find_by_reference(reference: str) -> CustomOption | None:
    """Return the option with this reference; None if there is none."""
    location, table, name = [*reference.rsplit(":", 2), "", ""][:3]
    options = find_custom_options(Path(location) if location.endswith(".py") else None)
    return options.get((table_group(table), name))


def own_keys(reference: str) -> tuple[str, ...]:
    """Return the keys of the function with this reference; empty if there is none."""
    custom = find_by_reference(reference)
    return custom.own if custom else ()


def packaged_task_file(name: str) -> Path | None:
    """Return the file of a task that a package defines; None if no package does."""
    task = _read_packages()[0].get((TASK, name))
    return _find_module_file(task.location) if task else None


def packaged_task_module(name: str) -> str | None:
    """Return the module of a task that a package defines; None if no package does."""
    task = _read_packages()[0].get((TASK, name))
    return task.location if task else None


@cache
def _read_packages() -> ParsedTables:
    """Return the definitions of installed packages; if two define the same option, the first package by name wins."""
    from importlib.metadata import entry_points

    options: dict[tuple[str, str], CustomOption] = {}
    problems: list[Problem] = []
    all_points = entry_points()  # called once, because it reads a file of each installed package
    points = {
        entry_point: None
        for group in (*TABLE_ENTRY_POINTS, TASK_ENTRY_POINTS)
        for entry_point in all_points.select(group=group)
    }
    for entry_point in sorted(
        points, key=lambda entry_point: (entry_point.dist.name if entry_point.dist else "", entry_point)
    ):
        package = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else entry_point.name
        file = _find_module_file(entry_point.module)
        if file is None:
            what = f"its entry point refers to the module {entry_point.module}, which is not installed"
            problems.append(Problem(what, f"package {package}", "reinstall the package, or uninstall it"))
        elif entry_point.group == TASK_ENTRY_POINTS:
            task = _read_packaged_task(entry_point.name, entry_point.module, file, package)
            if isinstance(task, Problem):
                problems.append(task)
            else:
                options = _merge(options, {(TASK, task.name): task})
        else:
            package_options, table_errors = read_tables(file, entry_point.module, package)
            options = _merge(options, package_options)
            problems += [problem for problem in table_errors if problem not in problems]
    return options, tuple(problems)


def _merge(used: Options, others: Options) -> dict[tuple[str, str], CustomOption]:
    """Return all definitions; those of `used` hide others of the same name.

    A module named by two entry points does not hide itself.
    """
    merged = {**others, **used}
    for key in used.keys() & others.keys():
        option, other = used[key], others[key].origin
        if other not in (option.origin, *option.hidden):
            merged[key] = replace(option, hidden=(*option.hidden, other))
    return merged


def _read_packaged_task(name: str, module: str, file: Path, package: str) -> CustomOption | Problem:
    """Return the task of an entry point, or what is wrong with it."""
    where = f"package {package}: {TASK_ENTRY_POINTS}[{name}]"
    name_error = find_name_error(TASK, name)
    if name_error:
        return Problem(name_error[0], where, name_error[1])
    try:
        build = read_functions(file).get("build")
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return Problem(f"{file} cannot be parsed", where, "reinstall the package, or uninstall it")
    if build is None:
        return Problem(
            f"the module {module} has no function build()",
            where,
            "define it; accel-run new my_task.py writes an example",
        )
    return CustomOption(TASK, name, "build", module, build, package)


def _find_module_file(module: str) -> Path | None:
    """Return the file of a module without importing the packages that contain it."""
    path = None
    for count in range(module.count(".") + 1):
        spec = PathFinder.find_spec(".".join(module.split(".")[: count + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


def forget_parsed_files() -> None:
    """Parse files again at the next use, for a program that runs while the user edits a task, such as a notebook."""
    for function in (read_module, list_nodes, read_functions, read_classes, read_tables):
        function.cache_clear()


def clear_package_cache() -> None:
    """Read the installed packages again at the next use; for packages installed or removed in this process."""
    _read_packages.cache_clear()
