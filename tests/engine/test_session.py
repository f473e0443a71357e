"""How a run gets its name, what its first rank records when it fails, and which error it raises."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.base.errors import (
    AccelRunError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    Exit,
    Hang,
    IncompatibleResume,
    MissingPackage,
    SystemLimit,
    exception_chain,
)
from runner.config.configuration import compose
from runner.config.phases import INFERENCE
from runner.config.request import Request
from runner.distributed.world import World
from runner.durable import files
from runner.durable.record_files import read_error, read_record
from runner.engine import session
from runner.engine.process.attempt import RunAttempt
from runner.engine.process.job import Job, SessionEnd, choose_run_name
from runner.engine.process.watchdog import END, HangTraces, ProgressMark
from runner.engine.run import Outcome, TrainingRun
from runner.engine.session import run_rank
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from runner.plan.run_plan import Plan
from tests.faults.recording import Quick


@pytest.mark.parametrize("name", ["last", "../x", "a/b", ".", "..", "-x", "two words"])
def test_invalid_run_names_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError):
        choose_run_name(compose(Request((f"run={name}",))))


def test_a_run_without_a_name_is_named_after_its_task() -> None:
    assert choose_run_name(compose(Request(("run=mine",)))) == "mine"
    assert "gpt" in choose_run_name(compose(Request(("task=gpt",))))


# ---------------------------------------------------------------- how a rank ends


TASK = Path(__file__).with_name("task_of_averages.py")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A run of two updates. Its task is not in the folder of this file, so errors raised here are not task errors."""
    (tmp_path / "averages.py").write_text(TASK.read_text())
    overrides = ("device=cpu", "monitor=off", f"output_root={tmp_path}", "updates=2", "backend.threads=1")
    configuration, inventory = (
        compose(Request(overrides, tmp_path / "averages.py")),
        Inventory((), Cpu("a processor", 4, 8, 0)),
    )
    return Job(configuration.request, configuration, make_plan(configuration, inventory), inventory, "mine")


def run_job(job: Job) -> SessionEnd:
    with files.use_system(Quick()):
        return run_rank(job, World(torch.device("cpu")))


def run_failing(job: Job, monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[..., Any]) -> BaseException:
    """Train with `act` instead of a step of the session; return the error."""
    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(session, where, act)
        run_job(job)
    return caught.value


