"""Hydra's only door: from the words on a command line to one checked, frozen Configuration.

Hydra composes the groups; the values on the command line are then set and everything is checked against the
signatures of the axis functions (schema.py). All problems are found in one go, and torch is not imported.
"""

from __future__ import annotations

import ast
import copy
import errno
import io
import re
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from runner.base.aliases import (
    FOREIGN_KEYS,
    PRECISION_NAMES,
    fix_of_key,
    fix_of_option,
    fix_of_value,
    fix_of_word,
    other_ways,
    own_names,
)
from runner.base.division import divide
from runner.base.errors import ConfigError, InputMissing, Problem, readable
from runner.base.guarded_yaml import MAX_DEPTH, read_guarded, refuse_calls, refuse_growth
from runner.base.paths import PACKAGE, shipped
from runner.base.phases import GROUPS as PHASE_GROUPS
from runner.base.phases import INFERENCE, LENGTHS, Declared, is_for, read_phases, values_of
from runner.base.phases import keys_of as phase_keys
from runner.base.schema import (
    MAX_SHOWN,
    REQUIRED,
    Expression,
    Key,
    Signature,
    choices_of,
    defaults,
    did_you_mean,
    fault,
    nearest,
    read_functions,
    read_module,
    settings_keys,
)
from runner.base.secret import looks_random, refuse_secrets, secret_problems
from runner.base.settings import EarlyStoppingSettings, EvaluateSettings, Settings

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

# group -> the file whose functions are its options
AXES: Mapping[str, str] = {
    "precision": "axes/precision.py",
    "parallelism": "axes/parallelism.py",
    "dataloader": "axes/dataloader.py",
    "prefetch": "axes/prefetch.py",
    "optimizer": "axes/optimizer.py",
    "scheduler": "axes/scheduler.py",
    "averaging": "engine/hooks/averaging.py",
    "compile": "axes/compile.py",
    "attention": "axes/attention.py",
    "memory": "axes/memory.py",
    "backend": "axes/backend.py",
    "checkpoint": "engine/save_policy.py",
    "watchdog": "engine/watchdog.py",
    "tracker": "observe/trackers.py",
    "monitor": "observe/monitor_thread.py",
    "profiler": "observe/profiler.py",
    "benchmark": "observe/step_times.py",
    "launcher": "launch/launcher.py",
}
GROUPS = (*AXES, "task", "hardware")
_SOURCES = {group: PACKAGE / file for group, file in AXES.items()}
SHOWN_BY = "accel-run plan shows every key"
MAX_WORD = 20_000  # characters of a word of the command line
MAX_UNREAD = 200  # problems after which the rest of the words are not looked at: something else went wrong
MAX_HINTS = 50  # unknown keys for which a near one is searched: more are another kind of mistake


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line, before it is understood.

    own_keys  of the command, besides settings: a slip may have meant one of them
    """

    overrides: tuple[str, ...] = ()
    task_file: Path | None = None
    config_dir: Path | None = None
    own_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One option of a group: the name chosen, the function behind it, and its keys."""

    name: str
    function: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class PhaseSettings:
    """What one phase is: its place in the run, and its own values of the settings that a phase may have.

    trains  names or prefixes of the parameters that are trained; None: all that want a gradient
    needs   phases that must be finished before
    """

    name: str
    kind: str
    needs: tuple[str, ...]
    trains: list[str] | None
    updates: int | None
    epochs: float | None
    global_batch_size: int
    micro_batch_size: int | Literal["auto"]
    max_grad_norm: float | None
    evaluate: EvaluateSettings
    early_stopping: EarlyStoppingSettings
    optimizer: Choice
    scheduler: Choice


@dataclass(frozen=True)
class Configuration:
    """Everything the user fixed, checked; after this nobody sees Hydra.

    choices  group -> choice, for every group but hardware
    phases   all phases of the task, in order; `settings.phases` says which of them run
    own_keys keys of the phases, empty where the task declares none and the one phase has the settings of the run
    hardware facts of the chosen profile; its name is `profile`
    for_auto keys of the task for the option that the plan chooses in the place of `auto`, such as precision.keep_fp32
    sources  key or group -> who set it: "command line", "profile t4", "task gpt", "config folder"; no entry: a default
    notes    what the user should know, such as shadowed files
    """

    settings: Settings
    choices: Mapping[str, Choice]
    inference: Mapping[str, Any]
    profile: str
    hardware: Mapping[str, Any]
    request: Request
    for_auto: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    phases: tuple[PhaseSettings, ...] = ()
    own_keys: Mapping[str, Any] = field(default_factory=dict)

    def asked_by_name(self, key: str) -> bool:
        """Tell whether the user typed this key or group, so that it must not be changed silently."""
        return self.sources.get(key) == "command line"

    def flat(self) -> dict[str, Any]:
        """Return every key with its value; a group's own key holds the name of the option."""
        found: dict[str, Any] = dict(_flatten(_as_mapping(self.settings)))
        for group, choice in self.choices.items():
            found[group] = choice.name
            found.update({f"{group}.{key}": value for key, value in choice.options.items()})
        found.update(self.own_keys)
        found["hardware"] = self.profile
        found.update({f"inference.{key}": value for key, value in self.inference.items()})
        return found


def compose(request: Request) -> Configuration:
    """Return the checked configuration of a command line.

    Raises ConfigError with all problems, InputMissing if the task file or the config folder does not exist, and
    SecurityRefusal for what would call something or leave the folder. A secret is refused before all else, alone, so
    that no other message repeats it.
    """
    refuse_secrets(request.overrides, partial(names_of_options, request.task_file, request.config_dir))
    _require_paths(request)
    parsed, problems = parse(request)
    groups, values = _split(parsed, request, problems)
    composed = _compose_groups(groups, request, problems)
    notes = list(_shadows(request.config_dir))
    task = _read_task(composed, values, request, problems)
    of_task = _options_of_task(task, groups, composed, request, problems)
    if of_task:
        composed = _compose_groups({**groups, **of_task}, request, problems)
    said = {key for key, _, _ in values} | set(groups)
    schema = _schema(composed, values, task, said, request, problems, notes)
    tree = _set_values(composed, values, schema, said, problems)
    problems += _check(tree, schema, already={problem.where for problem in problems})
    is_alone = composed["hydra_choices"]["parallelism"] == "single"  # what ranks can do is the plan's to say
    problems += _contradictions(tree, schema, is_alone=is_alone)
    if problems:
        raise ConfigError(problems)
    sources = _sources(groups, of_task, values, composed, schema, request)
    return _freeze(tree, composed, schema, sources, request, tuple(notes))


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the names of a group's options, the user's own included."""
    own = (file.stem for file in (config_dir / group).glob("*.yaml")) if config_dir else ()
    return sorted({*_names_shipped(group), *own})


def options_of_groups() -> dict[str, list[str]]:
    """Return every group with the names of its shipped options."""
    return {group: options_of(group) for group in GROUPS}


def names_of_options(task_file: Path | None = None, config_dir: Path | None = None) -> set[str]:
    """Return the name of every option, and every choice of a key: of the settings, the options and the tasks."""
    found = {file.stem for file in shipped("conf").rglob("*.yaml")}
    found.update(*(options_of(group, config_dir) for group in GROUPS))
    keys = [*settings_keys(Settings).values()]
    for file in {*_SOURCES.values(), *(task_source(task.name, None) for task in _shipped_tasks()), task_file}:
        with suppress(OSError, SyntaxError, ValueError):  # errors in a task's file are reported when it is read
            functions = read_functions(file).values() if file else ()
            keys += [key for function in functions for key in function.keys.values()]
    return found.union(*(choices_of(key.type) for key in keys))


@cache
def _names_shipped(group: str) -> tuple[str, ...]:
    return tuple(file.stem for file in (shipped("conf") / group).glob("*.yaml"))


def function_of(group: str, option: str) -> Signature | None:
    """Return the signature behind an option, or None where it has no function (such as `auto`)."""
    return read_functions(_SOURCES[group]).get(option.replace("-", "_"))


def task_source(name: str, task_file: Path | None) -> Path:
    """Return the Python file that defines the task."""
    return task_file if task_file else shipped("tasks") / name / "task.py"


def _shipped_tasks() -> list[Path]:
    return sorted(file.parent for file in shipped("tasks").glob("*/task.py"))


def to_yaml(configuration: Configuration) -> str:
    """Return the resolved configuration as YAML, for people and for the run directory."""
    from omegaconf import OmegaConf

    tree = dict(_as_mapping(configuration.settings))
    for group, choice in configuration.choices.items():
        tree[group] = {"option": choice.name, **choice.options}
    for key, value in configuration.own_keys.items():
        _, phase, name = key.split(".", 2)
        tree.setdefault("phase", {}).setdefault(phase, {})[name] = value
    tree["inference"] = dict(configuration.inference)
    tree["hardware"] = {"profile": configuration.profile, **configuration.hardware}
    return str(OmegaConf.to_yaml(OmegaConf.create(tree)))


def merge_overrides(old: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    """Return the old overrides with those replaced whose key is given anew, and with it all that stands under it."""
    new = tuple(new)
    roots = tuple(f"{_key_of(word)}." for word in new)
    return (*(word for word in old if not f"{_key_of(word)}.".startswith(roots)), *new)


def word_of(key: str, text: str) -> str:
    """Return the word of a command line that gives the key exactly this text."""
    if re.fullmatch(r"[\w./@:+-]+", text, re.ASCII):
        return f"{key}={text}"
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return f'{key}="{escaped}"'


# ---------------------------------------------------------------- the words


def _require_paths(request: Request) -> None:
    if request.task_file and not request.task_file.is_file():
        file = request.task_file.with_suffix(".py")
        fix = f"use --task {file}" if file.is_file() else f"make it: accel-run new {file}"
        raise InputMissing(f"{request.task_file} does not exist", where="--task", fix=fix)
    if request.config_dir and not request.config_dir.is_dir():
        raise InputMissing(
            f"{request.config_dir} is not a folder", where="--config-dir", fix="name the folder that holds your files"
        )


def parse(request: Request, *, sweeps: bool = False) -> tuple[list[Override], list[Problem]]:
    """Read each word with Hydra's grammar; a word that is none becomes a problem with the way to write it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []
    for word in _joined(request, problems):
        if len(problems) >= MAX_UNREAD:
            what = "and all after it must wait, not looked at: too much before it cannot be read"
            problems.append(Problem(what, word, "fix that first; put many settings into a file"))
            break
        if len(word) > MAX_WORD or _depth(word) > MAX_DEPTH:  # the grammar would take seconds to say no
            what = f"must have at most {MAX_WORD:,} characters and be nested at most {MAX_DEPTH} deep"
            problems.append(Problem(f"{what}, but has {len(word):,}", word, "put long texts into a file"))
            continue
        try:
            override = _read_word(parser, word)
        except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
            if _HALF_A_LIST.search(word):
                what = "has nothing where a value of its list should be"
                problems.append(Problem(what, word, "use key=1,2, or choice(1,2)"))
                continue
            near = _nearly(word, request.own_keys) if len(problems) < MAX_HINTS else ""
            problems.append(Problem(f"cannot be read: {_why_unread(word, error)}", word, near or _readable_word(word)))
            continue
        refuse_calls(override.key_or_group, None, word)
        if "${" in word.partition("=")[2]:
            fix = "write the value; a shell replaces $NAME outside of single quotes"
            problems.append(Problem("${...} can stand in files only", word, fix))
            continue
        if override.is_sweep_override() and not sweeps:
            if said := _no_sweep(word, request.own_keys):
                problems.append(Problem("is not one value", word, said))
                continue
            is_open = override.value_type is not None and override.value_type.name == "INTERVAL_SWEEP"
            means = "find the best of them with accel-run search" if is_open else "run them all with accel-run train -m"
            quoting = f", or quote it: '{_quoted(word)}'" if _may_be_quoted(word) else ""
            problems.append(Problem("is a sweep over several values", word, f"{means}{quoting}"))
            continue
        parsed.append(override)
    return parsed, problems


