"""Compose, merge and validate a request once: the result is a checked, frozen Configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from runner.base.errors import ConfigError, InputMissing
from runner.base.secret_refusal import refuse_secrets
from runner.config.composition import compose_groups
from runner.config.config_files import flatten, shadows
from runner.config.known_keys import PhaseKeys, Schema, check_phases, functions_behind, schema_of
from runner.config.layers import (
    for_hydra,
    merge,
    merge_phases,
    notes_of,
    notes_of_hooks,
    of_defaults,
    of_files,
    of_groups,
    of_task_file,
    of_task_groups,
    phase_choices,
    placed,
    sources_of,
    task_size,
    typed_setting,
    unused_of_files,
    values_of,
)
from runner.config.objective_keys import OBJECTIVE, nested_objectives, problems_of_objectives
from runner.config.options import AXES, names_of_options, notes_of_own, reference_of
from runner.config.overrides import parse, split
from runner.config.own_options import own_hooks, table_problems
from runner.config.own_tables import HOOK
from runner.config.phases import GROUPS as PHASE_GROUPS
from runner.config.request import Request
from runner.config.settings import EarlyStoppingSettings, EvaluateSettings, Settings
from runner.config.task_file import read_task
from runner.config.value_checks import check, contradictions


@dataclass(frozen=True)
class Choice:
    """The chosen option of a group: its name, the function that implements it, and its keys."""

    name: str
    function: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class PhaseSettings:
    """Settings of one phase.

    trains  names or prefixes of the parameters to train; None: all with requires_grad
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
    """The validated settings of the user; code after this does not depend on Hydra.

    choices  group -> choice, for every group but hardware
    phases   all phases of the task, in order; `settings.phases` selects those that run
    hooks    hooks of the task file and of packages, each with its keys and `enabled`
    objective_keys  keys of the objectives, `objective.NAME.KEY`
    own_keys keys of the phases; empty if the task declares none, so its only phase has the settings of the run
    hardware facts of the chosen profile; its name is `profile`
    for_auto keys of the task for the option that the plan chooses for `auto`, such as precision.keep_fp32
    sources  key or group -> what set it: "command line", "profile t4", "task gpt", "config folder"; no entry: a default
    notes    messages for the user, such as shadowed files
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
    hooks: tuple[Choice, ...] = ()
    objective_keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objectives(self) -> dict[str, dict[str, Any]]:
        """Return objective -> the keys that the user sets, with their values."""
        return nested_objectives({key: value for key, value in self.objective_keys.items() if key in self.sources})

    def is_set_by_user(self, key: str) -> bool:
        """Return whether the user set this key or group on the command line; it must then not be changed silently."""
        return self.sources.get(key) == "command line"

    def flat(self) -> dict[str, Any]:
        """Return every key with its value; a group's own key holds the name of the option."""
        found: dict[str, Any] = dict(flatten(_as_mapping(self.settings)))
        for group, choice in self.choices.items():
            found[group] = choice.name
            found.update({f"{group}.{key}": value for key, value in choice.options.items()})
        found.update({f"{HOOK}.{hook.name}.{key}": value for hook in self.hooks for key, value in hook.options.items()})
        found.update(self.objective_keys)
        found.update(self.own_keys)
        found["hardware"] = self.profile
        found.update({f"inference.{key}": value for key, value in self.inference.items()})
        return found


def compose(request: Request) -> Configuration:
    """Return the checked configuration of a command line.

    Raises ConfigError with all problems, InputMissing if the task file or the config folder does not exist, and
    SecurityRefusal for files that would call code or leave their folder. A secret is refused first and alone, so that
    no other message repeats it.
    """
    refuse_secrets(request.overrides, partial(names_of_options, request.task_file, request.config_dir))
    _require_paths(request)
    parsed, problems = parse(request)
    typed_groups, overrides = split(parsed, request, problems)
    typed = [typed_setting(*override) for override in overrides]
    notes = list(shadows(request.config_dir))

    groups = [*of_groups(typed_groups, request)]
    first = {"task": "", **values_of(merge(groups))}
    size_of = partial(task_size, typed, first["task"], first["hardware"], request)
    problems += table_problems(request.task_file)
    task = read_task(first["task"], request, size_of, problems)
    chosen = merge([*groups, *of_task_groups(task, request, problems)])

    composed = compose_groups(for_hydra(chosen, request.task_file), request, problems)
    choices = composed.pop("hydra_choices")
    functions = functions_behind(choices, composed, request, problems)
    of_phases = [phase_choices(phase, chosen, functions, typed, request.task_file, problems) for phase in task.phases]
    given = {setting.key: setting.value for setting in typed}
    schema = schema_of(functions, task, [values_of(each) for each in of_phases], request, given)
    problems += problems_of_objectives(task.objectives, given, request.task_file)

    unused = unused_of_files(chosen, choices["hardware"], schema, request.config_dir)
    of_composed = of_files(composed, choices, schema, request, problems, unused=unused, notes=notes)
    files = [*of_defaults(schema), *of_composed]
    of_task, for_auto = of_task_file(task, choices, schema, problems, notes)
    typed = [each for setting in typed for each in placed(setting, schema, problems)]
    run = merge(each for each in (*files, *of_task, *typed) if not each.of_phase)
    merged = {**run, **merge_phases(of_phases, run, [*files, *typed], schema, task, problems)}
    notes += notes_of_own(functions, choices["task"], request)
    notes += [*notes_of([*of_task, *typed], run, schema), *check_phases(schema, problems)]
    notes += notes_of_hooks(typed, run)

    problems += check(merged, schema, already={problem.where for problem in problems})
    is_alone = choices["parallelism"] == "single"  # the plan checks what ranks support
    problems += contradictions(values_of(merged), schema, is_alone=is_alone)
    if problems:
        raise ConfigError(problems)
    return _frozen(
        values_of(merged),
        choices,
        schema,
        request,
        hardware=composed.get("hardware") or {},
        for_auto=for_auto,
        sources={**sources_of(chosen), **sources_of(merged)},
        notes=tuple(notes),
    )