def raises(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> None:
        raise error

    return act


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


REFUSALS = [DataError("is damaged"), IncompatibleResume("differs"), MissingPackage("is not installed")]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_run_rejected_before_it_begins_leaves_no_folder(
    error: AccelRunError, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_failing(job, monkeypatch, "open_first_rank", raises(error)) is error
    assert not job.folder.exists()


def test_only_a_missing_package_discards_a_run_that_has_begun(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, is_kept in ((MissingPackage("is not installed"), False), (DataError("is damaged"), True)):

        def begin(job: Job, _: World, attempt: RunAttempt, *__: Any, error: AccelRunError = error) -> None:
            attempt.begin(job)
            raise error

        assert run_failing(job, monkeypatch, "open_first_rank", begin) is error
        assert job.folder.exists() == is_kept
    recorded = read_error(job.folder)
    assert recorded is not None
    assert recorded.cause == "is damaged"


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_an_earlier_run_is_not_discarded_with_a_rejected_attempt(
    error: AccelRunError, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_job(job).code == Exit.DONE
    before = content_of(job.folder)
    assert run_failing(job, monkeypatch, "open_first_rank", raises(error)) is error
    after = content_of(job.folder)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before == {"error.json"}


@pytest.mark.parametrize("reached", [0, 1])
def test_an_incompatible_resume_restores_run_files_unless_it_trained(
    reached: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(job: Job, _: World, attempt: RunAttempt, *__: Any) -> None:
        attempt.begin(job)
        attempt.reached = reached
        raise IncompatibleResume("differs")

    assert run_job(job).code == Exit.DONE
    before = json.loads((job.folder / "run.json").read_text())
    (job.folder / "command.sh").write_text("of the run")
    run_failing(job, monkeypatch, "open_first_rank", begin)
    after = json.loads((job.folder / "run.json").read_text())
    assert ((job.folder / "command.sh").read_text() == "of the run") == (reached == 0)
    assert (after == before) == (reached == 0)


def test_a_system_limit_is_recorded_with_its_cause(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = ImportError("libx.so: failed to map segment from shared object")
    error = run_failing(job, monkeypatch, "report_start", raises(cause))
    assert isinstance(error, SystemLimit)
    assert cause in exception_chain(error)
    recorded = read_error(job.folder)
    assert recorded is not None
    assert recorded.exit_code == Exit.SYSTEM
    assert "ImportError" in recorded.traceback


def test_an_internal_error_is_recorded_and_keeps_its_notes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = LookupError("of the runner")
    cause.add_note("seen at noon")
    for where in ("report_start", "run_phases", "report_end"):
        error = run_failing(job, monkeypatch, where, raises(cause))
        assert isinstance(error, AccelRunError)
        assert error.exit_code == Exit.SOFTWARE
        assert error.__cause__ is cause
        assert "seen at noon" in error.__notes__
        recorded = read_error(job.folder)
        assert recorded is not None
        assert "of the runner" in recorded.traceback


@pytest.mark.parametrize("error", [DataError("is damaged"), KeyboardInterrupt()], ids=["known", "interrupt"])
def test_a_known_error_is_recorded_and_raised_unchanged(
    error: BaseException, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_failing(job, monkeypatch, "run_phases", raises(error)) is error
    recorded = read_error(job.folder)
    assert recorded is not None
    assert recorded.exit_code == getattr(error, "exit_code", Exit.INTERRUPTED)
    assert read_record(job.folder).process.state == "failed"


def test_an_error_that_cannot_be_recorded_is_raised_unchanged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = LookupError("of the runner")
    monkeypatch.setattr(RunAttempt, "fail", lambda *_: False)
    assert run_failing(job, monkeypatch, "run_phases", raises(cause)) is cause


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError), (SystemExit(3), AccelRunError)],
    ids=["memory", "exit"],
)
def test_torch_errors_and_system_exits_are_translated(
    cause: BaseException, kind: type[AccelRunError], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = run_failing(job, monkeypatch, "run_phases", raises(cause))
    assert type(error) is kind
    assert error.__cause__ is cause
    assert "error.json" not in error.problems[0].fix, "the error is not one of the runner"


def test_a_successful_attempt_removes_the_error_of_an_earlier_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run_failing(job, monkeypatch, "run_phases", raises(DataError("is damaged")))
    assert run_job(job) == SessionEnd(Exit.DONE, is_stop_requested=False)
    record = read_record(job.folder)
    assert (record.process.state, record.process.exit_code) == ("done", Exit.DONE)
    assert record.result is not None
    assert record.result.update == 2
    assert read_error(job.folder) is None


# ---------------------------------------------------------------- around the training


class Calls:
    """Records calls to session functions, and calls `inside` before training."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job, self.notes = job, dict[str, Any]()
        self.run: TrainingRun | None = None
        self.inside: Callable[[TrainingRun], None] = lambda _: None
        self.mark = ProgressMark()
        actual = session.run_phases

        def train(run: TrainingRun, *args: Any) -> Outcome:
            self.run = run
            monkeypatch.setattr(run.observers.tracker, "finish", self.recording("finish"))
            monkeypatch.setattr(run.stop, "begin_shutdown", self.recording("begin_shutdown"))
            self.inside(run)
            return actual(run, *args)

        @contextmanager
        def run_watchdog(_: Plan, world: World, traces: HangTraces) -> Iterator[ProgressMark]:
            self.notes["traces"], self.notes["rank"] = traces, world.rank
            yield self.mark

        monkeypatch.setattr(session, "run_phases", train)
        monkeypatch.setattr(session, "run_watchdog", run_watchdog)
        for name in ("check_packages", "start_mirroring", "finish_mirroring"):
            monkeypatch.setattr(session, name, self.recording(name))

    def recording(self, name: str) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            self.notes[name] = (args, options)

        return call


@pytest.fixture
def calls(job: Job, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(job, monkeypatch)


@pytest.mark.parametrize(
    ("raised", "code", "should_wait"), [(None, 0, True), (LookupError("x"), 1, True), (KeyboardInterrupt(), 1, False)]
)
def test_the_end_of_training_is_announced_to_all_observers(
    raised: BaseException | None, code: int, should_wait: bool, calls: Calls
) -> None:
    if raised is not None:
        calls.inside = raises(raised)
    with nullcontext() if raised is None else pytest.raises((AccelRunError, KeyboardInterrupt)):
        run_job(calls.job)
    assert calls.notes["finish"][1] == {"exit_code": code, "hand_over": True}
    assert calls.notes["finish_mirroring"] == ((calls.run,), {"should_wait": should_wait})
    assert "begin_shutdown" in calls.notes
    assert calls.mark.is_ending.value
    assert calls.mark.now[0] == END
    assert calls.run is not None
    assert calls.run.progress_mark is calls.mark


@pytest.mark.parametrize("runs_inference", [False, True])
def test_packages_of_training_and_inference_are_checked_before_training(runs_inference: bool, calls: Calls) -> None:
    run_job(replace(calls.job, runs_inference=runs_inference))
    (_, uses, _), _ = calls.notes["check_packages"]
    assert uses == ["train", *([INFERENCE] if runs_inference else [])]


def test_mirroring_starts_with_a_flag_for_resumed_runs(calls: Calls) -> None:
    for resumes in (False, True):
        run_job(calls.job)
        assert calls.notes["start_mirroring"] == ((calls.run, None), {"resumes": resumes})


def test_changes_are_recorded_while_the_run_trains(calls: Calls) -> None:
    seen = []

    def change(run: TrainingRun) -> None:
        run.provenance.changes.append({"update": 0, "lr": 0.5})
        run.provenance.on_change()
        seen.extend(read_record(calls.job.folder).changes)

    calls.inside = change
    run_job(calls.job)
    assert seen == [{"update": 0, "lr": 0.5}]


@pytest.mark.parametrize("rank", [0, 1])
def test_stacks_of_a_hang_are_written_to_a_file_per_rank(
    rank: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job(calls.job)
    stop = SimpleNamespace(requested="SIGINT" if rank else None)
    monkeypatch.setattr(session, "open_other_rank", lambda *_: (SimpleNamespace(stop=stop), None))
    monkeypatch.setattr(session, "run_phases", lambda *_: Outcome("SIGINT", 2, {}))
    traces, name = calls.notes["traces"], "stacks.txt"
    if rank:
        end = run_rank(calls.job, replace(World(torch.device("cpu")), rank=1, world_size=2))
        assert end.is_stop_requested
        assert end.code == Outcome("SIGINT", 2, {}).exit_code
        traces, name = calls.notes["traces"], "stacks-rank1.txt"
    assert calls.notes["rank"] == rank
    assert (traces.file, traces.checkpoints) == (name, calls.job.folder / "checkpoints")
    if rank:
        traces.write_stacks("of a thread")
        assert (calls.job.folder / name).read_text() == "of a thread"


def test_a_hang_is_recorded_with_the_update_it_reached(calls: Calls) -> None:
    def hang(_: TrainingRun) -> None:
        calls.mark.num_updates.value = 7
        calls.notes["traces"].write_stacks("of a thread")
        calls.notes["traces"].record_error(Hang("no update for 60 s"))

    seen: list[Any] = []

    def look(run: TrainingRun) -> None:
        hang(run)
        seen.append((read_error(calls.job.folder), (calls.job.folder / "stacks.txt").read_text()))

    calls.inside = look
    run_job(calls.job)
    ((recorded, stacks),) = seen
    assert (recorded.exit_code, recorded.reached, stacks) == (Hang("").exit_code, 7, "of a thread")


def test_a_failure_is_recorded_with_the_update_it_reached(calls: Calls) -> None:
    def fail(_: TrainingRun) -> None:
        calls.mark.num_updates.value = 3
        raise DataError("is damaged")

    calls.inside = fail
    with pytest.raises(DataError):
        run_job(calls.job)
    recorded = read_error(calls.job.folder)
    assert recorded is not None
    assert recorded.reached == 3


def test_a_failed_attempt_keeps_the_measurements_of_a_complete_one(job: Job, calls: Calls) -> None:
    calls.inside = raises(DataError("is damaged"))
    with pytest.raises(DataError):
        run_job(job)
    first = read_record(job.folder)
    assert first.evidence is not None, "no earlier attempt has measurements"
    assert first.evidence.unfinished
    calls.inside = lambda _: None
    run_job(job)
    second = read_record(job.folder)
    assert second.evidence is not None
    assert second.evidence.updates, "updates after the first one are measured"
    assert not second.evidence.unfinished
    assert second.evidence.attempt == second.process.started
    assert second.result is not None
    assert second.result.phases.keys() == {"train"}
    calls.inside = raises(DataError("is damaged"))
    with pytest.raises(DataError):
        run_job(job)
    assert read_record(job.folder).evidence == second.evidence


def test_an_error_is_recorded_even_if_no_file_can_be_opened(job: Job, calls: Calls) -> None:
    opened: list[int] = []

    def exhaust(_: TrainingRun) -> None:
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            raise LookupError("of the runner") from error

    calls.inside = exhaust
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
    try:
        with pytest.raises(AccelRunError):
            run_job(job)
        for descriptor in opened:
            os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    recorded = read_error(job.folder)
    assert recorded is not None
    assert "of the runner" in recorded.traceback
