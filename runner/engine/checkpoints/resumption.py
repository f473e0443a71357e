"""Resume a run: find its checkpoint, compare its settings, and choose the phases that are left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, IncompatibleResume, InputMissing, Problem
from runner.base.paths import PACKAGE, shipped_path
from runner.base.text import abbreviate
from runner.config.request import format_value
from runner.config.schema import read_functions
from runner.durable.checkpoint import LoadedCheckpoint, load, load_newest, newest_name, recover, set_aside
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog, file_size, read, read_rows
from runner.durable.record_files import PLAN, read_record
from runner.durable.rewind import copy_metrics
from runner.durable.run_identity import manifest_uid
from runner.durable.weight_source import find_start
from runner.engine.checkpoints import oom_history
from runner.engine.checkpoints.checkpoint_state import check_state
from runner.engine.process.run_screen import Screen
from runner.plan.run_plan import PhasePlan, Plan

# Keys that determine what the run computes; they must not change.
FIXED_KEYS = (
    "task", "global_batch_size", "seed", "data.path", "data.train_samples", "data.shards", "data.shards_per_update",
    "dataloader.drop_last", "sampler", "trains", "adapter",
)  # fmt: skip
# Keys that determine what later updates compute; they may change only if resume_allow names them.
KEYS_ALLOWED_BY_NAME = (
    "updates", "epochs", "optimizer", "scheduler", "max_grad_norm", "precision", "early_stopping", "averaging",
    "sharpness", "hook", "objective",
)  # fmt: skip
# Keys that older checkpoints lack, with the values that reproduce the behavior of their version.
ADDED_KEYS: Mapping[str, Any] = {
    "adapter": "none",
    "averaging": "none",
    "sampler": "shuffle",
    "sharpness": "none",
    "data.shards": None,
    "data.shards_per_update": None,
    "weights.strict": True,
    "weights.only": [],
    "weights.rename": {},
}
# Keys that may always change, even if they belong to a group above.
MECHANICS_KEYS = ("optimizer.kernel", "sampler.micro_tokens", "task_file", "phases")


@dataclass(frozen=True)
class Difference:
    """Key whose value differs from the checkpoint."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {format_value(self.before)} -> {format_value(self.now)}"


def compare(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    allowed: Iterable[str],
    trained: int = 0,
    last: Mapping[str, Any] | None = None,
) -> list[Difference]:
    """Return the allowed differences. Raises IncompatibleResume listing all others.

    trained  number of updates of the phase in the checkpoint
    last     settings of the last process of the run; their differences are already allowed; None: unknown
    """
    if "task" in before and before["task"] != now.get("task"):  # all other differences follow from this one
        what = f"this run was trained with task {before['task']}, but the task is now {now.get('task')}"
        raise IncompatibleResume(what, where="task", fix="start a new run with another run=NAME, or use the run's task")
    allowed = tuple(allowed)
    classes = {
        key: "by name" if _belongs_to_custom_parallelism(key, before, now) else _classify(key)
        for key in dict.fromkeys((*now, *before))
        if before.get(key) != now.get(key)
    }
    is_allowed = {
        key: _is_under(key, allowed)
        or _is_under(_strip_phase(key), allowed)
        or (last is not None and last.get(key) == now.get(key))
        for key in classes
    }
    refused = [key for key, kind in classes.items() if kind == "fixed" or (kind == "by name" and not is_allowed[key])]
    # If an option itself is refused, its keys are not listed: they are restored or allowed together with it.
    refused = [key for key in refused if not _is_under(key.rpartition(".")[0], refused)]
    too_short = [key for key in refused if _strip_phase(key) == "updates" and (now.get(key) or trained) < trained]
    to_allow = [key for key in refused if classes[key] == "by name" and key not in too_short]
    problems = []
    for key in refused:
        what = f"was {format_value(before.get(key))} in the checkpoint and is {format_value(now.get(key))} now"
        fix = ""
        if classes[key] == "fixed":
            what = f"{what}; a run cannot be resumed with another value"
            fix = "restore the old value, or start a new run with another run=NAME"
        elif key in too_short:
            fix = f"the run already has {trained} updates: use {key}={trained} or more, or another run=NAME"
        elif key == to_allow[-1]:  # the fix of the last key has the complete setting to paste
            names = ",".join((*allowed, *to_allow))
            restore = "restore the other values and " if "fixed" in map(classes.get, refused) or too_short else ""
            fix = f"to continue anyway, {restore}use resume_allow=[{names}], or start a new run with another run=NAME"
        problems.append(Problem(what, key, fix))
    if problems:
        error = IncompatibleResume(str(problems[0]))
        error.problems = tuple(problems)
        raise error
    return [Difference(key, before.get(key), now.get(key)) for key in classes]


