"""`accel-run runs`, how commands find a run by name, and the script that reproduces a run."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.cli import main
from runner.commands.arguments import parse_run_request
from runner.config.request import Request
from runner.durable.run_state import derive_state
from runner.engine.process.repro_script import script
from runner.records.run_record import RunRecord


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder that has a run in each state, the most recently written one first."""
    states: dict[str, dict[str, object]] = {
        "fine": {"state": "done", "exit_code": 0, "task": "gpt", "metrics": {"val/loss": 1.25}},
        "broken": {"state": "failed", "exit_code": 70, "task": "gpt"},
        "saved": {"state": "preempted", "exit_code": 75, "task": "gpt"},
        "killed": {"state": "running", "pid": 0, "task": "gpt"},
        "alive": {"state": "running", "host": "elsewhere", "task": "\x1b[31mgpt"},
        "odd": {"state": 3, "metrics": {"val/loss": "x"}, "task": ["x"]},
    }
    for age, (name, record) in enumerate(states.items()):
        path = tmp_path / "outputs" / name
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps(record))
        (path / "plan.json").write_text(json.dumps({"phases": [{"name": "train", "updates": 40}]}))
        rows = [
            {"update": 10, "phase": "train", "train/loss": 3.0},
            {"update": 20, "phase": "train", "train/loss": 2.5},
        ]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"update": 30, "ph')
        for file in ("run.json", "metrics.jsonl"):
            os.utime(path / file, (1.7e9 - age, 1.7e9 - age))
    (tmp_path / "outputs" / "no run").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_run_is_listed_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "task", "state", "updates", "metric", "items/s", "written", "size"]
    messages = [re.split(r"  +", line)[:5] for line in lines]
    assert messages == [
        ["fine", "gpt", "finished", "20/40", "val/loss 1.25"],
        ["broken", "gpt", "failed (70)", "20/40", "train/loss 2.5"],
        ["saved", "gpt", "preempted (75)", "20/40", "train/loss 2.5"],
        ["killed", "gpt", "killed", "20/40", "train/loss 2.5"],
        ["alive", "\\x1b[31mgpt", "running", "20/40", "train/loss 2.5"],
        ["odd", "-", "unknown", "20/40", "train/loss 2.5"],
    ]


def test_the_json_list_has_the_same_content(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json", "output_root=outputs"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["finished", "failed", "preempted", "killed", "running", "unknown"]
    size = sum(path.stat().st_size for path in (folder / "outputs" / "fine").iterdir())
    assert rows[0] == {
        "name": "fine", "path": "outputs/fine", "task": "gpt", "state": "finished", "exit_code": 0, "phase": None, "update": 20, "total": 40,
        "metrics": {"val/loss": 1.25}, "written": "2023-11-14T22:13:20+00:00", "bytes": size, "items_per_s": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        ({"val/loss": 1.5, "val/accuracy": 0.5}, "val/loss 1.5"),
        ({"val/loss": None, "val/accuracy": 0.5}, "val/accuracy 0.5"),
        ({"balance/shares": [1, 2]}, "train/loss 2.5"),
    ],
)
@pytest.mark.parametrize("num_later", [0, 1])
def test_an_unfinished_run_shows_its_last_evaluation(
    last: dict[str, object], shown: str, num_later: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """run.json has metrics only if a process ended without an error."""
    path = folder / "outputs" / "killed" / "metrics.jsonl"
    train = {"update": 20, "phase": "train", "train/loss": 2.5}
    rows = [train, {"update": 20, "phase": "train", **last}, *[train] * num_later]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["runs"]) == 0
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert [line[4] for line in lines if line[0] == "killed"] == [shown]


