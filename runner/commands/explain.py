"""`accel-run explain KEY`: show what set a value, and its value without each source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from runner.base.secret import sanitize
from runner.base.text import wrap_for_terminal
from runner.commands.arguments import read
from runner.commands.plan import shown

if TYPE_CHECKING:
    from runner.config.configuration import Choice, Configuration
    from runner.config.request import Request
    from runner.config.schema import Key

HELP = """usage: accel-run explain KEY [key=value ...]

Shows which default, task, profile or override set the value of KEY, and its value without each of them.

examples
  accel-run explain precision +hardware=t4
  accel-run explain optimizer.lr optimizer.lr=0.01
"""


def run(argv: list[str]) -> int:
    """Print the sources of the key, highest precedence first."""
    from runner.base.errors import ConfigError, Problem
    from runner.config.configuration import compose

    arguments = read(argv, positional=1)
    if not arguments.positional:
        raise ConfigError(Problem("needs a key", "explain", "use accel-run explain optimizer.lr"))
    key, request = arguments.positional[0], arguments.request
    configuration = compose(request)
    if key not in configuration.flat():
        raise ConfigError(Problem("unknown key", key, _instead(key, configuration)))
    value = shown(configuration.flat()[key])
    lines = [f"{key} = {value}", f"  set by {source_of(key, configuration)}"]
    for words_left_out, asked in _without(key, request):
        try:
            lines.append(f"  without {words_left_out}: {_told(key, compose(asked))}")
        except ConfigError as error:
            lines.append(f"  without {words_left_out}: impossible, {error.problems[0].what}")
    print(wrap_for_terminal(sanitize("\n".join([*lines, *_meaning(key, value, configuration)]))))
    return 0


def _without(key: str, request: Request) -> Iterator[tuple[str, Request]]:
    """Yield the request without the overrides of the key, then also without its group, then without the profile."""
    kept, left_out = request.overrides, []
    for name in (key, key.split(".", maxsplit=1)[0], "hardware"):
        if any(_named(arg).startswith(f"{name}.") for arg in kept):
            continue  # keys that may belong to this option alone
        here = [arg for arg in kept if _named(arg) == name]
        left_out += here
        kept = tuple(arg for arg in kept if arg not in here)
        if here:
            yield " and ".join(left_out), replace(request, overrides=kept)


def _meaning(key: str, value: str, configuration: Configuration) -> Iterator[str]:
    """Yield the meaning of the key, its allowed values, and where a value derived on this machine is shown."""
    from runner.config.options import GROUPS, options_of

    known = _key(key, configuration)
    is_of_task = configuration.sources.get(key, "").partition(" ")[0] == "task"
    if known and is_of_task and key.split(".", maxsplit=1)[0] not in ("task", "inference"):
        yield f"  without the task: {shown(known.default)}, the default"
    if known and known.help:
        yield f"  meaning: {known.help}"
    if key in GROUPS:
        request = configuration.request
        yield f"  options: {', '.join(options_of(key, request.config_dir, request.task_file))}"
    if value == "auto":
        yield "  see how auto is resolved on this machine: accel-run plan"


def _told(key: str, configuration: Configuration) -> str:
    """Return the value and its source."""
    found = configuration.flat()
    if key in found:
        return f"{shown(found[key])}, set by {source_of(key, configuration)}"
    group = key.split(".", maxsplit=1)[0]
    return f"not defined, because {group}={configuration.choices[group].name} has no such key"


def source_of(key: str, configuration: Configuration) -> str:
    """Return the source of the key, with the file or override."""
    from runner.config.options import options_of

    request, source = configuration.request, configuration.sources.get(key, "default")
    kind, _, name = source.partition(" ")
    group = key.split(".", maxsplit=1)[0]
    if source == "command line":
        return f"the command line ({_word_for(key, request)})"
    if kind == "profile":
        return f"the profile {name} ({_file(f'hardware/{name}', request)})"
    if request.task_file and key == "task":
        return f"the command line (--task {request.task_file})"
    if request.task_file and (kind == "task" or group in ("task", "inference")):
        return f"the task ({request.task_file})"
    if kind == "task":
        return f"the task {name} ({_file(f'task/{name}', request) if group == 'task' else f'tasks/{name}/task.py'})"
    if "." in key and group in configuration.choices:
        choice = configuration.choices[group]
        if source == "config folder":
            return f"your folder ({_file(f'{group}/{choice.name}', request)})"
        if ":" in choice.function:
            return f"the default ({choice.function.rsplit(':', 2)[0]})"
        shipped = choice.name if choice.name in options_of(group) else choice.function
        return f"the default (conf/{group}/{shipped}.yaml)"
    hook = _hook(key, configuration)
    if hook is not None and source == "default":
        return f"the default ({hook.function.rsplit(':', 2)[0]})"
    if group == "inference":
        return f"the default (tasks/{configuration.choices['task'].name}/task.py)"
    return f"{'your folder' if source == 'config folder' else 'the default'} ({_file('config', request)})"


def _word_for(key: str, request: Request) -> str:
    """Return the override that set the key: its own, or for a phase that of the run or of its option."""
    from runner.config.phases import LENGTHS

    name = key.split(".", 2)[2] if key.startswith("phase.") else key
    group = name.partition(".")[0]
    for wanted in ((key,), (name,), LENGTHS if name in LENGTHS else (), (key[: len(key) - len(name)] + group, group)):
        found = [arg for arg in request.overrides if _named(arg) in wanted]
        if found:
            return found[-1]
    return "an option of it"


def _file(name: str, request: Request) -> str:
    """Return the configuration file of this name: the user's, or the built-in one as a repository path."""
    own = request.config_dir / f"{name}.yaml" if request.config_dir else None
    return str(own) if own and own.is_file() else f"conf/{name}.yaml"


