"""List the settings that a task file adds for the task, its options and its hooks, for `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runner.config.custom_options import TASK
from runner.config.custom_tables import HOOK, TECHNIQUE, hook_keys, read_tables
from runner.config.request import format_value
from runner.config.schema import REQUIRED, Expression, Key, read_functions


def describe_task_settings(task_file: Path) -> str:
    """Return the rows of a help text, each a setting with its default and meaning; empty if there are none."""
    rows: list[tuple[str, str]] = []
    with suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # the command itself reports it
        rows = [*_task_rows(task_file), *_option_rows(task_file)]
    if not rows:
        return ""
    lines = (f"  {setting:<27}  {meaning}".rstrip() for setting, meaning in rows)
    return "\n".join(["", f"settings of {task_file}", *lines, ""])


def _task_rows(task_file: Path) -> Iterator[tuple[str, str]]:
    build = read_functions(task_file).get("build")
    for key in build.keys.values() if build else ():
        yield _row(f"{TASK}.{key.name}", key)


def _option_rows(task_file: Path) -> Iterator[tuple[str, str]]:
    for (group, name), option in read_tables(task_file, str(task_file))[0].items():
        if group == HOOK:
            yield from (_row(full, key) for full, key in hook_keys(option).items())
            continue
        if group == TECHNIQUE:
            yield f"benchmark {name}", option.signature.summary
            continue
        yield f"{group}={name}", option.signature.summary
        yield from (_row(f"{group}.{key.name}", key) for key in option.signature.keys.values())


def _row(name: str, key: Key) -> tuple[str, str]:
    is_open = key.default is REQUIRED or isinstance(key.default, Expression)
    return f"{name}={'VALUE' if is_open else format_value(key.default)}", key.help