def _no_sweep(word: str, own_keys: tuple[str, ...]) -> str:
    """Return what to say instead of values with commas that are one value, such as gpus=0,1 or betas=0.9,0.95."""
    key, _, value = word.partition("=")
    name = key.lstrip("+")
    if name in own_keys:
        return ""
    if name not in GROUPS and name not in _all_keys():
        return _meant(name, value, own_keys)
    if re.fullmatch(r"\d{1,3}(,\d{3})+", value) or name == "device":  # 1,000
        said = fix_of_value(name, value) or f"use {_accepted(name, value)}"
        return said if "," not in said or name == "device" else ""
    is_list = name in _all_keys() and _is_accepted(f"{name}=[{value}]")
    return f"use {name}=[{value}]" if is_list else ""


def _why_unread(word: str, error: BaseException) -> str:
    """Return in plain words why a word is none, not in those of a grammar."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    key, has_value, value = word.partition("=")
    if not has_value or not key.strip("+~"):
        return "a setting is written key=value"
    if not re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w./@-]*", key):
        return "a key has letters, digits, _ and dots"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            more = opening if value.count(opening) > value.count(closing) else closing
            return f"a {more} has no partner"
    for quote in ("'", '"'):
        if value.count(quote) % 2:
            return f"a {quote} has no partner"
    if value.startswith("("):
        return "lists are written with [ and ]"
    if len(value) > 4000 and value.strip("-").isdigit():
        return "the number has too many digits"
    special = sorted(set(value) & set("(){}[]:,;&|<>?!*^`\\\"'#= "))
    return (
        f"the value has {' '.join(special)}, which have a meaning"
        if special
        else "the value is not text, number or list"
    )


def _read_word(parser: OverridesParser, word: str) -> Override:
    """Return what the word says. Letters beyond ASCII, as in a path, need no quotes, which Hydra's grammar wants."""
    key, _, value = word.partition("=")
    if value.isascii() or set(value) & set("'\"[]{}(),$"):
        return parser.parse_override(word)
    override = parser.parse_override(word_of(key, value))
    override.input_line = word
    return override


_HALF_A_LIST = re.compile(r"=\s*,|,\s*,|,\s*$|=\s*(choice|range|interval|glob)\(\s*\)$")


def _readable_word(word: str) -> str:
    """Return what to say instead of a word that cannot be read."""
    if items := re.fullmatch(r"([\w.]+)=\(([\w.,+-]*)\)", word):  # a tuple of Python
        return f"use {items[1]}=[{items[2]}]"
    key, _, value = word.partition("=")
    if key in _all_keys():
        listed = f"{key}=[{value.strip('[](){} ')}]"
        if _is_accepted(listed):
            return f"use {listed}"
    if between := re.fullmatch(r"[+]{0,2}([\w.]+)=(\w*log\w*|uniform)\((.*)\)", word):
        kind = "interval" if between[2] == "uniform" else "log"
        return f"accel-run search '{between[1]}={kind}({between[3]})' finds the best between two numbers"
    if _may_be_quoted(word):
        return f"quote it: '{_quoted(word)}'"
    text = value.strip("\"'")
    return f"use {_accepted(key, text)}"


def _may_be_quoted(word: str) -> bool:
    """Tell whether the value may be a text: that of a group or of a number may not."""
    key = key_of(word)
    return _is_accepted(_quoted(word)) if key in GROUPS or key in _all_keys() else True


