"""Compose, merge and validate a request once: the result is a checked, frozen Configuration."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.secret_refusal import refuse_secrets
from runner.config.config_files import flatten, shadowing_notes
from runner.config.custom_options import find_custom_hooks, table_problems
from runner.config.custom_tables import HOOK, omit_consequences
from runner.config.known_keys import PhaseKeys, Schema, build_schema, check_phases, find_functions
from runner.config.layers import (
    Merged,
    Setting,
    choose_phase_options,
    command_line_setting,
    default_settings,
    disabled_hook_notes,
    expand_setting,
    file_settings,
    find_unused_keys,
    group_settings,
    implied_groups,
    merge,
    merge_phases,
    select_for_hydra,
    setting_sources,
    setting_values,
    task_file_settings,
    task_group_settings,
    task_size,
    unused_setting_notes,
)
from runner.config.objective_keys import OBJECTIVE, check_objective_options, declared_key_notes, nest_objectives
from runner.config.options import AXES, collect_option_names, custom_option_notes, find_extension, option_reference
from runner.config.overrides import parse_overrides, split_overrides
from runner.config.phases import PHASE_GROUPS, name_phases
from runner.config.request import Request
from runner.config.schema import find_nearest, settings_types
from runner.config.settings import EarlyStoppingSettings, EvaluateSettings, Settings
from runner.config.task_file import read_task
from runner.config.value_checks import check_values, find_contradictions, long_warmup_problem


@dataclass(frozen=True)
class Choice:
    """The chosen option of a group: its name, the function that implements it, and its keys.

    extension  reference to a function of the task or a package that extends the shipped function; empty: none
    """

    name: str
    function: str
    options: Mapping[str, Any]
    extension: str = ""

    def uses(self, *options: str) -> bool:
        """Return whether one of these shipped options implements this choice, even under another name."""
        return self.function in options

    @property
    def reference(self) -> str:
        """Return the reference for which `find_signature` returns all keys of this option."""
        return self.extension or self.function

    @property
    def location(self) -> str:
        """Return the file or module, and the table, of an option of the task or a package; empty for a shipped one."""
        return self.reference.rpartition(":")[0]


@dataclass(frozen=True)
class PhaseSettings:
    """Settings of one phase.

    trains  names or prefixes of the parameters to train; None: all with requires_grad
    needs   phases that must be finished before this one
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
    """The validated settings of the user; code that uses it does not depend on Hydra.

    choices  group -> choice, for every group but hardware
    phases   all phases of the task, in order; `settings.phases` selects those that run
    hooks    hooks of the task file and of packages, each with its keys and `enabled`
    objective_keys  keys of the objectives, `objective.NAME.KEY`
    phase_keys  keys of the phases; empty if the task declares no phases: its only phase then has the settings of the
                run
    hardware  facts about the hardware from the chosen profile, whose name is `profile`
    for_auto  settings of the task for options that the plan may choose for `auto`, such as precision.keep_fp32
    sources  key or group -> what set it: "command line", "profile t4", "task gpt", "config folder"; no entry: a default
    notes    messages for the user, such as shadowed files
    has_updates  False for commands that use a trained model: they do not check the division of an update into
                 micro-batches
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
    phase_keys: Mapping[str, Any] = field(default_factory=dict)
    hooks: tuple[Choice, ...] = ()
    objective_keys: Mapping[str, Any] = field(default_factory=dict)
    has_updates: bool = True

    @property
    def objectives(self) -> dict[str, dict[str, Any]]:
        """Return objective -> the keys that the user sets, with their values."""
        return nest_objectives({key: value for key, value in self.objective_keys.items() if key in self.sources})

    def is_set_by_user(self, key: str) -> bool:
        """Return whether the user set this key or group on the command line; it must then not be changed silently."""
        return self.sources.get(key) == "command line"

    def flat(self) -> dict[str, Any]:
        """Return every key with its value; the value of a group's own key is the name of its option."""
        values: dict[str, Any] = dict(flatten(dataclasses.asdict(self.settings)))
        for group, choice in self.choices.items():
            values[group] = choice.name
            values.update({f"{group}.{key}": value for key, value in choice.options.items()})
        values.update(
            {f"{HOOK}.{hook.name}.{key}": value for hook in self.hooks for key, value in hook.options.items()}
        )
        values.update(self.objective_keys)
        values.update(self.phase_keys)
        values["hardware"] = self.profile
        values.update({f"inference.{key}": value for key, value in self.inference.items()})
        return values


