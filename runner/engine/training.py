"""Train: run the phases of a run, or the rest of them after a resume, and return how the run ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from runner.base.errors import AccelRunError, IncompatibleResume, InputMissing, TaskFault
from runner.config.schema import did_you_mean
from runner.durable.checkpoint import LoadedCheckpoint
from runner.durable.directory import RunDirectory
from runner.engine.checkpoint_state import convert_state_errors
from runner.engine.error_diagnosis import explain
from runner.engine.frozen_base import load_weights
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.metrics import Metrics
from runner.engine.phase import Phase, restore_rank_random_state
from runner.engine.phase_kinds import check_parameters
from runner.engine.resumption import ADDED_KEYS, compare
from runner.engine.run import Outcome, RunProgress, TrainingRun
from runner.engine.training_identity import changed_files, fingerprint_code
from runner.plan.run_plan import PhasePlan, Plan
from runner.records.phase_record import PhaseRecord


def train(run: TrainingRun, start: LoadedCheckpoint | None, before: Iterable[PhaseRecord] = ()) -> Outcome:
    """Run every unfinished phase. `start` is the checkpoint to resume from.

    before  records of the phases that the previous process of this run wrote at its end

    Raises errors of the task, the device or the disk; the last checkpoint stays valid.
    """
    origin = run.provenance
    origin.is_compared = True
    phases = phases_to_run(run.plan, start, run.directory)
    check_parameters(phases, run.parts.bare)
    _check_names(run)
    if run.parts.world.is_first:  # before training: edits made later do not affect the run
        origin.code = fingerprint_code(run.parts.source)
        origin.edited = changed_files(start.state.get("code", origin.code), origin.code) if start else []
    if start is not None:
        with convert_state_errors(start):
            _restore_progress(run, start, before)
        if not _is_resumed(start, phases[0], run.directory, run.plan):
            _load_finished_phase(run, start)
            start = None
    progress = run.progress
    for planned in phases:
        if start is None:  # otherwise the record of the resumed phase is kept
            progress.records[planned.name] = PhaseRecord(planned.kind, planned.name)
        phase = _open_phase(run, planned, start)
        start = None
        try:
            with phase:
                stopped_by = phase.run_updates()
        except BaseException as error:  # at this level, because torch reports a dead worker at any point of the code
            reported = phase.translate_error(error)
            if isinstance(reported, AccelRunError):
                reported.place = {**phase.place, **reported.place}
            if reported is error:
                raise
            raise reported from error
        saving = phase.hook(Checkpointing)
        run.tally.last_row = phase.hook(Metrics).meter.last_row or run.tally.last_row
        run.tally.state_bytes = phase.work.state_bytes()
        if stopped_by:
            is_resumable = saving.newest_number is not None
            return Outcome(stopped_by, phase.position.update, progress.metrics, not saving.is_unsaved, is_resumable)
        if not run.observers.profiler.only:
            progress.kept += [*(number for _, number in saving.saver.bests), phase.number]
        progress.updates_before += phase.position.update
    return Outcome(None, phase.position.update, progress.metrics)


def _open_phase(run: TrainingRun, planned: PhasePlan, start: LoadedCheckpoint | None) -> Phase:
    """Return the phase, ready to run updates. Raises TaskFault if the task raises during construction."""
    try:
        return Phase(run, planned, start)
    except Exception as error:
        where = f"the start of phase {planned.name}"
        reported = explain(error, run.parts.source, where, planned.batch.micro_batch_size)
        if reported is None or reported is error:
            raise
        raise reported from error


def _check_names(run: TrainingRun) -> None:
    """Raise TaskFault if losses or fits name a phase that does not exist, because they would never be called."""
    for kind, member, mapping in (
        ("train", "losses", run.parts.task.losses),
        ("fit", "fits", run.parts.task.fits),
    ):
        phases = [phase.name for phase in run.plan.phases if phase.kind == kind]
        for name in mapping:
            if name not in phases:
                raise TaskFault(
                    f"{member} has {name}, but the phases of kind {kind} are {', '.join(phases) or 'none'}",
                    where=str(run.parts.source),
                    fix=did_you_mean(name, phases) or "name it in PHASES",
                )


def _restore_progress(run: TrainingRun, start: LoadedCheckpoint, before: Iterable[PhaseRecord]) -> None:
    """Restore the state of the whole run from a checkpoint."""
    # A checkpoint elsewhere belongs to another run; this run then has none yet.
    is_own = start.path.parent == run.directory.checkpoints
    run.progress = RunProgress.from_state(start.state, is_own=is_own)
    if not is_own:
        return
    run.provenance.changes = [dict(change) for change in start.state.get("changes", [])]
    for written in before:
        record = run.progress.records.get(written.name)
        if record is not None and written.updates == record.updates and written.seconds > record.seconds:
            record.seconds, record.parts_s = written.seconds, dict(written.parts_s)


def _load_finished_phase(run: TrainingRun, start: LoadedCheckpoint) -> None:
    """Load the model of a finished phase that is not rerun; the next phase starts from it."""
    load_weights(run.parts, start)
    with convert_state_errors(start):
        run.parts.precision.load(start.state["precision"])
        restore_rank_random_state(run.parts.world, start, run.plan.settings.seed)
    run.progress.updates_before += int(start.state["phase_update"])
    if start.path.parent == run.directory.checkpoints:
        run.progress.kept += [*(int(number) for _, number in start.state["bests"]), start.update]


def phases_to_run(plan: Plan, start: LoadedCheckpoint | None, directory: RunDirectory) -> list[PhasePlan]:
    """Return the phases to run: that of the checkpoint if it is selected, then the selected unfinished ones.

    Phases that another run finished satisfy `needs`; phases that the user names run again in this run.
    Raises IncompatibleResume if the phase of the checkpoint is neither selected nor finished, or if no phase is left;
    InputMissing if a phase needs another that is neither finished nor comes before it.
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
                f"phase {current} is not finished: {done} of {total} updates",
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
                f"{', '.join(phase.name for phase in selected)} of this run is finished already", where="phases",
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
                fix=f"use phases=[{first}], or resume=RUN that has finished it",
            )
        available.add(phase.name)
    return selected


