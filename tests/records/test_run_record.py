"""A record of a run is read back as it was written. Reading it never raises an error, whatever the file contains."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import Problem
from runner.base.json_values import to_json
from runner.cli import main
from runner.config.request import Request
from runner.durable.directory import RunDirectory
from runner.durable.record_files import read_error, read_record
from runner.durable.run_request import load_run_request
from runner.durable.run_state import derive_state
from runner.plan.run_plan import Plan
from runner.records.evidence import Evidence
from runner.records.phase_record import PhaseRecord
from runner.records.run_record import (
    VERSION,
    AdoptedCheckpoint,
    ErrorRecord,
    ProcessRecord,
    RunOrigin,
    RunRecord,
    RunResult,
)
from runner.tools.report.run_data import read_run_data

OLD = Path(__file__).parent / "run_of_version_1"
FULL = RunRecord(
    name="first",
    names=("first", "zero"),
    uid="u",
    adopted=(AdoptedCheckpoint(uid="v", checkpoint="update-1"),),
    origin=RunOrigin(task="gpt", overrides=("seed=1",), folder="/data"),
    process=ProcessRecord(state="done", exit_code=0, pid=7),
    changes=({"file": "task.py"},),
    result=RunResult(
        update=4, metrics={"val/loss": 1.5, "val/pck": None}, phases={"train": PhaseRecord("train", "train", 4, 4)}
    ),
    evidence=Evidence(task="gpt", phases=(PhaseRecord("train", "train", updates=4),)),
)


def read_back(folder: Path, content: Any) -> RunRecord:
    (folder / "run.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_record(folder)


def missing_values(before: Any, now: Any, name: str = "run") -> Iterator[str]:
    """Yield the dotted names of values in `before` that are missing in `now`; new keys of objects are ignored."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            yield from missing_values(value, now.get(key), f"{name}.{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, value in enumerate(before):
            yield from missing_values(value, now[number], f"{name}.{number}")
    elif before != now:
        yield name


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder of runs, with one run that version 1 wrote."""
    shutil.copytree(OLD, tmp_path / "outputs" / "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    result = read_back(tmp_path, to_json(FULL.to_json()))
    assert result == FULL
    assert (result.problem, result.wrong, result.version) == ("", (), VERSION)


def test_an_error_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    error = ErrorRecord(cause="a", problems=(Problem("b", "c", "d"),), exit_code=65, place={"rank": 1}, reached=3)
    (tmp_path / "error.json").write_text(to_json(error.to_json()))
    assert read_error(tmp_path) == error


@pytest.mark.parametrize("content", ["", "[1]", '{"state": ', "null"])
def test_a_damaged_file_is_unknown_and_reported(tmp_path: Path, content: str) -> None:
    result = read_back(tmp_path, content)
    assert result == RunRecord()
    assert result.problem
    assert not result.is_known


def test_a_missing_file_is_unknown_and_reported(tmp_path: Path) -> None:
    assert read_record(tmp_path) == RunRecord()
    assert read_record(tmp_path).problem
    assert read_error(tmp_path) is None


@pytest.mark.parametrize("key", [each for each in FULL.to_json() if each != "version"])
def test_an_invalid_value_does_not_affect_other_values(tmp_path: Path, key: str) -> None:
    content = FULL.to_json()
    result = read_back(tmp_path, content | {key: 3 if isinstance(content[key], str) else "3"})
    rest = result.to_json()
    assert rest[key] == "3" or key in result.wrong  # a string may be valid for a key that is None
    assert bool(result.wrong) == bool(result.problem)
    assert {name: value for name, value in rest.items() if name != key} == {
        name: value for name, value in content.items() if name != key
    }


def test_known_fields_of_a_newer_version_are_read(tmp_path: Path) -> None:
    result = read_back(tmp_path, FULL.to_json() | {"version": VERSION + 1, "later": {"a": 1}})
    assert dataclasses.replace(result, version=VERSION) == FULL
    assert str(VERSION + 1) in result.problem


def test_a_run_of_version_1_is_read_completely(root: Path) -> None:
    result = read_record(root / "first")
    content = json.loads((OLD / "run.json").read_text())
    assert (result.problem, result.wrong) == ("", ())
    again = json.loads(to_json(result.to_json()))
    assert list(missing_values(content, again)) == []
    assert derive_state(result).word == "finished"


def test_commands_read_a_run_of_version_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "first"]) == 0
    shown = capsys.readouterr().out
    assert "475 items/s" in shown
    assert "update 6 of 6" in shown
    assert main(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["task"], row["update"], row["items_per_s"]) == ("finished", "cape", 6, 474.5517287580912)
    directory = RunDirectory.find(root, "first")
    assert load_run_request(directory, root, Request()).overrides[0] == "task=cape"
    assert len(directory.owner.uid or "") == 32
    story = read_run_data(directory)
    assert (story.task, story.metrics["val/pck"], "record" in story.missing) == ("cape", 0.14916314143829318, False)
    values = Plan.from_json((root / "first" / "plan.json").read_text()).values()
    assert (values["updates"], values["micro_batch_size"]) == (6, 4)
    evidence = read_record(root / "first").evidence
    assert evidence is not None
    assert evidence.updates == 5


@pytest.mark.parametrize("state", ["running", "failed"])
def test_throughput_is_that_of_the_last_process_with_rows(state: str) -> None:
    """A process that was killed leaves the measurements of an earlier process in run.json."""
    evidence = Evidence(items_per_s=1.0, attempt="2026-01-31T10:00:00.000+00:00")
    process = ProcessRecord(state=state, started="2026-02-01T10:00:00.000+00:00")
    record = RunRecord(process=process, evidence=evidence)
    assert record.throughput({"perf/throughput": 2.0}) == 2.0
    assert record.throughput({}) == 1.0
    own = dataclasses.replace(record, evidence=dataclasses.replace(evidence, attempt=process.started))
    assert own.throughput({"perf/throughput": 2.0}) == 1.0
