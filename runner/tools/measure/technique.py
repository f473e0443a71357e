"""Techniques that `benchmark suite=ladder` measures: named overrides, shipped or defined by the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.paths import shipped_path
from runner.config.configuration import Choice, Configuration, PhaseSettings
from runner.config.custom_options import find_custom_options
from runner.config.custom_tables import RESERVED_TECHNIQUES, TECHNIQUE, CustomOption, find_technique_error
from runner.config.guarded_yaml import read_guarded
from runner.config.options import find_signature
from runner.config.request import format_value, merge_overrides
from runner.config.schema import did_you_mean

BASELINE = "baseline"
STEP = "step"  # the first column of the table
STACK = "up to "  # begins the name of a stack of techniques
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,39}", re.ASCII)
_NAME_RULE = (
    "use at most 40 letters, digits, '.', '_' and '-', beginning with a letter or a digit, but none of"
    f" the names {', '.join(RESERVED_TECHNIQUES)}"
)
FOLDER = Path("benchmark") / "technique"  # in conf/, and in --config-dir


@dataclass(frozen=True)
class Technique:
    """Overrides that are applied to the baseline.

    needs  group -> option that the run must use; `device`: type of device, such as cuda
    """

    name: str
    overrides: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, configuration: Configuration, device: str) -> str:
        """Return the unmet requirement for this configuration on a device such as cuda:0; empty if there is none."""
        for group, option in self.needs.items():
            if group == "device":
                if option != device.partition(":")[0]:
                    return f"needs device={option}, but this run uses {device}"
                continue
            choices = {"the training": configuration.choices[group]}
            for phase in _training_phases(configuration):
                phase_choices = {"optimizer": phase.optimizer, "scheduler": phase.scheduler}
                choices |= {phase.name: phase_choices[group]} if group in phase_choices else {}
            for owner, choice in choices.items():
                if choice.name != option:
                    return f"needs {group}={option}, but {owner} has {group}={choice.name}"
        return ""


def load_techniques(config_dir: Path | None, task_file: Path | None = None) -> dict[str, Technique]:
    """Return all techniques by name, the baseline first, in the order in which they are stacked.

    A file in `config_dir` replaces a shipped one of the same name. Both replace an entry with that name in TECHNIQUES
    of the task file or of a package. Raises ConfigError, SecurityRefusal.
    """
    return {
        name: _read_technique(found, found.parent)
        if isinstance(found, Path)
        else _to_technique(name, found.content, f"{found.location}: {found.table}[{name!r}]")
        for name, found in find_techniques(config_dir, task_file).items()
    }


def find_techniques(config_dir: Path | None, task_file: Path | None = None) -> dict[str, Path | CustomOption]:
    """Return name -> file or entry of TECHNIQUES, in the order of `load_techniques`."""
    by_name: dict[str, Path | CustomOption] = {
        name: option for (group, name), option in find_custom_options(task_file).items() if group == TECHNIQUE
    }
    for root in [shipped_path("conf"), *([config_dir] if config_dir else [])]:
        by_name |= {file.stem: file for file in (root / FOLDER).glob("*.yaml")}
    rank = {name: number for number, name in enumerate(SHIPPED_ORDER)}
    return {name: by_name[name] for name in sorted(by_name, key=lambda name: (rank.get(name, len(rank)), name))}


def is_valid_name(name: str) -> bool:
    """Return whether a row of the results may have this name: NAME of a technique, or `up to NAME` for a stack."""
    return bool(_NAME.fullmatch(name.removeprefix(STACK))) and name not in RESERVED_TECHNIQUES


def select_techniques(names: Iterable[str], known: Mapping[str, Technique]) -> list[Technique]:
    """Return the techniques with these names, without the baseline. Raises ConfigError for unknown names."""
    names = list(dict.fromkeys(names))
    problems = [
        Problem(f"must be a technique, one of {', '.join(known)}", name, did_you_mean(name, known))
        for name in names
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return [known[name] for name in names if name != BASELINE]


def stack_overrides(members: Iterable[Technique], base: Technique, configuration: Configuration) -> tuple[str, ...]:
    """Return the overrides of the baseline with these techniques stacked on it.

    Later techniques replace settings of earlier ones. If a technique selects another optimizer, the learning rate, the
    weight decay and all other settings that both optimizers have are kept, unless an override sets them.
    """
    overrides = base.overrides
    for technique in members:
        overrides = merge_overrides(overrides, technique.overrides)
    names = [override.partition("=")[2] for override in overrides if override.startswith("optimizer=")]
    if not names:
        return overrides
    phase_overrides = (
        override
        for phase in _training_phases(configuration)
        for override in _carry_over_keys(phase.optimizer, names[-1], overrides, f"phase.{phase.name}.optimizer")
    )
    run_overrides = _carry_over_keys(configuration.choices["optimizer"], names[-1], overrides)
    return (*overrides, *run_overrides, *phase_overrides)


def _training_phases(configuration: Configuration) -> list[PhaseSettings]:
    return [phase for phase in configuration.phases if phase.kind == "train" and configuration.phase_keys]


def _carry_over_keys(before: Choice, option: str, overrides: Iterable[str], group: str = "optimizer") -> list[str]:
    """Return overrides that copy the settings of one optimizer to another: keys of both, except those in `overrides`.

    group  `optimizer`, or `phase.NAME.optimizer` for a phase, whose optimizer is then replaced too
    """
    signature = find_signature("optimizer", option)
    keys = {override.partition("=")[0] for override in overrides}
    if signature is None or option == before.name:
        return []
    return [f"{group}={option}"] * (group != "optimizer") + [
        f"{group}.{key}={format_value(value)}"
        for key, value in before.options.items()
        if key in signature.keys and f"optimizer.{key}" not in keys and f"{group}.{key}" not in keys
    ]


def _read_technique(file: Path, root: Path) -> Technique:
    """Read a technique from a file. Raises ConfigError for invalid content."""
    import yaml  # type: ignore[import-untyped]

    content = yaml.safe_load(read_guarded(file, root))
    return _to_technique(file.stem, content, str(file))


def _to_technique(name: str, content: Any, where: str) -> Technique:
    if not is_valid_name(name):
        what = "cannot be the name of a technique"
        raise ConfigError(Problem(what, where, f"rename {name}: {_NAME_RULE}"))
    error = find_technique_error(content)
    if error:
        raise ConfigError(Problem(error[0], where, error[1]))
    return Technique(name, tuple(content["overrides"]), content.get("needs") or {})


# Order of the shipped techniques: formats, layout, compilation, kernels, copies. Others follow by name.
SHIPPED_ORDER = (BASELINE, "tf32", "bf16", "fp16", "channels_last", "compile", "flash", "fused", "8bit",
         "autotune", "non_blocking", "prefetch")  # fmt: skip
