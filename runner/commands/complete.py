"""`accel-run complete -- WORDS...`: shell completion. Reads only the files it needs, because shells call it often."""

from __future__ import annotations

import ast
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.base.paths import PACKAGE, shipped
from runner.base.values import Matches
from runner.config.options import AXES, GROUPS, function_of, options_of, task_source
from runner.config.own_options import own_hooks
from runner.config.own_tables import HOOK, keys_of_hook
from runner.config.schema import Key, Signature, read_functions, settings_keys
from runner.config.settings import MAIN_KEYS, Settings

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
    offer = _COMMANDS.get(COMMANDS.get(line.command, ("", ""))[0])
    found = dict.fromkeys(_beginning_with(last, offer(line))) if offer else ()
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


# ---------------------------------------------------------------- one function per command


def _settings_or_flags(line: TypedLine, *more: str) -> list[str]:
    """Return flags, files after them, keys, or values after `key=`."""
    if line.previous in _PATH_FLAGS:
        return _paths(line.last, _PATH_FLAGS[line.previous])
    key, has_value, value = line.last.partition("=")
    if has_value and key in _PATH_FLAGS:
        return [f"{key}={path}" for path in _paths(value, _PATH_FLAGS[key])]
    if line.last.startswith("-"):
        return [*_PATH_FLAGS, *more, "--help"]
    return _with_values(line, key, value) if has_value else [f"{key}=" for key in _names(line)] + _beginnings(line)


def _plan(line: TypedLine) -> list[str]:
    return _settings_or_flags(line, "--probe")


def _train(line: TypedLine) -> list[str]:
    from runner.commands.sweep_arguments import GRID

    return _of_sweep(line, GRID) if {"-m", "--multirun"} & line.flags.keys() else _settings_or_flags(line, "-m")


def _search(line: TypedLine) -> list[str]:
    from runner.commands.search import OWN

    return _of_sweep(line, OWN)


def _of_sweep(line: TypedLine, own: Mapping[str, str]) -> list[str]:
    """Return settings and the options of a sweep."""
    key, has_value, _ = line.last.partition("=")
    if has_value and key in own:
        words = {"together": ("auto",), "goal": ("min", "max"), "retry": ("true", "false"), "metric": ("val/loss",)}
        return [f"{key}={word}" for word in words.get(key, ())]
    names = [] if has_value or line.last.startswith("-") else [name for name in own if name not in line.overrides]
    return [*(f"{name}=" for name in names), *_settings_or_flags(line)]


def _profile(line: TypedLine) -> list[str]:
    """Return the completions of `train`, and the keys of the profiler without their group."""
    from runner.commands.profile import OWN

    key, has_value, _ = line.last.partition("=")
    if has_value and key in OWN:
        signature = function_of("profiler", "trace")
        return [f"{key}={word}" for word in _literals(signature.keys[key].type)] if signature else []
    return [*(f"{name}=" for name in OWN if not line.last.startswith("-")), *_settings_or_flags(line)]


def _explain(line: TypedLine) -> list[str]:
    if line.lone or line.last.startswith("-") or "=" in line.last or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line)
    return _names(line) + _beginnings(line)


def _inference(line: TypedLine) -> list[str]:
    if line.last.startswith("-") or "=" in line.last or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line)
    keys = [
        f"{key}="
        for key in ("run", "checkpoint", "device", "output_root", *line.inference_keys())
        if key not in line.overrides
    ]
    return [*_run_names(line), *keys]


def _resume(line: TypedLine) -> list[str]:
    return [*([] if "=" in line.last or line.last.startswith("-") else _run_names(line)), *_settings_or_flags(line)]


def _evaluate(line: TypedLine) -> list[str]:
    key, has_value, _ = line.last.partition("=")
    if key == "split" and has_value:
        return ["split=train", "split=val", "split=test"]
    if line.last.startswith("-") or has_value or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line, "--json")
    keys = ("split", "checkpoint", "device", "output_root", "weights")
    return [*_run_names(line), *(f"{key}=" for key in keys if key not in line.overrides)]


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


def _export(line: TypedLine) -> list[str]:
    key, has_value, value = line.last.partition("=")
    if key == "format" and has_value:
        before = value[: value.rfind(",") + 1]
        return [f"format={before}{name}" for name in ("safetensors", "program", "onnx")]
    if line.last.startswith("-") or has_value or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line)
    return [
        *_run_names(line),
        *(f"{key}=" for key in ("format", "checkpoint", "device", "output_root") if key not in line.overrides),
    ]


def _list_of_runs(line: TypedLine) -> list[str]:
    if line.last.startswith("-"):
        return ["--json", "--help"]
    return _with_values(line, "output_root", line.last.partition("=")[2]) if "=" in line.last else ["output_root="]


def _report(line: TypedLine) -> list[str]:
    key, has_value, value = line.last.partition("=")
    if line.last.startswith("-"):
        return ["--help"]
    if has_value:
        folders = {"benchmarks": "/", "out": ".html"}
        return (
            [f"{key}={path}" for path in _paths(value, folders[key])]
            if key in folders
            else _with_values(line, key, value)
        )
    named = [name for name in [*_run_names(line, several=True), *_sweeps(line)] if name not in line.lone]
    return [*named, *(f"{key}=" for key in ("out", "benchmarks", "output_root") if key not in line.overrides)]


def _status(line: TypedLine) -> list[str]:
    key, has_value, value = line.last.partition("=")
    if line.last.startswith("-"):
        return ["--help"]
    if has_value:
        return _with_values(line, key, value)
    return [*_run_names(line), *([] if line.lone else _sweeps(line)), "output_root="]


