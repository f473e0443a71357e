"""Train: run the phases of a run, or the rest of them after a resume, and return how the run ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from runner.axes.optimizer import KEYS_WITH_NAMES, OPTIMIZERS, build_optimizer, check_library
from runner.axes.scheduler import SCHEDULERS, build_schedule
from runner.base.errors import AccelRunError, ConfigError, TaskFault
from runner.base.task import Task
from runner.config.schema import did_you_mean
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.checkpoints.checkpoint_state import convert_state_errors
from runner.engine.checkpoints.resumption import is_resumed, phases_to_run
from runner.engine.contract.error_diagnosis import explain
from runner.engine.hooks.checkpointing import Checkpointing, hook_state
from runner.engine.hooks.forward_state import ForwardState
from runner.engine.hooks.metrics import Metrics
from runner.engine.parts.assemble import begin_earlier_phases
from runner.engine.parts.frozen_base import load_weights
from runner.engine.parts.phase_kinds import check_parameters, count_updates, find_fit
from runner.engine.parts.train_order import make_order
from runner.engine.phase import Phase, restore_rank_random_state
from runner.engine.run import Outcome, RunProgress, TrainingRun
from runner.engine.sources.training_identity import changed_files, fingerprint_code
from runner.engine.update.objectives import ObjectiveSpec, parse_objectives
from runner.engine.update.parameter_selection import resolve_names, select_parameters
from runner.plan.run_plan import PhasePlan
from runner.records.phase_record import PhaseRecord


def run_phases(run: TrainingRun, start: LoadedCheckpoint | None, before: Iterable[PhaseRecord] = ()) -> Outcome:
    """Run every unfinished phase. `start` is the checkpoint to resume from.

    before  phase records that the previous process of this run wrote when it ended

    Raises errors of the task, the device or the disk; the last checkpoint stays valid.
    """
    origin = run.provenance
    origin.is_compared = True
    phases = phases_to_run(run.plan, start, run.directory)
    check_parameters(phases, run.parts.bare)
    _check_names(run)
    _check_libraries(run, phases)
    _check_options(run, phases[1:])  # the first phase checks its own when it starts
    if run.parts.world.is_first:  # before training: later edits do not affect this process
        origin.code = fingerprint_code(run.parts.source)
        origin.edited = changed_files(start.state.get("code", origin.code), origin.code) if start else []
    if start is not None:
        with convert_state_errors(start):
            _restore_progress(run, start, before)
    progress = run.progress
    resumes_phase = start is not None and is_resumed(start, phases[0], run.directory, run.plan)
    for planned in phases[1 if resumes_phase else 0 :]:
        # The checkpoint may be of another run, which finished this phase. This run must not count it as finished.
        progress.records.pop(planned.name, None)
    begin_earlier_phases(run.parts, progress.records, phases[0].name)
    if start is not None and not resumes_phase:
        _load_finished_phase(run, start)
        start = None
    for planned in phases:
        if start is None:  # otherwise the record of the resumed phase is kept
            progress.records[planned.name] = PhaseRecord(planned.kind, planned.name)
        phase = _open_phase(run, planned, start)
        start = None
        try:
            with phase:
                if planned is phases[0]:
                    _check_options(run, _with_known_length(phase, phases[1:]))
                stopped_by = phase.run_updates()
                run.tally.state_bytes = phase.work.state_bytes()  # before the phase frees its state
        except BaseException as error:  # here, because torch may report a dead data worker at any point
            reported = phase.translate_error(error)
            if isinstance(reported, AccelRunError):
                reported.place = {**phase.place, **reported.place}
            if reported is error:
                raise
            raise reported from error
        saving = phase.hook(Checkpointing)
        run.tally.last_row = phase.hook(Metrics).meter.last_row or run.tally.last_row
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
    """Raise TaskFault if losses or fits name a phase that does not exist, because such an entry would never be used."""
    for kind, member, mapping in (
        ("train", "losses", run.parts.task.losses),
        ("fit", "fits", run.parts.task.fits),
    ):
        phases = [phase.name for phase in run.plan.phases if phase.kind == kind]
        for name in mapping:
            if name not in phases:
                raise TaskFault(
                    f"{member} has an entry for {name}, which is not a phase of kind {kind};"
                    f" phases of this kind: {', '.join(phases) or 'none'}",
                    where=str(run.parts.source),
                    fix=did_you_mean(name, phases) or "add it to PHASES",
                )


def _check_libraries(run: TrainingRun, phases: Iterable[PhasePlan]) -> None:
    """Raise ConfigError before any phase starts if the optimizer of a phase needs a library that is missing."""
    for phase in phases:
        if phase.kind == "train":
            objectives = parse_objectives(run.parts.task, phase)
            for optimizer in [objective.optimizer for objective in objectives] or [phase.optimizer]:
                check_library(optimizer.function, optimizer.options, run.parts.world.device)


def _check_options(run: TrainingRun, phases: Iterable[PhasePlan]) -> None:
    """Raise an error if a later phase has invalid options or no fit, which would otherwise end the run between phases.

    Options that a task defines are not checked, because they may depend on the values of the parameters. Fits and names
    of parameters are not checked if the task defines `begin_phase`, which may add fits, or add or unfreeze parameters.
    """
    defines_begin_phase = _defines_begin_phase(run)
    for phase in phases:
        if phase.kind == "fit" and not defines_begin_phase:
            find_fit(run.parts, phase.name)
        if phase.kind != "train":
            continue
        objectives = parse_objectives(run.parts.task, phase)
        for objective in objectives:
            updates = None if phase.updates is None else -(-phase.updates // objective.every)
            names = objective.select_parameters(run.parts.bare)
            _check_training(run, f"objective.{objective.name}", objective, names, updates)
        if not objectives:
            names = select_parameters(run.parts.bare, phase.trains, with_frozen=defines_begin_phase)
            _check_training(run, f"phase.{phase.name}", phase, names, phase.updates)


def _with_known_length(first: Phase, later: Iterable[PhasePlan]) -> list[PhasePlan]:
    """Return the later phases whose length is given in epochs, with their length in updates.

    Phases are omitted if their number of updates may change until they start: if the task defines `begin_phase`, which
    may change the data, or if the sampler depends on values of the task, and no phase has read them yet.
    """
    parts = first.parts
    reads_task = first.planned.kind != "train" and not parts.plan.choices["sampler"].uses("shuffle", "sequential")
    if reads_task or _defines_begin_phase(first.run):
        return []
    known = []
    for phase in later:
        if phase.kind == "train" and phase.updates is None:
            order = make_order(parts, phase, first.fetcher)
            known.append(replace(phase, updates=count_updates(phase.epochs or 1, order.updates_per_epoch)))
    return known


def _defines_begin_phase(run: TrainingRun) -> bool:
    return type(run.parts.task).begin_phase is not Task.begin_phase


def _check_training(
    run: TrainingRun,
    where: str,
    chosen: PhasePlan | ObjectiveSpec,
    parameters: Mapping[str, nn.Parameter],
    updates: int | None,
) -> None:
    """Check options by building the optimizer for one-element parameters, and the schedule if its length is known.

    where    prefix of the keys in messages
    updates  number of updates; None: unknown
    """
    optimizer, schedule, device = chosen.optimizer, chosen.scheduler, run.parts.world.device
    options = resolve_names(optimizer.options, run.parts.bare, parameters, parameters)
    if _defines_begin_phase(run):
        options = {key: value for key, value in options.items() if key not in KEYS_WITH_NAMES}
    small = [(name, _placeholder(weight, device)) for name, weight in parameters.items()]
    try:
        if optimizer.function in OPTIMIZERS:
            build_optimizer(optimizer.function, small, options)
        if schedule.function in SCHEDULERS and updates is not None:
            build_schedule(schedule.function, updates, schedule.options)
    except ConfigError as error:
        raise ConfigError(replace(problem, where=f"{where}.{problem.where}") for problem in error.problems) from error


def _placeholder(weight: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a one-element parameter for which an optimizer rejects the same options as for the given one."""
    placeholder = nn.Parameter(torch.ones((1,) * weight.dim(), device=device))
    if hasattr(weight, "device_mesh"):
        placeholder.device_mesh = weight.device_mesh  # type: ignore[attr-defined]  # optimizers treat it as sharded
    return placeholder


def _restore_progress(run: TrainingRun, start: LoadedCheckpoint, before: Iterable[PhaseRecord]) -> None:
    # A checkpoint in another directory belongs to another run; this run then has no checkpoint yet.
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
    """Load the model of a finished phase, from which the next phase starts."""
    load_weights(run.parts, start)
    with convert_state_errors(start):
        ForwardState.load_finished_phase(run, hook_state(ForwardState.name, start))
        run.parts.precision.load(start.state["precision"])
        restore_rank_random_state(run.parts.world, start, run.plan.settings.seed)
    run.progress.updates_before += int(start.state["phase_update"])
    if start.path.parent == run.directory.checkpoints:
        run.progress.kept += [*(int(number) for _, number in start.state["bests"]), start.update]
