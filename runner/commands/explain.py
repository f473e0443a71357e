"""`accel-run explain KEY`: who set a value, and what it would be without each of them."""

from __future__ import annotations

from dataclasses import replace

from runner.commands.arguments import read
from runner.commands.plan import shown

HELP = """usage: accel-run explain KEY [key=value ...]

Tells which default, task, profile or override set the value of KEY, and what it would be without each.

examples
  accel-run explain precision +hardware=t4
  accel-run explain optimizer.lr optimizer.lr=0.01
"""


def run(words: list[str]) -> int:
    """Print the chain of who set the key, strongest first."""
    from runner.base.configuration import GROUPS, Configuration, compose
    from runner.base.errors import ConfigError, Problem
    from runner.base.schema import did_you_mean

    arguments = read(words, positional=1)
    if not arguments.positional:
        raise ConfigError(Problem("which key?", "explain", "say accel-run explain optimizer.lr"))
    key, request = arguments.positional[0], arguments.request
    configuration = compose(request)
    if key not in configuration.flat():
        raise ConfigError(Problem("unknown key", key, did_you_mean(key, [*configuration.flat(), *GROUPS])))

    def value(of: Configuration) -> str:
        return shown(of.flat()[key]) if key in of.flat() else "not there"

    source = configuration.sources.get(key, "default")
    print(f"{key} = {value(configuration)}   set by: {source}{_file_of(key, source, configuration)}")
    layers = [
        ("the command line", tuple(word for word in request.overrides if _key(word) != key)),
        ("the profile", tuple(word for word in request.overrides if _key(word) not in (key, "hardware"))),
    ]
    for name, kept in layers:
        if kept != request.overrides:
            without = compose(replace(request, overrides=kept))
            print(f"  without {name}: {value(without)}   set by: {without.sources.get(key, 'default')}")
    bare = compose(replace(request, overrides=()))
    print(f"  with nothing on the command line: {value(bare)}   set by: {bare.sources.get(key, 'default')}")
    group = key.split(".")[0]
    if group in configuration.choices and group != key and group != "task":
        signature = _help(group, configuration.choices[group].function, key.split(".", 1)[1])
        if signature:
            print(f"  meaning: {signature}")
    return 0


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _help(group: str, function: str, key: str) -> str:
    from runner.base.configuration import function_of

    signature = function_of(group, function)
    return signature.keys[key].help if signature and key in signature.keys else ""


def _file_of(key: str, source: str, configuration: object) -> str:
    from runner.base.configuration import Configuration

    assert isinstance(configuration, Configuration)
    if source == "command line":
        words = [word for word in configuration.request.overrides if _key(word) == key]
        return f" ({words[-1]})" if words else ""
    kind, _, name = source.partition(" ")
    if kind == "profile":
        return f" (conf/hardware/{name}.yaml)"
    if kind == "task" and not configuration.request.task_file:
        return f" (conf/task/{name}.yaml)"
    group = key.split(".")[0]
    if "." in key and group in configuration.choices:
        return f" (conf/{group}/{configuration.choices[group].name}.yaml)"
    return " (conf/config.yaml)"