def _key(key: str, configuration: Configuration) -> Key | None:
    """Return the documented key."""
    from runner.config.objective_keys import OBJECTIVE, keys_of_objectives
    from runner.config.options import AXES, function_of, task_source
    from runner.config.own_options import by_reference
    from runner.config.own_tables import keys_of_hook
    from runner.config.phases import GROUPS as PHASE_GROUPS
    from runner.config.schema import read_functions, settings_keys
    from runner.config.settings import Settings
    from runner.config.task_file import objectives_in

    group, _, name = key.partition(".")
    if group in AXES and name:
        signature = function_of(group, configuration.choices[group].function)
        return signature.keys.get(name) if signature else None
    hook = _hook(key, configuration)
    own = by_reference(hook.function) if hook else None
    if own is not None:
        return keys_of_hook(own)[key]
    if group == OBJECTIVE:
        file = task_source(configuration.choices["task"].name, configuration.request.task_file)
        chosen = {of: configuration.choices[of].function for of in PHASE_GROUPS}
        given = {**chosen, **configuration.objective_keys}
        signature_of = partial(function_of, task_file=configuration.request.task_file)
        return keys_of_objectives(objectives_in(file), given, signature_of).get(key)
    if group in ("task", "inference") and name:
        functions = read_functions(task_source(configuration.choices["task"].name, configuration.request.task_file))
        found = [functions[one].keys for one in functions if one == "build" or one.endswith(".predict")]
        return next((keys[name] for keys in found if name in keys), None)
    return settings_keys(Settings).get(key)


def _hook(key: str, configuration: Configuration) -> Choice | None:
    """Return the hook that has the key."""
    return next((hook for hook in configuration.hooks if key.startswith(f"hook.{hook.name}.")), None)


def _instead(key: str, configuration: Configuration) -> str:
    """Return a suggestion for an unknown key."""
    from runner.config.aliases import FOREIGN_KEYS
    from runner.config.options import AXES, GROUPS, option_with
    from runner.config.schema import did_you_mean

    if key in FOREIGN_KEYS:
        return f"here it is {FOREIGN_KEYS[key].replace('={}', '')}"
    group, _, name = key.partition(".")
    option = option_with(group, name) if group in AXES and name else None
    if option:
        return f"it belongs to {group}={option}: accel-run explain {key} {group}={option}"
    return did_you_mean(key, [*configuration.flat(), *GROUPS])


def _named(arg: str) -> str:
    return arg.partition("=")[0].lstrip("+~")
