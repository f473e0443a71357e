"""Options, hooks and tasks defined by a task file or an installed package, found without executing any of it.

Only the user can name code: with --task, or by installing a package with entry points.
"""

from __future__ import annotations

from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from runner.base.errors import Problem
from runner.config.own_tables import (
    HOOK,
    HOOK_TABLE,
    OPTION_TABLES,
    Options,
    OwnOption,
    Parsed,
    name_fault,
    read_tables,
)
from runner.config.schema import read_functions

TABLE_POINTS = ("accel_run.options", "accel_run.hooks")  # entry points that name a module with tables
TASK_POINTS = "accel_run.tasks"  # entry points that name a module with `build`
TASK = "task"


def own_options(task_file: Path | None) -> Options:
    """Return (group, name) -> definitions of installed packages and of the task file; broken tables are omitted."""
    return {**_of_packages()[0], **(read_tables(task_file, str(task_file))[0] if task_file else {})}


def own_hooks(task_file: Path | None) -> list[OwnOption]:
    """Return the hooks in the order in which they run: those of packages, then those of the task file."""
    return [option for (group, _), option in own_options(task_file).items() if group == HOOK]


def table_problems(task_file: Path | None) -> list[Problem]:
    """Return what is wrong with the tables of the task file and of installed packages."""
    return [*_of_packages()[1], *(read_tables(task_file, str(task_file))[1] if task_file else ())]


def by_reference(reference: str) -> OwnOption | None:
    """Return the option with this reference; None if it is no reference of an option."""
    place, table, name = [*reference.rsplit(":", 2), "", ""][:3]
    group = HOOK if table == HOOK_TABLE else OPTION_TABLES.get(table, ("",))[0]
    return own_options(Path(place) if place.endswith(".py") else None).get((group, name))


def file_of_task(name: str) -> Path | None:
    """Return the file of a task that a package defines, None if there is none of this name."""
    own = _of_packages()[0].get((TASK, name))
    return _file_of_module(own.place) if own else None


def module_of_task(name: str) -> str | None:
    """Return the module of a task that a package defines, None if there is none of this name."""
    own = _of_packages()[0].get((TASK, name))
    return own.place if own else None


@cache
def _of_packages() -> Parsed:
    """Return the definitions of installed packages; if two define the same option, the first package by name wins."""
    from importlib.metadata import entry_points

    found: dict[tuple[str, str], OwnOption] = {}
    problems: list[Problem] = []
    known = entry_points()  # once: it reads a file of each installed package
    points = {point: None for group in (*TABLE_POINTS, TASK_POINTS) for point in known.select(group=group)}
    for point in sorted(points, key=lambda each: (each.dist.name if each.dist else "", each)):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.name
        file = _file_of_module(point.module)
        if file is None:
            what = f"names the module {point.module}, which is not installed"
            problems.append(Problem(what, f"package {package}", "reinstall the package, or uninstall it"))
        elif point.group == TASK_POINTS:
            task = _task_of(point.name, point.module, file, package)
            if isinstance(task, Problem):
                problems.append(task)
            else:
                found.setdefault((TASK, task.name), task)
        else:
            options, wrong = read_tables(file, point.module, package)
            found = {**options, **found}
            problems += [problem for problem in wrong if problem not in problems]
    return found, tuple(problems)


def _task_of(name: str, module: str, file: Path, package: str) -> OwnOption | Problem:
    """Return the task of an entry point, or what is wrong with it."""
    where = f"package {package}: {TASK_POINTS}[{name}]"
    wrong = name_fault(TASK, name)
    if wrong:
        return Problem(wrong[0], where, wrong[1])
    try:
        build = read_functions(file).get("build")
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return Problem(f"{file} cannot be parsed", where, "reinstall the package, or uninstall it")
    if build is None:
        return Problem(f"the module {module} has no function build()", where, "an example: accel-run new my_task.py")
    return OwnOption(TASK, name, "build", module, build, package)


def _file_of_module(module: str) -> Path | None:
    """Return the file of a module without importing the packages that contain it."""
    path = None
    for count in range(module.count(".") + 1):
        spec = PathFinder.find_spec(".".join(module.split(".")[: count + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


def forget_packages() -> None:
    """Read the installed packages again at the next use: one was installed or removed in this process."""
    _of_packages.cache_clear()
