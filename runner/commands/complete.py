"""`accel-run complete -- WORDS...`: shell completion. Reads only the files it needs, because shells call it often.

What a command accepts is read from its help: options such as --json, keys such as `budget_s=`, alternatives such as
`sort_by=self|total|calls`, `key=value` for settings of a run, and `last|NAME|DIR` for runs. File names are
completed by the shell.
"""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from runner.base.paths import shipped_path
from runner.base.values import Matches
from runner.config.custom_options import find_custom_hooks
from runner.config.custom_tables import HOOK, hook_keys
from runner.config.inference_keys import inference_keys
from runner.config.options import AXES, GROUPS, find_signature, list_options, task_source
from runner.config.schema import Key, read_functions, settings_keys
from runner.config.settings import MAIN_KEYS, Settings

HELP = """usage: accel-run complete -- WORDS...

Prints the completions of the last of WORDS (the arguments after `accel-run`), one per line.
Used by the scripts of: accel-run completion bash (or zsh, or fish)
"""


def run(argv: list[str]) -> int:
    """Print the candidates, or nothing if an error occurs."""
    completions: list[str] = []
    with suppress(Exception):
        completions = candidates(argv[1:] if argv[:1] == ["--"] else argv)
    print("".join(f"{candidate}\n" for candidate in completions), end="")
    return 0


def candidates(argv: Sequence[str]) -> list[str]:
    """Return the completions of the last of `argv`, the arguments after `accel-run`.

    A candidate that ends with `=` or `.` is a prefix to be completed further.
    """
    from runner.commands import COMMANDS

    *previous, current = map(_unquote, argv or [""])
    if not previous:
        visible = [name for name, (_, summary) in COMMANDS.items() if summary]
        completions: Iterable[str] = [*visible, "--help", "--version"] if current.startswith("-") else visible
    elif previous[0] not in COMMANDS or previous[-1] in _PATH_FLAGS:
        return []
    else:
        module = import_module(f"runner.commands.{COMMANDS[previous[0]][0]}")
        completions = _complete(TypedLine.read(previous, current), module.HELP)
    unique = dict.fromkeys(completion for completion in completions if completion.startswith(current))
    return [completion for completion in unique if _UNQUOTED.fullmatch(completion.removeprefix(current))]


@dataclass
class TypedLine:
    """The command line up to the cursor; `current` is the argument that is being typed."""

    command: str
    current: str
    overrides: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, previous: Sequence[str], current: str) -> TypedLine:
        line = cls(previous[0], current)
        rest = list(previous[1:])
        while rest:
            arg = rest.pop(0)
            key, has_value, value = arg.partition("=")
            if arg.startswith("-"):
                line.flags[key] = rest.pop(0) if arg in _PATH_FLAGS and rest else value
            elif has_value:
                line.overrides[key.lstrip("+")] = value
            else:
                line.positionals.append(arg)
        return line

    @property
    def config_dir(self) -> Path | None:
        return self._path("--config-dir")

    @property
    def task_file(self) -> Path | None:
        return self._path("--task")

    @property
    def root(self) -> Path:
        return Path(self.overrides.get("output_root", "outputs")).expanduser()

    @cached_property
    def task_keys(self) -> Mapping[str, Key]:
        """The keys task.KEY and inference.KEY of the task's file; empty if it cannot be read."""
        with suppress(OSError, SyntaxError, ValueError):
            # Matched as text, because importing a YAML parser would take longer than everything else.
            defaults = (shipped_path("conf") / "config.yaml").read_text(encoding="utf-8")
            name = self.overrides.get("task") or re.findall(r"- task: (\w+)", defaults)[0]
            source = task_source(name, self.task_file)
            build = read_functions(source).get("build")
            keys = {f"task.{name}": key for name, key in (build.keys if build else {}).items()}
            return keys | {f"inference.{name}": key for name, key in inference_keys(source).items()}
        return {}

    def keys(self, prefix: str) -> dict[str, Key]:
        """Return the settings of all options that begin with `prefix`; only files that can have such keys are read."""
        keys = settings_keys(Settings)
        for group in AXES:
            if prefix and (group.startswith(prefix) or prefix.startswith(f"{group}.")):
                for option in list_options(group, None, self.task_file):
                    signature = find_signature(group, option, self.task_file)
                    keys |= {f"{group}.{name}": key for name, key in (signature.keys if signature else {}).items()}
        if prefix and (HOOK.startswith(prefix) or prefix.startswith(f"{HOOK}.")):
            keys |= {name: key for hook in find_custom_hooks(self.task_file) for name, key in hook_keys(hook).items()}
        keys |= self.task_keys
        keys["inference.seed"] = Key("inference.seed", int, 0)
        return {name: key for name, key in keys.items() if name.startswith(prefix)}

    def _path(self, flag: str) -> Path | None:
        return Path(self.flags[flag]).expanduser().absolute() if self.flags.get(flag) else None


# ---------------------------------------------------------------- candidates


