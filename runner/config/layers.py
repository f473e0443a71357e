"""Precedence: the settings of every source, merged once.

Each source contributes settings, `(key, value, rank, source)`. `merge` is the only function that decides which of them
wins, for groups, for settings of the run, and for settings of its phases.
"""

from __future__ import annotations

import typing
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from runner.base.errors import Problem
from runner.config.config_files import (
    file_keys,
    find_config_file,
    flatten,
    load_file,
    option_values,
    overridden_keys,
    selected_options,
    shipped_options,
)
from runner.config.custom_options import find_custom_options
from runner.config.custom_tables import ENABLED, HOOK
from runner.config.known_keys import PhaseKeys, Schema, explain_unused, settings_for_auto, unknown_key_problem
from runner.config.options import AXES, GROUPS, implemented_options, list_options, unknown_option
from runner.config.phases import LENGTHS, PHASE_GROUPS, TASK_GROUPS, DeclaredPhase
from runner.config.request import Request, format_value, override_key
from runner.config.schema import default_values, describe_mismatch, to_yaml_value
from runner.config.settings import MAIN_KEYS
from runner.config.suggestions import LIST_KEYS_HINT, MAX_HINTS
from runner.config.task_file import TaskFile

COMMAND_LINE = "command line"
FOLDER = "config folder"
DEFAULT = "default"
TASK = "task"


class Rank(IntEnum):
    """The sources of settings, weakest first.

    A config.yaml of the user's folder is a copy of the shipped one with changes: it sets every key, so it must not
    override the task. The file of an option sets only the keys that the user wrote into it.
    """

    DEFAULT = 0
    FOLDER_CONFIG = 1
    TASK = 2
    FOLDER_OPTION = 3
    PROFILE = 4
    COMMAND_LINE = 5


@dataclass(frozen=True)
class Setting:
    """A value that one source gives to a key.

    source     what set it, as in Configuration.sources
    where      location for messages: an override, or a place in the task's file; empty for a default
    file       user's configuration file that sets it
    entry      the entry of the mapping `key` that is set; empty: the whole value
    for_phase  set for one phase, not for the whole run
    """

    key: str
    value: Any
    rank: Rank = Rank.DEFAULT
    source: str = DEFAULT
    where: str = ""
    file: Path | None = None
    entry: str = ""
    for_phase: bool = False

    @property
    def strength(self) -> tuple[bool, bool, Rank]:
        """Return the sort key of precedence. On the command line, a key of the run overrides the task's phases."""
        return self.rank == Rank.COMMAND_LINE, self.for_phase, self.rank


Merged = Mapping[str, Setting]


def merge(settings: Iterable[Setting], lengths: tuple[str, str] = LENGTHS) -> dict[str, Setting]:
    """Return the setting that wins for each key.

    Updates and epochs are mutually exclusive: a source that sets one of them resets the other one, if a weaker source
    has set it.
    """
    merged: dict[str, Setting] = {}
    for _, equals in groupby(sorted(settings, key=lambda each: each.strength), key=lambda each: each.strength):
        same_strength: dict[str, Setting] = {}
        for setting in equals:
            same_strength[setting.key] = _merge_entry(
                setting, same_strength.get(setting.key) or merged.get(setting.key)
            )
        for key, other in (lengths, lengths[::-1]):
            if key in same_strength and other not in same_strength and same_strength[key].value is not None:
                same_strength[other] = replace(same_strength[key], key=other, value=None)
        merged |= same_strength
    return merged


def _merge_entry(setting: Setting, before: Setting | None) -> Setting:
    if not setting.entry:
        return setting
    mapping = before.value if before else {}
    if not isinstance(mapping, dict):  # reported as a value of a wrong type
        return before or setting
    return replace(setting, value={**mapping, setting.entry: setting.value}, entry="")


# ---------------------------------------------------------------- groups


