"""Record one execution of a run in the run directory: its state, the files to reproduce it, and its error."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, Exit, Hang, RunInUse, checkpoint_update, resume_note
from runner.base.json_values import to_json
from runner.base.rank_env import detect_rank, launcher_id
from runner.base.secret import sanitize
from runner.base.text import error_line
from runner.config.configuration import to_yaml
from runner.config.request import Request
from runner.durable import files
from runner.durable.checkpoint import LoadedCheckpoint, newest_name, newest_valid
from runner.durable.directory import RunDirectory
from runner.durable.record_files import ERROR, RUN, read_error, read_record
from runner.durable.run_identity import RunIdentity, generate_uid, manifest_uid
from runner.durable.run_state import process_state_name
from runner.engine.process import repro_script
from runner.engine.process.job import Job
from runner.host.process_tree import process_identity
from runner.plan.environment import collect_environment
from runner.records.evidence import Evidence
from runner.records.run_record import AdoptedCheckpoint, ErrorRecord, ProcessRecord, RunOrigin, RunRecord


class RunAttempt:
    """One execution of a run, recorded by rank 0; a resumed run has several.

    record   content of run.json, written only once the run can start, so that a refused attempt does not change it
    began    start in seconds since 1970
    reached  number of completed updates of all phases, saved or not; 0: unknown
    """

    def __init__(self, directory: RunDirectory, record: RunRecord, began: float) -> None:
        self.directory, self.record, self.began = directory, record, began
        self.reached = 0

    @classmethod
    def for_job(cls, job: Job, directory: RunDirectory) -> RunAttempt:
        """Create an attempt for a job; values that persist are copied from the run's previous record."""
        previous, plan, request = read_record(directory.path), job.plan, job.request
        record = RunRecord(
            name=job.name,
            names=tuple(sorted({directory.name, *directory.owner.names})),  # the folder may have been renamed
            origin=RunOrigin(
                task=plan.choices["task"].name,
                task_file=plan.task_file,
                config_dir=plan.config_dir,
                folder=str(Path.cwd()),
                overrides=tuple(request.overrides),
                command=request.command_line,
            ),
            process=ProcessRecord(
                state="running",
                pid=os.getpid(),
                birth=process_identity(os.getpid()),
                host=socket.gethostname(),
                started_by=launcher_id(),
                started=now(),
            ),
            tracker_id=previous.tracker_id,
            evidence=previous.evidence,  # kept until this process has measured something
            changes=previous.changes,
            adopted=previous.adopted,
        )
        return cls(directory, record, time.time())

    def identify(self, run: RunIdentity, start: LoadedCheckpoint | None, *, is_new: bool) -> None:
        """Record the uid of the run: the recorded one, that of the checkpoint if run.json was lost, or a new one.

        start   checkpoint from which the run resumes; if the user allowed one of another run, it is recorded as adopted
        is_new  the run restarts from scratch
        """
        checkpoint_uid = manifest_uid(start.manifest) if start else None
        adopted = () if is_new else self.record.adopted
        if not is_new and start is not None and checkpoint_uid is not None and run.has_other_uid(start.manifest):
            adopted += (AdoptedCheckpoint(uid=checkpoint_uid, checkpoint=start.path.name, time=now()),)
        uid = generate_uid() if is_new else run.uid or checkpoint_uid or generate_uid()
        self.record = replace(self.record, uid=uid, adopted=adopted)

    def begin(self, job: Job) -> None:
        """Write the files needed to understand and reproduce the run, then its record."""
        request, write = job.configuration.request, self.directory.write
        write("config.yaml", to_yaml(job.configuration))
        lines = "".join(f"- {json.dumps(override)}\n" for override in request.overrides)
        write("overrides.yaml", lines or "[]\n")
        write("command.sh", _format_command(request, self.directory.name))
        write("plan.json", job.plan.to_json())
        write("environment.json", to_json(collect_environment(job.inventory)))
        self.save()

    def measured(self, evidence: Evidence) -> None:
        """Set the measurements of the run up to this attempt, for the next save."""
        attempt = self.record.process.started
        self.record = replace(self.record, evidence=replace(evidence, attempt=attempt))

    def save(self, **changes: Any) -> None:
        """Write run.json, with these fields of the record changed. Raises StorageError."""
        self.record = replace(self.record, **changes)
        self.directory.write(RUN, to_json(self.record.to_json()))

    def finish(self, code: Exit) -> None:
        """Record that the run ended without error; the error of an earlier attempt no longer applies."""
        state = {Exit.PREEMPTED: "preempted", Exit.INTERRUPTED: "interrupted"}.get(code, "done")
        self.save(process=replace(self.record.process, state=state, exit_code=int(code), ended=now()))
        if files.exists(self.directory.error):
            files.remove(self.directory.error)

    def fail(self, error: BaseException) -> bool:
        """Write error.json and the run state; return whether that succeeded. Never masks the original error."""
        known_error = error if isinstance(error, AccelRunError) else None
        interrupted = Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.SOFTWARE
        code = int(known_error.exit_code if known_error else interrupted)
        problems = known_error.problems if known_error else ()
        started = self.record.process.started
        try:
            last_checkpoint = _last_checkpoint(error, self.directory)
            recorded, previous = read_record(self.directory.path), read_error(self.directory.path)
            if previous is None or previous.attempt != started:  # otherwise a rank has already recorded this failure
                previous = ErrorRecord()
            has_started = recorded.process.started == started
            # Another rank has recorded the cause; this error is only a consequence of its exit.
            is_recorded = code == Exit.RANK_LOST != previous.exit_code and previous.place.get("rank", 0) != 0
            reached = self.reached or previous.reached or checkpoint_update(last_checkpoint)
            self.reached = 0
            # A Hang already has this note.
            if has_started and (last_checkpoint or reached) and not getattr(error, "__notes__", ()):
                error.add_note(resume_note(last_checkpoint, reached))
            content = ErrorRecord(
                cause=problems[0].what if problems else error_line(error),
                where=problems[0].where if problems else "",
                fix=problems[0].fix if problems else "",
                problems=tuple(problems),
                exit_code=code,
                place={**previous.place, **(known_error.place if known_error else {})},
                last_checkpoint=last_checkpoint,
                reached=reached,
                updates_repeated=max(0, reached - checkpoint_update(last_checkpoint)),
                traceback="".join(traceback.format_exception(error)),
                attempt=started,
                time=now(),
                seconds=time.time() - self.began,
            )
            if is_recorded:
                code = previous.exit_code or code
            else:
                self.directory.write(ERROR, sanitize(to_json(content.to_json())))
            if has_started or not recorded.is_known:  # a refused attempt does not change the run
                process = replace(self.record.process, state="failed", exit_code=code, ended=now())
                self.directory.write(RUN, to_json(replace(self.record, process=process).to_json()))
            return True
        except Exception:  # full disk or no memory: must not hide the original error
            return False


