"""Techniques that the ladder measures: one YAML file of overrides each, shipped or of the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.paths import shipped_path
from runner.config.configuration import Choice, Configuration, PhaseSettings
from runner.config.guarded_yaml import read_guarded
from runner.config.options import find_signature
from runner.config.request import merge_overrides
from runner.config.schema import did_you_mean

BASELINE = "baseline"
STEP = "step"  # the first column of the table
FOLDER = Path("benchmark") / "technique"  # in conf/, and in --config-dir


@dataclass(frozen=True)
class Technique:
    """Overrides that are applied to the baseline.

    needs  group -> the option that the training must use; device: the kind of device
    """

    name: str
    overrides: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, configuration: Configuration, device: str) -> str:
        """Return what it lacks in this configuration on a device such as cuda:0; empty if nothing."""
        for group, option in self.needs.items():
            if group == "device":
                if option != device.partition(":")[0]:
                    return f"needs device={option}, but this run uses {device}"
                continue
            found = {"the training": configuration.choices[group]}
            for phase in _trained(configuration):
                own = {"optimizer": phase.optimizer, "scheduler": phase.scheduler}
                found |= {phase.name: own[group]} if group in own else {}
            for who, choice in found.items():
                if choice.name != option:
                    return f"needs {group}={option}, but {who} has {group}={choice.name}"
        return ""


def techniques(config_dir: Path | None) -> dict[str, Technique]:
    """Return all techniques by name, the baseline first, in the order in which they are stacked.

    A file of the user replaces a shipped one of the same name. Raises ConfigError, SecurityRefusal.
    """
    return {name: _read(file, file.parent) for name, file in files_of(config_dir).items()}


def files_of(config_dir: Path | None) -> dict[str, Path]:
    """Return name -> file, in the order of `techniques`."""
    found: dict[str, Path] = {}
    for root in [shipped_path("conf"), *([config_dir] if config_dir else [])]:
        found |= {file.stem: file for file in (root / FOLDER).glob("*.yaml")}
    place = {name: number for number, name in enumerate(ORDER)}
    return {name: found[name] for name in sorted(found, key=lambda name: (place.get(name, len(ORDER)), name))}


def is_name(name: str) -> bool:
    """Return whether a technique may have this name: printable, and not that of the steps."""
    return bool(name.strip()) and name.isprintable() and name != STEP


def chosen(names: Iterable[str], known: Mapping[str, Technique]) -> list[Technique]:
    """Return the techniques of these names. Raises ConfigError for unknown names."""
    names = list(dict.fromkeys(names))
    problems = [
        Problem(f"must be a technique, one of {', '.join(known)}", name, did_you_mean(name, known))
        for name in names
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return [known[name] for name in names if name != BASELINE]


def stacked(members: Iterable[Technique], base: Technique, configuration: Configuration) -> tuple[str, ...]:
    """Return the overrides of the baseline and these techniques on top of each other.

    A later one replaces settings of an earlier one. Another optimizer keeps the learning rate, the decay and all other
    settings that the training has set for the original one.
    """
    words = base.overrides
    for technique in members:
        words = merge_overrides(words, technique.overrides)
    names = [word.partition("=")[2] for word in words if word.startswith("optimizer=")]
    if not names:
        return words
    of_phases = (
        word
        for phase in _trained(configuration)
        for word in _carried(phase.optimizer, names[-1], words, f"phase.{phase.name}.optimizer")
    )
    return (*words, *_carried(configuration.choices["optimizer"], names[-1], words), *of_phases)


def _trained(configuration: Configuration) -> list[PhaseSettings]:
    """Return the phases that train and have separate settings."""
    return [phase for phase in configuration.phases if phase.kind == "train" and configuration.own_keys]


def _carried(before: Choice, option: str, words: Iterable[str], group: str = "optimizer") -> list[str]:
    """Return the keys of an optimizer as overrides for another one that has them too, unless they are set.

    group  where they are set: of the run, or of a phase, which then gets the other optimizer
    """
    signature = find_signature("optimizer", option)
    given = {word.partition("=")[0] for word in words}
    if signature is None or option == before.name:
        return []
    return [f"{group}={option}"] * (group != "optimizer") + [
        f"{group}.{key}={_word(value)}"
        for key, value in before.options.items()
        if key in signature.keys and f"optimizer.{key}" not in given and f"{group}.{key}" not in given
    ]


def _word(value: Any) -> str:
    """Return a value as typed after `key=`."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_word(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _read(file: Path, root: Path) -> Technique:
    """Return the technique of a file. Raises ConfigError for other content."""
    import yaml  # type: ignore[import-untyped]

    if file.stem in TAKEN or not is_name(file.stem):
        what = "cannot be the name of a technique: it has another meaning, or cannot be typed"
        raise ConfigError(Problem(what, str(file), "give the file another name"))
    content = yaml.safe_load(read_guarded(file, root))
    keys = "overrides: a list of key=value words, and needs: a mapping of group to option"
    if not isinstance(content, dict) or not content.keys() <= {"overrides", "needs"} or "overrides" not in content:
        raise ConfigError(Problem(f"must contain {keys}", str(file), "as in overrides: [precision=bf16]"))
    words, needs = content["overrides"], content.get("needs") or {}
    if not isinstance(words, list) or not all(isinstance(word, str) and "=" in word for word in words):
        raise ConfigError(Problem("must be a list of key=value words", f"{file}: overrides", "as in [precision=bf16]"))
    if not isinstance(needs, dict) or not all(isinstance(part, str) for pair in needs.items() for part in pair):
        raise ConfigError(Problem("must be a mapping of group to option", f"{file}: needs", "as in {optimizer: adamw}"))
    return Technique(file.stem, tuple(words), needs)


TAKEN = (STEP, "all", "init", "reset", "clean", "plots")  # a column, and arguments of the command line
# The order of the shipped ones: formats, layout, compilation, kernels, copies. Others follow by name.
ORDER = (BASELINE, "tf32", "bf16", "fp16", "channels_last", "compile", "flash", "fused", "8bit",
         "autotune", "non_blocking", "prefetch")  # fmt: skip
