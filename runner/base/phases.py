"""Phases as data: a task's PHASES, the resulting keys, and the precedence of their values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.base.errors import Problem
from runner.base.schema import Key, Signature, defaults, did_you_mean, settings_keys
from runner.base.settings import Settings

KINDS = ("train", "fit")
INFERENCE = "infer"  # the phase of every task that predicts with the result of the others
GROUPS = ("optimizer", "scheduler")  # groups for which a phase may choose another option
_OF_FIT = ("global_batch_size", "micro_batch_size", "evaluate.samples")
_OF_TRAIN = (*_OF_FIT, "evaluate", "updates", "epochs", "max_grad_norm", "early_stopping")
_STRUCTURE = ("kind", "needs")  # structure of a phase; cannot be changed on the command line
LENGTHS = ("updates", "epochs")


@dataclass(frozen=True)
class Declared:
    """A phase as declared in the task's file: `settings` maps keys to values, without the phase's name as prefix."""

    name: str
    kind: Literal["train", "fit"] = "train"
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the full configuration key of a key of this phase."""
        return f"phase.{self.name}.{name}"


def read_phases(
    literal: Mapping[str, Any], more: Mapping[str, Any], source: str, problems: list[Problem]
) -> tuple[Declared, ...]:
    """Parse the PHASES literal; `more` (`phase.NAME.KEY` of SETTINGS and SIZES) overrides it."""
    found: list[Declared] = []
    for name, content in literal.items():
        where = f"{source}: PHASES[{name!r}]"
        if not isinstance(content, dict) or not str(name).isidentifier() or name == INFERENCE:
            what = f"must be a name other than {INFERENCE}, with a mapping of keys to values"
            problems.append(Problem(what, where))
            continue
        kind, needs = content.get("kind", "train"), content.get("needs", [])
        if not isinstance(needs, list) or not all(isinstance(key, str) for key in content):
            problems.append(Problem('needs must be a list of phases, such as ["pretrain"], and keys are texts', where))
            continue
        if kind not in KINDS:
            problems.append(Problem(f"kind must be {' or '.join(KINDS)}, but is {kind}", where))
            continue
        before = [phase.name for phase in found]
        problems += [
            Problem(f"needs {other}, which is no phase before it", where, did_you_mean(str(other), before))
            for other in needs
            if other not in before
        ]
        lead = f"phase.{name}."
        settings = {key: value for key, value in content.items() if key not in _STRUCTURE}
        settings |= {key.removeprefix(lead): value for key, value in more.items() if key.startswith(lead)}
        found.append(Declared(name, kind, tuple(needs), settings))
    return tuple(found)


def keys_of(
    phase: Declared, options: Mapping[str, str], signature: Callable[[str, str], Signature | None]
) -> dict[str, Key]:
    """Return the keys that can be set for a phase, by their name within it.

    options   group -> option that the phase uses
    signature  (group, option) -> the function behind it
    """
    wanted = _OF_TRAIN if phase.kind == "train" else _OF_FIT
    keys = {
        name: key for name, key in settings_keys(Settings).items() if name in wanted or name.partition(".")[0] in wanted
    }
    if phase.kind == "fit":
        return keys
    keys["trains"] = Key("trains", list[str] | None, None, "names or prefixes of the parameters that are trained")
    for group in GROUPS:
        keys[group] = Key(group, str, options[group], f"option of {group}")
        behind = signature(group, options[group])
        keys |= {f"{group}.{name}": key for name, key in (behind.keys.items() if behind else ())}
    return keys


def values_of(
    phase: Declared,
    keys: Mapping[str, Key],
    options: Mapping[str, str],
    run_options: Mapping[str, str],
    tuned: Mapping[str, str],
    tree: Mapping[str, Any],
    said: Container[str],
    folder: Container[str],
) -> Iterator[tuple[str, Any, str]]:
    """Yield (key within the phase, value, source) for keys that the command line does not set for this phase.

    A key set for the whole run on the command line overrides what the task sets for a phase; this overrides
    values that the whole run has from elsewhere. `source` is "run", "folder", "task", "default",
    or "length" if the other one of updates and epochs is in effect.

    options   group -> option that the phase uses; `run_options` those of the whole run
    tuned   group -> option that the task's values apply to, if the phase names none
    tree   key -> value of the whole run
    said   keys and groups set on the command line
    folder   keys set in the user's configuration files
    """
    pinned = next((level for level in _levels(phase, said, folder) if any(level(name) for name in LENGTHS)), None)
    for name, key in keys.items():
        group = name.partition(".")[0]
        if phase.key(name) in said:
            continue
        same = group not in GROUPS or options[group] == run_options[group]
        if name in LENGTHS and pinned is not None and not pinned(name):
            yield name, None, "length"
        elif name in GROUPS:
            yield name, options[name], "task" if name in phase.settings and name not in said else "run"
        elif name in said and same:
            yield name, tree[name], "run"
        elif phase.key(name) in folder:
            yield name, tree[phase.key(name)], "folder"
        elif name in phase.settings and is_for(phase, group, options, tuned):
            yield name, phase.settings[name], "task"
        elif same and name in tree:
            yield name, tree[name], "run"
        else:
            yield name, defaults({name: key})[name], "default"


def is_for(phase: Declared, group: str, options: Mapping[str, str], tuned: Mapping[str, str]) -> bool:
    """Return whether the task's values for the keys of a group apply to the option that the phase uses."""
    return group not in GROUPS or options[group] == phase.settings.get(group, tuned[group])


def _levels(phase: Declared, said: Container[str], folder: Container[str]) -> list[Callable[[str], bool]]:
    """Return the sources that may set the length of a phase, strongest first."""
    return [
        lambda name: phase.key(name) in said,
        lambda name: name in said,
        lambda name: phase.key(name) in folder,
        lambda name: name in phase.settings,
    ]