def select_mathematics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that determine what a run computes."""
    return {key: value for key, value in values.items() if _classify(key) != "mechanics"}


def _strip_phase(key: str) -> str:
    return key.split(".", 2)[2] if key.startswith("phase.") else key


def _classify(key: str) -> str:
    key = _strip_phase(key)
    if _is_under(key, MECHANICS_KEYS):
        return "mechanics"
    # The keys of an optimizer may change if resume_allow names them; the optimizer itself may not.
    if key == "optimizer" or _is_under(key, FIXED_KEYS):
        return "fixed"
    return "by name" if _is_under(key, KEYS_ALLOWED_BY_NAME) else "mechanics"


def _belongs_to_custom_parallelism(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the key selects or configures a custom parallelism, which may sum gradients inexactly."""
    names = {str(values.get("parallelism", "auto")) for values in (before, now)}
    if all((shipped_path("conf") / "parallelism" / f"{name}.yaml").is_file() for name in names):
        return False
    shipped = read_functions(PACKAGE / "axes" / "parallelism.py")["ddp"].keys
    is_own = key.startswith("parallelism.") and key.removeprefix("parallelism.") not in shipped
    return key == "parallelism" or (is_own and len(names) == 1)


def _is_under(key: str, roots: Iterable[str]) -> bool:
    return any(key == root or key.startswith(root + ".") for root in roots)


def phases_to_run(plan: Plan, start: LoadedCheckpoint | None, directory: RunDirectory) -> list[PhasePlan]:
    """Return the phases to run: the phase of the checkpoint if it is selected, then other selected unfinished ones.

    If the checkpoint belongs to another run, its finished phases satisfy `needs`, and those in `phases` run again.
    Raises IncompatibleResume if the phase of the checkpoint is neither selected nor finished, or if no phase is left;
    InputMissing if a phase needs another one that is neither finished nor run before it.
    """
    selected, names = list(plan.selected), [phase.name for phase in plan.phases]
    finished: set[str] = set()
    if start is not None:
        current = start.state["phase"]
        if current not in names:
            raise IncompatibleResume(
                f"the checkpoint belongs to phase {current}, which the task does not have",
                where="phases",
                fix="use the task that the run was trained with, or start a new run with another run=NAME",
            )
        finished = {name for name, record in start.state["records"].items() if record["finished"]}
        is_selected = current in [phase.name for phase in selected]
        if not is_selected and current not in finished:
            done, total = start.state["phase_update"], start.state["total"]
            raise IncompatibleResume(
                f"must include {current}, which is not finished: {done} of {total} updates",
                where="phases",
                fix=f"use phases=[{current}]",
            )
        is_rerun = _is_rerun(plan, start, directory)
        remaining = [phase for phase in selected if is_rerun or phase.name not in finished]
        if is_selected and not (is_rerun and current in finished):
            remaining = [phase for phase in selected if phase.name == current] + [
                phase for phase in remaining if phase.name != current
            ]
        if not remaining:
            raise IncompatibleResume(
                f"all requested phases are finished: {', '.join(phase.name for phase in selected)}", where="phases",
                fix="start a new run with another run=NAME",
            )  # fmt: skip
        selected = remaining
    available = set(finished)
    for phase in selected:
        missing = [name for name in phase.needs if name not in available]
        if missing:
            needed = _collect_needs(plan, phase.name) - available
            first = ",".join(name for name in names if name in needed)
            raise InputMissing(
                f"phase {phase.name} needs {', '.join(missing)}, which run {directory.name} has not finished",
                where="phases",
                fix=f"use phases=[{first}], or resume=RUN with a run that has finished it",
            )
        available.add(phase.name)
    return selected


def _collect_needs(plan: Plan, name: str) -> set[str]:
    phase = plan.phase(name)
    assert phase is not None, "PHASES refers to its own phases only"
    return {name}.union(*(_collect_needs(plan, other) for other in phase.needs))


