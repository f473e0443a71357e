"""`accel-run complete -- WORDS...`: shell completion. Reads only the files it needs, because shells call it often."""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from runner.base.paths import shipped
from runner.base.values import Matches
from runner.config.objective_keys import OBJECTIVE, keys_of_objectives
from runner.config.options import AXES, GROUPS, function_of, options_of, task_source
from runner.config.own_options import own_hooks
from runner.config.own_tables import HOOK, keys_of_hook
from runner.config.phases import GROUPS as PHASE_GROUPS
from runner.config.schema import Key, Signature, read_functions, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.config.task_file import objectives_in
from runner.tools.measure.suites import MODES, SUITES, SuiteDeclaration

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

    A candidate that ends with `=`, `.` or `/` is a prefix to be completed further.
    """
    from runner.commands import COMMANDS

    *before, last = map(_unquoted, words or [""])
    if not before:
        visible = [name for name, (_, summary) in COMMANDS.items() if summary]
        return _beginning_with(last, [*visible, "--help", "--version"] if last.startswith("-") else visible)
    line = TypedLine.read(before, last)
    module = COMMANDS.get(line.command, ("", ""))[0]
    command = next(name for name, (other, _) in COMMANDS.items() if other == module) if module else ""
    accepts = _COMMANDS.get(" ".join([command, *line.lone[:1]])) or _COMMANDS.get(command)
    found = dict.fromkeys(_beginning_with(last, _offered(line, module, accepts))) if accepts else ()
    return [word for word in found if _UNQUOTED.fullmatch(word.removeprefix(last))]


@dataclass
class TypedLine:
    """The command line before the word under the cursor."""

    command: str
    last: str
    previous: str
    overrides: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    lone: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, before: Sequence[str], last: str) -> TypedLine:
        line = cls(before[0], last, before[-1])
        rest = list(before[1:])
        while rest:
            word = rest.pop(0)
            key, has_value, value = word.partition("=")
            if word in _PATH_FLAGS and rest:
                line.flags[word] = rest.pop(0)
            elif word.startswith("-"):
                line.flags[key] = value
            elif has_value:
                line.overrides[key.lstrip("+")] = value
            else:
                line.lone.append(word)
        return line

    @property
    def value(self) -> str:
        """The part of the last argument after `=`."""
        return self.last.partition("=")[2]

    @property
    def is_sweep(self) -> bool:
        return not {"-m", "--multirun"}.isdisjoint(self.flags)

    @property
    def config_dir(self) -> Path | None:
        return self._path("--config-dir")

    @property
    def root(self) -> Path:
        return Path(self.overrides.get("output_root", "outputs")).expanduser()

    @cached_property
    def task_file(self) -> Path | None:
        """The file of --task; for an existing run, the one it was trained with."""
        recorded = self._recorded[1]
        return self._path("--task") or (Path(recorded) if recorded else None)

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """Group -> option: the defaults list, then the task and the profile, then the line."""
        recorded = (word.partition("=") for word in self._recorded[0])
        given = {key.lstrip("+"): value for key, _, value in recorded} | self.overrides
        found = dict(_DEFAULT.findall(_yaml("config", self.config_dir)))
        for group in ("task", "hardware"):
            option = given.get(group, found.get(group, ""))
            found |= dict(_OVERRIDE.findall(_yaml(f"{group}/{option}", self.config_dir)))
        return found | {key: value for key, value in given.items() if key in GROUPS}

    @cached_property
    def task(self) -> Mapping[str, Signature]:
        """The functions of the task's file; empty if it cannot be read."""
        with suppress(OSError, SyntaxError, ValueError):
            return read_functions(task_source(self.chosen.get("task", ""), self.task_file))
        return {}

    def keys(self, prefix: str) -> dict[str, Key]:
        """Return the keys that begin with `prefix`; only the files that can hold such keys are read."""
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
        build = self.task.get("build")
        keys |= {f"task.{name}": key for name, key in (build.keys if build else {}).items()}
        return {name: key for name, key in (keys | self.inference_keys()).items() if name.startswith(prefix)}

    def inference_keys(self) -> dict[str, Key]:
        """Return the keys of the task's predict, and the seed."""
        found = (signature.keys for name, signature in self.task.items() if name.endswith(".predict"))
        keys = {f"inference.{name}": key for options in found for name, key in options.items()}
        return keys | {"inference.seed": Key("inference.seed", int, 0)}

    def _function(self, group: str) -> str:
        """Return the function behind the chosen option, which a variant of the user's names as `option: adamw`."""
        option = self.chosen.get(group, "")
        variant = re.search(r"^option:\s*[\"']?([\w-]+)", _yaml(f"{group}/{option}", self.config_dir), re.MULTILINE)
        return variant[1] if variant else option

    @cached_property
    def _recorded(self) -> tuple[Sequence[str], str | None]:
        """Overrides and task file of the run that `inference` or `resume` would use; none for other commands."""
        if self.command not in _USING_A_CHECKPOINT:
            return (), None
        from runner.base.errors import AccelRunError
        from runner.durable.directory import RunDirectory
        from runner.durable.record_files import read_record

        with suppress(AccelRunError):
            named = self.overrides.get("run", next(iter(self.lone), "last"))
            origin = read_record(RunDirectory.find(self.root, named).path).origin
            return origin.overrides or (), origin.task_file
        return (), None

    def _path(self, flag: str) -> Path | None:
        return Path(self.flags[flag]).expanduser().absolute() if self.flags.get(flag) else None