def _depth(word: str) -> int:
    """Return how deep brackets are nested, those of a quoted text included."""
    depth = deepest = 0
    for char in word:
        depth += (char in "[{(") - (char in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _joined(request: Request, problems: list[Problem]) -> Iterator[str]:
    """Yield words of the form key=value; explain `--lr 0.1`, `lr = 3` and lone words."""

    def proper(key: str, value: str) -> str:
        return proper_word(key, value, request.own_keys) if len(problems) < MAX_HINTS else SHOWN_BY

    rest = list(request.overrides)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            key, has_value, value = word.lstrip("-").partition("=")
            if not has_value and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
                while _NUMBER.fullmatch(value.rpartition(",")[2]) and rest and _NUMBER.fullmatch(rest[0]):
                    value += f",{rest.pop(0)}"  # --betas 0.9 0.95
                word = f"{word} {value}"
                value = f"[{value}]" if "," in value else value
            what, fix = "unknown option; settings have the form key=value", proper(key, value)
            if key in ("m", "multirun"):
                what, fix = "unknown option here", "accel-run train -m runs each of several values; search needs no -m"
            problems.append(Problem(what, word, fix))
        elif rest and rest[0] == "=":
            value = rest[1] if len(rest) > 1 else ""
            del rest[:2]
            problems.append(Problem("has spaces around =", f"{word} = {value}".strip(), proper(word, value)))
        elif word.endswith("=") and rest and "=" not in rest[0]:
            value = rest.pop(0)
            problems.append(Problem("has a space after =", f"{word} {value}", proper(word[:-1], value)))
        elif word.endswith(":") and rest and "=" not in rest[0] and not rest[0].startswith("-"):
            value = rest.pop(0)
            problems.append(Problem("has a colon in the place of =", f"{word} {value}", proper(word[:-1], value)))
        elif spaced := re.fullmatch(r"([\w.+]+)(?: +=\s*|= +)(.+)", word):
            problems.append(Problem("has spaces around =", word, proper(spaced[1].lstrip("+"), spaced[2])))
        elif colon := re.fullmatch(r"([\w.]+):([^/].*|$)", word):
            fix = proper(colon[1], colon[2]) if _is_key(colon[1], request.own_keys) else SHOWN_BY
            problems.append(Problem("has a colon in the place of =", word, fix))
        elif "=" not in word and rest and "=" not in rest[0] and _is_key(word, request.own_keys) and word not in GROUPS:
            value = rest.pop(0)
            problems.append(Problem("has a space in the place of =", f"{word} {value}", proper(word, value)))
        elif "=" not in word and not word.startswith("~"):
            what = "is not a setting; settings have the form key=value"
            fix = fix_of_word(readable(word, MAX_SHOWN), options_of_groups()) or proper(word, "")
            problems.append(Problem(what, word if word.strip() else f"{word!r}", fix))
        else:
            yield word


def _is_key(word: str, own_keys: tuple[str, ...]) -> bool:
    return word in own_keys or word in GROUPS or word in _all_keys() or bool(fix_of_key(word))


_NUMBER = re.compile(r"[+-]?\d+\.?\d*(?:e[+-]?\d+)?")


def proper_word(key: str, value: str, own_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of what was typed; what it suggests is accepted."""
    name, value = readable(key, MAX_SHOWN).replace("-", "_"), readable(value, MAX_SHOWN)
    if name == "resume":
        return fix_of_key("resume_from", value) if "." in value else f"use accel-run resume {value}".rstrip()
    if said := _meant(name, value, own_keys):
        return said
    if name == "checkpoint" and value:  # a folder or a file, as --checkpoint of other tools is given
        return fix_of_option("checkpoint", value) or acceptable(f"use checkpoint={value}")
    if name in GROUPS and value.lower() in ("", "true"):  # a switch elsewhere
        return fix_of_option(name, "true") or f"use {name}=NAME, one of {', '.join(options_of(name))}"
    near = name if name in GROUPS else nearest(name, [*GROUPS, *own_keys, *_plain_keys()], cutoff=0.7)
    is_meant = near == name or near in GROUPS or near in own_keys or _is_accepted(f"{near}={value or 'true'}")
    if near is None or not (is_meant or near.rpartition(".")[2] == name.rpartition(".")[2]):
        return SHOWN_BY  # a value that does not fit shows that something else was meant
    return acceptable(f"use {near}={value or '...'}", own_keys)


def _meant(name: str, value: str, own_keys: tuple[str, ...]) -> str:
    """Return what to say instead of a key of another tool, or of one of ours in a group of another tool."""
    if name.lower() in own_keys:
        return f"use {name.lower()}={value or '...'}" if name not in own_keys else ""
    is_batch, of_prediction = _NAMES_A_BATCH.search(name), [own for own in own_keys if own.startswith("inference.")]
    if (own := f"inference.{'batch_size' if is_batch else name.lower()}") in of_prediction:
        return f"use {own}={value or '...'}"
    if is_batch and of_prediction:
        return f"the task's prediction has no batch size; it has {', '.join(of_prediction)}"
    if said := fix_of_key(name, value):
        parts = name.lower().split("_")
        if len(parts) == 2 and (own := next((each for each in own_keys if each in parts), "")):
            return f"use {own}={value or '...'}"  # batch_size in benchmark, which has batch
        return acceptable(said, own_keys)
    for own in own_names(name):
        if own != name and (own in GROUPS or own in _all_keys()):
            return acceptable(f"use {own}={value or '...'}", own_keys)
    return ""


_NAMES_A_BATCH = re.compile(r"(?i)(?:^|_)(?:batch_?size|batch|bs|bsz|mbs|b)$")


def acceptable(said: str, own_keys: tuple[str, ...] = ()) -> str:
    """Return the suggestion with values that are accepted in the place of those that are not.

    What another tool takes for a value goes through the same tables as what is typed; else it is the default.
    """

    def checked(found: re.Match[str]) -> str:
        key, value = found["key"], found["value"]
        is_of_ours = key in GROUPS or key in _all_keys()
        if value == "..." and is_of_ours and key not in GROUPS and _is_accepted(f"{key}=true"):
            value = "true"  # a switch
        if not is_of_ours or key in own_keys or _PLACEHOLDER.fullmatch(value):
            return found[0]
        word = _accepted(key, value)
        return word if re.search(rf"(?<![\w.]){key.partition('.')[0]}=", said) else _with_option(word)

    return _SETTING.sub(checked, said)


def _with_option(word: str) -> str:
    """Return the word behind the option that it belongs to, where the usual one has no such key."""
    group, _, name = word.partition("=")[0].partition(".")
    usual = function_of(group, shipped_options()[group]) if group in AXES and name else None
    option = _option_with(group, name) if group in AXES and name else None
    return f"{group}={option} {word}" if usual and option and name.partition(".")[0] not in usual.keys else word


def _accepted(key: str, value: str) -> str:
    """Return a word for the key that is accepted, with this value if it can be."""
    if key in GROUPS:
        known = options_of(key)
        is_absent = value.lower() in ("false", "no", "null")  # as text, where another tool has it
        name = _option_name(key, None if is_absent else value, known)
        if name in known:
            return f"{key}={name if is_absent else value}"
        said = fix_of_option(key, value).removeprefix("use ")
        near = nearest(value, known) if not said else None
        return said or (f"{key}={near}" if near else f"{key}=NAME, one of {', '.join(known)}")
    for word in (f"{key}={value}", *other_ways(key, value)):
        if _is_accepted(word):
            return word
    group, _, name = key.partition(".")
    usual = function_of(group, shipped_options()[group]) if group in AXES else None  # optimizers differ in their rates
    candidates = [*([usual.keys[name]] if usual and name in usual.keys else []), *_all_keys()[key]]
    default = next((other.default for other in candidates if other.default not in (None, REQUIRED)), None)
    return f"{key}={text_of_value(default)}" if default is not None else f"{key}=..."


def _is_accepted(word: str) -> bool:
    """Tell whether a setting can be read and has a value that its key takes, whatever option has that key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = _read_word(OverridesParser.create(), word)
        is_sweep = override.is_sweep_override()
    except (HydraException, RecursionError, ValueError):
        return False
    key = override.key_or_group
    if is_sweep or (key not in GROUPS and key not in _all_keys()):
        return False
    value = override.value()
    if key in GROUPS:
        return _option_name(key, value, options_of(key)) in options_of(key)
    return any(fault(known.type, value) is None for known in _all_keys()[key])


def _nearly(word: str, own_keys: tuple[str, ...]) -> str:
    """Return "did you mean X?" where it is the key that cannot be read, such as a.,b for a.b."""
    key = word.partition("=")[0]
    if re.fullmatch(r"[+]{0,2}[\w.]*\w", key) and ".." not in key:
        return ""
    near = nearest(re.sub(r"\W+", ".", key).strip("."), [*GROUPS, *own_keys, *_plain_keys()], cutoff=0.8)
    return f"did you mean {near}?" if near else ""


_PLACEHOLDER = re.compile(r"\.\.\.|\[?[A-Z]+\]?")  # NAME, [NAME]: to be filled in by who reads it
_SETTING = re.compile(r"(?<![\w.'])(?P<key>[a-z][\w.]*)=(?P<value>\S+?)(?=[,;)]?(?:\s|$))")


@cache
def _all_keys() -> Mapping[str, tuple[Key, ...]]:
    """Return the keys of the settings and of all shipped options, each as every option that has it declares it."""
    found = {name: (key,) for name, key in settings_keys(Settings).items()}
    for group in AXES:
        for option in options_of(group):
            signature = function_of(group, option)
            for name, key in (signature.keys if signature else {}).items():
                found[f"{group}.{name}"] = (*found.get(f"{group}.{name}", ()), key)
    return found


def _plain_keys() -> list[str]:
    return list(_all_keys())


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    return f'{readable(key, MAX_SHOWN)}="{readable(value, MAX_SHOWN)}"'


def key_of(word: str) -> str:
    """Return the key of a setting as it is typed; the ~ of a word that deletes one stays, for it is refused."""
    return word.partition("=")[0].lstrip("+")


def _key_of(word: str) -> str:
    return key_of(word).lstrip("+~")


# ---------------------------------------------------------------- groups


def _split(
    parsed: list[Override], request: Request, problems: list[Problem]
) -> tuple[dict[str, str], list[tuple[str, Any, str]]]:
    """Divide overrides into group -> option and (key, value, word), dropping those that cannot be."""
    groups: dict[str, str] = {}
    values = []
    for override in parsed:
        key, word = override.key_or_group, override.input_line or ""
        if override.is_delete():
            problems.append(Problem("nothing is deleted here", word, _instead_of_deleting(_key_of(word))))
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            problems.append(Problem("Hydra only composes here; it starts and writes nothing", word, "leave it out"))
        elif override.package is not None:
            fix = f"use {key}={readable(text_of_value(override.value()), MAX_SHOWN)}"
            problems.append(Problem("packages (@) have no meaning here", word, fix))
        elif key in GROUPS:
            known = options_of(key, request.config_dir)
            option = _option_name(key, override.value(), known)
            if key in groups:
                problems.append(Problem(f"{key} is given twice, {groups[key]} and {option}", word, "give one of them"))
            elif key == "task" and request.task_file:
                problems.append(Problem("the task is given twice, here and by --task", word, "give one of them"))
            elif option not in known:
                near = fix_of_option(key, option) or did_you_mean(option, known)
                if key == "task" and option.endswith(".py"):
                    near = f"use --task {readable(option, MAX_SHOWN)}"
                listed = "one of " + ", ".join(known)
                problems.append(Problem(f"unknown {key}; must be {listed}", word, near))
            else:
                groups[key] = option
        else:
            values.append((key, override.value(), word))
    return groups, values


def _instead_of_deleting(key: str) -> str:
    """Return what to say instead of ~KEY."""
    if key in GROUPS:
        known = options_of(key)
        absent = _option_name(key, None, known)
        return f"use {key}={absent if absent in known else shipped_options().get(key, known[0])}"
    return f"leave it out, or use {_accepted(key, 'null')}" if key in _all_keys() else "leave it out"


def _option_name(group: str, value: Any, known: Iterable[str]) -> str:
    """Return the option meant. Absence is called off in some groups and none in others: any word for it will do."""
    if value is None or value is False or value in ("none", "off"):
        return next((name for name in ("off", "none") if name in known), text_of_value(value))
    name = "on" if value is True else str(value)
    return PRECISION_NAMES.get(name.lower(), name) if group == "precision" else name


_GLOBAL = "# @package _global_"  # Hydra: the keys of this file are those of the whole configuration


_kept: dict[Any, Any] | None = None


@contextmanager
def files_unchanged() -> Iterator[None]:
    """Inside, no file of a configuration changes: Hydra composes the same options once, nine tenths of the time."""
    global _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = None


def _compose_groups(groups: Mapping[str, str], request: Request, problems: list[Problem]) -> dict[str, Any]:
    """Let Hydra compose; return the tree with the chosen names under `hydra_choices`. Raises ConfigError."""
    if _kept is None:
        return _composed_by_hydra(groups, request, problems)
    key = (*sorted(groups.items()), request.task_file, request.config_dir)
    if key not in _kept:
        _kept[key] = _composed_by_hydra(groups, request, problems)
    return copy.deepcopy(dict(_kept[key]))


def _composed_by_hydra(groups: Mapping[str, str], request: Request, problems: list[Problem]) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = [f"{group}={option}" for group, option in groups.items()]
    if request.task_file:
        words.append("~task")
    profile = _file_of("hardware", groups.get("hardware", ""), request.config_dir)
    if profile and not _text_of(profile, request.config_dir).startswith(_GLOBAL):
        raise ConfigError([*problems, Problem(f"must begin with the line {_GLOBAL}", str(profile))])
    _search_user_folder(request.config_dir)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(shipped("conf")), **_version_base()), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*missing `_self_`")
            composed = hydra_compose("config", overrides=words, return_hydra_config=True)
    except yaml.MarkedYAMLError as error:
        where = f"{error.problem_mark.name}:{error.problem_mark.line + 1}" if error.problem_mark else "conf"
        raise ConfigError([*problems, Problem(f"must be YAML: {error.problem}", where)]) from error
    except UserWarning as error:  # only a config.yaml in the user's folder can lack it
        what = "must have _self_ in its defaults list, where its own values take their place"
        fix = "begin the list with `- _self_`, as the shipped file does"
        raise ConfigError([*problems, Problem(what, f"{request.config_dir}/config.yaml", fix)]) from error
    except RecursionError as error:
        files = ", ".join(f"{group}/{option}.yaml" for group, option in groups.items())
        what = "a defaults list must not lead back to its own file"
        raise ConfigError([*problems, Problem(what, files)]) from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError, AssertionError, yaml.YAMLError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # no fault of a file
        raise ConfigError([*problems, _of_composing(error, groups, request.config_dir)]) from error
    choices = OmegaConf.to_container(composed.hydra.runtime.choices)
    assert isinstance(choices, dict)
    missing = [group for group in GROUPS if not choices.get(group) and (group != "task" or not request.task_file)]
    if missing:  # only a config.yaml in the user's folder can lack one
        raise ConfigError(
            Problem(
                f"must choose an option of every group, but has none for {', '.join(missing)}",
                f"{request.config_dir}/config.yaml",
                f"begin with a copy of {shipped('conf')}/config.yaml, or give the file another name",
            )
        )
    tree = {str(key): composed._get_node(key) for key in composed if key != "hydra"}
    plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=False)
    assert isinstance(plain, dict)
    problems = [
        *(
            Problem("must be a mapping of keys to values", f"{group}/{choices[group]}.yaml")
            for group in GROUPS
            if not isinstance(plain.get(group, {}), (dict, NoneType))
        ),
        *_of_packages({str(group): str(option) for group, option in choices.items()}, request.config_dir),
    ]
    if problems:
        raise ConfigError(problems)
    return {**plain, "hydra_choices": choices}


