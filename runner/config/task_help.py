"""List the settings that a task file and installed packages add, for `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runner.config.custom_options import TASK, find_custom_options
from runner.config.custom_tables import HOOK, TECHNIQUE, CustomOption, hook_keys
from runner.config.request import format_value
from runner.config.schema import REQUIRED, Expression, Key, read_functions


def describe_settings(task_file: Path | None) -> str:
    """Return a table of settings with their defaults and meanings, for the task file and each installed package.

    Empty if there are none.
    """
    rows: dict[str, list[tuple[str, str]]] = {}
    with suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # the command itself reports it
        if task_file is not None:
            rows[str(task_file)] = [*_task_rows(task_file)]
        for option in find_custom_options(task_file).values():
            owner = f"the package {option.package}" if option.package else option.location
            rows.setdefault(owner, []).extend(_option_rows(option))
    lines: list[str] = []
    for owner, settings in rows.items():
        if settings:
            lines += ["", f"settings of {owner}"]
            lines += (f"  {setting:<27}  {meaning}".rstrip() for setting, meaning in settings)
    return "\n".join([*lines, ""]) if lines else ""


def _task_rows(task_file: Path) -> Iterator[tuple[str, str]]:
    build = read_functions(task_file).get("build")
    for key in build.keys.values() if build else ():
        yield _row(f"{TASK}.{key.name}", key)


def _option_rows(option: CustomOption) -> Iterator[tuple[str, str]]:
    if option.group == HOOK:
        yield from (_row(full, key) for full, key in hook_keys(option).items())
    elif option.group == TECHNIQUE:
        yield f"benchmark {option.name}", option.signature.summary
    else:
        yield f"{option.group}={option.name}", option.signature.summary
        yield from (_row(f"{option.group}.{key.name}", key) for key in option.signature.keys.values())


def _row(name: str, key: Key) -> tuple[str, str]:
    is_open = key.default is REQUIRED or isinstance(key.default, Expression)
    return f"{name}={'VALUE' if is_open else format_value(key.default)}", key.help