def _is_rerun(plan: Plan, start: LoadedCheckpoint, directory: RunDirectory) -> bool:
    """Return whether finished phases run again: `phases` is set, and the checkpoint belongs to another run."""
    return plan.settings.phases is not None and start.path.parent != directory.checkpoints


def is_resumed(start: LoadedCheckpoint, first: PhasePlan, directory: RunDirectory, plan: Plan) -> bool:
    """Return whether the first phase resumes from the checkpoint; otherwise it starts with the checkpoint's model."""
    is_finished = start.state["records"][start.state["phase"]]["finished"]
    return bool(start.state["phase"] == first.name) and not (is_finished and _is_rerun(plan, start, directory))


def find_finished(plan: Plan, directory: RunDirectory) -> LoadedCheckpoint | None:
    """Return the last checkpoint of a finished run if the plan leaves nothing to do; None if something may be left.

    Writes nothing, so that the run keeps the record of the process that finished it. Also returns None for errors,
    damaged files, and a mirror, which may hold newer checkpoints, because the start of the run handles these.
    """
    is_new_work = plan.settings.resume == "fresh" or plan.choices["profiler"].options.get("only")
    if is_new_work or plan.choices["checkpoint"].options.get("mirror") is not None:
        return None
    try:
        if read_record(directory.path).process.state != "done":
            return None
        start = load_newest(directory.checkpoints, directory.owner)
        if start is None or start.path.name != newest_name(directory.checkpoints):
            return None
        if file_size(directory.metrics) < int(start.manifest["metrics_bytes"]):
            return None
        if any(_classify(found.key) != "mechanics" for found in _differences(plan, check_state(start), directory)):
            return None
    except AccelRunError:
        return None
    records, selected = start.state["records"], [phase.name for phase in plan.selected]
    is_finished = all(name in records and records[name]["finished"] for name in selected)
    return start if is_finished and start.state["phase"] in selected else None


def _add_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint with the keys that it lacks if an earlier version wrote it."""
    of_options = {"averaging.start": 0.0} if values.get("averaging") == "swa" else {}
    return {**ADDED_KEYS, **of_options, **values}


def check_resume(plan: Plan, start: LoadedCheckpoint, directory: RunDirectory, report: Callable[[str], None]) -> None:
    """Report settings that differ from the checkpoint. Raises IncompatibleResume for those that must not differ.

    If the run is resumed again before it has saved a checkpoint, a setting that `resume_allow` has permitted may keep
    its value, but must not change further. Call this before plan.json is replaced.
    """
    for difference in _differences(plan, start, directory):
        if difference.key not in _UNREPORTED:
            report(f"differs from the checkpoint: {difference}")


def _differences(plan: Plan, start: LoadedCheckpoint, directory: RunDirectory) -> list[Difference]:
    """Return the allowed differences from the checkpoint. Raises IncompatibleResume for others.

    Settings of phases other than the resumed one are ignored, because those phases are finished or have not started.
    """
    current = start.state["phase"]
    resumed = current if current in [phase.name for phase in plan.selected] else None
    before, now = (
        {key: value for key, value in values.items() if not key.startswith("phase.") or key.split(".", 2)[1] == resumed}
        for values in (_add_keys(start.state["values"]), json.loads(json.dumps(plan.values())))
    )
    return compare(before, now, plan.settings.resume_allow, start.state["phase_update"], _last_values(directory))


def check_trained_names(start: LoadedCheckpoint, names: Iterable[str]) -> None:
    """Raise IncompatibleResume if the phase trains other parameters than the process that saved the checkpoint."""
    saved = start.state.get("trained")
    if saved is None:  # a checkpoint of an earlier version
        return
    before, now = set(saved), set(names)
    changes = {"is not trained now": before - now, "was not trained, but is now": now - before}
    problems = [
        Problem(
            f"phase {start.state['phase']}: {abbreviate(sorted(changed))} {change}",
            str(start.path),
            "set requires_grad in build and begin_phase as when the checkpoint was saved; to train other parameters,"
            " start a new run from its weights with weights=RUN",
        )
        for change, changed in changes.items()
        if changed
    ]
    if problems:
        error = IncompatibleResume(str(problems[0]))
        error.problems = tuple(problems)
        raise error


def _last_values(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the settings with which the last process of the run started; None if they are unknown."""
    try:
        values = Plan.from_json(read(directory.path / PLAN, at_most=_MAX_PLAN_BYTES).decode()).values()
    except (AccelRunError, ValueError, LookupError, TypeError, AttributeError):  # missing or damaged
        return None
    return _add_keys(json.loads(json.dumps(values)))