def _of_packages(choices: Mapping[str, str], config_dir: Path | None) -> Iterator[Problem]:
    """Say of the user's files whose keys would not be those of their group."""
    for group, option in choices.items():
        file = _file_of(group, option, config_dir)
        if config_dir is None or file is None or not file.is_relative_to(config_dir):
            continue
        found = re.match(r"(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)", _text_of(file, config_dir))
        if found and found[1] not in (group, "_global_"):
            what = f"must have no # @package line but {_GLOBAL}, which is for keys of the whole configuration"
            yield Problem(f"{what}, but has {found[1]}", str(file), "leave the line out")


def _of_composing(error: Exception, groups: Mapping[str, str], config_dir: Path | None) -> Problem:
    """Say what Hydra says, with the user's files that it may mean and what there is to choose from."""
    chosen = [(config_dir or Path()) / group / f"{option}.yaml" for group, option in (("", "config"), *groups.items())]
    where = ", ".join(str(file) for file in chosen if config_dir and file.is_file()) or str(config_dir or "conf")
    what = _first_line(error).rstrip(".")
    if "Invalid loaded object type" in what:
        return Problem("must be a mapping of keys to values", where)
    missing = re.search(r"'([a-z]+)/([^']+)'$", what)
    known = options_of(missing[1], config_dir) if missing else []
    if missing is None or not known:
        return Problem(what, where, "fix the file, or leave the option out")
    return Problem(f"{what}; must be one of {', '.join(known)}", where, did_you_mean(missing[2], known))


def _version_base() -> dict[str, Any]:
    """Hydra 1.3 warns when version_base is missing, 1.4 when it is given."""
    import hydra

    return {"version_base": "1.3"} if tuple(map(int, hydra.__version__.split(".")[:2])) < (1, 4) else {}


_user_folder: Path | None = None


