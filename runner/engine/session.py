"""Run a training job on a rank: open the run directory, train, print the report, and record how the run ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from runner.base.errors import AccelRunError, Exit, IncompatibleResume, MissingPackage, find_system_limit
from runner.base.text import error_line
from runner.config.options import task_source
from runner.config.phases import INFERENCE
from runner.distributed.peer_loss import is_peer_loss
from runner.distributed.world import World
from runner.durable.directory import RunDirectory
from runner.durable.signals import StopRequest
from runner.engine.contract.error_diagnosis import explain, make_task_fault
from runner.engine.contract.task_loading import check_packages
from runner.engine.mirroring import download_checkpoints, finish_mirroring, start_mirroring, wait_for_download
from runner.engine.opening import open_first_rank, open_other_rank
from runner.engine.process.attempt import RunAttempt, read_start_files, record_rank_failure, require_single_writer
from runner.engine.process.job import Job, SessionEnd
from runner.engine.process.run_screen import Screen, warnings_on
from runner.engine.process.watchdog import END, HangTraces, run_watchdog
from runner.engine.run_measurements import collect_evidence
from runner.engine.run_report import report_end, report_start
from runner.engine.training import run_phases
from runner.plan.run_plan import Plan
from runner.records.evidence import choose_evidence
from runner.records.run_record import RunResult
from runner.trackers.tracker import FINISH_S


def run_rank(job: Job, world: World) -> SessionEnd:
    """Train as one rank of the job; return the result.

    Raises AccelRunError, which rank 0 also writes to error.json if the run directory exists.
    """
    return _run_first_rank(job, world) if world.is_first else _run_other_rank(job, world)


def _run_first_rank(job: Job, world: World) -> SessionEnd:
    """Train as rank 0, which writes the files of the run and prints."""
    directory = RunDirectory.create_or_open(job.folder.parent, job.name)
    with (
        directory,
        require_single_writer(directory),
        Screen(directory) as screen,
        warnings_on(screen),
        _reserve_descriptors() as reserved,
    ):
        attempt = RunAttempt.for_job(job, directory)
        before = read_start_files(directory)
        try:
            with _expected_errors(job.plan):
                ended = _train(job, world, attempt, screen)
        except BaseException as error:
            reserved.close()
            is_refused = isinstance(error, AccelRunError) and not directory.run_json.exists()
            if directory.is_new and not attempt.reached and (is_refused or isinstance(error, MissingPackage)):
                with suppress(AccelRunError):
                    directory.discard()  # nothing to resume; run=last then still refers to the previous run
                raise
            if isinstance(error, IncompatibleResume) and before and not attempt.reached:
                with suppress(AccelRunError):  # refused only after run files were rewritten: restore them
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


def _run_other_rank(job: Job, world: World) -> SessionEnd:
    """Train as another rank, which writes no records: rank 0 or accel-run's launcher records how the run ended.

    Under another launcher, the rank records its own error, because rank 0 may be killed while it waits for this rank.
    """
    directory, began = RunDirectory.join(job.folder), time.time()

    def record_error(error: Exception) -> None:
        if not world.is_supervised and not is_peer_loss(error):
            record_rank_failure(directory, error, world.rank, began, int(progress_mark.num_updates.value))

    with ExitStack() as stack:
        name = f"stacks-rank{world.rank}.txt"
        traces = HangTraces(lambda stacks: directory.write(name, stacks), record_error, directory.checkpoints, name)
        progress_mark = stack.enter_context(run_watchdog(job.plan, world, traces))
        wait_for_download(job.plan, world)
        try:
            with _expected_errors(job.plan):
                run, start = open_other_rank(job, world, stack, stack.enter_context(StopRequest()))
                run.progress_mark = progress_mark
                outcome = run_phases(run, start)
        except Exception as error:
            record_error(error)
            raise
        return SessionEnd(outcome.exit_code, run.stop.requested is not None)


@contextmanager
def _reserve_descriptors() -> Iterator[ExitStack]:
    """Hold spare file descriptors until exit, so that error.json can be written even at the limit on open files."""
    with ExitStack() as stack:
        with suppress(OSError):
            for _ in range(_NUM_RESERVED):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield stack


def _train(job: Job, world: World, attempt: RunAttempt, screen: Screen) -> SessionEnd:

    def record_error(error: AccelRunError) -> None:
        attempt.reached = int(progress_mark.num_updates.value)
        attempt.fail(error)

    def record_end(code: Exit) -> None:
        if directory.run_json.exists():  # otherwise the run has not started
            attempt.finish(code)

    directory = attempt.directory
    with ExitStack() as stack:
        traces = HangTraces(
            lambda stacks: directory.write("stacks.txt", stacks), record_error, directory.checkpoints,
            record_end=record_end,
        )  # fmt: skip
        progress_mark = stack.enter_context(run_watchdog(job.plan, world, traces))
        mirror = download_checkpoints(job.plan, world, directory, screen, progress_mark)
        stop = stack.enter_context(StopRequest())
        progress_mark.is_stopping = lambda: stop.requested is not None
        run, start = open_first_rank(job, world, attempt, screen, stack, stop)
        run.progress_mark = progress_mark
        start_mirroring(run, mirror, resumes=start is not None and start.path.parent == directory.checkpoints)
        uses = [*(phase.name for phase in job.plan.selected), *([INFERENCE] if job.runs_inference else [])]
        check_packages(run.parts.task, uses, run.parts.source)
        before = attempt.record.evidence
        # Save each change immediately, because the run may be killed later.
        run.provenance.on_change = lambda: attempt.save(changes=tuple(run.provenance.changes))
        report_start(screen, job.plan, run.parts, job.inventory, start)
        exit_code, should_wait = 1, True
        try:
            outcome = run_phases(run, start, before.phases if before else ())
            exit_code = int(outcome.exit_code)
        except BaseException as error:
            should_wait = isinstance(error, Exception)
            with suppress(Exception):  # must not hide the original error
                partial = replace(collect_evidence(run, job.inventory), unfinished=True)
                if partial.updates or before is None:
                    attempt.measured(choose_evidence(before, partial))
            raise
        finally:
            progress_mark.advance(END, progress_mark.now[1])
            # The exit code is known. From here on, only a third stop signal kills the run, not a second one.
            progress_mark.is_ending.value = True
            run.stop.begin_shutdown()
            attempt.reached = run.num_updates
            run.observers.tracker.finish(FINISH_S, exit_code=exit_code, hand_over=True)
            finish_mirroring(run, should_wait=should_wait)
        evidence = replace(collect_evidence(run, job.inventory), attempt=attempt.record.process.started)
        result = RunResult(
            update=outcome.update,
            metrics=dict(outcome.metrics),
            baselines=run.baselines,
            phases=dict(run.progress.records),
        )
        attempt.record = replace(attempt.record, result=result)
        attempt.measured(choose_evidence(before, evidence))
        report_end(screen, run, outcome, evidence, runs_inference=job.runs_inference)
        return SessionEnd(outcome.exit_code, run.stop.requested is not None)


@contextmanager
def _expected_errors(plan: Plan) -> Iterator[None]:
    """Convert exceptions of the task, the device and the system to AccelRunError; leave internal errors unchanged."""
    try:
        yield
    except BaseException as error:  # a task may raise any exception
        source = task_source(plan.choices["task"].name, Path(plan.task_file) if plan.task_file else None)
        if isinstance(error, SystemExit):
            what, fix = f"the task called sys.exit({error.code})", "return from the task, or raise an exception"
            raise (make_task_fault(error, source, "the task") or AccelRunError(what, fix=fix)) from error
        reported = explain(error, source, "the run", plan.batch.micro_batch_size)
        if reported is None or reported is error:
            raise
        raise reported from error


def _internal_error(error: BaseException, directory: RunDirectory) -> AccelRunError:
    """Return an internal error as a one-line AccelRunError; error.json has the traceback."""
    fix = f"this is a bug in accel-run; please report it with {directory.shown / 'error.json'}"
    fault = AccelRunError(error_line(error), fix=fix)
    for note in getattr(error, "__notes__", ()):
        fault.add_note(note)
    return fault


_NUM_RESERVED = 4  # file descriptors needed to list a folder, read a checkpoint and write a file
