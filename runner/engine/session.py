"""Run a job from its directory to its exit code: train, report, and record how it ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import AccelRunError, IncompatibleResume, MissingPackage, find_system_limit
from runner.base.text import error_line
from runner.config.options import task_source
from runner.config.phases import INFERENCE
from runner.durable.directory import RunDirectory
from runner.engine.attempt import RunAttempt, only_writer, read_start_files
from runner.engine.job import Job, SessionEnd
from runner.plan.run_plan import Plan
from runner.records.run_record import RunResult

if TYPE_CHECKING:
    from runner.base.world import World
    from runner.engine.run import TrainingRun
    from runner.engine.run_screen import Screen


def take_part(job: Job, world: World) -> SessionEnd:
    """Train as one rank of the job; return the result.

    Raises AccelRunError; the same is then in error.json of the run directory, if there is one.
    """
    return _lead(job, world) if world.is_first else _follow(job, world)


def _lead(job: Job, world: World) -> SessionEnd:
    """Train as rank 0, which writes files and prints."""
    from runner.engine.run_screen import (
        Screen,
        warnings_on,
    )  # needs torch, whose import must not delay reports of invalid settings

    directory = RunDirectory.create_or_open(job.folder.parent, job.name)
    with directory, only_writer(directory), Screen(directory) as screen, warnings_on(screen), _spare() as spare:
        attempt = RunAttempt.of(job, directory)
        before = read_start_files(directory)
        try:
            with _expected_errors(job.plan):
                ended = _train(job, world, attempt, screen)
        except BaseException as error:
            spare.close()
            if isinstance(error, MissingPackage) and directory.is_new and not attempt.reached:
                with suppress(AccelRunError):
                    directory.discard()  # nothing to resume: `last` still refers to the previous run
                raise
            if isinstance(error, IncompatibleResume) and before and not attempt.reached:
                with suppress(AccelRunError):  # the difference is found only after the task and its data are built
                    for name, content in before.items():
                        directory.write(name, content)
            limit = find_system_limit(error)
            if limit is not None:
                limit.__cause__ = error  # its traceback is written to error.json
                attempt.fail(limit)
                raise limit from error
            is_written = attempt.fail(error)
            if is_written and not isinstance(error, (AccelRunError, KeyboardInterrupt)):
                raise _internal_error(error, directory) from error
            raise
        attempt.finish(ended.code)
    return ended


def _follow(job: Job, world: World) -> SessionEnd:
    """Train as any other rank, without output."""
    from runner.engine.mirroring import await_download
    from runner.engine.opening import open_silently
    from runner.engine.training import train
    from runner.engine.watchdog import HangTraces, watched

    directory = RunDirectory.join(job.folder)
    with ExitStack() as stack:
        name = f"stacks-rank{world.rank}.txt"
        # Without `record`: rank 0 records how the run ended.
        traces = HangTraces(lambda stacks: directory.write(name, stacks), checkpoints=directory.checkpoints, file=name)
        pulse = stack.enter_context(watched(job.plan, world, traces))
        await_download(job.plan, world)
        run, start = open_silently(job, world, stack)
        run.pulse = pulse
        with _expected_errors(job.plan):
            outcome = train(run, start)
        return SessionEnd(outcome.exit_code, run.stop.requested is not None, run.dropped)


@contextmanager
def _spare() -> Iterator[ExitStack]:
    """Reserve descriptors that are closed at the end: error.json must be writable even at the limit on open files."""
    with ExitStack() as held:
        with suppress(OSError):
            for _ in range(_NUM_SPARE):
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield held


def _train(job: Job, world: World, attempt: RunAttempt, screen: Screen) -> SessionEnd:
    """Open the run, train, and report the result."""
    from runner.engine.mirroring import begin_copies, download, end_copies
    from runner.engine.opening import open_recorded
    from runner.engine.run_evidence import evidence_of
    from runner.engine.run_report import report_end, report_start
    from runner.engine.task_loading import check_packages
    from runner.engine.training import train
    from runner.engine.watchdog import END, HangTraces, watched
    from runner.records.evidence import better_known
    from runner.trackers.tracker import FINISH_S

    def note(error: AccelRunError) -> None:
        if opened:
            attempt.reached = opened[0].reached
        attempt.fail(error)

    directory = attempt.directory
    opened: list[TrainingRun] = []
    with ExitStack() as stack:
        traces = HangTraces(lambda stacks: directory.write("stacks.txt", stacks), note, directory.checkpoints)
        pulse = stack.enter_context(watched(job.plan, world, traces))
        mirror = download(job.plan, world, directory, screen, pulse)
        run, start = open_recorded(job, world, attempt, screen, stack)
        run.pulse = pulse
        begin_copies(run, mirror, resumes=start is not None and start.path.parent == directory.checkpoints)
        uses = [*(phase.name for phase in job.plan.selected), *([INFERENCE] if job.predicts else [])]
        check_packages(run.parts.task, uses, run.parts.source)
        before = attempt.record.evidence
        # Written at once, because the run may be killed later.
        run.provenance.on_change = lambda: attempt.save(changes=tuple(run.provenance.changes))
        opened.append(run)
        report_start(screen, job.plan, run.parts, job.inventory, start)
        exit_code, waits = 1, True
        try:
            outcome = train(run, start, before.phases if before else ())
            exit_code = int(outcome.exit_code)
        except BaseException as error:
            waits = isinstance(error, Exception)
            with suppress(Exception):  # must not hide the original error
                made = replace(evidence_of(run, job.inventory), unfinished=True)
                evidence = better_known(before, made) if made.updates else before or made
                attempt.record = replace(attempt.record, evidence=evidence)
            raise
        finally:
            pulse.now = (END, pulse.now[1])
            pulse.ending.value = True
            run.stop.begin_end()
            attempt.reached = run.reached
            run.observers.tracker.finish(FINISH_S, exit_code=exit_code, leaves=True)
            end_copies(run, waits=waits)
        evidence = evidence_of(run, job.inventory)
        result = RunResult(
            update=outcome.update,
            metrics=dict(outcome.metrics),
            baselines=run.baselines,
            phases=dict(run.progress.records),
        )
        attempt.record = replace(attempt.record, result=result, evidence=better_known(before, evidence))
        report_end(screen, run, outcome, evidence)
        return SessionEnd(outcome.exit_code, run.stop.requested is not None, run.dropped)


@contextmanager
def _expected_errors(plan: Plan) -> Iterator[None]:
    """Convert every exception inside into an AccelRunError, except internal errors."""
    try:
        yield
    except BaseException as error:  # a task may raise any exception
        from runner.engine.error_diagnosis import explain

        source = task_source(plan.choices["task"].name, Path(plan.task_file) if plan.task_file else None)
        if isinstance(error, SystemExit):
            raise _left(error, source) from error
        shown = explain(error, source, "the run", plan.batch.micro_batch_size)
        if shown is None or shown is error:
            raise
        raise shown from error


def _internal_error(error: BaseException, directory: RunDirectory) -> AccelRunError:
    """Return an internal error as one line; the traceback is in error.json."""
    fix = f"this is a bug in accel-run; please report it with {directory.shown / 'error.json'}"
    fault = AccelRunError(error_line(error), fix=fix)
    for note in getattr(error, "__notes__", ()):
        fault.add_note(note)
    return fault


def _left(error: SystemExit, source: Path) -> AccelRunError:
    """Return the TaskFault for a task that calls sys.exit, which would otherwise end the run without a reason."""
    from runner.engine.error_diagnosis import make_task_fault

    return make_task_fault(error, source, "the task") or AccelRunError(
        f"the task called sys.exit({error.code})", fix="return from the task, or raise an exception"
    )


_NUM_SPARE = 4  # to list a folder, read a checkpoint and write a file