def _search_user_folder(folder: Path | None) -> None:
    """Put the user's folder before ours in Hydra's search path; after ours its files would be ignored."""
    global _user_folder
    first = _user_folder is None
    _user_folder = folder.resolve() if folder else None
    if folder is None or not first:
        return
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult, ConfigSource
    from hydra.plugins.search_path_plugin import SearchPathPlugin
    from omegaconf import OmegaConf

    class GuardedSource(FileConfigSource):
        """The user's files, each measured and searched before it is built."""

        @staticmethod
        def scheme() -> str:
            return "guarded"

        def load_config(self, config_path: str) -> ConfigResult:
            text = read_guarded(Path(self.path) / self._normalize_file_name(config_path), Path(self.path))
            return ConfigResult(
                config=OmegaConf.load(_Named(text, self.path, config_path)),
                path=self.full_path(),
                provider=self.provider,
                header=ConfigSource._get_header_dict(text[:512]),
            )

    class UserFolder(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            if _user_folder is not None:
                search_path.prepend("user", f"guarded://{_user_folder}")

    Plugins.instance().register(GuardedSource)
    Plugins.instance().register(UserFolder)


# ---------------------------------------------------------------- keys and values

Keys = Mapping[str, Key]


@dataclass(frozen=True)
class _Schema:
    """What may be set.

    functions      group -> the shipped option behind the chosen one
    task_settings  key -> value that the task's own file sets, for the options it was tuned with
    folder_keys    key -> file of the user's config folder that sets it
    profile_keys   key -> file of the hardware profile that sets it: after the task, before the command line
    said           keys and groups of the command line
    tuned          group -> option that the task's values are for
    phases         the task's phases, each with the options that it uses and its keys
    own_keys       of the command, besides settings
    """

    keys: Keys
    functions: Mapping[str, str]
    task_settings: Mapping[str, Any]
    for_auto: Mapping[str, Any]
    folder_keys: Mapping[str, Path]
    tuned: Mapping[str, str]
    phases: tuple[_Phase, ...] = ()
    profile_keys: Mapping[str, Path] = field(default_factory=dict)
    said: Container[str] = ()
    own_keys: tuple[str, ...] = ()

    def file_of(self, key: str) -> str:
        """Return the user's file that sets the key, with a colon; nothing where the word alone says who did."""
        if key in self.said:
            return ""
        file = self.folder_keys.get(key) or self.profile_keys.get(key)
        return f"{file}: " if file else ""

    def known(self, key: str) -> str:
        """Return the key to which `key` belongs: itself, or the mapping of which it is an entry."""
        return max((name for name in self.keys if key == name or key.startswith(f"{name}.")), key=len, default=key)


@dataclass(frozen=True)
class _Phase:
    declared: Declared
    options: Mapping[str, str]
    keys: Keys


@dataclass(frozen=True)
class _TaskFile:
    """What a task's file says without being run: the keys of `build` and `predict`, and its literals."""

    source: Path
    build: Keys = field(default_factory=dict)
    predict: Keys = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Declared, ...] = ()


def _schema(
    composed: Mapping[str, Any],
    values: list[tuple[str, Any, str]],
    task: _TaskFile,
    said: Container[str],
    request: Request,
    problems: list[Problem],
    notes: list[str],
) -> _Schema:
    """Gather the keys of the settings, of the chosen options, of the task, its phases and its predictions."""
    keys = settings_keys(Settings)
    choices = composed["hydra_choices"]
    found = {
        group: _function_behind(group, str(choices[group]), composed.get(group) or {}, request.config_dir)
        for group in AXES
    }
    functions = {group: function for group, function in found.items() if isinstance(function, str)}
    if len(functions) < len(found):  # the keys cannot be known, and would all be problems
        raise ConfigError([*problems, *(function for function in found.values() if isinstance(function, Problem))])
    for group, function in functions.items():
        signature = function_of(group, function)
        keys.update({f"{group}.{key.name}": key for key in (signature.keys.values() if signature else ())})
    keys.update({f"task.{key.name}": key for key in task.build.values()})
    keys.update({f"inference.{key.name}": key for key in task.predict.values()})
    keys["inference.seed"] = Key("inference.seed", int, 0, "seed of the sampling")
    tuned = {group: str(task.settings.get(group) or option) for group, option in shipped_options().items()}
    of_files = {"": "config", **{group: option for group, option in choices.items() if group != "hardware"}}
    profile, folder = str(choices["hardware"]), request.config_dir
    schema = _Schema(keys, functions, {}, {}, _folder_keys(of_files, folder, keys), tuned)
    schema = replace(schema, profile_keys=_profile_keys(profile, folder, keys))
    settings = {key: value for key, value in _flatten(task.settings, stop=keys) if key not in PHASE_GROUPS}
    for_auto = {key: value for key, value in settings.items() if _is_for_auto(key, value, schema, problems)}
    why_not = {key: _why_not_of_task(key, schema, choices) for key in settings if key not in for_auto}
    notes += [
        f"{key}={text_of_value(settings[key])} of the task is not used: {why}" for key, why in why_not.items() if why
    ]
    used = {key: settings[key] for key, why in why_not.items() if not why}
    phases = tuple(_phase(declared, values, schema, said, problems, notes) for declared in task.phases)
    for phase in phases:
        keys.update({phase.declared.key(name): key for name, key in phase.keys.items()})
    of_profile = _profile_keys(profile, folder, keys)  # those of phases are known only now
    return replace(schema, task_settings=used, for_auto=for_auto, phases=phases, profile_keys=of_profile, said=said,
                   own_keys=request.own_keys)  # fmt: skip


def _phase(
    declared: Declared,
    values: list[tuple[str, Any, str]],
    schema: _Schema,
    said: Container[str],
    problems: list[Problem],
    notes: list[str],
) -> _Phase:
    """Return a phase with the options that it uses: typed for it, typed for the run, the task's for it, the run's."""
    options = {}
    for group in PHASE_GROUPS:
        known = [option for option in options_of(group) if function_of(group, option)]
        own = [(str(value), word) for key, value, word in values if key == declared.key(group)]
        wanted, word = own[-1] if own else (str(declared.settings.get(group, "")), f"PHASES[{declared.name!r}]")
        if group in said and not own:
            wanted = ""
        if wanted and wanted not in known:
            what = f"unknown {group}; must be one of {', '.join(known)}"
            problems.append(Problem(what, word, did_you_mean(wanted, known)))
        options[group] = wanted if wanted in known else schema.functions[group]
    keys = phase_keys(declared, options, function_of)
    for key, value, _ in values if declared.kind == "train" else ():
        group = key.partition(".")[0]
        if group in PHASE_GROUPS and group != key and options[group] != schema.functions[group]:
            notes.append(
                f"{key}={text_of_value(value)} does not reach phase {declared.name}, whose {group} is {options[group]}"
            )
    for name, value in declared.settings.items():
        group = name.partition(".")[0]
        where = f"PHASES[{declared.name!r}][{name!r}]"
        if declared.kind == "train" and not is_for(declared, group, options, schema.tuned):
            if name != group:
                tuned = declared.settings.get(group, schema.tuned[group])
                notes.append(
                    f"{declared.key(name)}={text_of_value(value)} of the task is not used: it is for {group}={tuned}"
                )
        elif name not in keys and not any(name.startswith(f"{known}.") and known not in PHASE_GROUPS for known in keys):
            problems.append(Problem(f"unknown key of a phase of kind {declared.kind}", where, did_you_mean(name, keys)))
    return _Phase(declared, options, keys)


def _options_of_task(
    task: _TaskFile,
    groups: Mapping[str, str],
    composed: Mapping[str, Any],
    request: Request,
    problems: list[Problem],
) -> dict[str, str]:
    """Return group -> option that the task was tuned with, where only the shipped default stands against it."""
    choices, shipped_ones = composed["hydra_choices"], shipped_options()
    by_profile = selected_by_profile(str(choices["hardware"]), request.config_dir)
    found = {}
    for group in GROUPS:
        option = task.settings.get(group)
        if option is None or isinstance(option, dict):
            continue
        known = options_of(group, request.config_dir)
        if group not in PHASE_GROUPS:
            fix = f"use {group}={text_of_value(option)} on the command line"
            what = f"a task chooses options of {' and '.join(PHASE_GROUPS)} only"
            problems.append(Problem(what, f"SETTINGS[{group!r}]", fix))
        elif option not in known:
            what = f"unknown {group}; must be one of {', '.join(known)}"
            problems.append(Problem(what, f"SETTINGS[{group!r}]", did_you_mean(str(option), known)))
        elif group not in groups and group not in by_profile and choices[group] == shipped_ones[group] != option:
            found[group] = str(option)
    return found


def _is_for_auto(key: str, value: Any, schema: _Schema, problems: list[Problem]) -> bool:
    """Tell whether an option that may take the place of `auto` has this key."""
    group, _, name = key.partition(".")
    option = _option_with(group, name) if schema.functions.get(group) == "auto" else None
    signature = function_of(group, option) if option else None
    if signature is None:
        return False
    wrong = fault(signature.keys[name].type, value)
    problems += [Problem(wrong, f"SETTINGS[{key!r}]")] if wrong else []
    return True


def _why_not_of_task(key: str, schema: _Schema, choices: Mapping[str, str]) -> str:
    """Return why a task's value does not count: it was tuned for another option, or a profile or the folder sets it."""
    group, _, name = key.partition(".")
    file = schema.profile_keys.get(schema.known(key))
    if file is not None:
        return f"{file} sets it"
    if group not in AXES or not name:
        return ""
    file = schema.folder_keys.get(schema.known(key))
    if file is not None:
        return f"{file} sets it"
    if schema.known(key) not in schema.keys and _option_with(group, name):
        return f"{group}={choices[group]} has no such key"
    tuned = schema.tuned[group]
    signature = function_of(group, tuned)
    is_for_tuned = signature is not None and name.partition(".")[0] in signature.keys
    return f"it is for {group}={tuned}" if is_for_tuned and choices[group] != tuned else ""