def _monitor(line: TypedLine) -> list[str]:
    from runner.commands.monitor import FLAGS, MonitorOptions

    key, has_value, value = line.last.partition("=")
    if line.last.startswith("-"):
        return [*(flag for flag in FLAGS if flag not in line.flags), "--help"]
    if key == "log_dir" and has_value:
        return [f"log_dir={path}" for path in _paths(value, "/")]
    if has_value:
        return _with_values(line, key, value) if key in ("run", "output_root") else []
    return [f"{name}=" for name in settings_keys(MonitorOptions) if name not in line.overrides]


def _advise(line: TypedLine) -> list[str]:
    if line.last.startswith("apply="):
        return ["apply=true", "apply=false"]
    if line.last.startswith("-") or "=" in line.last or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line, "--json")
    own = [f"{key}=" for key in ("budget_s", "apply", "profile") if key not in line.overrides]
    return [*_run_names(line), *own, *_settings_or_flags(line)]


def _benchmark(line: TypedLine) -> list[str]:
    from runner.commands.benchmark import OWN
    from runner.tools.measure.suites import SUITES
    from runner.tools.measure.technique import files_of

    suite = SUITES.get(line.overrides.get("suite", OWN["suite"]))
    literals = _literals_of(suite[0]) if suite else {}
    options: Mapping[str, str] = literals.get("OPTIONS", {})
    is_ladder = "techniques" in options
    names = list(files_of(line.config_dir)) if is_ladder else []
    key, has_value, value = line.last.partition("=")
    if has_value and key == "folder":
        return [f"{key}={path}" for path in _paths(value, "/")]
    if has_value and key in {**OWN, **options}:
        known = {"suite": [*SUITES], "techniques": ["all", *names], "modes": ["all", *literals.get("MODES", ())]}
        before = value[: max(value.rfind(","), value.rfind("[")) + 1]
        there = {word.strip() for word in before.strip("[").split(",")}
        words = known.get(key, [word for word in options.get(key, "").split(",") if not word.isdigit()])
        return [f"{key}={before}{word}" for word in words if word and word not in there]
    if line.last.startswith("-") or has_value or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line, "--json")
    own = [f"{key}=" for key in (*OWN, *options) if key not in line.overrides]
    words = [*literals.get("WORDS", ()), *names]
    return [*(word for word in words if word not in line.lone), *own, *_settings_or_flags(line)]


def _literals_of(suite: str) -> dict[str, Any]:
    """Return the top-level literals of a suite's module, without the cost of importing it."""
    source = (PACKAGE / "tools" / "measure" / "suites" / f"{suite}.py").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                with suppress(ValueError, TypeError):
                    found[name] = ast.literal_eval(value) if value else None
    return found


def _tune(line: TypedLine) -> list[str]:
    from runner.commands.tune import OWN

    if line.last.startswith("-") or "=" in line.last or line.previous in _PATH_FLAGS:
        return _settings_or_flags(line, "--json")
    return [*(f"{key}=" for key in OWN if key not in line.overrides), *_settings_or_flags(line)]


def _doctor(line: TypedLine) -> list[str]:
    from runner.commands.doctor import CONTACT

    if CONTACT in line.lone:
        return _settings_or_flags(line, "--json")
    if line.last.startswith("-"):
        return ["--quick", "--json", "--help"]
    key, has_value, value = line.last.partition("=")
    if key == "checks" and has_value:
        from runner.tools.doctor.checks import CHECKS

        before = value[: max(value.rfind(","), value.rfind("[")) + 1]
        return [f"checks={before}{name}" for name in CHECKS]
    return _with_values(line, key, value) if has_value else [CONTACT, "checks=", "device=", "output_root="]


def _new(line: TypedLine) -> list[str]:
    return ["--help"] if line.last.startswith("-") else []


def _import(line: TypedLine) -> list[str]:
    if line.last.startswith("-"):
        return ["--help"]
    return ["key="] if line.lone else [path for ending in _FOREIGN for path in _paths(line.last, ending)]


def _completion(line: TypedLine) -> list[str]:
    from runner.commands.completion import SCRIPTS

    return ["--help"] if line.last.startswith("-") else [] if line.lone else list(SCRIPTS)


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
    if {"-m", "--multirun"} & line.flags.keys() and "," in value:
        lead, value = value.rpartition(",")[0] + ",", value.rpartition(",")[2]
    return [f"{key}={lead}{candidate}" for candidate in _values_of(line, key.lstrip("+"), value)]


def _values_of(line: TypedLine, key: str, value: str) -> Iterable[str]:
    if key == "checkpoint" and line.command in _USING_A_CHECKPOINT:
        return _checkpoints_of(line)
    if key in GROUPS:
        return _plain(options_of(key, line.config_dir, line.task_file))
    if key == "run":
        if line.command == "search" or {"-m", "--multirun"} & line.flags.keys():
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


def _run_names(line: TypedLine, *, several: bool = False) -> list[str]:
    """Return run names, unless one is given already and only one is allowed."""
    return ["last", *_runs(line)] if several or not (line.lone or "run" in line.overrides) else []


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
_FOREIGN = (".pt", ".pth", ".bin", ".ckpt")
_PATH_FLAGS = {"--task": ".py", "--config-dir": "/"}
# module of the command -> completion function
_COMMANDS: Mapping[str, Callable[[TypedLine], list[str]]] = {
    "train": _train,
    "search": _search,
    "both": _settings_or_flags,
    "plan": _plan,
    "profile": _profile,
    "explain": _explain,
    "inference": _inference,
    "resume": _resume,
    "runs": _list_of_runs,
    "status": _status,
    "report": _report,
    "evaluate_run": _evaluate,
    "export": _export,
    "monitor": _monitor,
    "advise": _advise,
    "tune": _tune,
    "benchmark": _benchmark,
    "doctor": _doctor,
    "new": _new,
    "import_": _import,
    "completion": _completion,
}
