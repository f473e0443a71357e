"""Hydra's only door: from the words on a command line to one checked, frozen Configuration.

Hydra composes the groups; the values on the command line are then set and everything is checked against the
signatures of the axis functions (schema.py). All problems are found in one go, and torch is not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.division import divide
from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.places import PACKAGE, shipped
from runner.base.schema import REQUIRED, Key, Signature, did_you_mean, fault, nearest, read_functions, settings_keys
from runner.base.settings import Settings

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# group -> the file whose functions are its options
AXES: Mapping[str, str] = {
    "precision": "axes/precision.py",
    "parallelism": "axes/parallelism.py",
    "dataloader": "axes/dataloader.py",
    "prefetch": "axes/prefetch.py",
    "optimizer": "axes/optimizer.py",
    "scheduler": "axes/scheduler.py",
    "compile": "axes/compile.py",
    "attention": "axes/attention.py",
    "memory": "axes/memory.py",
    "backend": "axes/backend.py",
    "checkpoint": "engine/saving.py",
    "tracker": "observe/trackers.py",
    "monitor": "observe/monitor.py",
    "profiler": "observe/profiler.py",
    "benchmark": "observe/benchmark.py",
}
GROUPS = (*AXES, "task", "hardware")

# Names people bring from other trainers, and what they are here.
PRECISION_NAMES = {
    "32": "fp32", "32-true": "fp32", "float32": "fp32", "full": "fp32",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16",
    "bf16-mixed": "bf16", "bfloat16": "bf16",
}  # fmt: skip
FOREIGN_KEYS = {
    "batch_size": "global_batch_size (samples per update) or micro_batch_size (samples per pass)",
    "accumulate_grad_batches": "global_batch_size and micro_batch_size; accumulation follows: 64 = 16 x 4",
    "gradient_accumulation_steps": "global_batch_size and micro_batch_size; accumulation follows: 64 = 16 x 4",
    "accumulation_steps": "global_batch_size and micro_batch_size; accumulation follows: 64 = 16 x 4",
    "clip_max_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "updates",
    "steps": "updates",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "accelerator": "device",
    "devices": "device, or parallelism.world_size for several",
    "use_amp": "precision=fp16, bf16 or fp32",
    "amp": "precision=fp16, bf16 or fp32",
    "mixed_precision": "precision=fp16, bf16 or fp32",
    "num_workers": "dataloader.num_workers",
    "pin_memory": "dataloader.pin_memory",
    "persistent_workers": "nothing to set: the workers live as long as the run",
    "dataloader.persistent_workers": "nothing to set: the workers live as long as the run",
    "output_dir": "output_root, and run=NAME for the folder in it",
}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line, before it is understood."""

    overrides: tuple[str, ...] = ()
    task_file: Path | None = None
    config_dir: Path | None = None


@dataclass(frozen=True)
class Choice:
    """One option of a group: the name chosen, the function behind it, and its keys."""

    name: str
    function: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Configuration:
    """Everything the user fixed, checked; after this nobody sees Hydra.

    choices  group -> choice, for every group but hardware
    hardware facts of the chosen profile; its name is `profile`
    sources  key or group -> who set it: "command line", "profile t4", "task gpt", "config folder"; else a default
    notes    what the user should know, such as shadowed files
    """

    settings: Settings
    choices: Mapping[str, Choice]
    inference: Mapping[str, Any]
    profile: str
    hardware: Mapping[str, Any]
    request: Request
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def asked_by_name(self, key: str) -> bool:
        """Tell whether the user typed this key or group, so that it must not be changed silently."""
        return self.sources.get(key) == "command line"

    def flat(self) -> dict[str, Any]:
        """Return every key with its value; a group's own key holds the name of the option."""
        found: dict[str, Any] = dict(_flatten(_as_mapping(self.settings)))
        for group, choice in self.choices.items():
            found[group] = choice.name
            found.update({f"{group}.{key}": value for key, value in choice.options.items()})
        found["hardware"] = self.profile
        found.update({f"inference.{key}": value for key, value in self.inference.items()})
        return found


