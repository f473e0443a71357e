"""`accel-run resume` continues a stopped run from any folder with its arguments, and rejects what `train` rejects."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from runner.cli import main
from runner.durable.checkpoint import checkpoint_path, load
from tests.commands_here import run_here

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
WORDS = ["--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "updates=60", "checkpoint.every=10"]
STOPPED = [*WORDS, "task.fail_at=25"]
ON = {"NO_KILL": "1"}  # keeps the task from failing again


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that failed after its checkpoint at update 20."""
    folder = tmp_path_factory.mktemp("project")
    assert run_here(["train", *STOPPED], folder).code == 70
    return folder


@pytest.fixture
def copied_run(failed_run: Path, tmp_path: Path) -> Path:
    """Copy `failed_run`, and record the copy as the folder in which the run was started."""
    folder = tmp_path / "my prøject"
    shutil.copytree(failed_run, folder)
    record = folder / "outputs" / "mine" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"folder": str(folder)}))
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def updates_at_end(folder: Path) -> int:
    return load(checkpoint_path(folder / "outputs" / "mine" / "checkpoints", 60)).update


def test_resume_works_from_any_folder_with_original_arguments(copied_run: Path, elsewhere: Path) -> None:
    result = run_here(
        ["resume", f"output_root={json.dumps(str(copied_run / 'outputs'), ensure_ascii=False)}"], elsewhere, ON
    )
    assert result.code == 0, result.err
    assert "resumes after update 20" in result.out
    assert result.err.startswith("resume: accel-run ")
    assert result.err.endswith(f"   (in {copied_run})\n")
    assert updates_at_end(copied_run) == 60
    assert not list(elsewhere.glob("outputs"))
    run = copied_run / "outputs" / "mine"
    shown = [line.split(maxsplit=1)[1] for line in result.out.splitlines() if line.startswith(("directory", "run  "))]
    assert shown[1:] == [str(run), str(run)]
    assert shlex.split(result.out.splitlines()[-1])[-1] == f'run="{run}"', (
        "the command must work in the current directory"
    )
    record = json.loads((copied_run / "outputs" / "mine" / "run.json").read_text())
    assert record["state"] == "done"
    assert sorted(record["overrides"]) == sorted(word for word in STOPPED[2:])
    args = shlex.split(record["command"])  # the command that defines the run, not `accel-run resume`
    assert args[:4] == ["accel-run", "train", "--task", str(TASK)]
    assert set(STOPPED[2:]) <= set(args)


@pytest.mark.slow
def test_a_run_folder_needs_confirmation_of_its_task(copied_run: Path, elsewhere: Path) -> None:
    run = str(copied_run / "outputs" / "mine")
    refused = run_here(["resume", run], elsewhere, ON)
    assert refused.code == 89
    assert f"--task {TASK}" in refused.err
    result = run_here(["resume", run, "--task", str(TASK)], elsewhere, ON)
    assert result.code == 0, result.err
    assert updates_at_end(copied_run) == 60


@pytest.mark.slow
def test_a_moved_run_resumes_in_its_new_folder(copied_run: Path, elsewhere: Path) -> None:
    (copied_run / "outputs").rename(elsewhere / "kept")
    result = run_here(["resume", "mine", "output_root=kept"], elsewhere, ON)
    assert result.code == 0, result.err
    assert load(checkpoint_path(elsewhere / "kept" / "mine" / "checkpoints", 60)).update == 60
    copied_run.rename(copied_run.parent / "renamed")
    again = run_here(["resume", "mine", "output_root=kept"], elsewhere, ON)
    assert str(copied_run) in again.err, "the original working directory must be gone"
    assert again.code == 0, again.err


def test_changes_of_results_need_resume_allow(copied_run: Path) -> None:
    refused = run_here("resume mine seed=1 global_batch_size=24", copied_run, ON)
    assert refused.code == 88
    assert "seed: was " in refused.err
    assert "global_batch_size: " in refused.err
    by_name = run_here("resume updates=70", copied_run, ON)
    assert by_name.code == 88
    assert "resume_allow=[updates]" in by_name.err
    longer = run_here("resume updates=70 resume_allow=[updates] dataloader=thread", copied_run, ON)
    assert longer.code == 0, longer.err
    assert load(checkpoint_path(copied_run / "outputs" / "mine" / "checkpoints", 70)).update == 70


