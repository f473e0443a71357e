"""Groups and their options: names, functions and keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from runner.base.errors import Problem
from runner.base.paths import PACKAGE, shipped_path
from runner.config.aliases import PRECISION_NAMES
from runner.config.custom_options import (
    TASK,
    find_by_reference,
    find_custom_hooks,
    find_custom_options,
    packaged_task_file,
)
from runner.config.request import Request, format_value
from runner.config.schema import Key, Signature, did_you_mean, literal_choices, read_functions, settings_keys
from runner.config.settings import Settings

# group -> the file whose functions are its options
AXES: Mapping[str, str] = {
    "precision": "axes/precision.py",
    "parallelism": "axes/parallelism.py",
    "dataloader": "axes/dataloader.py",
    "sampler": "axes/sampler.py",
    "prefetch": "axes/prefetch.py",
    "optimizer": "axes/optimizer.py",
    "scheduler": "axes/scheduler.py",
    "adapter": "engine/contract/lora.py",
    "averaging": "engine/hooks/averaging.py",
    "sharpness": "engine/update/sharpness.py",
    "compile": "axes/compile.py",
    "attention": "axes/attention.py",
    "memory": "axes/memory.py",
    "backend": "axes/backend.py",
    "checkpoint": "engine/checkpoints/save_policy.py",
    "watchdog": "engine/process/watchdog.py",
    "tracker": "trackers/tracker.py",
    "monitor": "monitor/monitor_thread.py",
    "profiler": "profiling/profiler.py",
    "launcher": "launch/launcher.py",
}


GROUPS = (*AXES, "task", "hardware")


SOURCES = {group: PACKAGE / file for group, file in AXES.items()}


def list_options(group: str, config_dir: Path | None = None, task_file: Path | None = None) -> list[str]:
    """Return the names of a group's options, including those of the user's folder, task file and packages."""
    user_options = (file.stem for file in (config_dir / group).glob("*.yaml")) if config_dir else ()
    custom = (name for custom_group, name in find_custom_options(task_file) if custom_group == group)
    return sorted({*_shipped_names(group), *user_options, *custom})


def list_all_options() -> dict[str, list[str]]:
    """Return every group with the names of its shipped options."""
    return {group: list_options(group) for group in GROUPS}


def collect_option_names(task_file: Path | None = None, config_dir: Path | None = None) -> set[str]:
    """Return the names of all options, and all literal choices of keys of settings, options and tasks."""
    names = {file.stem for file in shipped_path("conf").rglob("*.yaml")}
    names.update(*(list_options(group, config_dir, task_file) for group in GROUPS))
    keys = [*settings_keys(Settings).values()]
    for file in {*SOURCES.values(), *(task_source(task.name, None) for task in shipped_tasks()), task_file}:
        with suppress(OSError, SyntaxError, ValueError):  # errors in a task's file are reported when it is read
            functions = read_functions(file).values() if file else ()
            keys += [key for function in functions for key in function.keys.values()]
    return names.union(*(literal_choices(key.type) for key in keys))


@cache
def _shipped_names(group: str) -> tuple[str, ...]:
    return tuple(file.stem for file in (shipped_path("conf") / group).glob("*.yaml"))


def find_signature(group: str, option: str, task_file: Path | None = None) -> Signature | None:
    """Return the signature of an option, or None if it has no function (such as `auto`).

    option  name of the option, or a reference that `option_reference` has returned
    """
    custom = find_by_reference(option) if ":" in option else find_custom_options(task_file).get((group, option))
    return custom.signature if custom else read_functions(SOURCES[group]).get(option.replace("-", "_"))


def implemented_options(group: str, task_file: Path | None) -> list[str]:
    """Return the options that a phase or objective may choose: shipped ones, and those of the task and packages."""
    return [option for option in list_options(group, None, task_file) if find_signature(group, option, task_file)]


def unknown_option(group: str, option: object, available: Sequence[str], where: str) -> Problem:
    """Return the problem of an option that does not exist."""
    what = f"unknown {group}; must be one of {', '.join(available)}"
    return Problem(what, where, did_you_mean(str(option), available))


def option_reference(group: str, option: str, task_file: Path | None) -> str:
    """Return the reference to the function of an option for `option_table.call_option`: its name if it is shipped."""
    custom = find_custom_options(task_file).get((group, option))
    return custom.reference if custom else option


def find_extension(group: str, option: str, task_file: Path | None) -> tuple[str, str]:
    """Return the references to the function of an option, and to a function that extends it ("" if none)."""
    custom = find_custom_options(task_file).get((group, option))
    return (
        (custom.base, custom.reference) if custom and custom.base else (option_reference(group, option, task_file), "")
    )


def custom_option_notes(functions: Mapping[str, str], task: str, request: Request) -> Iterator[str]:
    """Yield a note for each option, hook and task that is not shipped, with its origin."""
    options = find_custom_options(request.task_file)
    for group, option in {**functions, TASK: task}.items():
        custom = options.get((group, option))
        if custom is None:
            continue
        file = request.config_dir / group / f"{option}.yaml" if request.config_dir else None
        values = f", with the values of {file}" if file and file.is_file() else ""
        extended = f", and extends {group}={custom.base}" if custom.base else ""
        scope = ", and reads the training data only" if group == "dataloader" else ""
        yield f"{group}={option} is from {custom.choice}{extended}{scope}{values}"
    for hook in find_custom_hooks(request.task_file):
        yield f"hook {hook.name} is from {hook.choice}"


def task_source(name: str, task_file: Path | None) -> Path:
    """Return the Python file that defines the task."""
    return task_file or packaged_task_file(name) or shipped_path("tasks") / name / "task.py"


def shipped_tasks() -> list[Path]:
    """Return the folders of the shipped tasks, sorted by name."""
    return sorted(file.parent for file in shipped_path("tasks").glob("*/task.py"))


@cache
def all_keys() -> Mapping[str, tuple[Key, ...]]:
    """Return the keys of the settings and of all shipped options, each with its declarations in all options."""
    keys = {name: (key,) for name, key in settings_keys(Settings).items()}
    for group in AXES:
        for option in list_options(group):
            signature = find_signature(group, option)
            for name, key in (signature.keys if signature else {}).items():
                keys[f"{group}.{name}"] = (*keys.get(f"{group}.{name}", ()), key)
    return keys


def canonical_option(group: str, value: Any, available: Iterable[str]) -> str:
    """Return the canonical option name; off, none, false and null are interchangeable."""
    if value is None or value is False or value in ("none", "off"):
        return next((name for name in ("off", "none") if name in available), format_value(value))
    name = "on" if value is True else str(value)
    return PRECISION_NAMES.get(name.lower(), name) if group == "precision" else name


def option_with_key(group: str, key: str, task_file: Path | None = None) -> str | None:
    """Return the first option of the group that has this key, or a mapping that contains it."""
    order = [*read_functions(SOURCES[group])]  # common options come first in the source
    for option in sorted(
        list_options(group, None, task_file), key=lambda name: order.index(name) if name in order else len(order)
    ):
        signature = find_signature(group, option, task_file)
        if signature and key.partition(".")[0] in signature.keys:
            return option
    return None