class UnrecordedAttempt(RunAttempt):
    """An attempt that only measures: it writes no record."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory, RunRecord(), time.time())

    def begin(self, job: Job) -> None:
        """Do nothing."""


def record_failure(job: Job, error: AccelRunError, began: float, stacks: str = "", completed: int = 0) -> None:
    """Write error.json and the state of the run for ranks that could not do it themselves, if they had started.

    began      start of the ranks in seconds since 1970
    stacks     stack traces of all ranks if they hung, for stacks.txt
    completed  number of completed updates of all phases, saved or not; 0: unknown
    """
    if not job.folder.is_dir():
        return
    with suppress(AccelRunError), RunDirectory.create_or_open(job.folder.parent, job.name) as directory:
        attempt = RunAttempt(directory, read_record(directory.path), began)
        if attempt.record.process.started_since(began):
            if stacks:
                with suppress(AccelRunError):  # the disk may be full
                    directory.write("stacks.txt", stacks)
            attempt.reached = completed
            attempt.fail(error)


def record_rank_failure(directory: RunDirectory, error: Exception, rank: int, began: float, completed: int) -> None:
    """Write error.json and the state of the run on a rank other than 0, which another launcher started.

    That launcher may kill rank 0 before rank 0 can write them. Does nothing if the run directory of rank 0 is on
    another machine, or if its record says that the run has ended.

    began      start of the rank in seconds since 1970
    completed  number of completed updates of all phases, saved or not; 0: unknown
    """
    record = read_record(directory.path)
    if record.process.state != "running":
        return
    attempt = RunAttempt(directory, record, began)
    attempt.reached = completed
    named = error if isinstance(error, AccelRunError) else AccelRunError(error_line(error))
    if named is not error:
        named.__cause__ = error  # its traceback is written to error.json
    named.place = {"rank": rank, **named.place}
    attempt.fail(named)


def record_early_end(job: Job, code: Exit, began: float) -> None:
    """Write the state of a run whose ranks were ended before their first update, if they had started.

    began  start of the ranks in seconds since 1970
    """
    if not job.folder.is_dir():
        return
    with suppress(AccelRunError), RunDirectory.create_or_open(job.folder.parent, job.name) as directory:
        attempt = RunAttempt(directory, read_record(directory.path), began)
        if attempt.record.process.started_since(began) and attempt.record.process.state == "running":
            attempt.finish(code)


@contextmanager
def require_single_writer(directory: RunDirectory) -> Iterator[None]:
    """Raise RunInUse if the recorded process still writes the run and only its lock file was removed."""
    process = read_record(directory.path).process if directory.lost_lock_file else ProcessRecord()
    is_here = process.host == socket.gethostname() and process.pid != os.getpid()
    if is_here and process_state_name(process) == "running":
        raise RunInUse(
            f"process {process.pid} still writes to this run, although its lock file was removed",
            where=f"run={directory.name}",
            fix="wait until it has finished, stop it, or use another run=NAME",
        )
    yield


def read_start_files(directory: RunDirectory) -> dict[str, bytes]:
    """Return the files that `RunAttempt.begin` replaces, with their content; empty for a new run."""
    files_by_name = {}
    for name in ("config.yaml", "overrides.yaml", "command.sh", "plan.json", "environment.json", RUN):
        with suppress(AccelRunError):
            files_by_name[name] = files.read(directory.path / name, at_most=1 << 26)
    return files_by_name if RUN in files_by_name else {}


def now() -> str:
    """Return the time in UTC, in ISO format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _format_command(request: Request, name: str) -> bytes:
    member = detect_rank(os.environ)
    has_launcher = member is not None and member.world_size > 1
    return repro_script.script(request, name, Path.cwd(), sys.executable, started_elsewhere=has_launcher)


def _last_checkpoint(error: BaseException, directory: RunDirectory) -> str | None:
    """Return the name of the newest valid checkpoint, or of the newest one if it cannot be checked now."""
    if isinstance(error, Hang):  # not verified: the disk may be blocked; only complete ones have this name
        return newest_name(directory.checkpoints)
    try:
        valid = newest_valid(directory.checkpoints, directory.owner)
    except Exception:  # no memory or no thread available
        return newest_name(directory.checkpoints)
    if valid is not None:
        return valid.name
    # With a failing disk, a checkpoint that cannot be read now may be valid.
    exit_code = getattr(error, "exit_code", 0)
    is_system_error = isinstance(error.__cause__, OSError) or exit_code in (Exit.SYSTEM, Exit.INPUT_OUTPUT)
    return newest_name(directory.checkpoints) if is_system_error else None