# ---------------------------------------------------------------- what each command accepts


@dataclass(frozen=True)
class Accepts:
    """The arguments that a command accepts besides `--help`.

    words     positional arguments
    own       its own keys; None: `OWN` of its module
    flags     options without a value
    settings  settings of a training: no; accepted but not listed (`values`); or listed after its own keys
    """

    words: Callable[[TypedLine], Iterable[str]] = lambda line: ()
    own: Callable[[TypedLine], Iterable[str]] | None = None
    flags: tuple[str, ...] = ()
    settings: Literal["no", "values", "listed"] = "no"


def _offered(line: TypedLine, module: str, accepts: Accepts) -> Iterable[str]:
    """Return completions of the last argument, including some that do not begin with what is typed."""
    path_flags = _PATH_FLAGS if accepts.settings != "no" else {}
    key, has_value, value = line.last.partition("=")
    if line.previous in path_flags:
        return _paths(line.last, path_flags[line.previous])
    if has_value and key in path_flags:
        return [f"{key}={path}" for path in _paths(value, path_flags[key])]
    if line.last.startswith("-"):
        return [flag for flag in (*path_flags, *accepts.flags, "--help") if flag not in line.flags]
    own = list(accepts.own(line) if accepts.own else _own_keys(module))
    find = _OWN_VALUES.get(key, _suite_values if accepts.own is _benchmark_keys else None)
    if has_value and key in own and find:
        before = value[: max(value.rfind(","), value.rfind("[")) + 1]
        given = {word.strip() for word in before.strip("[").split(",")}
        return [f"{key}={before}{word}" for word in find(line) if word not in given]
    if has_value:
        return _with_values(line, key, value) if path_flags or key in (*own, "run", "output_root") else []
    keys = [f"{name}=" for name in own if name not in line.overrides]
    settings = [*(f"{name}=" for name in _names(line)), *_beginnings(line)] if accepts.settings == "listed" else []
    return [*(word for word in accepts.words(line) if word not in line.lone), *keys, *settings]


def _own_keys(module: str) -> Iterable[str]:
    found: Iterable[str] = vars(import_module(f"runner.commands.{module}")).get("OWN", ())
    return found