def group_settings(command_line: Mapping[str, str], request: Request) -> Iterator[Setting]:
    """Yield the options that the configuration files and the command line choose."""
    folder = request.config_dir
    shipped = shipped_options()
    config_options = {**shipped, **selected_options("", "config", folder)} if folder else shipped
    for group, option in config_options.items():
        is_user_choice = option != shipped.get(group)
        yield Setting(group, option, *((Rank.FOLDER_OPTION, FOLDER) if is_user_choice else ()))
    profile = command_line.get("hardware", config_options.get("hardware", ""))
    for group, option in selected_options("hardware", profile, folder).items():
        yield Setting(group, option, Rank.PROFILE, f"profile {profile}")
    for group, option in command_line.items():
        yield Setting(group, option, Rank.COMMAND_LINE, COMMAND_LINE)


def implied_groups(command_line: Iterable[Setting], chosen: Merged) -> Iterator[Setting]:
    """Yield parallelism=auto if the command line gives a number of ranks, and no source chooses an option."""
    if chosen["parallelism"].rank == Rank.DEFAULT:
        sizes = [setting for setting in command_line if setting.key == "parallelism.world_size"]
        yield from (Setting("parallelism", "auto", Rank.COMMAND_LINE, COMMAND_LINE, size.where) for size in sizes[:1])


def task_group_settings(task: TaskFile, request: Request, problems: list[Problem]) -> Iterator[Setting]:
    """Yield the options that the task's file selects."""
    for group in GROUPS:
        option = task.settings.get(group)
        if option is None or isinstance(option, dict):
            continue
        available = list_options(group, request.config_dir, request.task_file)
        if group not in TASK_GROUPS:
            fix = f"use {group}={format_value(option)} on the command line"
            what = f"a task can select options only for {', '.join(TASK_GROUPS[:-1])} and {TASK_GROUPS[-1]}"
            problems.append(Problem(what, f"SETTINGS[{group!r}]", fix))
        elif option not in available:
            problems.append(unknown_option(group, option, available, f"SETTINGS[{group!r}]"))
        else:
            yield Setting(group, str(option), Rank.TASK, task.label)


def select_for_hydra(chosen: Merged, task_file: Path | None) -> dict[str, str]:
    """Return the options that must be passed to Hydra, because its files do not select them.

    These are the options that the task and the command line select, and all options without a file.
    """
    custom = find_custom_options(task_file)
    return {
        group: setting.value
        for group, setting in chosen.items()
        if setting.rank in (Rank.TASK, Rank.COMMAND_LINE) or (group, setting.value) in custom
    }


# ---------------------------------------------------------------- settings of the run


def default_settings(schema: Schema) -> Iterator[Setting]:
    """Yield the defaults of the signatures."""
    for key, value in default_values(schema.keys).items():
        if not key.startswith("phase."):
            yield Setting(key, value)