def to_yaml(configuration: Configuration) -> str:
    """Return the resolved configuration as YAML, for the terminal and for the run directory."""
    from runner.config.yaml_text import yaml_text

    return yaml_text(tree_of(configuration))


def tree_of(configuration: Configuration) -> dict[str, Any]:
    """Return the resolved configuration as nested dictionaries."""
    tree = dict(_as_mapping(configuration.settings))
    for group, choice in configuration.choices.items():
        tree[group] = {"option": choice.name, **choice.options}
    for key, value in configuration.own_keys.items():
        _, phase, name = key.split(".", 2)
        tree.setdefault("phase", {}).setdefault(phase, {})[name] = value
    if configuration.hooks:
        tree[HOOK] = {hook.name: dict(hook.options) for hook in configuration.hooks}
    if configuration.objectives:
        tree[OBJECTIVE] = configuration.objectives
    tree["inference"] = dict(configuration.inference)
    tree["hardware"] = {"profile": configuration.profile, **configuration.hardware}
    return tree


def _require_paths(request: Request) -> None:
    if request.task_file and not request.task_file.is_file():
        file = request.task_file.with_suffix(".py")
        fix = f"use --task {file}" if file.is_file() else f"create it: accel-run new {file}"
        raise InputMissing(f"{request.task_file} does not exist", where="--task", fix=fix)
    if request.config_dir and not request.config_dir.is_dir():
        raise InputMissing(
            f"{request.config_dir} is not a folder",
            where="--config-dir",
            fix="pass the folder that contains your files",
        )


def _frozen(
    tree: Mapping[str, Any], choices: Mapping[str, str], schema: Schema, request: Request, **rest: Any
) -> Configuration:
    def under(group: str) -> dict[str, Any]:
        return {key.removeprefix(f"{group}."): value for key, value in tree.items() if key.startswith(f"{group}.")}

    chosen = {
        group: Choice(choices[group], reference_of(group, schema.functions[group], request.task_file), under(group))
        for group in AXES
    }
    task = request.task_file.stem if request.task_file else choices["task"]
    chosen["task"] = Choice(task, task, under("task"))
    settings = _settings(Settings, tree)
    phases = [_phase_settings(phase, tree, request.task_file) for phase in schema.phases]
    return Configuration(
        settings=settings,
        choices=chosen,
        inference=under("inference"),
        profile=choices["hardware"],
        request=request,
        phases=tuple(phases) or (_only_phase(settings, chosen),),
        own_keys={key: value for key, value in tree.items() if key.startswith("phase.")},
        hooks=tuple(
            Choice(hook.name, hook.reference, under(f"{HOOK}.{hook.name}")) for hook in own_hooks(request.task_file)
        ),
        objective_keys={key: value for key, value in tree.items() if key.startswith(f"{OBJECTIVE}.")},
        **rest,
    )


def _phase_settings(phase: PhaseKeys, tree: Mapping[str, Any], task_file: Path | None) -> PhaseSettings:
    """Return the settings of a declared phase; keys that a fit phase lacks get values without effect."""

    def choice(group: str) -> Choice:
        lead, option = phase.declared.key(f"{group}."), phase.options[group]
        options = {key.removeprefix(lead): value for key, value in tree.items() if key.startswith(lead)}
        return Choice(option, reference_of(group, option, task_file), options)

    own = {name: tree[phase.declared.key(name)] for name in phase.keys}
    plain = ("trains", "updates", "epochs", "global_batch_size", "micro_batch_size", "max_grad_norm")
    values: dict[str, Any] = {name: own.get(name) for name in plain} | {group: choice(group) for group in PHASE_GROUPS}
    for name, kind in (("evaluate", EvaluateSettings), ("early_stopping", EarlyStoppingSettings)):
        lead = f"{name}."
        values[name] = kind(**{key.removeprefix(lead): value for key, value in own.items() if key.startswith(lead)})
    return PhaseSettings(name=phase.declared.name, kind=phase.declared.kind, needs=phase.declared.needs, **values)


def _only_phase(settings: Settings, choices: Mapping[str, Choice]) -> PhaseSettings:
    """Return the only phase of a task that declares none; it has the settings of the run."""
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


def _as_mapping(settings: Settings) -> Mapping[str, Any]:
    import dataclasses

    return dataclasses.asdict(settings)