def _keys(*names: str) -> Callable[[TypedLine], Iterable[str]]:
    return lambda line: names


def _keys_to_explain(line: TypedLine) -> list[str]:
    """Return a key to explain, or overrides after it."""
    return [f"{name}{'=' if line.lone else ''}" for name in _names(line)] + _beginnings(line)


def _run_or_sweep(line: TypedLine) -> Iterable[str]:
    return [*_run_names(line), *([] if line.lone else _sweeps(line))]


def _runs_and_sweeps(line: TypedLine) -> Iterable[str]:
    return ["last", *_runs(line), *_sweeps(line)]


def _files_to_import(line: TypedLine) -> Iterable[str]:
    return (
        [] if line.lone else [path for ending in (".pt", ".pth", ".bin", ".ckpt") for path in _paths(line.last, ending)]
    )


def _sweep_keys(line: TypedLine) -> Iterable[str]:
    from runner.commands.sweep_arguments import GRID

    return GRID if line.is_sweep else ()


def _benchmark_keys(line: TypedLine) -> Iterable[str]:
    from runner.commands.benchmark import OWN

    return (*OWN, *_suite(line).options)


def _benchmark_words(line: TypedLine) -> Iterable[str]:
    return (*_suite(line).words, *_techniques(line))


def _techniques(line: TypedLine) -> list[str]:
    from runner.tools.measure.technique import files_of

    return list(files_of(line.config_dir)) if "techniques" in _suite(line).options else []


def _suite(line: TypedLine) -> SuiteDeclaration:
    from runner.commands.benchmark import OWN

    return SUITES.get(line.overrides.get("suite", OWN["suite"]), SuiteDeclaration(""))


def _suite_values(line: TypedLine) -> list[str]:
    """Return the words in the default value of an option of the suite, such as none, memory and device."""
    default = _suite(line).options.get(line.last.partition("=")[0], "")
    return [word for word in default.split(",") if word and not word.isdigit()]


def _checks(line: TypedLine) -> Iterable[str]:
    from runner.tools.doctor.checks import CHECKS

    return CHECKS


def _profiler_values(line: TypedLine) -> Iterable[str]:
    signature = function_of("profiler", "trace")
    return _literals(signature.keys[line.last.partition("=")[0]].type) if signature else ()


def _shells(line: TypedLine) -> Iterable[str]:
    from runner.commands.completion import SCRIPTS

    return () if line.lone else SCRIPTS


def _checkpoints_of(line: TypedLine) -> list[str]:
    """Return the values of `checkpoint=` in a command that uses a checkpoint of a run."""
    from runner.base.errors import AccelRunError
    from runner.durable.checkpoint import newest_first
    from runner.durable.checkpoint_choice import BEST, LAST, number_in
    from runner.durable.directory import RunDirectory

    numbers: list[str] = []
    with suppress(AccelRunError):
        run = RunDirectory.find(line.root, line.overrides.get("run", next(iter(line.lone), "last")))
        numbers = [str(number_in(path)) for path in newest_first(run.checkpoints)]
    return [BEST, LAST, *numbers]


# ---------------------------------------------------------------- keys and values


def _names(line: TypedLine) -> list[str]:
    """Return the groups and keys that complete `last`; dotted keys only after a dot."""
    plus = "+" if line.last.startswith("+") else ""
    typed = line.last.lstrip("+")
    names = [*GROUPS, *MAIN_KEYS, *line.keys(typed)]
    return [plus + name for name in names if ("." in typed or "." not in name) and name not in line.overrides]


def _beginnings(line: TypedLine) -> list[str]:
    """Return prefixes such as `optimizer.` for dotted keys."""
    typed = line.last.lstrip("+")
    groups = {name.split(".")[0] for name in line.keys(typed) if "." in name} if "." not in typed else set()
    plus = "+" if line.last.startswith("+") else ""
    return [f"{plus}{group}." for group in sorted(groups)]


