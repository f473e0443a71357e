"""Phases as data: a task's PHASES, and the keys of each phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.base.errors import Problem
from runner.config.schema import Key, Signature, did_you_mean, settings_keys
from runner.config.settings import Settings

KINDS = ("train", "fit")
INFERENCE = "infer"  # phase of every task that predicts with the trained model
GROUPS = ("optimizer", "scheduler")  # groups for which a phase may choose another option
# groups for which a task may choose another option, because they are part of the mathematics
TASK_GROUPS = (*GROUPS, "sampler", "averaging", "adapter", "sharpness")
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
