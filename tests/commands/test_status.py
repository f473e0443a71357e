"""`accel-run status` in every state that a run can have."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.base.text import NOT_MEASURED
from runner.cli import main
from tests.commands_here import run_here
from tests.forkserver import ForkServer
from tests.waiting import wait_until

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
RESUME = "accel-run resume killed"
BASE = ["train", "--task", str(TASK), "device=cpu", "monitor=off"]


@pytest.fixture(scope="module")
def runs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished, a failed, a killed and a stopped run."""
    folder = tmp_path_factory.mktemp("runs")
    outputs = folder / "outputs"
    assert run_here([*BASE, "run=finished"], folder).code == 0
    assert run_here([*BASE, "run=broken", "task.fail_at=50"], folder).code == 70
    wait_for = f"task.wait_for={outputs}/killed/checkpoints/update-0000000037"
    assert server.run([*BASE, "run=killed", "task.kill_at=39", wait_for], folder).code == -signal.SIGKILL
    pid = server.start([*BASE, "run=stopped", "task.sleep_s=0.02"], folder)
    wait_for_metrics(outputs / "stopped")
    os.kill(pid, signal.SIGTERM)
    assert server.wait().code == 75
    return folder


@pytest.fixture
def folder(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a copy of the folder with the runs, and return it."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wait_for_metrics(run: Path) -> None:
    wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size)


