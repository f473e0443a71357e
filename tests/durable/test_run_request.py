"""The settings of a run are read from its own files and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.errors import DataError, SecurityRefusal
from runner.config.request import Request
from runner.durable.directory import RunDirectory
from runner.durable.run_request import RunRequest, load_run_request

TRUSTED = Request(task_file=Path("/where/task.py"))


def run_with_record(folder: Path, record: str) -> RunDirectory:
    """Create a run directory with this run.json."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(record)
    return RunDirectory.join(folder)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{}",
        "[1]",
        '{"task": "gpt"',
        '{"task": "gpt", "overrides": 3}',
        '{"task": "gpt", "overrides": ["a=\\u0000"]}',
        '{"task": "gpt", "overrides": [], "task_file": "/a\\u0000.py"}',
        '{"task": "gpt", "overrides": [], "folder": "/\\ud800"}',
    ],
)
def test_a_damaged_record_does_not_select_another_task(tmp_path: Path, record: str) -> None:
    with pytest.raises(DataError, match="the settings of run damaged are unknown"):
        load_run_request(run_with_record(tmp_path / "damaged", record), tmp_path, TRUSTED)


def test_a_record_may_have_no_overrides(tmp_path: Path) -> None:
    run = run_with_record(tmp_path / "run", '{"task": "gpt", "overrides": [], "task_file": null}')
    assert load_run_request(run, tmp_path, Request()) == RunRequest((), None, None)


def test_given_overrides_replace_those_of_the_run() -> None:
    origin = RunRequest(("optimizer=sgd", "optimizer.lr=1", "run=first", "resume=fresh"), Path("/a.py"), None)
    given = Request(("seed=1", "optimizer=adamw"), None, Path("/conf"), ("budget_s",))
    request = origin.request(given)
    assert request == Request(("seed=1", "optimizer=adamw"), Path("/a.py"), Path("/conf"), ("budget_s",))


def test_paths_of_a_run_refer_to_its_working_directory(tmp_path: Path) -> None:
    for name in ("data", "base.safetensors", "one two"):
        (tmp_path / name).touch()
    overrides = ("data.path=data", "weights=base.safetensors", "data.path='one two'", "data.path=gone", "seed=1")
    assert RunRequest(overrides, None, None, tmp_path).with_absolute_paths().overrides == (
        f"data.path={tmp_path}/data",
        f"weights={tmp_path}/base.safetensors",
        f'data.path="{tmp_path}/one two"',
        "data.path=gone",
        "seed=1",
    )
    assert RunRequest(overrides, None, None, None).with_absolute_paths().overrides == overrides


def test_a_foreign_run_folder_does_not_select_code(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    record = f'{{"task": "task", "overrides": [], "task_file": "{task}", "folder": "{tmp_path}"}}'
    (tmp_path / "outputs").mkdir()
    run = run_with_record(tmp_path / "outputs" / "first", record)
    assert load_run_request(run, tmp_path / "outputs", Request()) == RunRequest((), task, None, tmp_path)
    with pytest.raises(SecurityRefusal, match="never decides which code runs"):
        load_run_request(run, tmp_path / "elsewhere", Request())
    inner = run_with_record(run.path / "first-1", record)
    with pytest.raises(SecurityRefusal, match="never decides which code runs"):
        load_run_request(inner, tmp_path / "outputs", Request())
    (run.path / "sweep.json").touch()
    assert load_run_request(inner, tmp_path / "outputs", Request()).task_file == task, (
        "a trial of the user's own sweep must be accepted"
    )
    (run.path / "away").symlink_to(run_with_record(tmp_path / "away", record).path)
    with pytest.raises(SecurityRefusal, match="never decides which code runs"):
        load_run_request(RunDirectory.join(run.path / "away"), tmp_path / "outputs", Request())
    assert load_run_request(run, tmp_path / "elsewhere", Request(task_file=task)).folder == tmp_path
