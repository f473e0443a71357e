"""All valid keys of the settings, the chosen options, the task, its phases and its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem, to_one_line
from runner.base.secret import looks_random
from runner.config.aliases import FOREIGN_KEYS
from runner.config.config_files import base_option, shipped_options
from runner.config.custom_options import find_custom_hooks
from runner.config.custom_tables import hook_keys
from runner.config.objective_keys import list_objective_keys
from runner.config.options import AXES, GROUPS, find_signature, list_options, option_with_key
from runner.config.phases import PHASE_GROUPS, DeclaredPhase, phase_keys
from runner.config.request import Request, format_value
from runner.config.schema import MAX_SHOWN, Key, Keys, Signature, describe_mismatch, did_you_mean, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.config.suggestions import LIST_KEYS_HINT, translate_key
from runner.config.task_file import TaskFile


@dataclass(frozen=True)
class PhaseKeys:
    """A declared phase of the task, with its options and keys.

    options  group -> option
    keys     name within the phase -> key
    """

    declared: DeclaredPhase
    options: Mapping[str, str]
    keys: Keys

    def tuned_option(self, group: str, run_options: Mapping[str, str]) -> str:
        """Return the option of the group for which the phase declares its values."""
        return str(self.declared.settings.get(group, run_options[group]))

    def has_key(self, name: str) -> bool:
        """Return whether the phase has the key, or a mapping that contains it."""
        return name in self.keys or any(
            name.startswith(f"{known}.") and known not in PHASE_GROUPS for known in self.keys
        )

    def declared_values(self, tuned: Mapping[str, str]) -> dict[str, Any]:
        """Return the declared settings that apply to the options in use."""
        return {
            name: value
            for name, value in self.declared.settings.items()
            if name not in PHASE_GROUPS and self.has_key(name) and not self.is_for_other_option(name, tuned)
        }

    def is_for_other_option(self, name: str, tuned: Mapping[str, str]) -> bool:
        """Return whether the declared value of a key is for an option other than the one in use."""
        group = name.partition(".")[0]
        is_of_option = self.declared.kind == "train" and group in PHASE_GROUPS and name != group
        return is_of_option and self.options[group] != self.tuned_option(group, tuned)


@dataclass(frozen=True)
class Schema:
    """All valid keys of a configuration.

    functions      group -> name of the function that implements the chosen option; a user's option may be a variant of
                   a shipped one
    tuned_options  group -> option for which the task's values were tuned
    phases         the task's phases
    command_keys   keys and flags of the command that are not settings
    task_file      the user's task file, which may define options
    """

    keys: Keys
    functions: Mapping[str, str]
    tuned_options: Mapping[str, str]
    phases: tuple[PhaseKeys, ...] = ()
    command_keys: tuple[str, ...] = ()
    task_file: Path | None = None

    def signature(self, group: str, option: str) -> Signature | None:
        """Return the signature of the function that implements an option."""
        return find_signature(group, option, self.task_file)

    def option_with_key(self, group: str, key: str) -> str | None:
        """Return an option of the group that has this key."""
        return option_with_key(group, key, self.task_file)

    def canonical_key(self, key: str) -> str:
        """Return the key to which `key` belongs: itself, the main key of its group, or the mapping that contains it."""
        name = key = MAIN_KEYS.get(key, key)
        while name and name not in self.keys:
            name = name.rpartition(".")[0]
        return name or key


def find_functions(
    choices: Mapping[str, str], composed: Mapping[str, Any], request: Request, problems: list[Problem]
) -> dict[str, str]:
    """Return group -> name of the function that implements the chosen option. Raises ConfigError if there is none."""
    results = {group: _find_function(group, choices[group], composed.get(group) or {}, request) for group in AXES}
    functions = {group: function for group, function in results.items() if isinstance(function, str)}
    if len(functions) < len(results):  # the keys of an unknown option would all be reported as unknown
        raise ConfigError([*problems, *(function for function in results.values() if isinstance(function, Problem))])
    return functions


def build_schema(
    functions: Mapping[str, str],
    task: TaskFile,
    phase_options: Sequence[Mapping[str, str]],
    request: Request,
    command_line: Mapping[str, Any],
) -> Schema:
    """Return the keys of the settings, of the chosen options, of the task, its phases and its predictions.

    command_line  key -> value of the command line
    """
    keys = settings_keys(Settings)
    signature_of = partial(find_signature, task_file=request.task_file)
    for group, function in functions.items():
        signature = signature_of(group, function)
        keys.update({f"{group}.{key.name}": key for key in (signature.keys.values() if signature else ())})
    for hook in find_custom_hooks(request.task_file):
        keys.update(hook_keys(hook))
    keys.update(list_objective_keys(task.objectives, {**functions, **command_line}, signature_of))
    keys.update({f"task.{key.name}": key for key in task.build.values()})
    keys.update({f"inference.{key.name}": key for key in task.predict.values()})
    keys["inference.seed"] = Key("inference.seed", int, 0, "random seed of the predictions")
    phases = []
    for declared, options in zip(task.phases, phase_options, strict=True):
        phases.append(PhaseKeys(declared, options, phase_keys(declared, options, signature_of)))
    for phase in phases:
        keys.update({phase.declared.key(name): key for name, key in phase.keys.items()})
    selected = {group: option for group, option in task.settings.items() if isinstance(option, str)}
    tuned = {group: selected.get(group, option) for group, option in shipped_options().items()}
    return Schema(keys, functions, tuned, tuple(phases), request.command_keys, request.task_file)


def settings_for_auto(settings: Mapping[str, Any], schema: Schema, problems: list[Problem]) -> dict[str, Any]:
    """Return the task's values that apply only if the plan chooses a certain option for a group set to `auto`."""
    result = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        option = schema.option_with_key(group, name) if schema.functions.get(group) == "auto" else None
        signature = schema.signature(group, option) if option else None
        if signature is not None:
            wrong = describe_mismatch(signature.keys[name].type, value)
            problems += [Problem(wrong, f"SETTINGS[{key!r}]")] if wrong else []
            result[key] = value
    return result