def _complete(line: TypedLine, text: str) -> Iterable[str]:
    usage = text.partition("\n\n")[0]
    has_settings = "key=value" in usage
    key, has_value, value = line.current.partition("=")
    if line.current.startswith("-"):
        flags = [*(_PATH_FLAGS if has_settings else ()), *re.findall(r"(?<![\w-])--?[a-z][\w-]*", usage), "--help"]
        return [flag for flag in flags if flag not in line.flags]
    keys = [] if "[-m]" in usage and "-m" not in line.flags else _keys_in_help(text)
    if has_value:
        prefix = value[: max(value.rfind(","), value.rfind("[")) + 1]  # the earlier items of a list
        return [
            f"{key}={prefix}{item}" for item in _complete_values(line, key.lstrip("+"), text, has_settings=has_settings)
        ]
    completions = []
    if not line.positionals:  # alternatives such as bash|zsh|fish, and subcommands on further lines of the usage
        completions += re.findall(r"(?<=[ |])[a-z]+(?=\||$)", usage.partition("[")[0])
        completions += re.findall(rf"\n +accel-run {line.command} ([a-z_]+) ", usage)
    if "NAME|DIR" in usage and "run" not in line.overrides and not line.positionals:
        completions += _run_names(line)
    if line.command == "benchmark":
        words, keys = _complete_suite(line)
        completions += words
    elif has_settings:
        keys = [name for name in keys if name not in (*GROUPS, *line.keys(""))]
    completions += [f"{name}=" for name in keys if name not in line.overrides]
    if line.command == "explain" and not line.positionals:
        return [name.removesuffix("=") for name in _settings(line)]
    return [*completions, *(_settings(line) if has_settings else ())]


def _settings(line: TypedLine) -> Iterable[str]:
    """Yield groups, keys and prefixes such as `optimizer.`; dotted keys are offered only after a dot is typed."""
    typed = line.current.lstrip("+")
    plus = "+" if line.current.startswith("+") else ""
    known = line.keys(typed)
    for name in (*GROUPS, *MAIN_KEYS, *known):
        if ("." in typed or "." not in name) and name not in line.overrides:
            yield f"{plus}{name}="
    if "." not in typed:
        yield from (f"{plus}{group}." for group in sorted({name.split(".")[0] for name in known if "." in name}))


def _complete_values(line: TypedLine, key: str, text: str, *, has_settings: bool) -> Iterable[str]:
    alternatives = re.search(rf"\b{re.escape(key)}=(\w+(?:\|\w+)+)", text)
    if key == "suite":
        from runner.tools.measure.suites import SUITES

        return SUITES
    if key == "checks":
        from runner.tools.doctor.checks import CHECKS

        return CHECKS
    if key in ("run", "resume"):
        return [*(("auto", "fresh") if key == "resume" else ()), *_run_names(line)]
    # A command whose help has checkpoint=best|last|N does not complete the options of the group.
    if key in GROUPS and has_settings and not (alternatives and key == "checkpoint"):
        return _shell_safe(list_options(key, line.config_dir, line.task_file))
    if alternatives:
        return [word for word in alternatives[1].split("|") if not word.isupper()]
    if not has_settings:
        return []
    keys = line.keys(key)
    return _literals(keys[key].type) if key in keys else []


def _keys_in_help(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"(?:^ +|\[)(\w+)=", text.replace("key=value", ""), re.MULTILINE)))


def _complete_suite(line: TypedLine) -> tuple[list[str], list[str]]:
    from runner.commands.benchmark import COMMAND_KEYS
    from runner.tools.measure.suites import SUITES, SuiteDeclaration
    from runner.tools.measure.technique import find_techniques

    suite = SUITES.get(line.overrides.get("suite", COMMAND_KEYS["suite"]), SuiteDeclaration(""))
    known = find_techniques(line.config_dir, line.task_file) if "techniques" in suite.options else ()
    arguments = (*suite.positional, *known)
    return [arg for arg in arguments if arg not in line.positionals], [*COMMAND_KEYS, *suite.options]


def _run_names(line: TypedLine) -> list[str]:
    """Return `last` and the names of the runs; for `train`, only those of runs or sweeps that it would resume."""
    from runner.durable.directory import list_runs, list_sweeps

    if line.command == "search" or "-m" in line.flags:
        return _shell_safe(path.name for path in list_sweeps(line.root))
    if line.command in ("train", "both"):  # the name of a trial would start a new run
        return _shell_safe(path.name for path in list_runs(line.root, include_sweeps=False))
    return ["last", *_shell_safe(path.name for path in list_runs(line.root))]


def _literals(annotation: Any) -> list[str]:
    """Return the values of an enumerable type, as typed on the command line."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return ["true", "false"]
    if annotation in (None, type(None)):
        return ["null"]
    if origin is typing.Literal:
        return [str(value).lower() if isinstance(value, bool) else str(value) for value in arguments]
    if origin is typing.Annotated:
        patterns = [metadata for metadata in arguments[1:] if isinstance(metadata, Matches)]
        matches = [
            match
            for pattern in patterns
            for match in re.split(r", | or ", pattern.description)
            if pattern.allows(match)
        ]
        return matches or _literals(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in _literals(argument)]
    return []


def _shell_safe(names: Iterable[str]) -> list[str]:
    """Return the names that are safe in a shell; an untrusted folder may contain others."""
    return [name for name in names if _SHELL_SAFE.fullmatch(name)]


def _unquote(arg: str) -> str:
    """Return an argument without shell quoting, because shells pass it to the completion as typed."""
    try:
        return (shlex.split(arg) or [""])[0] if set(arg) & set("\\\"'") else arg
    except ValueError:  # unclosed quote
        return arg.replace('"', "").replace("'", "")


_SHELL_SAFE = re.compile(r"[A-Za-z0-9_][\w.-]*")  # a name without special meaning in a shell
_UNQUOTED = re.compile(r"[\w./=:,+-]*")  # allowed characters in the completed part
_PATH_FLAGS = ("--task", "--config-dir")  # followed by a path, which the shell completes