def _collect_needs(plan: Plan, name: str) -> set[str]:
    """Return a phase and all phases that it depends on, transitively."""
    phase = plan.phase(name)
    assert phase is not None, "PHASES refers to its own phases only"
    return {name}.union(*(_collect_needs(plan, other) for other in phase.needs))


def _is_rerun(plan: Plan, start: LoadedCheckpoint, directory: RunDirectory) -> bool:
    """Return whether finished phases run again: the user names phases, and the checkpoint is of another run."""
    return plan.settings.phases is not None and start.path.parent != directory.checkpoints


def _is_resumed(start: LoadedCheckpoint, first: PhasePlan, directory: RunDirectory, plan: Plan) -> bool:
    """Return whether the first phase resumes from the checkpoint; otherwise it starts with the checkpoint's model."""
    is_finished = start.state["records"][start.state["phase"]]["finished"]
    return bool(start.state["phase"] == first.name) and not (is_finished and _is_rerun(plan, start, directory))


def check_resume(plan: Plan, start: LoadedCheckpoint, report: Callable[[str], None]) -> None:
    """Report settings that differ from the checkpoint. Raises IncompatibleResume for those that must not differ.

    Of the phase settings only those of the resumed phase are compared: the others are finished or not started.
    """
    current = start.state["phase"]
    resumed = current if current in [phase.name for phase in plan.selected] else None
    before, now = (
        {key: value for key, value in values.items() if not key.startswith("phase.") or key.split(".", 2)[1] == resumed}
        for values in ({**ADDED_KEYS, **start.state["values"]}, json.loads(json.dumps(plan.values())))
    )
    for difference in compare(before, now, plan.settings.resume_allow, start.state["phase_update"]):
        if difference.key not in _UNREPORTED:
            report(f"differs from the checkpoint: {difference}")


_UNREPORTED = ("run", "resume", "resume_allow", "output_root", "device")
