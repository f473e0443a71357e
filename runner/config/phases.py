"""Parse the PHASES of a task, and list the keys of each phase."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from runner.base.errors import Problem
from runner.config.aliases import PHASE_ADVICE
from runner.config.schema import Key, Signature, did_you_mean, settings_keys
from runner.config.settings import Settings

KINDS = ("train", "fit")
INFERENCE = "infer"  # phase of every task that predicts with the trained model
PHASE_GROUPS = ("optimizer", "scheduler")  # groups for which a phase may choose another option
# groups for which a task may choose another option, because these options change the result of training
TASK_GROUPS = (*PHASE_GROUPS, "sampler", "averaging", "adapter", "sharpness")
_FIT_KEYS = ("global_batch_size", "micro_batch_size", "evaluate.samples")
_TRAIN_KEYS = (*_FIT_KEYS, "evaluate", "updates", "epochs", "max_grad_norm", "early_stopping")
_STRUCTURE_KEYS = ("kind", "needs")  # structure of a phase; cannot be changed on the command line
LENGTHS = ("updates", "epochs")


@dataclass(frozen=True)
class DeclaredPhase:
    """A phase as declared in the task's file: `settings` maps keys to values, without the phase's name as prefix."""

    name: str
    kind: Literal["train", "fit"] = "train"
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the full configuration key of a key of this phase."""
        return f"phase.{self.name}.{name}"


def parse_phases(
    literal: Mapping[str, Any], overrides: Mapping[str, Any], source: str, problems: list[Problem]
) -> tuple[DeclaredPhase, ...]:
    """Parse the PHASES literal; `overrides` (`phase.NAME.KEY` of SETTINGS and SIZES) overrides it."""
    phases: list[DeclaredPhase] = []
    for name, declaration in literal.items():
        where = f"{source}: PHASES[{name!r}]"
        if not isinstance(declaration, dict) or not str(name).isidentifier() or name == INFERENCE:
            what = f"the name must be an identifier other than {INFERENCE}, and the value must map keys to values"
            problems.append(Problem(what, where))
            continue
        kind, needs = declaration.get("kind", "train"), declaration.get("needs", [])
        if not isinstance(needs, list) or not all(isinstance(key, str) for key in declaration):
            problems.append(
                Problem(
                    'the value of needs must be a list of phases, such as ["pretrain"], and keys must be strings', where
                )
            )
            continue
        if kind not in KINDS:
            problems.append(Problem(f"the value of kind must be {' or '.join(KINDS)}, but is {kind}", where))
            continue
        earlier = [phase.name for phase in phases]
        problems += [
            Problem(f"needs {needed}, which is not an earlier phase", where, did_you_mean(str(needed), earlier))
            for needed in needs
            if needed not in earlier
        ]
        prefix = f"phase.{name}."
        settings = {key: value for key, value in declaration.items() if key not in _STRUCTURE_KEYS}
        settings |= {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}
        phases.append(DeclaredPhase(name, kind, tuple(needs), settings))
    return tuple(phases)


def name_phases(problem: Problem, phases: Sequence[DeclaredPhase]) -> Problem:
    """Name the phases of the task, in order, in the advice for `--phase 2`, which may count from 0 or from 1."""
    if not phases or problem.fix != f"use {PHASE_ADVICE}":
        return problem
    names = [phase.name for phase in phases]
    value = re.split("[ =]", problem.where)[-1].strip("[]")
    listed = f"phases=[NAME]; the phases of the task, in this order, are {', '.join(names)}"
    return replace(problem, fix=f"use phases=[{value}]" if value in names else f"use {listed}")


def phase_keys(
    phase: DeclaredPhase, options: Mapping[str, str], signature: Callable[[str, str], Signature | None]
) -> dict[str, Key]:
    """Return the keys that can be set for a phase, by their name within it.

    options    group -> option that the phase uses
    signature  (group, option) -> signature of the option
    """
    allowed = _TRAIN_KEYS if phase.kind == "train" else _FIT_KEYS
    keys = {
        name: key
        for name, key in settings_keys(Settings).items()
        if name in allowed or name.partition(".")[0] in allowed
    }
    if phase.kind == "fit":
        return keys
    keys["trains"] = Key("trains", list[str] | None, None, "names or prefixes of the parameters that are trained")
    for group in PHASE_GROUPS:
        keys[group] = Key(group, str, options[group], f"option of {group}")
        option_signature = signature(group, options[group])
        keys |= {f"{group}.{name}": key for name, key in (option_signature.keys.items() if option_signature else ())}
    return keys
