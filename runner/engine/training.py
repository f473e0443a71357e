"""Train: run the phases of a run, resume where it stopped, and return how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from runner.base.errors import AccelRunError, IncompatibleResume, InputMissing, TaskFault
from runner.config.schema import did_you_mean
from runner.durable.checkpoint import Loaded
from runner.durable.directory import RunDirectory
from runner.engine.checkpoint_state import convert_state_errors
from runner.engine.error_diagnosis import explain
from runner.engine.frozen_base import load_weights
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.metrics import Metrics
from runner.engine.phase import Phase, restore_random_state_of
from runner.engine.phase_kinds import check_parameters
from runner.engine.resumption import ADDED, compare
from runner.engine.run import Outcome, RunProgress, TrainingRun
from runner.engine.training_identity import changed_files, code_of
from runner.plan.run_plan import PhasePlan, Plan
from runner.records.phase_record import PhaseRecord


def train(run: TrainingRun, start: Loaded | None, before: Iterable[PhaseRecord] = ()) -> Outcome:
    """Run every unfinished phase. `start` is the checkpoint to resume from.

    before  records of the phases, as the previous process of this run left them at its end

    Raises errors of the task, the device or the disk; the last checkpoint stays valid.
    """
    origin = run.provenance
    origin.is_compared = True
    phases = phases_to_walk(run.plan, start, run.directory)
    check_parameters(phases, run.parts.bare)
    _check_names(run)
    if run.parts.world.is_first:  # before training: edits made later do not affect the run
        origin.code = code_of(run.parts.source)
        origin.edited = changed_files(start.state.get("code", origin.code), origin.code) if start else []
    if start is not None:
        with convert_state_errors(start):
            _take_over(run, start, before)
        if not _resumes(start, phases[0], run.directory, run.plan):
            _begin_after(run, start)
            start = None
    progress = run.progress
    for planned in phases:
        if start is None:  # otherwise the record of the resumed phase is kept
            progress.records[planned.name] = PhaseRecord(planned.kind, planned.name)
        phase = _begun(run, planned, start)
        start = None
        try:
            with phase:
                stopped_by = phase.run()
        except BaseException as error:  # at this level, because torch reports a dead worker at any point of the code
            shown = phase.explained(error)
            if isinstance(shown, AccelRunError):
                shown.place = {**phase.place, **shown.place}
            if shown is error:
                raise
            raise shown from error
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


def _begun(run: TrainingRun, planned: PhasePlan, start: Loaded | None) -> Phase:
    """Return the phase, ready to run updates. Raises TaskFault if the task raises during construction."""
    try:
        return Phase(run, planned, start)
    except Exception as error:
        where = f"the start of phase {planned.name}"
        shown = explain(error, run.parts.source, where, planned.batch.micro_batch_size)
        if shown is None or shown is error:
            raise
        raise shown from error


def _check_names(run: TrainingRun) -> None:
    """Raise TaskFault if losses or fits name a phase that does not exist, because they would never be called."""
    for kind, name_of, named in (
        ("train", "losses", run.parts.task.losses),
        ("fit", "fits", run.parts.task.fits),
    ):
        known = [phase.name for phase in run.plan.phases if phase.kind == kind]
        for name in named:
            if name not in known:
                raise TaskFault(
                    f"{name_of} has {name}, but the phases of kind {kind} are {', '.join(known) or 'none'}",
                    where=str(run.parts.source),
                    fix=did_you_mean(name, known) or "name it in PHASES",
                )


def _take_over(run: TrainingRun, start: Loaded, before: Iterable[PhaseRecord]) -> None:
    """Restore the state of the whole run from a checkpoint."""
    is_own = (
        start.path.parent == run.directory.checkpoints
    )  # otherwise it belongs to another run, and this one has none yet
    run.progress = RunProgress.of(start.state, is_own=is_own)
    if not is_own:
        return
    run.provenance.changes = [dict(change) for change in start.state.get("changes", [])]
    for known in before:
        record = run.progress.records.get(known.name)
        if record is not None and known.updates == record.updates and known.seconds > record.seconds:
            record.seconds, record.parts_s = known.seconds, dict(known.parts_s)


def _begin_after(run: TrainingRun, start: Loaded) -> None:
    """Load the model of a finished phase that is not rerun; the next phase starts from it."""
    load_weights(run.parts, start)
    with convert_state_errors(start):
        run.parts.precision.load(start.state["precision"])
        restore_random_state_of(run.parts.world, start, run.plan.settings.seed)
    run.progress.updates_before += int(start.state["phase_update"])
    if start.path.parent == run.directory.checkpoints:
        run.progress.kept += [*(int(number) for _, number in start.state["bests"]), start.update]


def phases_to_walk(plan: Plan, start: Loaded | None, directory: RunDirectory) -> list[PhasePlan]:
    """Return the phases to run: that of the checkpoint if it is selected, then the selected unfinished ones.

    Phases that another run finished satisfy `needs`; phases that the user names run again in this run.
    Raises IncompatibleResume if the phase of the checkpoint is neither selected nor finished, or nothing is left;
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
            made, total = start.state["phase_update"], start.state["total"]
            raise IncompatibleResume(
                f"phase {current} is not finished: {made} of {total} updates",
                where="phases",
                fix=f"use phases=[{current}]",
            )
        is_repeated = _is_repeated(plan, start, directory)
        coming = [phase for phase in selected if is_repeated or phase.name not in finished]
        if is_selected and not (is_repeated and current in finished):
            coming = [phase for phase in selected if phase.name == current] + [
                phase for phase in coming if phase.name != current
            ]
        if not coming:
            raise IncompatibleResume(
                f"{', '.join(phase.name for phase in selected)} of this run is finished already", where="phases",
                fix="start a new run with another run=NAME",
            )  # fmt: skip
        selected = coming
    there = set(finished)
    for phase in selected:
        missing = [name for name in phase.needs if name not in there]
        if missing:
            wanted = _with_needs(plan, phase.name) - there
            first = ",".join(name for name in names if name in wanted)
            raise InputMissing(
                f"phase {phase.name} needs {', '.join(missing)}, which run {directory.name} has not finished",
                where="phases",
                fix=f"use phases=[{first}], or resume=RUN that has finished it",
            )
        there.add(phase.name)
    return selected


