"""Check the merged values: types, ranges and contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.base.division import divide
from runner.base.errors import Problem, to_one_line
from runner.config.aliases import (
    fix_of_value,
)
from runner.config.known_keys import Schema
from runner.config.layers import Setting, values_of
from runner.config.phases import INFERENCE
from runner.config.request import text_of_value
from runner.config.schema import MAX_SHOWN, Expression, did_you_mean, fault, nearest
from runner.config.suggestions import suggest_value


def check(merged: Mapping[str, Setting], schema: Schema, already: set[str]) -> list[Problem]:
    """Return a problem for each value of the wrong type."""
    problems, tree = [], values_of(merged)
    for name, key in schema.keys.items():
        if name not in tree:
            problems.append(Problem("must be given", name, f"use {name}=..."))
            continue
        if isinstance(tree[name], Expression):
            continue  # reported when the task was read
        if name.startswith("phase.") and tree[name] == tree.get(name.split(".", 2)[2]):
            continue  # reported for the run
        wrong = fault(key.type, tree[name])
        literal = tree[name] if isinstance(tree[name], str) else ""
        near = did_you_mean(literal, _literals(key.type)) if wrong and literal else ""
        if name == "phases" and literal:
            known = [phase.declared.name for phase in schema.phases] or ["train"]
            near = f"use phases=[{nearest(literal, known) or known[0]}]"
        near = near or (suggest_value(name, key, tree[name]) if wrong else "")
        file = f"{merged[name].file}: " if merged[name].file else ""
        problem = Problem(wrong or "", f"{file}{name}={text_of_value(tree[name])}", near)
        if wrong and problem.where not in already:
            problems.append(problem)
    return problems


def contradictions(tree: Mapping[str, Any], schema: Schema, *, is_alone: bool) -> list[Problem]:
    """Return contradictions between individually valid keys that do not depend on the machine."""
    problems = []
    resumed = tree.get("resume")
    if isinstance(resumed, str) and (said := fix_of_value("resume", resumed)):
        problems.append(Problem("does not name a run to start from", f"resume={resumed}", said))
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


def _phase_contradictions(tree: Mapping[str, Any], schema: Schema) -> list[Problem]:
    """Return problems of the selected phases: unknown names, and a selection without work."""
    wanted = tree.get("phases")
    kinds = {phase.declared.name: phase.declared.kind for phase in schema.phases} or {"train": "train"}
    known = [*kinds, INFERENCE]
    if wanted is not None and not (isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)):
        return []  # reported as a wrong type
    if wanted == []:
        fix = f"use phases=[{known[0]}], or phases=null for all"
        return [Problem("contains no phase", "phases=[]", fix)]
    problems = [
        Problem(
            f"the task has no phase {to_one_line(name, MAX_SHOWN)}; phases: {', '.join(known)}",
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