def find_resume_point(
    plan: Plan, directory: RunDirectory, screen: Screen, metrics: AppendLog
) -> LoadedCheckpoint | None:
    """Return the checkpoint to resume from, or None; truncate metrics.jsonl to the rows before it."""
    requested = plan.settings.resume
    if requested == "fresh":
        phases_to_run(plan, None, directory)  # raises before anything is renamed
        if set_aside(directory.checkpoints):
            screen.info("resume=fresh: earlier checkpoints were renamed to checkpoints/earlier-*")
        if metrics.length:
            copy_metrics(directory)
        metrics.cut(0)
        oom_history.remove_reductions(directory)
        return None
    run, allows_others = directory.owner, _ANOTHER_RUN in plan.settings.resume_allow
    recovered = recover(directory.checkpoints, run, allows_others=allows_others)
    for name, reasons in recovered.skipped:
        screen.warn(f"checkpoint {name} was skipped: {'; '.join(reasons)}")
    start = recovered.checkpoint
    if start is None and requested != "auto":
        start = check_state(_load_requested(requested, plan, directory))
        screen.info(f"starts from {start.path}")
        check_resume(plan, start, directory, screen.info)
        phases_to_run(plan, start, directory)
        metrics.cut(0)
        return start
    if start is None:
        phases_to_run(plan, None, directory)
        metrics.cut(0)
        return None
    if requested != "auto":
        screen.info(f"resume={requested} has no effect: this run already has checkpoints")
    try:
        check_resume(plan, check_state(start), directory, screen.info)
    except IncompatibleResume as error:
        *others, last = error.problems
        hint = f"to resume the run with its settings: accel-run resume {directory.argument(plan.settings.output_root)}"
        error.problems = (*others, replace(last, fix=f"{last.fix}\n{hint}"))
        raise
    phases_to_run(plan, start, directory)
    if run.has_other_uid(start.manifest):
        screen.warn(
            f"{start.path.name} belongs to another run, {manifest_uid(start.manifest)}; this run continues from it"
        )
    expected_bytes = int(start.manifest["metrics_bytes"])
    if metrics.length < expected_bytes:  # the weights are valid: rows lost in a power failure do not prevent resuming
        screen.warn(f"metrics.jsonl has lost its last rows: {metrics.length} of {expected_bytes} bytes remain")
    repeated = count_repeated(directory.metrics, start.state["phase"], int(start.state["phase_update"]))
    metrics.cut(expected_bytes)
    note = f"; {repeated} updates after it are repeated" if repeated > 0 else ""
    screen.info(f"resumes after update {start.state['phase_update']} from {start.path.name}{note}")
    return start


def _load_requested(requested: str, plan: Plan, directory: RunDirectory) -> LoadedCheckpoint:
    """Return the checkpoint that resume= selects: the folder it names, or the newest valid one of the run it names."""
    other = find_start(requested, plan.settings.root, directory)
    if isinstance(other, Path):
        return load(other)
    recovered = load_newest(other.checkpoints, other.owner)
    if recovered is None:
        fix = f"use accel-run status {other.name} to see its checkpoints, or accel-run runs to find another run"
        raise InputMissing(f"run {other.name} has no valid checkpoint", where=f"resume={requested}", fix=fix)
    return recovered


def count_repeated(metrics: Path, phase: str, update: int) -> int:
    """Return how many updates of the phase after `update` are in metrics.jsonl; each phase counts its own from 1."""
    updates = (row.get("update") for row in read_rows(metrics) if row.get("phase") == phase)
    return max((each - update for each in updates if isinstance(each, int)), default=0)


_MAX_PLAN_BYTES = 16 << 20  # a larger file is damaged: plan.json has tens of KB
_UNREPORTED = ("run", "resume", "resume_allow", "output_root", "device")
_ANOTHER_RUN = "run"  # in resume_allow: accept a checkpoint of another run