def _with_needs(plan: Plan, name: str) -> set[str]:
    """Return a phase and all phases that it depends on, transitively."""
    phase = plan.phase(name)
    assert phase is not None, "PHASES refers to its own phases only"
    return {name}.union(*(_with_needs(plan, other) for other in phase.needs))


def _is_repeated(plan: Plan, start: Loaded, directory: RunDirectory) -> bool:
    """Return True if the user names phases, and the checkpoint is of another run: they run again here."""
    return plan.settings.phases is not None and start.path.parent != directory.checkpoints


def _resumes(start: Loaded, first: PhasePlan, directory: RunDirectory, plan: Plan) -> bool:
    """Return True if the first phase resumes from the checkpoint; otherwise it starts with the checkpoint's model."""
    is_finished = start.state["records"][start.state["phase"]]["finished"]
    return bool(start.state["phase"] == first.name) and not (is_finished and _is_repeated(plan, start, directory))


def check_resume(plan: Plan, start: Loaded, say: Callable[[str], None]) -> None:
    """Report settings that differ from the checkpoint. Raises IncompatibleResume for those that must not differ.

    Of the phase settings only those of the resumed phase are compared: the others are finished or not started.
    """
    current = start.state["phase"]
    resumed = current if current in [phase.name for phase in plan.selected] else None
    before, now = (
        {key: value for key, value in values.items() if not key.startswith("phase.") or key.split(".", 2)[1] == resumed}
        for values in ({**ADDED, **start.state["values"]}, json.loads(json.dumps(plan.values())))
    )
    for difference in compare(before, now, plan.settings.resume_allow, start.state["phase_update"]):
        if difference.key not in _UNSAID:
            say(f"differs from the checkpoint: {difference}")


_UNSAID = ("run", "resume", "resume_allow", "output_root", "device")
