"""`accel-run complete -- WORDS...`: shell completion. Reads only the files it needs, because shells call it often.

What a command accepts is read from its help: options such as --json, keys such as `budget_s=`, alternatives such as
`sort_by=self|total|calls`, `key=value` for settings of a training, and `last|NAME|DIR` for runs. File names are
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
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from runner.base.paths import shipped_path
from runner.base.values import Matches
from runner.config.objective_keys import OBJECTIVE, keys_of_objectives
from runner.config.options import AXES, GROUPS, function_of, options_of, task_source
from runner.config.own_options import own_hooks
from runner.config.own_tables import HOOK, keys_of_hook
from runner.config.phases import GROUPS as PHASE_GROUPS
from runner.config.schema import Key, Signature, read_functions, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.config.task_file import objectives_in

HELP = """usage: accel-run complete -- WORDS...

Prints the completions of the last of WORDS (the arguments after `accel-run`), one per line.
Used by the scripts of: accel-run completion bash (or zsh, or fish)
"""


def run(words: list[str]) -> int:
    """Print the candidates; errors print nothing."""
    found: list[str] = []
    with suppress(Exception):
        found = candidates(words[1:] if words[:1] == ["--"] else words)
    print("".join(f"{candidate}\n" for candidate in found), end="")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of `words`, the arguments after `accel-run`.

    A candidate that ends with `=` or `.` is a prefix to be completed further.
    """
    from runner.commands import COMMANDS

    *before, last = map(_unquoted, words or [""])
    if not before:
        shown = [name for name, (_, summary) in COMMANDS.items() if summary]
        found: Iterable[str] = [*shown, "--help", "--version"] if last.startswith("-") else shown
    elif before[0] not in COMMANDS or before[-1] in _PATH_FLAGS:
        return []
    else:
        module = import_module(f"runner.commands.{COMMANDS[before[0]][0]}")
        found = _offered(TypedLine.read(before, last), module.HELP)
    offered = dict.fromkeys(word for word in found if word.startswith(last))
    return [word for word in offered if _UNQUOTED.fullmatch(word.removeprefix(last))]


@dataclass
class TypedLine:
    """The command line before the word under the cursor."""

    command: str
    last: str
    overrides: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, before: Sequence[str], last: str) -> TypedLine:
        line = cls(before[0], last)
        rest = list(before[1:])
        while rest:
            word = rest.pop(0)
            key, has_value, value = word.partition("=")
            if word.startswith("-"):
                line.flags[key] = rest.pop(0) if word in _PATH_FLAGS and rest else value
            elif has_value:
                line.overrides[key.lstrip("+")] = value
            else:
                line.words.append(word)
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
    def chosen(self) -> Mapping[str, str]:
        """Group -> option: the defaults list, then the task and the profile, then the line."""
        found = dict(_DEFAULT.findall(_yaml("config", self.config_dir)))
        for group in ("task", "hardware"):
            option = self.overrides.get(group, found.get(group, ""))
            found |= dict(_OVERRIDE.findall(_yaml(f"{group}/{option}", self.config_dir)))
        return found | {key: value for key, value in self.overrides.items() if key in GROUPS}

    @cached_property
    def task(self) -> Mapping[str, Signature]:
        """The functions of the task's file; empty if it cannot be read."""
        with suppress(OSError, SyntaxError, ValueError):
            return read_functions(task_source(self.chosen.get("task", ""), self.task_file))
        return {}

    def keys(self, prefix: str) -> dict[str, Key]:
        """Return the settings that begin with `prefix`; only the files that can hold such keys are read."""
        keys = settings_keys(Settings)
        for group in AXES:
            if prefix and (group.startswith(prefix) or prefix.startswith(f"{group}.")):
                signature = function_of(group, self._function(group), self.task_file)
                keys |= {f"{group}.{name}": key for name, key in (signature.keys if signature else {}).items()}
        if prefix and (HOOK.startswith(prefix) or prefix.startswith(f"{HOOK}.")):
            keys |= {name: key for hook in own_hooks(self.task_file) for name, key in keys_of_hook(hook).items()}
        if prefix and (OBJECTIVE.startswith(prefix) or prefix.startswith(f"{OBJECTIVE}.")):
            chosen = {group: self._function(group) for group in PHASE_GROUPS}
            declared = objectives_in(task_source(self.chosen.get("task", ""), self.task_file))
            keys |= keys_of_objectives(declared, chosen, partial(function_of, task_file=self.task_file))
        for name, signature in self.task.items():
            lead = "task" if name == "build" else "inference" if name.endswith(".predict") else ""
            keys |= {f"{lead}.{key}": value for key, value in signature.keys.items() if lead}
        keys["inference.seed"] = Key("inference.seed", int, 0)
        return {name: key for name, key in keys.items() if name.startswith(prefix)}

    def _function(self, group: str) -> str:
        """Return the function behind the chosen option, which a variant of the user's names as `option: adamw`."""
        option = self.chosen.get(group, "")
        variant = re.search(r"^option:\s*[\"']?([\w-]+)", _yaml(f"{group}/{option}", self.config_dir), re.MULTILINE)
        return variant[1] if variant else option

    def _path(self, flag: str) -> Path | None:
        return Path(self.flags[flag]).expanduser().absolute() if self.flags.get(flag) else None


# ---------------------------------------------------------------- what is offered