def compose(request: Request) -> Configuration:
    """Return the checked configuration of a command line.

    Raises ConfigError with all problems, InputMissing if the task file or the config folder does not exist.
    """
    _require_paths(request)
    parsed, problems = _parse(request)
    groups, values = _split(parsed, request, problems)
    composed = _compose_groups(groups, request, problems)
    schema = _schema(composed, request, problems)
    tree = _set_values(composed, values, schema, problems)
    problems += _check(tree, schema, already={problem.where for problem in problems})
    problems += _contradictions(tree, {key for key, _, _ in values})
    if problems:
        raise ConfigError(problems)
    return _freeze(tree, composed, schema, groups, values, request)


def expand_sweep(request: Request) -> list[Request]:
    """Return one request per combination of the comma lists, ranges and choices among the overrides."""
    from itertools import product

    parsed, problems = _parse(request, sweeps=True)
    if problems:
        raise ConfigError(problems)
    lists = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line or ""]
        for override in parsed
    ]
    return [Request(tuple(words), request.task_file, request.config_dir) for words in product(*lists)]


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the names of a group's options, the user's own included."""
    folders = [shipped("conf") / group] + ([config_dir / group] if config_dir else [])
    return sorted({file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")})


def function_of(group: str, option: str) -> Signature | None:
    """Return the signature behind an option, or None where it has no function (such as `auto`)."""
    return read_functions(PACKAGE / AXES[group]).get(option.replace("-", "_"))


def task_source(name: str, task_file: Path | None) -> Path:
    """Return the Python file that defines the task."""
    return task_file if task_file else shipped("tasks") / name / "task.py"


def to_yaml(configuration: Configuration) -> str:
    """Return the resolved configuration as YAML, for people and for the run directory."""
    from omegaconf import OmegaConf

    tree = dict(_as_mapping(configuration.settings))
    for group, choice in configuration.choices.items():
        tree[group] = {"option": choice.name, **choice.options}
    tree["inference"] = dict(configuration.inference)
    tree["hardware"] = {"profile": configuration.profile, **configuration.hardware}
    return str(OmegaConf.to_yaml(OmegaConf.create(tree)))


def merge_overrides(old: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    """Return the old overrides with those replaced whose key is given anew."""
    new = tuple(new)
    keys = {_key_of(word) for word in new}
    return (*(word for word in old if _key_of(word) not in keys), *new)


# ---------------------------------------------------------------- the words


def _require_paths(request: Request) -> None:
    if request.task_file and not request.task_file.is_file():
        raise InputMissing(
            f"{request.task_file} does not exist", where="--task", fix=f"make it: accel-run new {request.task_file}"
        )
    if request.config_dir and not request.config_dir.is_dir():
        raise InputMissing(f"{request.config_dir} is not a folder", where="--config-dir")


def _parse(request: Request, *, sweeps: bool = False) -> tuple[list[Override], list[Problem]]:
    """Read each word with Hydra's grammar; a word that is none becomes a problem with the way to write it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed, problems = [], []
    for word in _joined(request.overrides, problems):
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(Problem(f"cannot be read: {reason}", word, "quote it: 'key=\"any text\"'"))
            continue
        if override.is_sweep_override() and not sweeps:
            problems.append(
                Problem("is a sweep over several values", word, f"run them all with -m, or quote it: '{_quoted(word)}'")
            )
            continue
        parsed.append(override)
    return parsed, problems


