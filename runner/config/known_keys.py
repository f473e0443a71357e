"""All valid keys: of the settings, the chosen options, the task, its phases and its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem, to_one_line
from runner.base.secret import looks_random
from runner.config.aliases import FOREIGN_KEYS
from runner.config.config_files import shipped_options, variant_of
from runner.config.objective_keys import keys_of_objectives
from runner.config.options import AXES, GROUPS, function_of, option_with, options_of
from runner.config.own_options import own_hooks
from runner.config.own_tables import keys_of_hook
from runner.config.phases import GROUPS as PHASE_GROUPS
from runner.config.phases import Declared
from runner.config.phases import keys_of as phase_keys
from runner.config.request import Request, text_of_value
from runner.config.schema import MAX_SHOWN, Key, Keys, Signature, did_you_mean, fault, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.config.suggestions import SHOWN_BY, translate_key
from runner.config.task_file import TaskFile


@dataclass(frozen=True)
class PhaseKeys:
    """A declared phase of the task, with its options and keys.

    options  group -> option
    keys     by their name within the phase
    """

    declared: Declared
    options: Mapping[str, str]
    keys: Keys

    def tuned(self, group: str, of_run: Mapping[str, str]) -> str:
        """Return the option of the group that the declared values are for."""
        return str(self.declared.settings.get(group, of_run[group]))

    def takes(self, name: str) -> bool:
        """Return whether the phase has the key, or a mapping that contains it."""
        return name in self.keys or any(
            name.startswith(f"{known}.") and known not in PHASE_GROUPS for known in self.keys
        )

    def declared_values(self, tuned: Mapping[str, str]) -> dict[str, Any]:
        """Return the declared settings that apply to the options in use."""
        return {
            name: value
            for name, value in self.declared.settings.items()
            if name not in PHASE_GROUPS and self.takes(name) and not self.is_for_another(name, tuned)
        }

    def is_for_another(self, name: str, tuned: Mapping[str, str]) -> bool:
        """Return whether the declared value of a key is for another option than the one in use."""
        group = name.partition(".")[0]
        is_of_option = self.declared.kind == "train" and group in PHASE_GROUPS and name != group
        return is_of_option and self.options[group] != self.tuned(group, tuned)


@dataclass(frozen=True)
class Schema:
    """All valid keys of a configuration.

    functions  group -> the option whose function is behind the chosen one
    tuned      group -> option that the task's values are for
    phases     the task's phases
    own_keys   of the command, besides settings
    task_file  which may define options
    """

    keys: Keys
    functions: Mapping[str, str]
    tuned: Mapping[str, str]
    phases: tuple[PhaseKeys, ...] = ()
    own_keys: tuple[str, ...] = ()
    task_file: Path | None = None

    def signature(self, group: str, option: str) -> Signature | None:
        """Return the signature behind an option."""
        return function_of(group, option, self.task_file)

    def option_with(self, group: str, key: str) -> str | None:
        """Return an option of the group that has this key."""
        return option_with(group, key, self.task_file)

    def known(self, key: str) -> str:
        """Return the key to which `key` belongs: itself, the main key of its group, or the mapping that has it."""
        key = MAIN_KEYS.get(key, key)
        return max((name for name in self.keys if key == name or key.startswith(f"{name}.")), key=len, default=key)


def functions_behind(
    choices: Mapping[str, str], composed: Mapping[str, Any], request: Request, problems: list[Problem]
) -> dict[str, str]:
    """Return group -> the option whose function is behind the chosen one. Raises ConfigError if one has none."""
    found = {group: _function_behind(group, choices[group], composed.get(group) or {}, request) for group in AXES}
    functions = {group: function for group, function in found.items() if isinstance(function, str)}
    if len(functions) < len(found):  # the keys cannot be known, and would all be problems
        raise ConfigError([*problems, *(function for function in found.values() if isinstance(function, Problem))])
    return functions


def schema_of(
    functions: Mapping[str, str],
    task: TaskFile,
    phase_options: Sequence[Mapping[str, str]],
    request: Request,
    typed: Mapping[str, Any],
) -> Schema:
    """Return the keys of the settings, of the chosen options, of the task, its phases and its predictions.

    typed  key -> value of the command line
    """
    keys = settings_keys(Settings)
    signature_of = partial(function_of, task_file=request.task_file)
    for group, function in functions.items():
        signature = signature_of(group, function)
        keys.update({f"{group}.{key.name}": key for key in (signature.keys.values() if signature else ())})
    for hook in own_hooks(request.task_file):
        keys.update(keys_of_hook(hook))
    keys.update(keys_of_objectives(task.objectives, {**functions, **typed}, signature_of))
    keys.update({f"task.{key.name}": key for key in task.build.values()})
    keys.update({f"inference.{key.name}": key for key in task.predict.values()})
    keys["inference.seed"] = Key("inference.seed", int, 0, "seed of the sampling")
    phases = []
    for declared, options in zip(task.phases, phase_options, strict=True):
        phases.append(PhaseKeys(declared, options, phase_keys(declared, options, signature_of)))
    for phase in phases:
        keys.update({phase.declared.key(name): key for name, key in phase.keys.items()})
    chosen = {group: option for group, option in task.settings.items() if isinstance(option, str)}
    tuned = {group: chosen.get(group, option) for group, option in shipped_options().items()}
    return Schema(keys, functions, tuned, tuple(phases), request.own_keys, request.task_file)


def for_auto_of(settings: Mapping[str, Any], schema: Schema, problems: list[Problem]) -> dict[str, Any]:
    """Return the task's values for options that the plan may choose for `auto`."""
    found = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        option = schema.option_with(group, name) if schema.functions.get(group) == "auto" else None
        signature = schema.signature(group, option) if option else None
        if signature is not None:
            wrong = fault(signature.keys[name].type, value)
            problems += [Problem(wrong, f"SETTINGS[{key!r}]")] if wrong else []
            found[key] = value
    return found


