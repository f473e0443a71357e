"""Check the merged values: types, ranges and contradictions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from runner.base.errors import Problem, to_one_line
from runner.config.known_keys import Schema
from runner.config.layers import DEFAULT, Merged, Setting, setting_values
from runner.config.phases import INFERENCE
from runner.config.request import format_value
from runner.config.schema import (
    MAX_SHOWN,
    REQUIRED,
    Expression,
    Key,
    describe_mismatch,
    did_you_mean,
    find_nearest,
    literal_choices,
)
from runner.workload.division import divide

_OFF_IF_NULL = ("max_grad_norm", "early_stopping.patience")


def check_values(
    merged: Merged, schema: Schema, reported: set[str], *, without_overrides: Callable[[], Merged]
) -> list[Problem]:
    """Return a problem for each value of the wrong type, except at the places in `reported`.

    without_overrides  returns the settings that would apply without the command line, for suggestions
    """
    problems, tree = [], setting_values(merged)
    for name, key in schema.keys.items():
        if name not in tree:
            problems.append(Problem("must be set", name, f"use {name}=..."))
            continue
        if isinstance(tree[name], Expression):
            continue  # reported when the task was read
        if name.startswith("phase.") and tree[name] == tree.get(name.split(".", 2)[2]):
            continue  # already reported for the same key of the run
        mismatch = describe_mismatch(key.type, tree[name])
        file = f"{merged[name].file}: " if merged[name].file else ""
        where = f"{file}{name}={format_value(tree[name])}"
        if mismatch and where not in reported:
            fix = _suggest_value(name, key, tree[name], schema)
            fix = fix or _suggest_default(name, key, without_overrides().get(name))
            problems.append(Problem(mismatch, where, fix))
    return problems


def _suggest_value(name: str, key: Key, value: Any, schema: Schema) -> str:
    literal = value if isinstance(value, str) else ""
    if name == "phases" and literal:
        known = [phase.declared.name for phase in schema.phases] or ["train"]
        return f"use phases=[{find_nearest(literal, known) or known[0]}]"
    if near := did_you_mean(literal, literal_choices(key.type)):
        return near
    if name == "device" and (literal == "gpu" or str(value).isdecimal()):
        return "use device=cuda" if literal else f"use device=cuda:{value}"
    if abbreviated := re.fullmatch(r"(\d+(?:\.\d+)?)([km])", literal.lower()):  # updates=10k
        number = round(float(abbreviated[1]) * {"k": 1_000, "m": 1_000_000}[abbreviated[2]])
        return "" if describe_mismatch(key.type, number) else f"use {name}={number}"
    if isinstance(value, float) and value.is_integer() and not describe_mismatch(key.type, int(value)):  # updates=1e3
        return f"use {name}={int(value)}"
    if value in (0, "none", "off") and name.endswith(_OFF_IF_NULL):  # these values turn it off in other trainers
        return f"use {name}=null to disable it"
    return ""


def _suggest_default(name: str, key: Key, setting: Setting | None) -> str:
    """Suggest the value of `setting`, which applies without the command line, or else the default of the key."""
    for value, source in ((setting.value, setting.source) if setting else (None, ""), (key.default, DEFAULT)):
        if value not in (None, REQUIRED) and not describe_mismatch(key.type, value):
            return f"use {name}={format_value(value)}, {'the default' if source == DEFAULT else f'from {source}'}"
    return ""


def find_contradictions(tree: Mapping[str, Any], schema: Schema, *, checks_division: bool) -> list[Problem]:
    """Return contradictions between individually valid keys that do not depend on the machine."""
    problems = []
    if tree.get("resume") == "last":  # it could mean the run itself, or the newest other one
        fix = "use accel-run resume to resume the last run, or resume=NAME to start a new run from another one"
        problems.append(Problem("does not name a run to start from", "resume=last", fix))
    total, micro = tree.get("global_batch_size"), tree.get("micro_batch_size")
    if not checks_division or not isinstance(total, int) or total < 1:
        pass
    elif micro == "auto" or (isinstance(micro, int) and micro > 0):
        batch = divide(total, micro, (total,))
        problems += [batch] if isinstance(batch, Problem) else []
    for prefix in ("", *(phase.declared.key("") for phase in schema.phases if phase.declared.kind == "train")):
        updates, epochs = tree.get(f"{prefix}updates"), tree.get(f"{prefix}epochs")
        if updates is None and epochs is None:
            problems.append(
                Problem("updates or epochs must be set", f"{prefix}updates=null", f"use {prefix}updates=1000")
            )
        if updates is not None and epochs is not None:
            where = f"{prefix}updates={updates} {prefix}epochs={epochs}"
            problems.append(Problem("both are set", where, "set only one of them"))
    return problems + _phase_contradictions(tree, schema)


def long_warmup_problem(warmup: int, updates: int, key: str) -> Problem:
    """Return the problem of a warm-up that is longer than the training; `key` is the full key of the warm-up."""
    return Problem(
        f"must be at most the number of updates ({updates}), but is {warmup}",
        key,
        f"use {key}={updates} or less, or a fraction of all updates such as {key}=0.02",
    )


def _phase_contradictions(tree: Mapping[str, Any], schema: Schema) -> list[Problem]:
    selected = tree.get("phases")
    kinds = {phase.declared.name: phase.declared.kind for phase in schema.phases} or {"train": "train"}
    phase_names = [*kinds, INFERENCE]
    if selected is not None and not (isinstance(selected, list) and all(isinstance(name, str) for name in selected)):
        return []  # reported as a wrong type
    if selected == []:
        fix = f"use phases=[{phase_names[0]}], or phases=null for all"
        return [Problem("contains no phase", "phases=[]", fix)]
    problems = [
        Problem(
            f"the task has no phase {to_one_line(name, MAX_SHOWN)}; phases: {', '.join(phase_names)}",
            "phases",
            did_you_mean(name, phase_names),
        )
        for name in selected or ()
        if name not in phase_names
    ]
    epochs_keys = {phase.declared.name: phase.declared.key("epochs") for phase in schema.phases}
    remaining = [
        name
        for name in (selected or kinds)
        if name == INFERENCE or kinds.get(name) == "fit" or tree.get(epochs_keys.get(name, "epochs")) != 0
    ]
    if not problems and not remaining:
        fix = "use epochs=1, or updates=100"
        problems.append(Problem("there is nothing to do: every selected phase trains for 0 epochs", "epochs=0", fix))
    return problems