def _offered(line: TypedLine, text: str) -> Iterable[str]:
    """Return completions of the last argument of a command with this help; some may not begin with what is typed."""
    usage = text.partition("\n\n")[0]
    has_settings = "key=value" in usage
    key, has_value, value = line.last.partition("=")
    if line.last.startswith("-"):
        flags = [*(_PATH_FLAGS if has_settings else ()), *re.findall(r"(?<![\w-])--?[a-z][\w-]*", usage), "--help"]
        return [flag for flag in flags if flag not in line.flags]
    own = [] if "[-m]" in usage and "-m" not in line.flags else _own_keys(text)
    if has_value:
        lead = value[: max(value.rfind(","), value.rfind("[")) + 1]  # the earlier items of a list
        return [f"{key}={lead}{each}" for each in _values_of(line, key.lstrip("+"), text, has_settings=has_settings)]
    found = []
    if not line.words:  # alternatives such as bash|zsh|fish, and a word that another line of the usage begins with
        found += re.findall(r"(?<=[ |])[a-z]+(?=\||$)", usage.partition("[")[0])
        found += re.findall(rf"\n +accel-run {line.command} ([a-z_]+) ", usage)
    if "NAME|DIR" in usage and "run" not in line.overrides and not line.words:
        found += _runs(line)
    if line.command == "benchmark":
        words, own = _of_suite(line)
        found += words
    elif has_settings:
        own = [name for name in own if name not in (*GROUPS, *line.keys(""))]
    found += [f"{name}=" for name in own if name not in line.overrides]
    if line.command == "explain" and not line.words:
        return [name.removesuffix("=") for name in _settings(line)]
    return [*found, *(_settings(line) if has_settings else ())]


def _settings(line: TypedLine) -> Iterable[str]:
    """Yield the groups and keys that complete `last`, and prefixes such as `optimizer.`: dotted keys after a dot."""
    typed = line.last.lstrip("+")
    plus = "+" if line.last.startswith("+") else ""
    keys = line.keys(typed)
    for name in (*GROUPS, *MAIN_KEYS, *keys):
        if ("." in typed or "." not in name) and name not in line.overrides:
            yield f"{plus}{name}="
    if "." not in typed:
        yield from (f"{plus}{group}." for group in sorted({name.split(".")[0] for name in keys if "." in name}))


def _values_of(line: TypedLine, key: str, text: str, *, has_settings: bool) -> Iterable[str]:
    alternatives = re.search(rf"\b{re.escape(key)}=(\w+(?:\|\w+)+)", text)
    if key == "suite":
        from runner.tools.measure.suites import SUITES

        return SUITES
    if key == "checks":
        from runner.tools.doctor.checks import CHECKS

        return CHECKS
    if key in ("run", "resume"):
        return [*(("auto", "fresh") if key == "resume" else ()), *_runs(line)]
    if key in GROUPS and has_settings and not (alternatives and key == "checkpoint"):  # best|last|N, not the group
        return _plain(options_of(key, line.config_dir, line.task_file))
    if alternatives:
        return [word for word in alternatives[1].split("|") if not word.isupper()]
    if not has_settings:
        return []
    known = line.keys(key)
    return _literals(known[key].type) if key in known else []


def _own_keys(text: str) -> list[str]:
    """Return the keys in the help of a command, without the settings of a training."""
    return list(dict.fromkeys(re.findall(r"(?:^ +|\[)(\w+)=", text.replace("key=value", ""), re.MULTILINE)))


def _of_suite(line: TypedLine) -> tuple[list[str], list[str]]:
    """Return the words and the keys of the suite on the line."""
    from runner.commands.benchmark import OWN
    from runner.tools.measure.suites import SUITES, SuiteDeclaration
    from runner.tools.measure.technique import files_of

    suite = SUITES.get(line.overrides.get("suite", OWN["suite"]), SuiteDeclaration(""))
    words = (*suite.words, *(files_of(line.config_dir) if "techniques" in suite.options else ()))
    return [word for word in words if word not in line.words], [*OWN, *suite.options]


def _runs(line: TypedLine) -> list[str]:
    """Return what names a run: `last` and the runs; for a training, the runs and sweeps that it would continue."""
    from runner.durable.directory import runs, sweeps

    if line.command == "search" or "-m" in line.flags:
        return _plain(path.name for path in sweeps(line.root))
    if line.command in ("train", "both"):  # the name of a trial would start another run
        return _plain(path.name for path in runs(line.root, in_sweeps=False))
    return ["last", *_plain(path.name for path in runs(line.root))]


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
        patterns = [item for item in arguments[1:] if isinstance(item, Matches)]
        words = [word for each in patterns for word in re.split(r", | or ", each.description) if each.allows(word)]
        return words or _literals(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in _literals(argument)]
    return []


def _plain(names: Iterable[str]) -> list[str]:
    """Return the names that are safe in a shell; an untrusted folder may contain others."""
    return [name for name in names if _PLAIN.fullmatch(name)]


def _yaml(name: str, config_dir: Path | None) -> str:
    """Return the text of a configuration file, the user's before the built-in one; empty if there is none."""
    for folder in ([config_dir] if config_dir else []) + [shipped_path("conf")]:
        with suppress(OSError):
            return (folder / f"{name}.yaml").read_text(encoding="utf-8")
    return ""


def _unquoted(word: str) -> str:
    """Return a word without shell quoting; shells pass it as typed."""
    try:
        return (shlex.split(word) or [""])[0] if set(word) & set("\\\"'") else word
    except ValueError:  # a quote that is still open
        return word.replace('"', "").replace("'", "")


_PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*")  # a name without special meaning in a shell
_UNQUOTED = re.compile(r"[\w./=:,+-]*")  # allowed characters in the completed part
# The defaults list, matched as text: importing a YAML parser would take longer than all the rest.
_DEFAULT = re.compile(r"^ *- (\w+): [\"']?([\w-]+)", re.MULTILINE)
_OVERRIDE = re.compile(r"^ *- override /(\w+): [\"']?([\w-]+)", re.MULTILINE)
_PATH_FLAGS = ("--task", "--config-dir")  # followed by a path, which the shell completes