def _function_behind(group: str, option: str, content: Mapping[str, Any], config_dir: Path | None) -> str | Problem:
    """Return the shipped option that makes this one: it names it, or builds on it, or is it."""
    where = f"{group}/{option}.yaml"
    function = str(content.get("option") or _variant_of(group, option, config_dir))
    known = [name for name in options_of(group) if name == "auto" or function_of(group, name)]
    if function in known:
        return function
    what = f"must name the option it is a variant of, such as `option: {known[-1]}`"
    return Problem(what, where, did_you_mean(function, known))


def _variant_of(group: str, option: str, config_dir: Path | None) -> str:
    """Return the shipped option on which a file builds through its defaults list; its own name if it builds on none."""
    if function_of(group, option) is None:
        for entry in _load(group, option, config_dir).get("defaults") or ():
            if isinstance(entry, str) and entry != "_self_":
                return _variant_of(group, entry.rpartition("/")[2].partition("@")[0], config_dir)
    return option


def _folder_keys(choices: Mapping[str, str], config_dir: Path | None, known: Container[str]) -> dict[str, Path]:
    """Return the keys that files of the user's folder set, each with its file."""
    found: dict[str, Path] = {}
    if config_dir is None:
        return found
    for group, option in choices.items():
        file = config_dir / group / f"{option}.yaml"
        if file.is_file():
            found.update(dict.fromkeys(_file_keys(group, option, config_dir, known), file))
    return found


def _profile_keys(profile: str, config_dir: Path | None, known: Container[str]) -> dict[str, Path]:
    """Return the settings of a hardware profile, each with its file; facts of the hardware are none."""
    file = _file_of("hardware", profile, config_dir)
    keys = _file_keys("hardware", profile, config_dir, known) if file else []
    return {key: file for key in keys if file and not key.startswith("hardware.")}


def _of_size(
    sizes: Mapping[str, Any], build: Keys, composed: Mapping[str, Any], values: list[tuple[str, Any, str]]
) -> Mapping[str, Any]:
    """Return the settings that belong to the size of the task: a larger model wants another learning rate."""
    said = [str(value) for key, value, _ in values if key == "task.size"]
    default = (composed.get("task") or {}).get("size") or (build["size"].default if "size" in build else "")
    settings = sizes.get(said[-1] if said else str(default))
    return settings if isinstance(settings, dict) else {}


def _read_task(
    composed: Mapping[str, Any], values: list[tuple[str, Any, str]], request: Request, problems: list[Problem]
) -> _TaskFile:
    """Return what the task's file says, without running it; SIZES of the size in use comes on top of SETTINGS."""
    source = task_source(str(composed["hydra_choices"].get("task") or ""), request.task_file)
    try:
        functions, tree = read_functions(source), read_module(source)
    except SyntaxError as error:
        problems.append(Problem(f"is not valid Python, line {error.lineno}: {error.msg}", str(source), "fix that line"))
        return _TaskFile(source)
    except (RecursionError, MemoryError):  # Python's parser has no memory left: it means its stack
        problems.append(Problem("must be nested less deeply: Python cannot read it", str(source)))
        return _TaskFile(source)
    except (UnicodeDecodeError, ValueError) as error:
        problems.append(Problem(f"is not a Python file: {error}", str(source), "use --task FILE.py"))
        return _TaskFile(source)
    except OSError as error:  # an option of the user's folder for which there is no task
        name, known = composed["hydra_choices"].get("task"), [folder.name for folder in _shipped_tasks()]
        what = f"there is no task of that name; must be one of {', '.join(known)} ({source}: {error.strerror})"
        problems.append(Problem(what, f"task={name}", "use --task FILE for a task of your own"))
        return _TaskFile(source)
    if "build" not in functions:
        what, fix = "has no function build()", "an example: accel-run new my_task.py"
        problems.append(Problem(what, str(source), fix))
        return _TaskFile(source)
    build = functions["build"].keys
    predict = {
        name: key for found in functions if found.endswith(".predict") for name, key in functions[found].keys.items()
    }
    for name, key in [*build.items(), *predict.items()]:
        if isinstance(key.default, Expression):
            what = f"the default of {name} must be a literal, such as 64 or 'text', but is {key.default.text}"
            problems.append(
                Problem(what, str(source), "make it None or a literal, and what is to be computed in build")
            )
    settings, sizes, phases = (_literal(tree, name, source, problems) for name in ("SETTINGS", "SIZES", "PHASES"))
    by_default = {
        f"{place}.{name}": key.default
        for place, keys in (("task", build), ("inference", predict))
        for name, key in keys.items()
        if key.default is not REQUIRED and not isinstance(key.default, Expression)
    }
    if hidden := secret_problems(by_default, source.name):  # before the defaults reach config.yaml and plan.json
        raise ConfigError(hidden)
    kept_in_it = [*secret_problems(settings, source.name), *secret_problems(sizes, source.name)]
    if kept_in_it or (kept_in_it := secret_problems(phases, source.name)):
        raise ConfigError(kept_in_it)
    settings = {**settings, **_of_size(sizes, build, composed, values)}
    of_phases = {key: value for key, value in settings.items() if key.startswith("phase.") and key.count(".") > 1}
    for short in {"phase", *(f"phase.{name}" for name in phases)} & set(settings):
        problems.append(Problem("must be written in full: phase.NAME.KEY", f"SETTINGS[{short!r}]"))
        del settings[short]
    declared = read_phases(phases, of_phases, source.name, problems)
    names = [phase.name for phase in declared]
    for setting in of_phases:
        phase = setting.split(".")[1]
        if phase not in names:
            problems.append(Problem("PHASES has no such phase", f"SETTINGS[{setting!r}]", did_you_mean(phase, names)))
    rest = {key: value for key, value in settings.items() if key not in of_phases}
    return _TaskFile(source, build, predict, rest, declared)


def _literal(tree: ast.Module, name: str, source: Path, problems: list[Problem]) -> Mapping[str, Any]:
    """Return the literal mapping that the module binds to a name; nothing where it does not."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and getattr(target, "id", "") == name and node.value:
            try:
                settings = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                settings = None
            if isinstance(settings, dict):
                return settings
            problems.append(Problem(f"{name} must be a literal mapping of keys to values", str(source)))
    return {}


def _set_values(
    composed: Mapping[str, Any],
    values: list[tuple[str, Any, str]],
    schema: _Schema,
    said: Collection[str],
    problems: list[Problem],
) -> dict[str, Any]:
    """Return key -> value: signature defaults, then the composed tree, then the task's settings, then the user's.

    Those of the phases come last, since they follow from all others.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = {key: value for key, value in defaults(schema.keys).items() if not key.startswith("phase.")}
    given = {key: value for key, value in composed.items() if key not in ("hydra_choices", "hardware")}
    try:
        if _interpolates(given):
            refuse_growth(given)
            given = OmegaConf.to_container(OmegaConf.create(given), resolve=True)  # type: ignore[assignment]
    except RecursionError:
        problems.append(Problem("one ${KEY} leads to the next too often", "the configuration", "write the value"))
        given = {}
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "conf")
        fix = "write the value, or ${KEY} with a key that the files have"
        problems.append(Problem(_first_line(error), f"{schema.file_of(schema.known(key))}{key}", fix))
    if by_reference := secret_problems(given, "the configuration, each ${...} replaced"):
        raise ConfigError(by_reference)
    for key, value in _flatten(given, stop=schema.keys):
        group, _, name = key.partition(".")
        if name != "option" or group not in AXES:
            _place(tree, key, value, f"{schema.file_of(key)}{key}={text_of_value(value)}", schema, problems)
    for key, value in schema.task_settings.items():
        if key not in GROUPS:  # an option that it may not choose is said already
            _place(tree, key, value, f"SETTINGS[{key!r}]", schema, problems)
    _keep_one_length(tree, schema.task_settings)
    _keep_one_length(tree, schema.profile_keys)
    for key, value, word in values:
        if not key.startswith("phase."):
            _place(tree, key, value, word, schema, problems)
    _keep_one_length(tree, said)
    in_files = {*schema.folder_keys, *schema.profile_keys}
    for phase in schema.phases:
        known = {schema.known(key) for key in said}
        for name, value, _ in values_of(
            phase.declared, phase.keys, phase.options, schema.functions, schema.tuned, tree, known, in_files
        ):
            tree[phase.declared.key(name)] = value
    for key, value, word in values:
        if key.startswith("phase."):
            _place(tree, key, value, word, schema, problems)
    return tree