def _with_values(line: TypedLine, key: str, value: str) -> list[str]:
    """Return `key=value` for every known value; in a sweep for the last item of a comma list."""
    lead = ""
    if line.is_sweep and "," in value:
        lead, value = value.rpartition(",")[0] + ",", value.rpartition(",")[2]
    return [f"{key}={lead}{candidate}" for candidate in _values_of(line, key.lstrip("+"), value)]


def _values_of(line: TypedLine, key: str, value: str) -> Iterable[str]:
    if key == "checkpoint" and line.command in _USING_A_CHECKPOINT:
        return _checkpoints_of(line)
    if key in GROUPS:
        return _plain(options_of(key, line.config_dir, line.task_file))
    if key == "run":
        if line.command == "search" or line.is_sweep:
            return _sweeps(line)
        if line.command in ("train", "both"):  # the name of a trial would start another run
            return _runs(line, in_sweeps=False)
        return ["last", *_runs(line)]
    if key == "resume":
        return ["auto", "fresh", *_runs(line)]
    if key in _PATH_KEYS:
        return [*(_runs(line) if key == "weights" else ()), *_paths(value, _PATH_KEYS[key])]
    known = line.keys(key)
    return _literals(known[key].type) if key in known else []


def _literals(annotation: Any) -> list[str]:
    """Return the values of an enumerable type, as typed on the command line."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return ["true", "false"]
    if annotation in (None, type(None)):
        return ["null"]
    if origin is typing.Literal:
        return [_typed(value) for value in arguments]
    if origin is typing.Annotated:
        examples = [word for item in arguments[1:] if isinstance(item, Matches) for word in _examples(item)]
        return examples or _literals(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in _literals(argument)]
    return []


def _examples(pattern: Matches) -> list[str]:
    """Return the example values of a pattern, such as `cuda` but not `cuda:N`."""
    return [word for word in re.split(r", | or ", pattern.description) if pattern.allows(word)]


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


# ---------------------------------------------------------------- names of files and runs


def _run_names(line: TypedLine) -> list[str]:
    """Return the names of runs, unless one is given already."""
    return [] if line.lone or "run" in line.overrides else ["last", *_runs(line)]


def _runs(line: TypedLine, *, in_sweeps: bool = True) -> list[str]:
    from runner.durable.directory import runs

    return _plain(path.name for path in runs(line.root, in_sweeps=in_sweeps))


def _sweeps(line: TypedLine) -> list[str]:
    from runner.durable.directory import sweeps

    return _plain(path.name for path in sweeps(line.root))


def _plain(names: Iterable[str]) -> list[str]:
    """Return the names that are safe in a shell; an untrusted folder may contain others."""
    return [name for name in names if _PLAIN.fullmatch(name)]


def _paths(typed: str, suffix: str) -> list[str]:
    """Return folders, with a slash at the end, and files of this suffix ("": all, "/": none) that begin as typed."""
    folder, _, name = typed.rpartition("/")
    base = Path(f"{folder}/" if "/" in typed else ".").expanduser()
    lead = f"{folder}/" if "/" in typed else ""
    found: list[str] = []
    if not base.is_dir():
        return found
    for path in sorted(base.iterdir()):
        if not _PLAIN.fullmatch(path.name.removeprefix(".")):
            continue
        if path.name.startswith(name) and (name or not path.name.startswith(".")):
            if path.is_dir():
                found.append(f"{lead}{path.name}/")
            elif path.name.endswith(suffix):
                found.append(f"{lead}{path.name}")
    return found


def _yaml(name: str, config_dir: Path | None) -> str:
    """Return the text of a configuration file, the user's before the built-in one; empty if there is none."""
    for folder in ([config_dir] if config_dir else []) + [shipped("conf")]:
        with suppress(OSError):
            return (folder / f"{name}.yaml").read_text(encoding="utf-8")
    return ""