def status(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    """Return the lines that `status` prints, with N instead of losses and throughputs; it must succeed."""
    assert main(["status", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [re.sub(r"(loss|throughput ) [0-9.,]+", r"\1 N", line) for line in out.splitlines()]


def test_status_of_finished_failed_and_killed_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], screen: Callable[..., None]
) -> None:
    text = "\n\n".join("\n".join(status(capsys, name)) for name in ("finished", "broken", "killed"))
    screen(text, replace={r"task\.wait_for=\S+": "task.wait_for=FILE", r"\.py:\d+": ".py:LINE"})


@pytest.mark.slow
def test_runs_and_status_suggest_the_next_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs` lists every state; `status` suggests report or resume."""
    assert main(["runs", "--json"]) == 0
    states = {row["name"]: (row["state"], row["exit_code"]) for row in json.loads(capsys.readouterr().out)}
    assert states == {
        "finished": ("finished", 0),
        "broken": ("failed", 70),
        "killed": ("killed", None),
        "stopped": ("preempted", 75),
    }
    for name in states:
        script = (folder / "outputs" / name / "command.sh").read_text()
        assert shlex.join(["train", "--task", str(TASK), *BASE[3:]]) in script
        assert f"run={name}\n" in script, "status must suggest resuming the run"
    pytest.importorskip("matplotlib")
    assert main(["report", "killed"]) == 0
    page = (folder / "outputs" / "killed" / "report.html").read_text()
    assert 'id="loss"' in page
    assert RESUME in page


def test_a_failed_run_shows_its_last_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = status(capsys, "broken")
    assert lines[0].startswith("broken: failed (exit 70) ")
    line = next(number for number, text in enumerate(TASK.read_text().splitlines(), 1) if 'KeyError("points")' in text)
    cause = json.loads((folder / "outputs" / "broken" / "error.json").read_text())["cause"]
    assert "raised KeyError: 'points'" in cause
    assert lines[-2].strip().endswith(f" {TASK}:{line}: {cause} (exit 70)")
    assert lines[-1].strip().startswith(f"{TASK.name}:{line} ")


@pytest.mark.slow
def test_the_last_error_is_shown_until_the_run_succeeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "outputs" / "broken" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "state": "running", "pid": 0}))
    assert not status(capsys, "broken")[-2].endswith("(exit 70)"), "status must show that the later attempt was killed"
    assert run_here([*BASE, "run=broken", "task.fail_at=50"], folder, env={"NO_KILL": "1"}).code == 0
    lines = status(capsys, "broken")
    assert lines[0].startswith("broken: finished ")
    assert not any("last error" in line for line in lines)
    assert not (folder / "outputs" / "broken" / "error.json").exists()


def test_status_of_a_killed_run_suggests_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = status(capsys, "killed")
    assert lines[0].startswith("killed: killed; ")
    assert RESUME in lines[0]
    assert lines[-1].split()[1:] == ["update-0000000037:", "valid", "(last)"]


def test_a_reused_pid_does_not_make_a_run_alive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "outputs" / "killed" / "run.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "pid": os.getpid(), "started": "2001-01-01T00:00:00+00:00"}))
    assert status(capsys, "killed")[0].startswith("killed: killed; ")


def test_a_run_on_another_machine_may_be_running(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "outputs" / "killed" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": "elsewhere"}))
    assert status(capsys, "killed")[0].startswith("killed: running on ")


def test_status_of_a_stopped_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = status(capsys, "stopped")
    assert " resume stopped " in lines[0]
    assert lines[-1].endswith(": valid (last)")


def test_status_of_a_running_run(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # The run does not end while the test lasts.
    long = ["task.sleep_s=0.02", "updates=1000", "evaluate.every=0", "checkpoint.every=500"]
    pid = server.start([*BASE, "run=mine", *long], tmp_path)
    try:
        wait_for_metrics(tmp_path / "outputs" / "mine")
        lines = status(capsys, "mine")
    finally:
        os.kill(pid, signal.SIGTERM)
        server.wait()
    assert lines[0].startswith("mine: running ")
    assert re.search(r" update \d+ of 1000 ", lines[3])
    assert lines[-1] == "  checkpoints none yet"


def test_a_damaged_checkpoint_is_listed_with_the_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = folder / "outputs" / "finished" / "checkpoints"
    file = checkpoints / "update-0000000100" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    (checkpoints / "update-0000000080" / "optimizer.safetensors").unlink()
    first, second, third = (line.split(": ") for line in status(capsys, "finished")[-3:])
    assert first[1:] == ["valid (last)"]
    assert (second[1], second[2].split()[0]) == ("damaged", "optimizer.safetensors")
    assert (third[1], third[2].split()[0]) == ("damaged", "model.safetensors")


def test_last_selects_the_most_recently_written_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("finished", "killed"):
        os.utime(folder / "outputs" / name / "run.json")
        assert status(capsys)[0].startswith(f"{name}: ")
        assert status(capsys, "last")[0].startswith(f"{name}: ")


def test_a_run_is_found_by_its_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def place(*args: str) -> str:
        line = status(capsys, *args)[0]
        assert line.startswith("finished: finished ")
        return line.partition("(")[2].rstrip(")")

    assert place("outputs/finished") == "outputs/finished"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = folder / "outputs" / "finished"
    assert place(str(path)) == str(path)
    for named in ("finished", "run=finished"):
        assert place(named, "output_root=../outputs") == "../outputs/finished"


def test_unfinished_checkpoints_are_not_reported_as_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = folder / "outputs" / "killed" / "checkpoints" / ".tmp-update-0000000041-00ff"
    begun.mkdir()
    assert f"{begun.name}: incomplete" in "\n".join(status(capsys, "killed"))
    begun.rmdir()


def test_an_unknown_run_exits_with_66_and_a_suggestion(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "finishd"]) == 66
    out, err = capsys.readouterr()
    assert out == ""
    assert "run=finishd" in err
    assert " finished?" in err


def test_exit_code_is_66_if_there_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 66
    assert "accel-run train" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 3}', "\0"])
def test_unreadable_files_are_shown_as_unknown(content: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "outputs" / "finished"
    for name in ("run.json", "plan.json", "error.json", "metrics.jsonl", "events.jsonl"):
        (run / name).write_text(content)
    assert status(capsys, "finished")[2] == "  command     unknown"


def test_a_missing_loss_is_shown_as_not_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = folder / "outputs" / "finished" / "metrics.jsonl"
    last = {**json.loads(rows.read_text().splitlines()[-1]), "val/loss": None}
    with rows.open("a") as file:
        file.write(json.dumps(last) + "\n")
    assert any(f"val/loss {NOT_MEASURED}" in line for line in status(capsys, "finished"))


@pytest.mark.parametrize("rows", ["", '{"update": 1, "phase": "train", "train/loss": 1.0}\n'])
def test_a_run_stopped_between_rows_shows_its_last_update(
    rows: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = folder / "outputs" / "stopped"
    (stopped / "metrics.jsonl").write_text(rows)
    result = json.loads((stopped / "run.json").read_text())["phases"]["train"]
    reached = f"{result['updates']} of {result['total']}"
    assert [line for line in status(capsys, "stopped") if reached in line]
    assert main(["runs"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("stopped "))
    assert reached.replace(" of ", "/") in row


def test_phases_without_metric_rows_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "outputs" / "finished" / "run.json"
    record = json.loads(file.read_text())
    fit = {**record["phases"]["train"], "name": "statistics", "kind": "fit", "updates": 3, "total": 3}
    file.write_text(json.dumps({**record, "phases": {"statistics": fit, **record["phases"]}}))
    phases = [line.split()[1:6] for line in status(capsys, "finished") if line.startswith("  phase ")]
    assert phases == [["statistics:", "update", "3", "of", "3"], ["train:", "update", "100", "of", "100"]]


def test_an_early_rejection_leaves_no_folder(tmp_path: Path) -> None:
    """The run is rejected before its settings are written."""
    result = run_here([*BASE, "run=refused", "resume=nowhere"], tmp_path)
    assert result.code == 66, result.err
    assert "refused" not in result.err, "the message must not list the folder as a run to resume"
    assert not (tmp_path / "outputs" / "refused").exists()