def test_resume_allow_holds_for_one_command(copied_run: Path) -> None:
    longer = run_here("resume updates=62 resume_allow=[updates]", copied_run, ON)
    assert longer.code == 0, longer.err
    words = [word for word in STOPPED if word != "updates=60"]
    for command in (["resume"], ["train", *words]):
        refused = run_here([*command, "updates=64"], copied_run, ON)
        assert refused.code == 88, command
        assert "resume_allow=[updates]" in refused.err
        assert run_here(["resume"], copied_run, ON).code == 0, "the permitted value is kept"


def test_a_permitted_change_survives_a_failure_before_a_checkpoint(copied_run: Path) -> None:
    failed = run_here("resume optimizer.lr=0.02 resume_allow=[optimizer]", copied_run)
    assert failed.code == 70, failed.err
    other = run_here("resume optimizer.lr=0.03", copied_run, ON)
    assert other.code == 88
    assert "resume_allow=[optimizer.lr]" in other.err
    result = run_here("resume", copied_run, ON)
    assert result.code == 0, result.err
    state = load(checkpoint_path(copied_run / "outputs" / "mine" / "checkpoints", 60)).state
    assert state["values"]["optimizer.lr"] == 0.02


def test_a_run_resumes_with_a_scheduler_of_different_state(copied_run: Path) -> None:
    words = "evaluate.every=10 scheduler.metric=val/loss resume_allow=[scheduler]"
    result = run_here(f"resume scheduler=plateau {words}", copied_run, ON)
    assert result.code == 0, result.err
    result = run_here("resume scheduler=constant updates=62 resume_allow=[scheduler,updates]", copied_run, ON)
    assert result.code == 0, result.err
    assert load(checkpoint_path(copied_run / "outputs" / "mine" / "checkpoints", 62)).state["schedule"] == {}


@pytest.mark.slow
def test_a_resumed_run_is_not_shorter_than_its_checkpoint(copied_run: Path) -> None:
    refused = run_here("resume updates=10", copied_run, ON)
    assert refused.code == 88
    assert "updates=20" in refused.err, "the message must name the update of the checkpoint"
    result = run_here("resume updates=10 resume_allow=[updates]", copied_run, ON)
    assert result.code == 0, result.err
    run = copied_run / "outputs" / "mine"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    begins = [event for event in events if event["kind"] == "phase"][-1]
    assert (begins["update"], begins["total"]) == (20, 20)
    assert any("20 updates" in event.get("text", "") for event in events if event["kind"] == "warning")
    record = json.loads((run / "run.json").read_text())["phases"]["train"]
    assert (record["updates"], record["total"], record["finished"]) == (20, 20, True)


def test_epochs_replace_updates_when_resuming(copied_run: Path) -> None:
    refused = run_here("resume epochs=3", copied_run, ON)
    assert refused.code == 88
    assert "resume_allow=[epochs,updates]" in refused.err
    assert "both are set" not in refused.err


@pytest.mark.slow
def test_a_run_started_with_resume_fresh_can_be_resumed(copied_run: Path) -> None:
    record = copied_run / "outputs" / "mine" / "run.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"overrides": [*content["overrides"], "resume=fresh"]}))
    result = run_here("resume", copied_run, ON)
    assert result.code == 0, result.err
    assert "resumes after update 20" in result.out


@pytest.mark.parametrize(
    ("args", "code", "answer"),
    [
        ("resume", 66, "run=last: "),
        ("resume nothing", 66, "run=nothing: "),
        ("resume first run=second", 78, "run=second: "),
        ("resume first resume=fresh", 78, "resume=fresh: "),
    ],
)
def test_invalid_arguments_of_resume_are_reported(
    args: str,
    code: int,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args.split()) == code
    assert capsys.readouterr().err.startswith(f"accel-run: {answer}")
