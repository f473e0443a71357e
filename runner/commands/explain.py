"""`accel-run explain KEY`: show what set a value, and its value without each source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from runner.base.errors import ConfigError, Problem
from runner.base.secret import sanitize
from runner.base.text import wrap_for_terminal
from runner.commands.arguments import parse_arguments, refuse_unknown_options
from runner.config.aliases import FOREIGN_KEYS
from runner.config.configuration import Choice, Configuration, compose
from runner.config.custom_options import find_by_reference, own_keys
from runner.config.custom_tables import hook_keys
from runner.config.inference_keys import inference_keys
from runner.config.objective_keys import OBJECTIVE, list_objective_keys
from runner.config.options import AXES, GROUPS, find_signature, list_options, option_with_key, task_source
from runner.config.phases import LENGTHS, PHASE_GROUPS
from runner.config.request import Request, format_value, override_key
from runner.config.schema import Key, did_you_mean, read_functions, settings_keys
from runner.config.settings import Settings
from runner.config.task_file import read_objectives

HELP = """usage: accel-run explain KEY [key=value ...]

Shows which default, task, profile or override set the value of KEY, and its value without each of them.

examples
  accel-run explain precision +hardware=t4
  accel-run explain optimizer.lr optimizer.lr=0.01
"""


def run(argv: list[str]) -> int:
    """Print the sources of the key, highest precedence first."""
    arguments = parse_arguments(argv, positional=1)
    refuse_unknown_options(arguments.request)
    if not arguments.positional:
        raise ConfigError(Problem("needs a key", "explain", "use accel-run explain optimizer.lr"))
    key, request = arguments.positional[0], arguments.request
    configuration = compose(request)
    if key not in configuration.flat():
        raise ConfigError(Problem("unknown key", key, _suggest_key(key, configuration)))
    value = format_value(configuration.flat()[key])
    lines = [f"{key} = {value}", f"  set by {describe_source(key, configuration)}"]
    for removed, reduced in _remove_overrides(key, request):
        try:
            lines.append(f"  without {removed}: {_describe_value(key, compose(reduced))}")
        except ConfigError as error:
            lines.append(f"  without {removed}: invalid, {error.problems[0].what}")
    print(wrap_for_terminal(sanitize("\n".join([*lines, *_describe_key(key, value, configuration)]))))
    return 0


def _remove_overrides(key: str, request: Request) -> Iterator[tuple[str, Request]]:
    """Yield (removed overrides, reduced request): without the key, then also its group, then also the profile."""
    remaining, removed = request.overrides, []
    for name in (key, key.split(".", maxsplit=1)[0], "hardware"):
        if any(override_key(arg).startswith(f"{name}.") for arg in remaining):
            continue  # without this override, another option may apply, which lacks these keys
        matching = [arg for arg in remaining if override_key(arg) == name]
        removed += matching
        remaining = tuple(arg for arg in remaining if arg not in matching)
        if matching:
            yield " and ".join(removed), replace(request, overrides=remaining)


def _describe_key(key: str, value: str, configuration: Configuration) -> Iterator[str]:
    """Yield lines with the default, the meaning and the options of a key, and where to see what `auto` selects."""
    documented = _find_key(key, configuration)
    is_set_by_task = configuration.sources.get(key, "").partition(" ")[0] == "task"
    if documented and is_set_by_task and key.split(".", maxsplit=1)[0] not in ("task", "inference"):
        yield f"  without the task: {format_value(documented.default)}, the default"
    if documented and documented.help:
        yield f"  meaning: {documented.help}"
    if key in GROUPS:
        request = configuration.request
        yield f"  options: {', '.join(list_options(key, request.config_dir, request.task_file))}"
    if value == "auto":
        yield "  accel-run plan shows what auto selects, unless that is decided during the run"


def _describe_value(key: str, configuration: Configuration) -> str:
    values = configuration.flat()
    if key in values:
        return f"{format_value(values[key])}, set by {describe_source(key, configuration)}"
    group = key.split(".", maxsplit=1)[0]
    return f"not defined, because {group}={configuration.choices[group].name} has no such key"


def describe_source(key: str, configuration: Configuration) -> str:
    """Return the source of the key, with the file or override."""
    request, source = configuration.request, configuration.sources.get(key, "default")
    source_kind, _, name = source.partition(" ")
    group = key.split(".", maxsplit=1)[0]
    if source == "command line":
        return f"the command line ({_override_for(key, request)})"
    if source_kind == "profile":
        return f"the profile {name} ({_config_file(f'hardware/{name}', request)})"
    if request.task_file and key == "task":
        return f"the command line (--task {request.task_file})"
    if group == OBJECTIVE and source == "default" and _is_declared(key, configuration):
        source_kind, name = "task", configuration.choices["task"].name
    if request.task_file and (source_kind == "task" or group in ("task", "inference")):
        return f"the task ({request.task_file})"
    if source_kind == "task":
        return (
            f"the task {name} ({_config_file(f'task/{name}', request) if group == 'task' else f'tasks/{name}/task.py'})"
        )
    if "." in key and group in configuration.choices:
        choice = configuration.choices[group]
        if source == "config folder":
            return f"your folder ({_config_file(f'{group}/{choice.name}', request)})"
        if key.partition(".")[2] in own_keys(choice.reference):
            return f"the default ({choice.reference.rsplit(':', 2)[0]})"
        file_name = choice.name if choice.name in list_options(group) else choice.function
        return f"the default (conf/{group}/{file_name}.yaml)"
    hook = _find_hook(key, configuration)
    if hook is not None and source == "default":
        return f"the default ({hook.function.rsplit(':', 2)[0]})"
    if group == "inference":
        return f"the default (tasks/{configuration.choices['task'].name}/task.py)"
    return f"{'your folder' if source == 'config folder' else 'the default'} ({_config_file('config', request)})"


def _is_declared(key: str, configuration: Configuration) -> bool:
    """Return whether OBJECTIVES of the task contains the key `objective.NAME.KEY`."""
    _, name, declared = key.split(".", 2)
    objectives = read_objectives(task_source(configuration.choices["task"].name, configuration.request.task_file))
    return declared in objectives.get(name, {})


def _override_for(key: str, request: Request) -> str:
    """Return the override that set the key; a key of a phase may be set for the whole run, or by choosing an option."""
    name = key.split(".", 2)[2] if key.startswith("phase.") else key
    group = name.partition(".")[0]
    given = {override_key(arg): arg for arg in request.overrides}
    entries = [known for known in given if known.startswith((f"{key}.", f"{name}."))]  # entries of a mapping
    prefix = key.removesuffix(name)
    lengths = [before + length for before in (prefix, "") for length in LENGTHS] if name in LENGTHS else []
    candidates = (key, name, *lengths, *entries, prefix + group, group)
    return next((given[known] for known in candidates if known in given), "one of its arguments")


def _config_file(name: str, request: Request) -> str:
    user_file = request.config_dir / f"{name}.yaml" if request.config_dir else None
    return str(user_file) if user_file and user_file.is_file() else f"conf/{name}.yaml"


def _find_key(key: str, configuration: Configuration) -> Key | None:
    group, _, name = key.partition(".")
    if group in AXES and name:
        signature = find_signature(group, configuration.choices[group].reference)
        return signature.keys.get(name) if signature else None
    hook = _find_hook(key, configuration)
    custom_hook = find_by_reference(hook.function) if hook else None
    if custom_hook is not None:
        return hook_keys(custom_hook)[key]
    if group == OBJECTIVE:
        source = task_source(configuration.choices["task"].name, configuration.request.task_file)
        options = {of: configuration.choices[of].function for of in PHASE_GROUPS}
        option_values = {**options, **configuration.objective_keys}
        signature_of = partial(find_signature, task_file=configuration.request.task_file)
        return list_objective_keys(read_objectives(source), option_values, signature_of).get(key)
    if group in ("task", "inference") and name:
        source = task_source(configuration.choices["task"].name, configuration.request.task_file)
        keys = read_functions(source)["build"].keys if group == "task" else inference_keys(source)
        return keys.get(name)
    return settings_keys(Settings).get(key)


def _find_hook(key: str, configuration: Configuration) -> Choice | None:
    return next((hook for hook in configuration.hooks if key.startswith(f"hook.{hook.name}.")), None)


def _suggest_key(key: str, configuration: Configuration) -> str:
    if key in FOREIGN_KEYS:
        return f"use {FOREIGN_KEYS[key].replace('={}', '')}"
    group, _, name = key.partition(".")
    owner = option_with_key(group, name) if group in AXES and name else None
    if owner:
        return f"use accel-run explain {key} {group}={owner}, the option that has this key"
    return did_you_mean(key, [*configuration.flat(), *GROUPS])
