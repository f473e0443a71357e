"""How a run gets its name, what its first rank leaves when it fails, and which error it raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import (
    AccelRunError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    Exit,
    IncompatibleResume,
    MissingPackage,
    SystemLimit,
    exception_chain,
)
from runner.base.world import World
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable import files
from runner.durable.record_files import read_error, read_record
from runner.engine import session
from runner.engine.attempt import RunAttempt
from runner.engine.job import Job, SessionEnd, choose_run_name
from runner.engine.session import run_rank
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from tests.faults.recording import Quick


@pytest.mark.parametrize("name", ["last", "../x", "a/b", ".", "..", "-x", "two words"])
def test_a_name_outside_of_the_output_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        choose_run_name(compose(Request((f"run={name}",))))


def test_a_run_without_a_name_is_named_after_its_task() -> None:
    assert choose_run_name(compose(Request(("run=mine",)))) == "mine"
    assert "gpt" in choose_run_name(compose(Request(("task=gpt",))))


# ---------------------------------------------------------------- how a rank ends


TASK = Path(__file__).with_name("task_of_averages.py")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A run of two updates, of a task in another folder than this file, whose errors are not those of the task."""
    (tmp_path / "averages.py").write_text(TASK.read_text())
    overrides = ("device=cpu", "monitor=off", f"output_root={tmp_path}", "updates=2", "backend.threads=1")
    configuration, inventory = (
        compose(Request(overrides, tmp_path / "averages.py")),
        Inventory((), Cpu("a processor", 4, 8, 0)),
    )
    return Job(configuration.request, configuration, make_plan(configuration, inventory), inventory, "mine")


def trained(job: Job) -> SessionEnd:
    with files.use_system(Quick()):
        return run_rank(job, World(torch.device("cpu")))


def failed(job: Job, monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[..., Any]) -> BaseException:
    """Train with `act` instead of a step of the session; return the error."""
    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(session, where, act)
        trained(job)
    return caught.value


def raises(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> None:
        raise error

    return act


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


REFUSALS = [DataError("is damaged"), IncompatibleResume("differs"), MissingPackage("is not installed")]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_run_that_is_refused_before_it_begins_leaves_no_folder(
    error: AccelRunError, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed(job, monkeypatch, "open_first_rank", raises(error)) is error
    assert not job.folder.exists()


def test_only_a_missing_package_discards_a_run_that_has_begun(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, is_kept in ((MissingPackage("is not installed"), False), (DataError("is damaged"), True)):

        def begin(job: Job, _: World, attempt: RunAttempt, *__: Any, error: AccelRunError = error) -> None:
            attempt.begin(job)
            raise error

        assert failed(job, monkeypatch, "open_first_rank", begin) is error
        assert job.folder.exists() == is_kept
    recorded = read_error(job.folder)
    assert recorded is not None
    assert recorded.cause == "is damaged"


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_an_earlier_run_is_not_discarded_with_a_refused_attempt(
    error: AccelRunError, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained(job).code == Exit.DONE
    before = content_of(job.folder)
    assert failed(job, monkeypatch, "open_first_rank", raises(error)) is error
    after = content_of(job.folder)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before == {"error.json"}


@pytest.mark.parametrize("reached", [0, 1])
def test_a_resume_that_turns_out_incompatible_restores_the_files_of_the_run_unless_it_trained(
    reached: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(job: Job, _: World, attempt: RunAttempt, *__: Any) -> None:
        attempt.begin(job)
        attempt.reached = reached
        raise IncompatibleResume("differs")

    assert trained(job).code == Exit.DONE
    before = json.loads((job.folder / "run.json").read_text())
    (job.folder / "command.sh").write_text("of the run")
    failed(job, monkeypatch, "open_first_rank", begin)
    after = json.loads((job.folder / "run.json").read_text())
    assert ((job.folder / "command.sh").read_text() == "of the run") == (reached == 0)
    assert (after == before) == (reached == 0)


def test_a_system_limit_is_reported_as_such_and_recorded_with_its_cause(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = ImportError("libx.so: failed to map segment from shared object")
    error = failed(job, monkeypatch, "report_start", raises(cause))
    assert isinstance(error, SystemLimit)
    assert cause in exception_chain(error)
    recorded = read_error(job.folder)
    assert recorded is not None
    assert recorded.exit_code == Exit.SYSTEM
    assert "ImportError" in recorded.traceback


def test_an_internal_error_is_recorded_and_keeps_its_notes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = LookupError("of the runner")
    cause.add_note("seen at noon")
    for where in ("report_start", "train", "report_end"):
        error = failed(job, monkeypatch, where, raises(cause))
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
    assert failed(job, monkeypatch, "train", raises(error)) is error
    recorded = read_error(job.folder)
    assert recorded is not None
    assert recorded.exit_code == getattr(error, "exit_code", Exit.INTERRUPTED)
    assert read_record(job.folder).process.state == "failed"


def test_an_error_that_cannot_be_recorded_is_raised_itself(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = LookupError("of the runner")
    monkeypatch.setattr(RunAttempt, "fail", lambda *_: False)
    assert failed(job, monkeypatch, "train", raises(cause)) is cause


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError), (SystemExit(3), AccelRunError)],
    ids=["memory", "exit"],
)
def test_errors_of_torch_and_exits_are_translated(
    cause: BaseException, kind: type[AccelRunError], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failed(job, monkeypatch, "train", raises(cause))
    assert type(error) is kind
    assert error.__cause__ is cause


def test_an_attempt_that_ends_without_error_removes_that_of_an_earlier_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(job, monkeypatch, "train", raises(DataError("is damaged")))
    assert trained(job) == SessionEnd(Exit.DONE, is_stop_requested=False)
    record = read_record(job.folder)
    assert (record.process.state, record.process.exit_code) == ("done", Exit.DONE)
    assert record.result is not None
    assert record.result.update == 2
    assert read_error(job.folder) is None