def _joined(words: tuple[str, ...], problems: list[Problem]) -> Iterator[str]:
    """Yield words of the form key=value; explain `--lr 0.1`, `lr = 3` and lone words."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            key, has_value, value = word.lstrip("-").partition("=")
            if not has_value and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
                word = f"{word} {value}"
            problems.append(Problem("unknown option; settings are written key=value", word, _proper(key, value)))
        elif rest and rest[0] == "=":
            value = rest[1] if len(rest) > 1 else ""
            del rest[:2]
            problems.append(Problem("has spaces around =", f"{word} = {value}".strip(), _proper(word, value)))
        elif word.endswith("=") and rest and "=" not in rest[0]:
            value = rest.pop(0)
            problems.append(Problem("has a space after =", f"{word} {value}", _proper(word[:-1], value)))
        elif "=" not in word and not word.startswith("~"):
            problems.append(Problem("is not a setting; settings are written key=value", word, _proper(word, "")))
        else:
            yield word


def _proper(key: str, value: str) -> str:
    """Return the line to type instead of what was typed."""
    name = key.replace("-", "_")
    if name in FOREIGN_KEYS:
        known = FOREIGN_KEYS[name]
        return f"say {known}={value or '...'}" if known.isidentifier() or "." in known.split()[0] else f"say {known}"
    near = name if name in GROUPS else nearest(name, [*GROUPS, *_plain_keys()], cutoff=0.7)
    return f"say {near}={value or '...'}" if near else "accel-run plan shows every key"


def _plain_keys() -> list[str]:
    """Return the keys that exist whatever is chosen: settings, and the default options' keys."""
    keys = list(settings_keys(Settings))
    for group in ("optimizer", "scheduler", "dataloader", "checkpoint"):
        for option in options_of(group):
            signature = function_of(group, option)
            keys += [f"{group}.{key}" for key in (signature.keys if signature else ())]
    return list(dict.fromkeys(keys))


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    return f'{key}="{value}"'


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


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
            problems.append(Problem("nothing is deleted here", word, f"say {_key_of(word)}=none, =off or =null"))
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            problems.append(Problem("Hydra only composes here; it starts and writes nothing", word, "leave it out"))
        elif key in GROUPS:
            option = _option_name(key, override.value())
            known = options_of(key, request.config_dir)
            if key in groups:
                problems.append(
                    Problem(f"{key} is given twice, {groups[key]} and {option}", word, "give one of them")
                )
            elif key == "task" and request.task_file:
                problems.append(Problem("the task is given twice, here and by --task", word, "give one of them"))
            elif option not in known:
                near = did_you_mean(option, known)
                listed = "one of " + ", ".join(known)
                problems.append(Problem(f"unknown {key}; must be {listed}", word, near))
            else:
                groups[key] = option
        else:
            values.append((key, override.value(), word))
    return groups, values


def _option_name(group: str, value: Any) -> str:
    name = {True: "on", False: "off", None: "none"}.get(value, str(value)) if not isinstance(value, int) or isinstance(value, bool) else str(value)
    return PRECISION_NAMES.get(name.lower(), name) if group == "precision" else name