def compose(request: Request, *, has_updates: bool = True) -> Configuration:
    """Return the checked configuration of a command line.

    has_updates  see `Configuration`

    Raises ConfigError with all problems, InputMissing if the task file or the config folder does not exist, and
    SecurityRefusal for files that would call code or leave their folder. A secret is reported first and as the only
    problem, so that no other message repeats it.
    """
    refuse_secrets(request.overrides, partial(collect_option_names, request.task_file, request.config_dir))
    _check_paths(request)
    parsed, problems = parse_overrides(request)
    group_overrides, overrides = split_overrides(parsed, request, problems)
    command_line = [command_line_setting(*override) for override in overrides]
    notes = list(shadowing_notes(request.config_dir))

    groups = [*group_settings(group_overrides, request)]
    before_task = {"task": "", **setting_values(merge(groups))}
    resolve_size = partial(task_size, command_line, before_task["task"], before_task["hardware"], request)
    problems += table_problems(request.task_file)
    task = read_task(before_task["task"], request, resolve_size, problems)
    notes += task.notes
    groups += implied_groups(command_line, merge(groups))
    chosen = merge([*groups, *task_group_settings(task, request, problems)])

    from runner.config.composition import compose_groups  # Hydra is slow to import

    composed = compose_groups(select_for_hydra(chosen, request.task_file), request, problems)
    choices = composed.pop("hydra_choices")
    functions = find_functions(choices, composed, request, problems)
    phase_options = [
        choose_phase_options(phase, chosen, functions, command_line, request.task_file, problems)
        for phase in task.phases
    ]
    requested = {setting.key: setting.value for setting in command_line}
    schema = build_schema(functions, task, [setting_values(options) for options in phase_options], request, requested)
    problems += check_objective_options(task.objectives, requested, request.task_file)
    if len(task.phases) <= 1:  # otherwise, the key may apply to a phase with a single loss
        notes += declared_key_notes(task.objectives, requested)

    unused = find_unused_keys(chosen, choices["hardware"], schema, request.config_dir)
    from_files = file_settings(composed, choices, schema, request, problems, unused=unused, notes=notes)
    files = [*default_settings(schema), *from_files]
    from_task, for_auto = task_file_settings(task, choices, schema, problems, notes)
    expanded = [setting for override in command_line for setting in expand_setting(override, schema, problems)]

    def merge_with(overrides: list[Setting], problems: list[Problem]) -> tuple[Merged, Merged]:
        run = merge(setting for setting in (*files, *from_task, *overrides) if not setting.for_phase)
        return run, {**run, **merge_phases(phase_options, run, [*files, *overrides], schema, task, problems)}

    run, merged = merge_with(expanded, problems)
    notes += custom_option_notes(functions, choices["task"], request)
    notes += [*unused_setting_notes([*from_task, *expanded], run, schema), *check_phases(schema, problems)]
    notes += disabled_hook_notes(expanded, run)

    reported = {problem.where for problem in problems}
    problems += check_values(merged, schema, reported, without_overrides=lambda: merge_with([], [])[1])
    divides = has_updates and choices["parallelism"] == "single"  # otherwise the plan checks what the ranks support
    problems += find_contradictions(setting_values(merged), schema, checks_division=divides)
    if problems:
        raise ConfigError([name_phases(problem, task.phases) for problem in omit_consequences(problems)])
    configuration = _build_configuration(
        setting_values(merged),
        choices,
        schema,
        request,
        hardware=composed.get("hardware") or {},
        for_auto=for_auto,
        sources={**setting_sources(chosen), **setting_sources(merged)},
        notes=tuple(notes),
        has_updates=has_updates,
    )
    if has_updates and (problems := _find_long_warmups(configuration)):
        raise ConfigError(problems)
    return configuration


def _find_long_warmups(configuration: Configuration) -> list[Problem]:
    """Return a problem for each shipped schedule whose warm-up is longer than its phase.

    Phases whose length is in epochs are left out, because epochs are converted to updates only when the data is loaded.
    The schedule itself then checks its warm-up.
    """
    problems = []
    for phase in configuration.phases:
        if phase.name in (configuration.settings.phases or [phase.name]) and not phase.scheduler.location:
            warmup = phase.scheduler.options.get("warmup", 0)
            if phase.updates is not None and warmup > max(1, phase.updates):
                key = f"phase.{phase.name}.scheduler.warmup" if configuration.phase_keys else "scheduler.warmup"
                problems.append(long_warmup_problem(warmup, phase.updates, key))
    return problems


def to_yaml(configuration: Configuration) -> str:
    """Return the resolved configuration as YAML, for the terminal and for the run directory."""
    from runner.config.yaml_text import yaml_text

    return yaml_text(tree_of(configuration))


def tree_of(configuration: Configuration) -> dict[str, Any]:
    """Return the resolved configuration as nested dictionaries."""
    tree = dataclasses.asdict(configuration.settings)
    for group, choice in configuration.choices.items():
        tree[group] = {"option": choice.name, **choice.options}
    for key, value in configuration.phase_keys.items():
        _, phase, name = key.split(".", 2)
        tree.setdefault("phase", {}).setdefault(phase, {})[name] = value
    if configuration.hooks:
        tree[HOOK] = {hook.name: dict(hook.options) for hook in configuration.hooks}
    if configuration.objectives:
        tree[OBJECTIVE] = configuration.objectives
    tree["inference"] = dict(configuration.inference)
    tree["hardware"] = {"profile": configuration.profile, **configuration.hardware}
    return tree