@pytest.mark.parametrize(
    ("best", "shown"),
    [
        ("val/accuracy", "val/accuracy 0.5"),
        ("val/none", "val/loss 1.5"),
        ("val/f1", "val/loss 1.5"),
        ([1], "val/loss 1.5"),
    ],
)
def test_the_metric_of_the_best_checkpoint_is_shown(
    best: object, shown: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "outputs" / "fine"
    choices = {"checkpoint": {"name": "default", "options": {"best": best}}}
    (path / "plan.json").write_text(json.dumps({"choices": choices}))
    metrics = {"val/loss": 1.5, "val/accuracy": 0.5, "val/none": None}
    (path / "run.json").write_text(json.dumps({"state": "done", "exit_code": 0, "metrics": metrics}))
    assert main(["runs"]) == 0
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert [line[4] for line in lines if line[0] == "fine"] == [shown]


def test_the_suggested_resume_command_names_the_run() -> None:
    """The name may be a generated one, so the typed arguments alone would start another run."""
    known = {"state": "preempted", "name": "gpt-1"}
    restarted = {**known, "state": "running", "overrides": ["resume=fresh"]}
    elsewhere = {**known, "overrides": ["output_root=my runs"]}
    resume = "accel-run resume"
    for state, line in (
        (known, f"{resume} gpt-1"),
        (restarted, f"{resume} gpt-1"),
        ({**known, "name": ["x"]}, f"{resume} NAME"),
        (elsewhere, f"{resume} gpt-1 'output_root=my runs'"),
    ):
        assert derive_state(RunRecord.decode(json.dumps(state).encode())).sentence.endswith(f": {line}")


def test_status_suggests_a_command_for_any_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "outputs" / "saved"
    monkeypatch.chdir("/")
    assert main(["status", str(run)]) == 0
    assert f"accel-run resume {run}" in capsys.readouterr().out


def test_damaged_runs_do_not_hide_other_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, plan in (("bad\nname", {"phases": 3}), ("bad2", {"phases": [{"name": ["x"], "updates": "y"}, 7]})):
        path = folder / "outputs" / name
        path.mkdir()
        (path / "plan.json").write_text(json.dumps(plan))
        (path / "metrics.jsonl").write_text('{"update": 1, "phase": ["x"], "train/loss": NaN}\n')
    assert main(["runs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert len({line.index("ago") for line in [*lines, head] if "days ago" in line}) == 1
    assert any(line.startswith("bad\\nname ") for line in lines)


def test_missing_runs_and_typos_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().err.endswith(" accel-run train\n")
    for word, fix in (("first", "accel-run status first"), ("outputroot=x", "did you mean output_root?")):
        assert main(["runs", word]) == 78
        assert fix in capsys.readouterr().err


def test_a_run_is_either_an_argument_or_a_key() -> None:
    assert parse_run_request(["mine", "seed=1"]).overrides == ("seed=1", "run=mine")
    assert parse_run_request(["run=mine"]).overrides == ("run=mine",)
    assert parse_run_request([]).overrides == ()
    with pytest.raises(ConfigError, match="but mine is also given"):
        parse_run_request(["mine", "run=other"])


@pytest.mark.parametrize("args", [["status"], ["export"], ["inference"], ["advise"], ["report"]])
def test_all_commands_find_a_run_the_same_way(
    args: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for named in (["nowhere"], ["run=nowhere"], ["outputs/no run"]):
        assert main([*args, *named]) == 66
        messages = capsys.readouterr().err
        assert (named[0] if " " in named[0] else "'nowhere'") in messages
        assert "fine, broken" in messages


WORDS = (
    "optimizer.lr=0.1",
    "run=mine",
    'inference.prompt=it\'s $HOME `id` "x"\n; exit 3 #',
    "data.path=/a b/\u00e4\udcff",
    "-x",
)


def test_the_reproduction_script_has_the_exact_arguments(tmp_path: Path) -> None:
    here = tmp_path / "with space" / "and 'quote"
    here.mkdir(parents=True)
    program = tmp_path / "py thon"
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import os, sys; print([os.getcwd(), *sys.argv[1:]])' \"$@\"\n"
    )
    program.chmod(0o755)
    text = script(
        Request((*WORDS, "resume=fresh"), Path("/t/my task.py"), Path("/c")),
        "mine",
        here,
        str(program),
        started_elsewhere=True,
    )
    (tmp_path / "command.sh").write_bytes(text)
    done = subprocess.run(["sh", "command.sh", "run=again"], cwd=tmp_path, capture_output=True, check=True)
    messages = [str(here), "-P", "-m", "runner", "train", "--task", "/t/my task.py", "--config-dir", "/c", *(word for word in WORDS if word != "run=mine"), "run=again"]  # fmt: skip
    assert eval(done.stdout) == messages  # `program` above prints this list
    assert b"torchrun" in text


@pytest.mark.parametrize("command", ["runs", "monitor run=last", "report"])
def test_commands_reject_folders_that_are_not_local(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "output_root=s3://bucket/runs"]) == 78
    assert "s3://bucket/runs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