def _compose_groups(groups: Mapping[str, str], request: Request, problems: list[Problem]) -> dict[str, Any]:
    """Let Hydra compose; return the tree with the chosen names under `hydra_choices`."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = [f"{group}={option}" for group, option in groups.items()]
    if request.task_file:
        words.append("~task")
    _search_user_folder(request.config_dir)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(shipped("conf")), **_version_base()):
            composed = hydra_compose("config", overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError([*problems, Problem(_first_line(error), str(request.config_dir or "conf"))]) from error
    choices = OmegaConf.to_container(composed.hydra.runtime.choices)
    tree = {str(key): composed._get_node(key) for key in composed if key != "hydra"}
    plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=False)
    assert isinstance(plain, dict)
    return {**plain, "hydra_choices": choices}


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
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class UserFolder(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            if _user_folder is not None:
                search_path.prepend("user", f"file://{_user_folder}")

    Plugins.instance().register(UserFolder)


# ---------------------------------------------------------------- keys and values


@dataclass(frozen=True)
class _Schema:
    keys: Mapping[str, Key]
    functions: Mapping[str, str]
    settings_of_task: Mapping[str, Any]


def _schema(composed: Mapping[str, Any], request: Request, problems: list[Problem]) -> _Schema:
    """Gather the keys of the settings, of the chosen options, of the task and of its predictions."""
    keys = settings_keys(Settings)
    functions = {}
    for group in AXES:
        option = composed["hydra_choices"].get(group)
        function = (composed.get(group) or {}).get("option", option)
        signature = function_of(group, function)
        if signature is None and function != "auto":
            known = [name for name in options_of(group) if function_of(group, name)]
            problems.append(
                Problem(
                    f"must say which option it is a variant of, such as `option: {known[0]}`",
                    f"{group}/{option}.yaml",
                    did_you_mean(str(function), known),
                )
            )
        functions[group] = function
        keys.update({f"{group}.{key.name}": key for key in (signature.keys.values() if signature else ())})
    source = task_source(composed["hydra_choices"].get("task") or "", request.task_file)
    build, predict, defaults = _read_task(source, problems)
    keys.update({f"task.{key.name}": key for key in build.keys.values()})
    keys.update({f"inference.{key.name}": key for key in predict})
    keys["inference.seed"] = Key("inference.seed", int, 0, "seed of the sampling")
    return _Schema(keys, functions, defaults)


def _read_task(source: Path, problems: list[Problem]) -> tuple[Signature, list[Key], Mapping[str, Any]]:
    """Return the keys of `build`, those of `predict`, and the SETTINGS of a task file, without running it."""
    nothing = Signature("build", (), {}, "")
    try:
        functions = read_functions(source)
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except SyntaxError as error:
        problems.append(Problem(f"is not valid Python, line {error.lineno}: {error.msg}", str(source)))
        return nothing, [], {}
    except (UnicodeDecodeError, ValueError) as error:
        problems.append(Problem(f"is not a Python file: {error}", str(source)))
        return nothing, [], {}
    if "build" not in functions:
        problems.append(
            Problem("must define build(*, ...) -> Task, and does not", str(source), "an example: accel-run new my_task.py")
        )
        return nothing, [], {}
    predict = [key for name, found in functions.items() if name.endswith(".predict") for key in found.keys.values()]
    defaults: Mapping[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["SETTINGS"]:
            try:
                defaults = ast.literal_eval(node.value)
            except ValueError:
                problems.append(Problem("SETTINGS must be a literal mapping of keys to values", str(source)))
    return functions["build"], predict, defaults


def _set_values(
    composed: Mapping[str, Any], values: list[tuple[str, Any, str]], schema: _Schema, problems: list[Problem]
) -> dict[str, Any]:
    """Return key -> value: signature defaults, then the composed tree, then the task's settings, then the user's."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree: dict[str, Any] = {name: key.default for name, key in schema.keys.items() if key.default is not REQUIRED}
    given = {key: value for key, value in composed.items() if key not in ("hydra_choices", "hardware")}
    try:
        given = OmegaConf.to_container(OmegaConf.create(given), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        problems.append(Problem(_first_line(error), "conf"))
    for key, value in _flatten(given, stop=schema.keys):
        if key.endswith(".option") and key.split(".")[0] in AXES:
            continue
        _place(tree, key, value, f"{key}={_word(value)}", schema, problems)
    for key, value in schema.settings_of_task.items():
        _place(tree, str(key), value, f"SETTINGS[{key!r}]", schema, problems)
    for key, value, word in values:
        _place(tree, key, _plain(value), word, schema, problems)
    return tree


def _place(
    tree: dict[str, Any], key: str, value: Any, word: str, schema: _Schema, problems: list[Problem]
) -> None:
    if key in schema.keys:
        tree[key] = value
        return
    inside = next((known for known in schema.keys if key.startswith(known + ".")), None)
    if inside and isinstance(tree.get(inside), dict):  # an entry of a mapping, as optimizer.lr_scales.head=0.1
        tree[inside] = {**tree[inside], key[len(inside) + 1 :]: value}
        return
    if isinstance(value, dict) and any(known.startswith(key + ".") for known in schema.keys):
        for name, item in value.items():
            _place(tree, f"{key}.{name}", item, word, schema, problems)
        return
    foreign = FOREIGN_KEYS.get(key)
    if foreign:
        problems.append(Problem("unknown key", word, f"here it is {foreign}"))
        return
    group = key.split(".")[0]
    if group in AXES and "." in key:
        names = ", ".join(known for known in schema.keys if known.startswith(group + "."))
        option = schema.functions[group]
        elsewhere = _option_with(group, key.split(".", 1)[1])
        near = did_you_mean(key, [known for known in schema.keys if known.startswith(group + ".")])
        hint = f"it belongs to {group}={elsewhere}" if elsewhere else near
        problems.append(Problem(f"unknown key of {group}={option}; known: {names or 'none'}", word, hint))
        return
    problems.append(
        Problem("unknown key", word, did_you_mean(key, [*schema.keys, *GROUPS]) or "accel-run plan shows every key")
    )


def _option_with(group: str, key: str) -> str | None:
    for option in options_of(group):
        signature = function_of(group, option)
        if signature and key in signature.keys:
            return option
    return None


def _check(tree: Mapping[str, Any], schema: _Schema, already: set[str]) -> list[Problem]:
    """Return a problem for each value that does not fit its type."""
    problems = []
    for name, key in schema.keys.items():
        if name not in tree:
            problems.append(Problem("must be given", name, f"say {name}=..."))
            continue
        wrong = fault(key.type, tree[name])
        where = f"{name}={_word(tree[name])}"
        if wrong and where not in already:
            literal = tree[name] if isinstance(tree[name], str) else ""
            near = did_you_mean(literal, _literals(key.type)) if literal else ""
            problems.append(Problem(wrong, where, near))
    return problems


def _contradictions(tree: Mapping[str, Any], typed: set[str]) -> list[Problem]:
    """Return what is wrong between keys that are each right, as far as no machine needs to be known for it."""
    problems = []
    total, micro = tree.get("global_batch_size"), tree.get("micro_batch_size")
    if isinstance(total, int) and total > 0 and (micro == "auto" or (isinstance(micro, int) and micro > 0)):
        batch = divide(total, micro, 1)
        problems += [batch] if isinstance(batch, Problem) else []
    updates, epochs = tree.get("updates"), tree.get("epochs")
    if updates is None and epochs is None:
        problems.append(Problem("updates or epochs must be given", "updates=null", "say updates=1000"))
    if {"updates", "epochs"} <= typed and updates is not None and epochs is not None:
        problems.append(Problem("both are given", f"updates={updates} epochs={epochs}", "give one of them"))
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
    groups: Mapping[str, str],
    values: list[tuple[str, Any, str]],
    request: Request,
) -> Configuration:
    names = composed["hydra_choices"]
    choices = {}
    for group in AXES:
        options = {key.split(".", 1)[1]: value for key, value in tree.items() if key.startswith(group + ".")}
        choices[group] = Choice(str(names[group]), schema.functions[group], options)
    task = {key[5:]: value for key, value in tree.items() if key.startswith("task.")}
    name = request.task_file.stem if request.task_file else str(names["task"])
    choices["task"] = Choice(name, name, task)
    return Configuration(
        settings=_settings(Settings, tree),
        choices=choices,
        inference={key[10:]: value for key, value in tree.items() if key.startswith("inference.")},
        profile=str(names["hardware"]),
        hardware=composed.get("hardware") or {},
        request=request,
        sources=_sources(groups, values, names, schema, request),
        notes=tuple(_shadows(request.config_dir)),
    )


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
    values: list[tuple[str, Any, str]],
    names: Mapping[str, str],
    schema: _Schema,
    request: Request,
) -> dict[str, str]:
    """Say who set what, weakest first so that the strongest stays."""
    found: dict[str, str] = {}
    if request.task_file:
        found.update({str(key): f"task {request.task_file.name}" for key in schema.settings_of_task})
    else:
        found.update({key: f"task {names['task']}" for key in _file_keys("task", names["task"], request.config_dir)})
    for group in selected_by_profile(str(names["hardware"]), request.config_dir):
        found[group] = f"profile {names['hardware']}"
    found.update(dict.fromkeys(groups, "command line"))
    found.update({key: "command line" for key, _, _ in values})
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