def _interpolates(value: Any) -> bool:
    """Tell whether a value refers to another one: only then OmegaConf must build the tree, a tenth of the time."""
    if isinstance(value, Mapping):
        return any(_interpolates(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_interpolates(item) for item in value)
    return isinstance(value, str) and "${" in value


def _keep_one_length(tree: dict[str, Any], said: Container[str]) -> None:
    """Let who says `epochs` take back the `updates` of those before, and the other way round."""
    for key, other in (("updates", "epochs"), ("epochs", "updates")):
        if key in said and other not in said and tree.get(key) is not None:
            tree[other] = None


def _place(tree: dict[str, Any], key: str, value: Any, word: str, schema: _Schema, problems: list[Problem]) -> None:
    if key in schema.keys:
        tree[key] = _named(value)
        return
    inside = schema.known(key)
    if isinstance(tree.get(inside), dict):  # an entry of a mapping, as optimizer.lr_scales.head=0.1
        tree[inside] = {**tree[inside], key.removeprefix(f"{inside}."): value}
        return
    if isinstance(value, dict) and any(known.startswith(key + ".") for known in schema.keys):
        for name, item in value.items():
            _place(tree, f"{key}.{name}", item, word, schema, problems)
        return
    problems.append(
        _unknown(key, word, schema) if len(problems) < MAX_HINTS else Problem("unknown key", word, SHOWN_BY)
    )


def _unknown(key: str, word: str, schema: _Schema) -> Problem:
    value = readable(word.partition("=")[2], MAX_SHOWN)
    group, _, name = key.partition(".")
    is_of_option = group in AXES and name
    elsewhere = _option_with(group, name) if is_of_option else None
    said = "" if elsewhere else _meant(key, value, schema.own_keys)
    if is_of_option and not (said and key in FOREIGN_KEYS):
        names = [known for known in schema.keys if known.startswith(f"{group}.")]
        near = said or did_you_mean(name, [known.removeprefix(f"{group}.") for known in names]).replace(
            "mean ", f"mean {group}."
        )
        hint = f"it belongs to {group}={elsewhere}" if elsewhere else near
        option = schema.functions[group]
        where = key if not hint and looks_random(value) else word
        return Problem(f"unknown key of {group}={option}; known: {', '.join(names) or 'none'}", where, hint)
    is_of_task = group == "task" and bool(name)
    of_task = [known for known in schema.keys if known.startswith("task.")] if is_of_task else []
    near = said or did_you_mean(key, of_task if is_of_task else [*schema.keys, *GROUPS, *schema.own_keys])
    what = f"unknown key of the task; known: {', '.join(of_task) or 'none'}" if is_of_task else "unknown key"
    where = key if not near and looks_random(value) else word
    return Problem(what, where, near or SHOWN_BY)


def _option_with(group: str, key: str) -> str | None:
    """Return an option of the group that has this key, or the mapping of which it is an entry."""
    for option in options_of(group):
        signature = function_of(group, option)
        if signature and key.partition(".")[0] in signature.keys:
            return option
    return None


def _check(tree: Mapping[str, Any], schema: _Schema, already: set[str]) -> list[Problem]:
    """Return a problem for each value that does not fit its type."""
    problems = []
    for name, key in schema.keys.items():
        if name not in tree:
            problems.append(Problem("must be given", name, f"use {name}=..."))
            continue
        if isinstance(tree[name], Expression):
            continue  # said when the task was read
        if name.startswith("phase.") and tree[name] == tree.get(name.split(".", 2)[2]):
            continue  # said of the run
        wrong = fault(key.type, tree[name])
        literal = tree[name] if isinstance(tree[name], str) else ""
        near = did_you_mean(literal, _literals(key.type)) if wrong and literal else ""
        if name == "phases" and literal:
            near = fix_of_value(name, literal) or _phases_meant(literal, schema)
        near = near or (_example_of(name, key, tree[name]) if wrong else "")
        problem = Problem(wrong or "", f"{schema.file_of(name)}{name}={text_of_value(tree[name])}", near)
        if wrong and problem.where not in already:
            problems.append(problem)
    return problems


def _phases_meant(text: str, schema: _Schema) -> str:
    """Return what to say instead of phases=NAME, with names that the task has."""
    known = [*(phase.declared.name for phase in schema.phases), INFERENCE] if schema.phases else ["train", INFERENCE]
    names = [name if name in known else nearest(name, known) for name in re.split(r"[\s,+]+", text.strip("()[] "))]
    return f"use phases=[{','.join(name for name in names if name)}]" if all(names) else f"use phases=[{known[0]}]"


def _example_of(name: str, key: Key, value: Any) -> str:
    """Return a word that fits in the place of one that does not: what was meant, else the default."""
    if isinstance(value, float) and value.is_integer() and not fault(key.type, int(value)):
        return f"use {name}={int(value)}"
    if said := fix_of_value(name, value):
        return said
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not fault(key.type, str(value)):
        return f"use '{name}=\"{value}\"', for a text"
    written = f"[{','.join(map(text_of_value, value))}]" if isinstance(value, list) else text_of_value(value)
    if word := next(
        (word for word in other_ways(name, written) if word != f"{name}={written}" and _fits_key(word, name, key)), ""
    ):
        return f"use {word}"
    known = () if key.default in (None, REQUIRED) or fault(key.type, key.default) else (key.default,)
    return next((f"use {name}={text_of_value(default)}, the default" for default in known), "")


def _fits_key(word: str, name: str, key: Key) -> bool:
    """Tell whether the word is accepted: for the key itself by its type, which a task may have declared."""
    if not word.startswith(f"{name}=") or name in _all_keys():
        return _is_accepted(word)
    return fault(key.type, _plain_value(word.partition("=")[2])) is None


def _plain_value(text: str) -> Any:
    """Return what a word's text means: a number, a list or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _contradictions(tree: Mapping[str, Any], schema: _Schema, *, is_alone: bool) -> list[Problem]:
    """Return what is wrong between keys that are each right, as far as no machine needs to be known for it."""
    problems = []
    resumed = tree.get("resume")
    if isinstance(resumed, str) and (said := fix_of_value("resume", resumed)):
        problems.append(Problem("names no run to start from", f"resume={resumed}", said))
    total, micro = tree.get("global_batch_size"), tree.get("micro_batch_size")
    if not is_alone or not isinstance(total, int) or total < 1:
        pass
    elif micro == "auto" or (isinstance(micro, int) and micro > 0):
        batch = divide(total, micro, (total,))
        problems += [batch] if isinstance(batch, Problem) else []
    for lead in ("", *(phase.declared.key("") for phase in schema.phases if phase.declared.kind == "train")):
        updates, epochs = tree.get(f"{lead}updates"), tree.get(f"{lead}epochs")
        if updates is None and epochs is None:
            problems.append(
                Problem("updates or epochs must be given", f"{lead}updates=null", f"use {lead}updates=1000")
            )
        if updates is not None and epochs is not None:
            where = f"{lead}updates={updates} {lead}epochs={epochs}"
            problems.append(Problem("both are given", where, "give one of them"))
    return problems + _phase_contradictions(tree, schema)


def _phase_contradictions(tree: Mapping[str, Any], schema: _Schema) -> list[Problem]:
    """Return what is wrong with the choice of phases: names that are none, and nothing left to do."""
    wanted = tree.get("phases")
    kinds = {phase.declared.name: phase.declared.kind for phase in schema.phases} or {"train": "train"}
    known = [*kinds, INFERENCE]
    if wanted is not None and not (isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)):
        return []  # said with its type
    if wanted == []:
        fix = f"use phases=[{known[0]}], or phases=null for all"
        return [Problem("names no phase", "phases=[]", fix)]
    problems = [
        Problem(
            f"the task has no phase {readable(name, MAX_SHOWN)}; phases: {', '.join(known)}",
            "phases",
            did_you_mean(name, known),
        )
        for name in wanted or ()
        if name not in known
    ]
    own = {phase.declared.name: phase.declared.key("epochs") for phase in schema.phases}
    left = [
        name
        for name in (wanted or kinds)
        if name == INFERENCE or kinds.get(name) == "fit" or tree.get(own.get(name, "epochs")) != 0
    ]
    if not problems and not left:
        fix = "use epochs=1, or updates=100"
        problems.append(Problem("leaves nothing to do: no phase of kind fit is selected", "epochs=0", fix))
    return problems


def _literals(annotation: Any) -> list[str]:
    import typing

    if typing.get_origin(annotation) is typing.Literal:
        return [item for item in typing.get_args(annotation) if isinstance(item, str)]
    return [word for item in typing.get_args(annotation) for word in _literals(item)]


# ---------------------------------------------------------------- the result


def _freeze(
    tree: Mapping[str, Any],
    composed: Mapping[str, Any],
    schema: _Schema,
    sources: Mapping[str, str],
    request: Request,
    notes: tuple[str, ...],
) -> Configuration:
    def under(group: str) -> dict[str, Any]:
        return {key.removeprefix(f"{group}."): value for key, value in tree.items() if key.startswith(f"{group}.")}

    names = composed["hydra_choices"]
    choices = {group: Choice(str(names[group]), schema.functions[group], under(group)) for group in AXES}
    task = request.task_file.stem if request.task_file else str(names["task"])
    choices["task"] = Choice(task, task, under("task"))
    settings = _settings(Settings, tree)
    phases = [_phase_settings(phase, tree) for phase in schema.phases]
    return Configuration(
        settings=settings,
        choices=choices,
        inference=under("inference"),
        profile=str(names["hardware"]),
        hardware=composed.get("hardware") or {},
        request=request,
        for_auto=schema.for_auto,
        sources=sources,
        notes=notes,
        phases=tuple(phases) or (_only_phase(settings, choices),),
        own_keys={key: value for key, value in tree.items() if key.startswith("phase.")},
    )


def _phase_settings(phase: _Phase, tree: Mapping[str, Any]) -> PhaseSettings:
    """Return the settings of a declared phase; what a fit does not have is what does nothing."""

    def choice(group: str) -> Choice:
        lead, option = phase.declared.key(f"{group}."), phase.options[group]
        return Choice(
            option, option, {key.removeprefix(lead): value for key, value in tree.items() if key.startswith(lead)}
        )

    own = {name: tree[phase.declared.key(name)] for name in phase.keys}
    plain = ("trains", "updates", "epochs", "global_batch_size", "micro_batch_size", "max_grad_norm")
    values: dict[str, Any] = {name: own.get(name) for name in plain} | {group: choice(group) for group in PHASE_GROUPS}
    for name, kind in (("evaluate", EvaluateSettings), ("early_stopping", EarlyStoppingSettings)):
        lead = f"{name}."
        values[name] = kind(**{key.removeprefix(lead): value for key, value in own.items() if key.startswith(lead)})
    return PhaseSettings(name=phase.declared.name, kind=phase.declared.kind, needs=phase.declared.needs, **values)


def _only_phase(settings: Settings, choices: Mapping[str, Choice]) -> PhaseSettings:
    """Return the one phase of a task that declares none: it has the settings of the run."""
    same = ("updates", "epochs", "global_batch_size", "micro_batch_size", "max_grad_norm", "evaluate", "early_stopping")
    values: dict[str, Any] = {name: getattr(settings, name) for name in same}
    values |= {group: choices[group] for group in PHASE_GROUPS}
    return PhaseSettings(name="train", kind="train", needs=(), trains=None, **values)


def _settings(kind: type, tree: Mapping[str, Any], prefix: str = "") -> Any:
    import dataclasses
    import typing

    hints = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: _settings(hints[field.name], tree, f"{prefix}{field.name}.")
            if dataclasses.is_dataclass(hints[field.name])
            else tree[prefix + field.name]
            for field in dataclasses.fields(kind)
        }
    )


def _sources(
    groups: Mapping[str, str],
    of_task: Mapping[str, str],
    values: list[tuple[str, Any, str]],
    composed: Mapping[str, Any],
    schema: _Schema,
    request: Request,
) -> dict[str, str]:
    """Say who set what, weakest first so that the strongest stays."""
    names, folder = composed["hydra_choices"], request.config_dir
    task = request.task_file.name if request.task_file else names["task"]
    in_file = [] if request.task_file else _file_keys("task", names["task"], folder, schema.keys)
    found = dict.fromkeys(schema.folder_keys, "config folder")
    found |= dict.fromkeys((*in_file, *schema.task_settings, *of_task), f"task {task}")
    found |= dict.fromkeys(selected_by_profile(str(names["hardware"]), folder), f"profile {names['hardware']}")
    found |= dict.fromkeys(schema.profile_keys, f"profile {names['hardware']}")
    found |= dict.fromkeys(groups, "command line")
    found |= {schema.known(key): "command line" for key, _, _ in values}
    for phase in schema.phases:
        triples = values_of(
            phase.declared,
            phase.keys,
            phase.options,
            schema.functions,
            schema.tuned,
            defaults(schema.keys),
            {*(schema.known(key) for key, _, _ in values), *groups},
            {*schema.folder_keys, *schema.profile_keys},
        )
        of_run = {"task": f"task {task}", "default": "default", "folder": "config folder"}
        for name, _, source in triples:
            by = next(other for other in LENGTHS if other != name) if source == "length" else name
            is_of_profile = source == "folder" and phase.declared.key(name) in schema.profile_keys
            who = found.get(phase.declared.key(name)) if is_of_profile else of_run.get(source)
            who = who or found.get(by, "default")
            if who != "default":
                found[phase.declared.key(name)] = who
    return found


def selected_by_profile(profile: str, config_dir: Path | None = None) -> dict[str, str]:
    """Return group -> option that a hardware profile selects."""
    content = _load("hardware", profile, config_dir)
    chosen = {}
    for entry in content.get("defaults") or ():
        if isinstance(entry, dict):
            for key, option in entry.items():
                if str(key).startswith("override "):
                    chosen[str(key).split()[1].lstrip("/")] = str(option)
    return chosen


def own_profile(profile: str, config_dir: Path | None) -> Path | None:
    """Return the file of a hardware profile in the user's folder; None where it is one of ours."""
    file = _file_of("hardware", profile, config_dir)
    return file if file and config_dir and file.is_relative_to(config_dir) else None


def facts_of_profiles(config_dir: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return profile -> its facts of hardware, of every profile that there is."""
    found = {name: _load("hardware", name, config_dir).get("hardware") for name in options_of("hardware", config_dir)}
    return {name: facts for name, facts in found.items() if isinstance(facts, dict)}


def _file_keys(group: str, option: str, config_dir: Path | None, known: Container[str]) -> list[str]:
    """Return the keys that an option's file sets, as they are called on the command line."""
    content = {key: value for key, value in _load(group, option, config_dir).items() if key != "defaults"}
    file = _file_of(group, option, config_dir)
    is_global = not group or (file is not None and _GLOBAL in _text_of(file, config_dir))
    return [key for key, _ in _flatten(content, "" if is_global else f"{group}.", known)]


def _load(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    if _kept is None:
        return _loaded(group, option, config_dir)
    key = group, option, config_dir
    if key not in _kept:
        _kept[key] = _loaded(group, option, config_dir)
    return copy.deepcopy(dict(_kept[key]))


def _loaded(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    from omegaconf import OmegaConf

    file = _file_of(group, option, config_dir)
    text = _text_of(file, config_dir) if file else ""
    content = OmegaConf.to_container(OmegaConf.load(_Named(text, str(file))), resolve=False) if text else None
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _file_of(group: str, option: str, config_dir: Path | None) -> Path | None:
    """Return the file of an option, the user's before ours."""
    if Path(option).is_absolute():  # it would take the place of the folder
        return None
    files = [folder / group / f"{option}.yaml" for folder in (config_dir, shipped("conf")) if folder]
    return next((file for file in files if file.is_file()), None)


class _Named(io.StringIO):
    """A text that YAML's messages call by the name of its file."""

    def __init__(self, text: str, *parts: str) -> None:
        super().__init__(text)
        self.name = str(Path(*parts))


def _text_of(file: Path, config_dir: Path | None) -> str:
    """Return the text of a configuration file; one that is not ours is guarded."""
    if config_dir is not None and file.is_relative_to(config_dir):
        return read_guarded(file, config_dir)
    return file.read_text(encoding="utf-8")


def _shadows(config_dir: Path | None) -> Iterator[str]:
    if config_dir is None:
        return
    for file in sorted(config_dir.rglob("*.yaml")):
        inner = file.relative_to(config_dir)
        if (shipped("conf") / inner).is_file():
            yield f"{file} is used instead of the shipped {inner}"


def _flatten(tree: Mapping[str, Any], prefix: str = "", stop: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the leaves with dotted names; what is named in `stop` is a leaf, an empty group is none."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in stop:
            yield from _flatten(value, f"{name}.", stop)
        elif value is not None or name not in GROUPS:
            yield name, value


def _as_mapping(settings: Settings) -> Mapping[str, Any]:
    import dataclasses

    return dataclasses.asdict(settings)


def _named(value: Any) -> Any:
    """Return a mapping with text for keys: the `0` of a module's name reads as a number."""
    return {str(key): _named(item) for key, item in value.items()} if isinstance(value, dict) else value


def text_of_value(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(text_of_value(item) for item in value)}]" if isinstance(value, (list, tuple)) else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def shipped_options() -> dict[str, str]:
    """Return group -> option of the shipped defaults list."""
    entries = _load("", "config", None).get("defaults") or ()
    return {str(key): str(value) for entry in entries if isinstance(entry, dict) for key, value in entry.items()}