def file_settings(
    composed: Mapping[str, Any], choices: Mapping[str, str], schema: Schema, request: Request, problems: list[Problem],
    *, unused: Mapping[str, str], notes: list[str],
) -> Iterator[Setting]:  # fmt: skip
    """Yield the settings of the configuration files, each with the user's file that sets it, if any.

    composed  the tree that Hydra composed from all files
    unused    result of `find_unused_keys`; these keys get the values of the option's file instead
    """
    origins = _origins(choices, schema, request, unused)
    for key, group in overridden_keys(request.config_dir, schema.keys).items() if request.config_dir else ():
        file = find_config_file("", "config", request.config_dir)
        what = f"{key} has no effect here, because {group} follows _self_ in the defaults list"
        problems.append(Problem(what, str(file), f"set it in an option file, {request.config_dir}/{group}/NAME.yaml"))

    def origin(key: str) -> Setting:
        return origins.get(key) or origins.get(schema.canonical_key(key)) or Setting(key, None)

    from runner.config.composition import resolve_references  # Hydra is slow to import

    given = resolve_references(composed, lambda key: origin(key).file, problems)
    values = dict(flatten({key: value for key, value in given.items() if key != "hardware"}, stop=schema.keys))
    for key, why in unused.items():
        group, _, name = key.partition(".")
        notes.append(f"{key}={format_value(values.pop(key, None))} of {why}")
        of_option = option_values(group, choices[group], request.config_dir)
        values |= {key: of_option[name]} if name in of_option else {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        if name != "option" or group not in AXES:
            file = origin(key).file
            where = f"{file}: {key}={format_value(value)}" if file else f"{key}={format_value(value)}"
            yield from expand_setting(replace(origin(key), key=key, value=value, where=where), schema, problems)


def find_unused_keys(chosen: Merged, profile: str, schema: Schema, folder: Path | None) -> dict[str, str]:
    """Return key -> why the value of a profile or of the user's config.yaml does not apply.

    As in a task, a key of a group, such as optimizer.betas, applies only to the option that the same file selects.
    Without this rule, the command line could not select another option: the file's keys would be unknown to that
    option, or their values tuned for a different one.
    """
    reasons: dict[str, str] = {}
    for file_group, option, rank in (("", "config", Rank.FOLDER_CONFIG), ("hardware", profile, Rank.PROFILE)):
        selected = selected_options(file_group, option, folder)
        for key in file_keys(file_group, option, folder, schema.keys):
            group, _, name = key.partition(".")
            reasons.pop(key, None)  # of two files, the last one sets the value
            if group not in AXES or not name or chosen[group].rank <= rank:
                continue
            current = chosen[group].value
            source = f"profile {profile}" if rank == Rank.PROFILE else str(find_config_file("", "config", folder))
            if selected.get(group, current) != current:
                reasons[key] = f"{source} is not used: it applies only to {group}={selected[group]}"
            elif schema.canonical_key(key) not in schema.keys and schema.option_with_key(group, name):
                reasons[key] = f"{source} is not used: {group}={current} has no such key"
    return reasons


def _origins(
    choices: Mapping[str, str], schema: Schema, request: Request, unused: Container[str]
) -> dict[str, Setting]:
    """Return key -> a setting without value, with the rank and file of its source; defaults have no entry."""
    folder, origins = request.config_dir, {}
    chosen = {"": "config", **{group: option for group, option in choices.items() if group != "hardware"}}
    for file_group, option in chosen.items():
        file = find_config_file(file_group, option, folder)
        is_user_file = folder is not None and file is not None and file.is_relative_to(folder)
        for key in file_keys(file_group, option, folder, schema.keys) if is_user_file else ():
            is_option_key = key.partition(".")[0] in (*AXES, "phase")
            rank = Rank.FOLDER_OPTION if is_option_key else Rank.FOLDER_CONFIG
            origins[key] = Setting(key, None, rank, FOLDER, "", file)
    task, profile = choices["task"], choices["hardware"]
    for key in () if request.task_file else file_keys("task", task, folder, schema.keys):
        file = origins[key].file if key in origins else None
        origins[key] = Setting(key, None, Rank.TASK, f"task {task}", "", file)
    for key in file_keys("hardware", profile, folder, schema.keys):
        file = find_config_file("hardware", profile, folder)
        if key not in unused:
            origins[key] = Setting(key, None, Rank.PROFILE, f"profile {profile}", "", file)
    return origins


def task_file_settings(
    task: TaskFile, choices: Mapping[str, str], schema: Schema, problems: list[Problem], notes: list[str]
) -> tuple[list[Setting], dict[str, Any]]:
    """Return the task file's settings that apply, and those for options that the plan may choose for `auto`."""
    values = {key: value for key, value in flatten(task.settings, stop=schema.keys) if key not in TASK_GROUPS}
    for_auto = settings_for_auto(values, schema, problems)
    settings: list[Setting] = []
    for key, value in values.items():
        reason = "" if key in for_auto else explain_unused(key, choices, schema)
        if reason:
            notes.append(f"the task's {key}={format_value(value)} is not used: {reason}")
        elif key not in for_auto and key not in GROUPS:  # options that a task may not select are reported elsewhere
            setting = Setting(key, value, Rank.TASK, task.label, f"SETTINGS[{key!r}]")
            settings += expand_setting(setting, schema, problems)
    return settings, for_auto


def command_line_setting(key: str, value: Any, argument: str) -> Setting:
    """Return the setting of an override of the command line."""
    return Setting(key, value, Rank.COMMAND_LINE, COMMAND_LINE, argument, for_phase=key.startswith("phase."))


def expand_setting(setting: Setting, schema: Schema, problems: list[Problem]) -> Iterator[Setting]:
    """Yield the setting under the keys that it sets: its own key, the mapping that contains it, or keys of a group."""
    key, value = setting.key, setting.value
    if not isinstance(value, dict):
        key = MAIN_KEYS.get(key, key)
    if key in schema.keys:
        value = _text_of_number(setting, schema.keys[key].type)
        yield replace(setting, key=key, value=value, for_phase=key.startswith("phase."))
        return
    parent = schema.canonical_key(key)
    if parent != key and isinstance(schema.keys[parent].default, dict):  # optimizer.lr_scales.head=0.1
        entry = key.removeprefix(f"{parent}.")
        yield replace(setting, key=parent, entry=entry, for_phase=parent.startswith("phase."))
    elif isinstance(value, dict) and any(known.startswith(f"{key}.") for known in schema.keys):
        for name, item in value.items():
            yield from expand_setting(replace(setting, key=f"{key}.{name}", value=item), schema, problems)
    elif len(problems) < MAX_HINTS:
        problems.append(unknown_key_problem(key, setting.where, schema))
    else:
        problems.append(Problem("unknown key", setting.where, LIST_KEYS_HINT))


def _text_of_number(setting: Setting, kind: Any) -> Any:
    """Return the value; a number given to a string setting becomes the text as written: run=007, task.tag=1e-3."""
    value, text = setting.value, setting.where.partition("=")[2]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and override_key(setting.where) == setting.key and describe_mismatch(kind, value):
        return value if describe_mismatch(kind, text) else text
    return _stringify_names(kind, value)


def _stringify_names(kind: Any, value: Any) -> Any:
    """Convert module names in lists and mappings of strings back to text: `0` is parsed as a number."""
    item_types = typing.get_args(kind)[-1:]
    if isinstance(value, list):  # of list[str], or of list[str] | None
        has_names = any(each == list[str] for each in (kind, *typing.get_args(kind)))
        return [_stringify(item) for item in value] if has_names else value
    if not isinstance(value, dict):
        return value
    mapping = _stringify_keys(value)
    return {key: _stringify(item) for key, item in mapping.items()} if item_types == (str,) else mapping


def _stringify(item: Any) -> Any:
    return str(item) if type(item) is int else item


def _stringify_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {format_value(key): _stringify_keys(item) for key, item in value.items()}  # `true` and `null` as written


# ---------------------------------------------------------------- phases


def choose_phase_options(
    declared: DeclaredPhase,
    run: Merged,
    functions: Mapping[str, str],
    command_line: Iterable[Setting],
    task_file: Path | None,
    problems: list[Problem],
) -> dict[str, Setting]:
    """Return group -> the setting that selects the option of a phase.

    run           group -> the setting that selects the option of the run
    functions     group -> name of the function that implements the run's option
    command_line  settings of the command line for phases
    task_file     the user's task file, which may define options
    """
    chosen = {}
    for group in PHASE_GROUPS:
        run_setting = replace(run[group], key=declared.key(group), value=functions[group])
        settings = [run_setting, *(setting for setting in command_line if setting.key == run_setting.key)]
        if group in declared.settings:
            where = f"PHASES[{declared.name!r}]"
            settings.append(Setting(run_setting.key, declared.settings[group], Rank.TASK, TASK, where, for_phase=True))
        winner = merge(settings)[run_setting.key]
        available = implemented_options(group, task_file)
        if winner.value not in (*available, functions[group]):
            problems.append(unknown_option(group, winner.value, available, winner.where))
            winner = run_setting
        chosen[group] = winner
    return chosen


def phase_settings(
    phase: PhaseKeys, run: Merged, schema: Schema, task: TaskFile, problems: list[Problem]
) -> Iterator[Setting]:
    """Yield the settings of a phase: its defaults, those of the run, and those that the task declares for it.

    The run's keys of a group apply only if the phase uses the same option as the run.
    """
    declared = phase.declared
    for name, key in phase.keys.items():
        yield Setting(declared.key(name), to_yaml_value(key.default))
        group = name.partition(".")[0]
        if name in run and (group not in PHASE_GROUPS or phase.options[group] == schema.functions[group]):
            # Without the file: if the value is invalid, the problem is reported for the run.
            yield replace(run[name], key=declared.key(name), file=None)
    for name, value in phase.declared_values(schema.tuned_options).items():
        where = f"PHASES[{declared.name!r}][{name!r}]"
        yield from expand_setting(Setting(declared.key(name), value, Rank.TASK, task.label, where), schema, problems)


def merge_phases(
    chosen: Sequence[Merged], run: Merged, settings: Iterable[Setting], schema: Schema, task: TaskFile,
    problems: list[Problem],
) -> dict[str, Setting]:  # fmt: skip
    """Return the settings of all phases.

    chosen    for each phase, group -> the setting that selects its option
    settings  settings of the files and of the command line
    """
    merged: dict[str, Setting] = {}
    for phase, options in zip(schema.phases, chosen, strict=True):
        prefix = phase.declared.key("")
        phase_overrides = [setting for setting in settings if setting.key.startswith(prefix)]
        lengths = phase.declared.key(LENGTHS[0]), phase.declared.key(LENGTHS[1])
        merged |= merge([*phase_settings(phase, run, schema, task, problems), *phase_overrides], lengths)
        for setting in options.values() if phase.declared.kind == "train" else ():
            merged[setting.key] = replace(setting, source=task.label if setting.source == TASK else setting.source)
    return merged


def unused_setting_notes(settings: Iterable[Setting], run: Merged, schema: Schema) -> Iterator[str]:
    """Yield a note for each setting that has no effect because of another source or the option of a phase.

    settings  settings of the task's file and of the command line
    """
    for setting in settings:
        assignment = f"{setting.key}={format_value(setting.value)}"
        winner, group = run.get(setting.key, setting), setting.key.partition(".")[0]
        if setting.rank == Rank.TASK and winner.rank in (Rank.FOLDER_OPTION, Rank.PROFILE):
            yield f"the task's {assignment} is not used: {winner.file or winner.source} sets it"
        for phase in schema.phases if setting.rank == Rank.COMMAND_LINE and group in PHASE_GROUPS else ():
            if phase.declared.kind == "train" and phase.options[group] != schema.functions[group]:
                option = phase.options[group]
                yield f"{assignment} has no effect in phase {phase.declared.name}, whose {group} is {option}"


def disabled_hook_notes(command_line: Iterable[Setting], run: Merged) -> Iterator[str]:
    """Yield a note for each key of the command line that belongs to a disabled hook."""
    for setting in command_line:
        group, _, name = setting.key.rpartition(".")
        enabled = run.get(f"{group}.{ENABLED}")
        if group.startswith(f"{HOOK}.") and enabled is not None and name != ENABLED and enabled.value is False:
            assignment = f"{setting.key}={format_value(setting.value)}"
            yield f"{assignment} is not used, because the hook is off ({group}.{ENABLED}=true enables it)"


def task_size(command_line: Iterable[Setting], task: str, profile: str, request: Request, default: Any) -> str:
    """Return the value of task.size, which is needed before composition to select settings of SIZES."""
    folder = request.config_dir
    sizes = [Setting("task.size", default)]
    for rank, content in (
        (Rank.TASK, {} if request.task_file else load_file("task", task, folder)),
        (Rank.PROFILE, load_file("hardware", profile, folder).get("task")),
    ):
        if isinstance(content, Mapping) and content.get("size") is not None:
            sizes.append(Setting("task.size", content["size"], rank))
    sizes += [setting for setting in command_line if setting.key == "task.size"]
    return str(merge(sizes)["task.size"].value)


def setting_values(merged: Merged) -> dict[str, Any]:
    """Return key -> value."""
    return {key: setting.value for key, setting in merged.items()}


def setting_sources(merged: Merged) -> dict[str, str]:
    """Return key -> source for all keys that are not defaults."""
    return {key: setting.source for key, setting in merged.items() if setting.source != DEFAULT}