def _file_keys(group: str, option: str, config_dir: Path | None) -> list[str]:
    content = {key: value for key, value in _load(group, option, config_dir).items() if key != "defaults"}
    return [key for key, _ in _flatten(content)]


def _load(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    from omegaconf import OmegaConf

    for folder in ([config_dir] if config_dir else []) + [shipped("conf")]:
        file = folder / group / f"{option}.yaml"
        if file.is_file():
            content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
            return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    return {}


def _shadows(config_dir: Path | None) -> Iterator[str]:
    if config_dir is None:
        return
    for file in sorted(config_dir.rglob("*.yaml")):
        inner = file.relative_to(config_dir)
        if (shipped("conf") / inner).is_file():
            yield f"{file} is used instead of the shipped {inner}"


def _flatten(tree: Mapping[str, Any], prefix: str = "", stop: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in stop:
            yield from _flatten(value, f"{name}.", stop)
        elif not (isinstance(value, Mapping) and name not in stop) and not (value is None and not prefix and name in GROUPS):
            yield name, value


def _as_mapping(settings: Settings) -> Mapping[str, Any]:
    import dataclasses

    return dataclasses.asdict(settings)


def _plain(value: Any) -> Any:
    """Turn Hydra's quoted strings, lists and mappings into plain Python values."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(_word(item) for item in value)}]" if isinstance(value, list) else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]




def shipped_options() -> dict[str, str]:
    """Return group -> option of the shipped defaults list."""
    entries = _load("", "config", None).get("defaults") or ()
    return {str(key): str(value) for entry in entries if isinstance(entry, dict) for key, value in entry.items()}