def why_not_for(key: str, choices: Mapping[str, str], schema: Schema) -> str:
    """Return why a task's value does not apply: it was tuned for another option. Empty if it applies."""
    group, _, name = key.partition(".")
    if group not in AXES or not name:
        return ""
    if schema.known(key) not in schema.keys and schema.option_with(group, name):
        return f"{group}={choices[group]} has no such key"
    tuned = schema.tuned[group]
    signature = schema.signature(group, tuned)
    is_for_tuned = signature is not None and name.partition(".")[0] in signature.keys
    return f"it is for {group}={tuned}" if is_for_tuned and choices[group] != tuned else ""


def check_phases(schema: Schema, problems: list[Problem]) -> list[str]:
    """Report unknown keys of the declared phases; return a note for each value that is for another option."""
    notes = []
    for phase in schema.phases:
        declared = phase.declared
        for name, value in declared.settings.items():
            if phase.is_for_another(name, schema.tuned):
                group = name.partition(".")[0]
                assignment = f"{declared.key(name)}={text_of_value(value)}"
                notes.append(
                    f"{assignment} of the task is not used: it is for {group}={phase.tuned(group, schema.tuned)}"
                )
            elif not phase.takes(name):
                what = f"unknown key of a phase of kind {declared.kind}"
                problems.append(Problem(what, f"PHASES[{declared.name!r}][{name!r}]", did_you_mean(name, phase.keys)))
    return notes


def unknown(key: str, argument: str, schema: Schema) -> Problem:
    """Return the problem of an unknown key, with the key that was probably meant."""
    value = to_one_line(argument.partition("=")[2], MAX_SHOWN)
    group, _, name = key.partition(".")
    is_of_option = group in AXES and name
    elsewhere = schema.option_with(group, name) if is_of_option else None
    suggestion = "" if elsewhere else translate_key(key, value, schema.own_keys)
    if is_of_option and not (suggestion and key in FOREIGN_KEYS):
        names = [known for known in schema.keys if known.startswith(f"{group}.")]
        near = suggestion or did_you_mean(name, [known.removeprefix(f"{group}.") for known in names]).replace(
            "mean ", f"mean {group}."
        )
        hint = f"it belongs to {group}={elsewhere}" if elsewhere else near
        option = schema.functions[group]
        where = key if not hint and looks_random(value) else argument
        return Problem(f"unknown key of {group}={option}; known: {', '.join(names) or 'none'}", where, hint)
    is_of_task = group == "task" and bool(name)
    of_task = [known for known in schema.keys if known.startswith("task.")] if is_of_task else []
    near = suggestion or did_you_mean(key, of_task if is_of_task else [*schema.keys, *GROUPS, *schema.own_keys])
    what = f"unknown key of the task; known: {', '.join(of_task) or 'none'}" if is_of_task else "unknown key"
    where = key if not near and looks_random(value) else argument
    return Problem(what, where, near or SHOWN_BY)


def _function_behind(group: str, option: str, content: Mapping[str, Any], request: Request) -> str | Problem:
    """Return the option whose function implements this one: the one that its file names or builds on, or itself."""
    function, file = str(content.get("option") or variant_of(group, option, request.config_dir)), request.task_file
    known = [name for name in options_of(group, None, file) if name == "auto" or function_of(group, name, file)]
    if function in known:
        return function
    what = f"must name the option it is a variant of, such as `option: {known[-1]}`"
    return Problem(what, f"{group}/{option}.yaml", did_you_mean(function, known))