def _check_paths(request: Request) -> None:
    if request.task_file and not request.task_file.is_file():
        path = request.task_file
        dotted = Path(f"{path.parent.joinpath(*path.name.split('.'))}.py")  # package.module, as in python -m
        file = dotted if dotted.is_file() else path.with_suffix(".py")
        name = shlex.quote(str(file))
        others = sorted(path.stem for path in file.parent.glob("*.py"))
        fix = f"use --task {name}" if file.is_file() else f"create it: accel-run new {name}"
        if not file.is_file() and (near := find_nearest(file.stem, others)):
            fix = f"use --task {shlex.quote(str(file.with_stem(near)))}"
        what = "is a folder; expected a file" if request.task_file.is_dir() else "does not exist"
        raise InputMissing(f"{request.task_file} {what}", where="--task", fix=fix)
    if request.config_dir and not request.config_dir.is_dir():
        raise InputMissing(
            f"{request.config_dir} is not a folder",
            where="--config-dir",
            fix="pass the folder that contains your files",
        )


def _build_configuration(
    tree: Mapping[str, Any], choices: Mapping[str, str], schema: Schema, request: Request, **fields: Any
) -> Configuration:
    def keys_under(group: str) -> dict[str, Any]:
        return {key.removeprefix(f"{group}."): value for key, value in tree.items() if key.startswith(f"{group}.")}

    axis_choices = {}
    for group in AXES:
        function, extension = find_extension(group, schema.functions[group], request.task_file)
        axis_choices[group] = Choice(choices[group], function, keys_under(group), extension)
    task = request.task_file.stem if request.task_file else choices["task"]
    axis_choices["task"] = Choice(task, task, keys_under("task"))
    settings = _build_settings(Settings, tree)
    phases = [_phase_settings(phase, tree, request.task_file) for phase in schema.phases]
    return Configuration(
        settings=settings,
        choices=axis_choices,
        inference=keys_under("inference"),
        profile=choices["hardware"],
        request=request,
        phases=tuple(phases) or (_only_phase(settings, axis_choices),),
        phase_keys={key: value for key, value in tree.items() if key.startswith("phase.")},
        hooks=tuple(
            Choice(hook.name, hook.reference, keys_under(f"{HOOK}.{hook.name}"))
            for hook in find_custom_hooks(request.task_file)
        ),
        objective_keys={key: value for key, value in tree.items() if key.startswith(f"{OBJECTIVE}.")},
        **fields,
    )


def _phase_settings(phase: PhaseKeys, tree: Mapping[str, Any], task_file: Path | None) -> PhaseSettings:
    """Return the settings of a declared phase; keys that a fit phase does not have get placeholders."""

    def choice(group: str) -> Choice:
        prefix, option = phase.declared.key(f"{group}."), phase.options[group]
        options = {key.removeprefix(prefix): value for key, value in tree.items() if key.startswith(prefix)}
        return Choice(option, option_reference(group, option, task_file), options)

    phase_values = {name: tree[phase.declared.key(name)] for name in phase.keys}
    names = ("trains", "updates", "epochs", "global_batch_size", "micro_batch_size", "max_grad_norm")
    values: dict[str, Any] = {name: phase_values.get(name) for name in names} | {
        group: choice(group) for group in PHASE_GROUPS
    }
    for name, kind in (("evaluate", EvaluateSettings), ("early_stopping", EarlyStoppingSettings)):
        prefix = f"{name}."
        values[name] = kind(
            **{key.removeprefix(prefix): value for key, value in phase_values.items() if key.startswith(prefix)}
        )
    return PhaseSettings(name=phase.declared.name, kind=phase.declared.kind, needs=phase.declared.needs, **values)


def _only_phase(settings: Settings, choices: Mapping[str, Choice]) -> PhaseSettings:
    """Return the only phase of a task that declares none; it has the settings of the run."""
    shared_names = (
        "updates",
        "epochs",
        "global_batch_size",
        "micro_batch_size",
        "max_grad_norm",
        "evaluate",
        "early_stopping",
    )
    values: dict[str, Any] = {name: getattr(settings, name) for name in shared_names}
    values |= {group: choices[group] for group in PHASE_GROUPS}
    return PhaseSettings(name="train", kind="train", needs=(), trains=None, **values)


def _build_settings(kind: type, tree: Mapping[str, Any], prefix: str = "") -> Any:
    hints = settings_types(kind)
    return kind(
        **{
            field.name: _build_settings(hints[field.name], tree, f"{prefix}{field.name}.")
            if dataclasses.is_dataclass(hints[field.name])
            else tree[prefix + field.name]
            for field in dataclasses.fields(kind)
        }
    )