def _unquoted(word: str) -> str:
    """Return a word without shell quoting; shells pass it as typed."""
    if not set(word) & set("\\\"'"):
        return word
    try:
        return (shlex.split(word) or [""])[0]
    except ValueError:  # a quote that is still open
        return word.replace('"', "").replace("'", "")


def _beginning_with(typed: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(typed)]


_PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*")  # a name without special meaning in a shell
_UNQUOTED = re.compile(r"[\w./=:,+-]*")  # allowed characters in the completed part
# The defaults list, matched as text: importing a YAML parser would take longer than all the rest.
_DEFAULT = re.compile(r"^ *- (\w+): [\"']?([\w-]+)", re.MULTILINE)
_OVERRIDE = re.compile(r"^ *- override /(\w+): [\"']?([\w-]+)", re.MULTILINE)
_PATH_KEYS = {"output_root": "/", "data.path": "", "weights": ".safetensors"}
_USING_A_CHECKPOINT = ("inference", "infer", "evaluate", "export", "resume")
_USUAL_KEYS = ("checkpoint", "device", "output_root")
_PATH_FLAGS = {"--task": ".py", "--config-dir": "/"}
# key of a command -> its values; the other values follow from the types of the settings
_OWN_VALUES: Mapping[str, Callable[[TypedLine], Iterable[str]]] = {
    "apply": lambda line: ("true", "false"),
    "checks": _checks,
    "folder": lambda line: _paths(line.value, "/"),
    "format": lambda line: ("safetensors", "program", "onnx"),
    "goal": lambda line: ("min", "max"),
    "log_dir": lambda line: _paths(line.value, "/"),
    "metric": lambda line: ("val/loss",),
    "modes": lambda _: ("all", *MODES),
    "out": lambda line: _paths(line.value, ".html"),
    "record_shapes": _profiler_values,
    "retry": lambda line: ("true", "false"),
    "sort_by": _profiler_values,
    "split": lambda line: ("train", "val", "test"),
    "suite": lambda _: SUITES,
    "techniques": lambda line: ("all", *_techniques(line)),
    "together": lambda line: ("auto",),
    "with_stack": _profiler_values,
}
# command, or a command and its first argument -> what it accepts
_COMMANDS: Mapping[str, Accepts] = {
    "train": Accepts(own=_sweep_keys, flags=("-m",), settings="listed"),
    "search": Accepts(settings="listed"),
    "both": Accepts(settings="listed"),
    "plan": Accepts(flags=("--probe",), settings="listed"),
    "profile": Accepts(settings="listed"),
    "explain": Accepts(_keys_to_explain, settings="values"),
    "inference": Accepts(_run_names, lambda line: ("run", *_USUAL_KEYS, *line.inference_keys()), settings="values"),
    "resume": Accepts(_run_names, settings="listed"),
    "runs": Accepts(flags=("--json",)),
    "status": Accepts(_run_or_sweep, _keys("output_root")),
    "report": Accepts(_runs_and_sweeps, _keys("out", "output_root", "every_s"), ("--watch",)),
    "evaluate": Accepts(_run_names, _keys("split", *_USUAL_KEYS, "weights"), ("--json",), "values"),
    "export": Accepts(_run_names, _keys("format", *_USUAL_KEYS), settings="values"),
    "monitor": Accepts(flags=("--once", "--json")),
    "advise": Accepts(_run_names, flags=("--json",), settings="listed"),
    "tune": Accepts(flags=("--json",), settings="listed"),
    "benchmark": Accepts(_benchmark_words, _benchmark_keys, ("--json",), "listed"),
    "doctor": Accepts(lambda line: ("first_contact",), flags=("--json",)),
    "doctor first_contact": Accepts(flags=("--json",), settings="listed"),
    "import": Accepts(_files_to_import, lambda line: ("key",) if line.lone else ()),
    "completion": Accepts(_shells),
    "new": Accepts(),
}