def explain_unused(key: str, choices: Mapping[str, str], schema: Schema) -> str:
    """Return why a task's value does not apply to the chosen option, or "" if it applies."""
    group, _, name = key.partition(".")
    if group not in AXES or not name:
        return ""
    if schema.canonical_key(key) not in schema.keys and schema.option_with_key(group, name):
        return f"{group}={choices[group]} has no such key"
    tuned = schema.tuned_options[group]
    signature = schema.signature(group, tuned)
    is_for_tuned = signature is not None and name.partition(".")[0] in signature.keys
    return f"it applies only to {group}={tuned}" if is_for_tuned and choices[group] != tuned else ""


def check_phases(schema: Schema, problems: list[Problem]) -> list[str]:
    """Report unknown keys of the declared phases; return a note for each value that is not for the option in use."""
    notes = []
    for phase in schema.phases:
        declared = phase.declared
        for name, value in declared.settings.items():
            if phase.is_for_other_option(name, schema.tuned_options):
                group = name.partition(".")[0]
                assignment = f"{declared.key(name)}={format_value(value)}"
                option = phase.tuned_option(group, schema.tuned_options)
                notes.append(f"the task's {assignment} is not used: it applies only to {group}={option}")
            elif not phase.has_key(name):
                what = f"unknown key for a phase of kind {declared.kind}"
                problems.append(Problem(what, f"PHASES[{declared.name!r}][{name!r}]", did_you_mean(name, phase.keys)))
    return notes


def unknown_key_problem(key: str, argument: str, schema: Schema) -> Problem:
    """Return the error for an unknown key, with a suggestion of the intended key."""
    value = to_one_line(argument.partition("=")[2], MAX_SHOWN)
    group, _, name = key.partition(".")
    is_option_key = group in AXES and name
    owner = schema.option_with_key(group, name) if is_option_key else None
    suggestion = "" if owner else translate_key(key, value, schema.command_keys)
    if is_option_key and not (suggestion and key in FOREIGN_KEYS):
        names = [known for known in schema.keys if known.startswith(f"{group}.")]
        near = suggestion or did_you_mean(name, [known.removeprefix(f"{group}.") for known in names]).replace(
            "mean ", f"mean {group}."
        )
        hint = f"use {group}={owner}, which has this key" if owner else near
        option = schema.functions[group]
        where = key if not hint and looks_random(value) else argument
        return Problem(f"unknown key of {group}={option}; known: {', '.join(names) or 'none'}", where, hint)
    is_task_key = group == "task" and bool(name)
    task_keys = [known for known in schema.keys if known.startswith("task.")] if is_task_key else []
    near = suggestion or did_you_mean(key, task_keys if is_task_key else [*schema.keys, *GROUPS, *schema.command_keys])
    what = f"unknown key of the task; known: {', '.join(task_keys) or 'none'}" if is_task_key else "unknown key"
    where = key if not near and looks_random(value) else argument
    return Problem(what, where, near or LIST_KEYS_HINT)


def _find_function(group: str, option: str, content: Mapping[str, Any], request: Request) -> str | Problem:
    function, file = str(content.get("option") or base_option(group, option, request.config_dir)), request.task_file
    available = [
        name for name in list_options(group, None, file) if name == "auto" or find_signature(group, name, file)
    ]
    if function in available:
        return function
    what = f"must name the option of which it is a variant, such as `option: {available[-1]}`"
    return Problem(what, f"{group}/{option}.yaml", did_you_mean(function, available))
