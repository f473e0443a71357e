"""The record of an attempt to run: run.json, error.json, and the files that reproduce the run."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, Hang, Problem, RunInUse, StorageError
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable import files
from runner.durable.checkpoint import LoadedCheckpoint, checkpoint_path, load_newest, save
from runner.durable.directory import RunDirectory
from runner.durable.record_files import read_error, read_record
from runner.durable.run_identity import generate_uid
from runner.durable.system import System
from runner.engine.process.attempt import (
    RunAttempt,
    UnrecordedAttempt,
    now,
    read_start_files,
    record_failure,
    require_single_writer,
)
from runner.engine.process.job import Job
from runner.host.process_tree import process_identity
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from runner.records.evidence import Evidence
from runner.records.run_record import AdoptedCheckpoint, ErrorRecord, ProcessRecord, RunRecord
from tests.faults.saver import snapshot

UID, OTHER = generate_uid(), generate_uid()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create_or_open(tmp_path, "mine") as directory:
        yield directory


def start_attempt(run: RunDirectory, **others: Any) -> RunAttempt:
    """Return an attempt with a saved record, like that of a started run."""
    process = ProcessRecord(state="running", pid=os.getpid(), host=socket.gethostname(), started=now())
    attempt = RunAttempt(run, RunRecord(name="mine", uid=UID, process=process, **others), 0.0)
    attempt.save()
    return attempt


def add_checkpoints(run: RunDirectory, *updates: int, uid: str = UID) -> None:
    for update in updates:
        given = snapshot(update)
        save(run.checkpoints, replace(given, facts={**given.facts, "run_uid": uid}))


def damage(run: RunDirectory, update: int) -> None:
    (checkpoint_path(run.checkpoints, update) / "state.json").write_bytes(b"{}")


def error_of(run: RunDirectory) -> ErrorRecord:
    record = read_error(run.path)
    assert record is not None
    return record


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


# ---------------------------------------------------------------- failures


def test_a_failure_is_recorded_with_its_problems_and_repeated_updates(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_checkpoints(run, 3, 5)
    attempt, error = start_attempt(run), DataError("row 7 is damaged", where="rows.csv", fix="remove it")
    attempt.reached, error.place = 9, {"rank": 0, "update": 9}
    attempt.began = 100.0
    monkeypatch.setattr(time, "time", lambda: 107.5)
    assert attempt.fail(error)
    record = error_of(run)
    assert record.seconds == 7.5
    assert (record.cause, record.where, record.fix) == ("row 7 is damaged", "rows.csv", "remove it")
    assert (record.problems, record.exit_code) == (error.problems, Exit.BAD_DATA)
    assert (record.place, record.attempt) == ({"rank": 0, "update": 9}, attempt.record.process.started)
    assert (record.last_checkpoint, record.reached, record.updates_repeated) == ("update-0000000005", 9, 4)
    assert "DataError" in record.traceback
    assert record.time is not None
    assert record.time >= (record.attempt or "")
    process = read_record(run.path).process
    assert (process.state, process.exit_code, process.ended is None) == ("failed", Exit.BAD_DATA, False)
    assert (process.pid, process.started) == (os.getpid(), record.attempt)
    assert len(notes(error)) == 1
    assert "update 5" in notes(error)[0]


def test_all_problems_are_recorded_and_the_first_is_the_cause(run: RunDirectory) -> None:
    error = ConfigError([Problem("is negative", "lr", "use 0.1"), Problem("is unknown", "lrr")])
    assert start_attempt(run).fail(error)
    record = error_of(run)
    assert [problem.what for problem in record.problems] == ["is negative", "is unknown"]
    assert (record.cause, record.where, record.fix, record.exit_code) == ("is negative", "lr", "use 0.1", Exit.CONFIG)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyError("points"), Exit.SOFTWARE), (KeyboardInterrupt(), Exit.INTERRUPTED)]
)
def test_an_exception_without_problems_is_recorded_with_its_text_as_cause(
    run: RunDirectory, error: BaseException, code: Exit
) -> None:
    assert start_attempt(run).fail(error)
    record = error_of(run)
    assert type(error).__name__ in record.cause
    assert (record.where, record.fix, record.problems, record.place) == ("", "", (), {})
    assert (record.exit_code, read_record(run.path).process.exit_code) == (code, code)


def test_a_rejected_attempt_changes_neither_run_json_nor_error_notes(run: RunDirectory) -> None:
    add_checkpoints(run, 3)
    start_attempt(run)
    before = run.run_json.read_bytes()
    process = ProcessRecord(state="running", started="2001-01-01T00:00:00+00:00")
    refused, error = RunAttempt(run, RunRecord(name="mine", process=process), 0.0), DataError("too late")
    assert refused.fail(error)
    assert run.run_json.read_bytes() == before
    assert (error_of(run).attempt, error_of(run).cause) == (process.started, "too late")
    assert notes(error) == []


def test_a_rejected_first_attempt_is_recorded_as_failed(run: RunDirectory) -> None:
    attempt = RunAttempt(run, RunRecord(name="mine", process=ProcessRecord(state="running", started=now())), 0.0)
    assert attempt.fail(ConfigError(Problem("is negative", "lr")))
    record = read_record(run.path)
    assert (record.name, record.process.state, record.process.exit_code) == ("mine", "failed", Exit.CONFIG)


def test_the_launcher_keeps_the_place_that_a_rank_recorded(run: RunDirectory) -> None:
    attempt, first, second = start_attempt(run), DataError("of the rank"), DataError("of the launcher")
    attempt.reached, first.place, second.place = 7, {"rank": 1, "samples": [3]}, {"rank": 0}
    attempt.fail(first)
    attempt.fail(second)
    record = error_of(run)
    assert (record.cause, record.place, record.reached) == ("of the launcher", {"rank": 0, "samples": [3]}, 7)


def test_a_failure_does_not_inherit_values_of_an_earlier_attempt(run: RunDirectory) -> None:
    earlier = ErrorRecord(attempt="2001-01-01T00:00:00+00:00", reached=50, place={"rank": 3}, cause="old")
    run.write("error.json", json.dumps(earlier.to_json()))
    start_attempt(run).fail(DataError("new"))
    assert (error_of(run).place, error_of(run).reached, error_of(run).updates_repeated) == ({}, 0, 0)


def test_the_last_checkpoint_counts_as_reached_if_no_progress_is_known(run: RunDirectory) -> None:
    add_checkpoints(run, 3)
    start_attempt(run).fail(error := DataError("damaged"))
    assert (error_of(run).reached, error_of(run).updates_repeated, len(notes(error))) == (3, 0, 1)


def test_a_failure_before_any_progress_has_no_note(run: RunDirectory) -> None:
    start_attempt(run).fail(error := DataError("damaged"))
    assert (error_of(run).last_checkpoint, error_of(run).reached, notes(error)) == (None, 0, [])


def test_a_failure_after_updates_without_a_checkpoint_has_a_note(run: RunDirectory) -> None:
    attempt, error = start_attempt(run), DataError("damaged")
    attempt.reached = 4
    attempt.fail(error)
    assert (error_of(run).last_checkpoint, error_of(run).updates_repeated, len(notes(error))) == (None, 4, 1)


def test_an_error_with_a_note_gets_no_second_note(run: RunDirectory) -> None:
    attempt, error = start_attempt(run), Hang("hangs")
    attempt.reached = 4
    error.add_note("from the watchdog")
    attempt.fail(error)
    assert notes(error) == ["from the watchdog"]


def test_a_damaged_checkpoint_is_skipped_unless_the_disk_fails_or_the_run_hangs(run: RunDirectory) -> None:
    add_checkpoints(run, 3, 5)
    damage(run, 5)
    attempt = start_attempt(run)
    for error, last in ((DataError("x"), 3), (Hang("x"), 5)):
        attempt.fail(error)
        assert error_of(run).last_checkpoint == f"update-{last:010}"
    damage(run, 3)
    failed_read, unreadable = DataError("x"), StorageError("x")
    failed_read.__cause__ = OSError(5, "Input/output error")
    few_descriptors = AccelRunError("x")
    few_descriptors.exit_code = Exit.SYSTEM
    last_by_error = (
        (DataError("x"), None),
        (failed_read, 5),
        (unreadable, 5),
        (few_descriptors, 5),
        (KeyError(), None),
    )
    for each, newest in last_by_error:
        attempt.fail(each)
        assert error_of(run).last_checkpoint == (None if newest is None else f"update-{newest:010}")


def test_the_newest_checkpoint_is_recorded_if_none_can_be_checked(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_checkpoints(run, 3)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("runner.engine.process.attempt.newest_valid", out_of_memory)
    start_attempt(run).fail(DataError("x"))
    assert error_of(run).last_checkpoint == "update-0000000003"


class Full(System):
    """A full disk."""

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        raise OSError(28, "No space left on device")


def test_fail_returns_false_if_the_failure_cannot_be_recorded(run: RunDirectory) -> None:
    attempt = start_attempt(run)
    with files.use_system(Full()):
        assert not attempt.fail(DataError("the cause"))
    assert read_error(run.path) is None
    assert read_record(run.path).process.state == "running"


def test_the_launcher_can_record_the_failure_of_its_process(run: RunDirectory, tmp_path: Path) -> None:
    job: Any = SimpleNamespace(name="mine", folder=run.path)
    began = time.time()
    start_attempt(run)
    run.release()
    record_failure(job, Hang("hangs"), began + 3600.0, "of an earlier start", 3)
    assert read_error(run.path) is None
    record_failure(job, Hang("hangs"), began, "stacks", 8)
    assert (error_of(run).reached, error_of(run).exit_code) == (8, Exit.HANG)
    assert (run.path / "stacks.txt").read_text() == "stacks"
    record_failure(SimpleNamespace(name="other", folder=tmp_path / "other"), Hang("hangs"), began, "", 8)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_a_failure_without_stacks_writes_no_stacks_file(run: RunDirectory) -> None:
    job: Any = SimpleNamespace(name="mine", folder=run.path)
    began = time.time()
    start_attempt(run)
    run.release()
    record_failure(job, Hang("hangs"), began)
    assert read_record(run.path).process.state == "failed"
    assert not (run.path / "stacks.txt").exists()


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("code", "state"),
    [(Exit.DONE, "done"), (Exit.PREEMPTED, "preempted"), (Exit.INTERRUPTED, "interrupted")],
)
def test_an_end_without_error_is_recorded_and_removes_an_earlier_error(
    run: RunDirectory, code: Exit, state: str
) -> None:
    attempt = start_attempt(run)
    attempt.fail(DataError("of an earlier attempt"))
    attempt.finish(code)
    record = read_record(run.path)
    assert (record.process.state, record.process.exit_code, record.uid) == (state, code, UID)
    assert record.process.ended is not None
    assert not run.error.exists()


# ---------------------------------------------------------------- the identity


def checkpoint_of(run: RunDirectory) -> LoadedCheckpoint:
    start = load_newest(run.checkpoints)
    assert start is not None
    return start


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_keeps_its_uid_or_adopts_the_checkpoint_uid(run: RunDirectory, known: bool) -> None:
    add_checkpoints(run, 3)
    attempt = RunAttempt(run, RunRecord(uid=UID if known else None), 0.0)
    attempt.save()
    attempt.identify(run.owner, checkpoint_of(run), is_new=False)
    assert (attempt.record.uid, attempt.record.adopted) == (UID, ())


def test_a_run_without_uid_and_checkpoint_gets_a_new_one(run: RunDirectory) -> None:
    uids = set()
    for _ in range(2):
        attempt = RunAttempt(run, RunRecord(), 0.0)
        attempt.identify(run.owner, None, is_new=False)
        uids.add(attempt.record.uid)
    assert len(uids - {None}) == 2


def test_an_adopted_checkpoint_of_another_run_is_recorded_once(run: RunDirectory) -> None:
    add_checkpoints(run, 3, uid=OTHER)
    attempt = start_attempt(run)
    for _ in range(2):
        attempt.identify(run.owner, checkpoint_of(run), is_new=False)
        attempt.save()
    assert attempt.record.uid == UID
    assert [(each.uid, each.checkpoint) for each in attempt.record.adopted] == [(OTHER, "update-0000000003")]


def test_a_run_restarted_from_scratch_gets_a_new_uid(run: RunDirectory) -> None:
    add_checkpoints(run, 3)
    attempt = start_attempt(run, adopted=(AdoptedCheckpoint(uid=OTHER),))
    attempt.identify(run.owner, checkpoint_of(run), is_new=True)
    assert attempt.record.uid not in (None, UID)
    assert attempt.record.adopted == ()


# ---------------------------------------------------------------- the files of a start


def job_of(*overrides: str, command: tuple[str, ...] = ()) -> Job:
    request = Request(overrides, command=command)
    configuration, inventory = compose(request), Inventory((), Cpu("a processor", 4, 8, 0))
    return Job(request, configuration, make_plan(configuration, inventory), inventory, "mine")


def test_an_attempt_records_its_command_and_process_and_keeps_persistent_fields(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = Evidence(items_per_s=3.0)
    start_attempt(run, names=("old",), tracker_id="t1", changes=({"update": 3},), evidence=evidence)
    monkeypatch.setattr(sys, "argv", ["another program", "x=1"])
    monkeypatch.setattr(time, "time", lambda: 100.0)
    command = ("train", "device=cpu", "seed=3", "run=a b")
    attempt = RunAttempt.for_job(job_of("device=cpu", "seed=3", command=command), run)
    record = attempt.record
    assert (record.name, record.names) == ("mine", ("mine", "old"))
    assert (record.tracker_id, record.changes, record.evidence) == ("t1", ({"update": 3},), evidence)
    assert shlex.split(record.origin.command or "") == ["accel-run", *command]
    assert (record.origin.overrides, record.origin.folder) == (("device=cpu", "seed=3"), str(Path.cwd()))
    assert record.origin.task is not None
    process = record.process
    assert (process.state, process.pid, process.host) == ("running", os.getpid(), socket.gethostname())
    assert process.birth == process_identity(os.getpid())
    assert process.started_by is not None
    assert process.started is not None
    assert (attempt.began, attempt.reached) == (100.0, 0)


def test_a_request_without_a_command_is_recorded_as_train(run: RunDirectory) -> None:
    attempt = RunAttempt.for_job(job_of("device=cpu", "seed=3"), run)
    assert shlex.split(attempt.record.origin.command or "") == ["accel-run", "train", "device=cpu", "seed=3"]


@pytest.mark.parametrize("overrides", [(), ("device=cpu", "seed=3")])
def test_starting_a_run_writes_the_files_that_reproduce_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accel-run", "train", *overrides])
    job = job_of(*overrides)
    assert read_start_files(run) == {}
    attempt = RunAttempt.for_job(job, run)
    attempt.begin(job)
    written = read_start_files(run)
    assert set(written) == {
        "config.yaml", "overrides.yaml", "command.sh", "plan.json", "environment.json", "run.json",
    }  # fmt: skip
    assert all(content == (run.path / name).read_bytes() for name, content in written.items())
    lines = [f'- "{override}"' for override in overrides] or ["[]"]
    assert written["overrides.yaml"].decode().splitlines() == lines
    assert f"set -- {shlex.join(['train', *overrides])} ".encode() in written["command.sh"]
    assert b"torchrun" not in written["command.sh"]
    assert json.loads(written["plan.json"]) == json.loads(job.plan.to_json())
    assert read_record(run.path) == attempt.record


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_script_uses_torchrun_if_torchrun_started_several_ranks(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["accel-run", "train"])
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", world_size), ("LOCAL_WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    job = job_of()
    RunAttempt.for_job(job, run).begin(job)
    assert ("torchrun" in run.command.read_text()) == (world_size == 2)


def test_an_unrecorded_attempt_writes_nothing_at_its_start(run: RunDirectory) -> None:
    before = sorted(path.name for path in run.path.iterdir())
    UnrecordedAttempt(run).begin(job_of())
    assert sorted(path.name for path in run.path.iterdir()) == before


# ---------------------------------------------------------------- a second process


@pytest.mark.parametrize("case", ["writes", "has its lock file", "own process", "other host", "ended", "gone"])
def test_a_run_without_its_lock_file_has_one_writer(run: RunDirectory, case: str) -> None:
    other = os.getppid()
    process = ProcessRecord(state="running", pid=other, birth=process_identity(other), host=socket.gethostname())
    if case == "own process":
        process = replace(process, pid=os.getpid(), birth=process_identity(os.getpid()))
    process = {
        "other host": replace(process, host="elsewhere"), "ended": replace(process, state="done"),
        "gone": replace(process, birth="another"),
    }.get(case, process)  # fmt: skip
    RunAttempt(run, RunRecord(name="mine", process=process), 0.0).save()
    run.lost_lock_file = case != "has its lock file"
    with pytest.raises(RunInUse, match=str(other)) if case == "writes" else nullcontext(), require_single_writer(run):
        pass
