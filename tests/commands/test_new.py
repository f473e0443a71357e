"""The task file of `accel-run new` works unchanged, with any setting and from any folder."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli import main
from tests.commands_here import run_here
from tests.forkserver import ForkServer
from tests.waiting import wait_until

LINE = "accel-run train --task ./my_task.py"
ON_CPU = ["device=cpu", "monitor=off"]
SHORT = [*ON_CPU, "updates=20"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Change to a folder with the new task, and return the folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_task.py"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith(f" {LINE}\n")
    return tmp_path


def state(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["state"])


def test_the_new_task_is_short_and_names_its_file(folder: Path) -> None:
    text = (folder / "my_task.py").read_text()
    assert len(text.splitlines()) < 40
    assert LINE in text
    assert "class MyTask(Task)" in text


@pytest.mark.parametrize("is_absolute", [True, False])
def test_the_printed_command_contains_the_file_name(
    is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("a folder") / "my_task.py"
    place.parent.mkdir()
    assert main(["new", str(place.absolute() if is_absolute else place)]) == 0
    command = shlex.split(capsys.readouterr().out.partition("try it: ")[2])
    assert command[:3] == ["accel-run", "train", "--task"]
    assert Path(command[3]).resolve() == (tmp_path / place).resolve()
    assert main(["explain", "task.hidden", *command[2:]]) == 0


def test_a_suggested_name_is_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a folder").mkdir()
    assert main(["new", str(tmp_path / "a folder" / "json.py")]) == 78
    command = shlex.split(capsys.readouterr().err.partition("use accel-run ")[2])
    assert main(command) == 0
    assert (tmp_path / "a folder" / "my_json.py").is_file()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "args",
    [
        [],
        ["precision=bf16", "micro_batch_size=16", "dataloader.num_workers=2"],
        ["task.hidden=16", "task.depth=3", "optimizer=sgd", "scheduler=constant", "max_grad_norm=null"],
        ["precision=fp16", "dataloader=thread", "checkpoint.every=5"],
        ["epochs=0.5", "dataloader.drop_last=true"],
        ["dataloader.cache=memory"],
    ],
    ids=" ".join,
)
def test_the_new_task_trains_with_any_setting(args: list[str], folder: Path) -> None:
    given = [word for word in SHORT if not ("updates" in word and any("epochs" in one for one in args))]
    result = run_here(["train", "--task", "./my_task.py", "run=mine", *given, *args], folder)
    assert result.code == 0, result.err
    assert result.err == ""
    assert state(folder / "outputs" / "mine") == "done"


def test_training_the_new_task_reduces_the_loss(folder: Path) -> None:
    result = run_here(["train", "--task", "./my_task.py", "run=mine", "updates=60", *ON_CPU], folder)
    assert result.code == 0, result.err
    record = json.loads((folder / "outputs" / "mine" / "run.json").read_text())
    assert record["metrics"]["val/loss"] < 0.3  # 0.69 is the loss at chance level


@pytest.mark.slow
def test_the_new_task_is_found_from_another_folder(folder: Path) -> None:
    elsewhere = folder / "else" / "where"
    elsewhere.mkdir(parents=True)
    result = run_here(
        ["train", "--task", "../../my_task.py", "run=mine", *SHORT, "dataloader.num_workers=2"], elsewhere
    )
    assert result.code == 0, result.err
    assert state(elsewhere / "outputs" / "mine") == "done"
    # The run records the path of its task, so inference works from any folder.
    asked = run_here(["inference", "run=mine", "output_root=else/where/outputs"], folder)
    assert asked.code == 0, asked.err


@pytest.mark.slow
def test_the_new_task_resumes_after_sigterm(server: ForkServer, folder: Path) -> None:
    args = ["train", "--task", "./my_task.py", "run=mine", "updates=100000", "log_every=1", *ON_CPU]
    run = folder / "outputs" / "mine"
    for life in ("first", "second"):
        before = (run / "metrics.jsonl").stat().st_size if life == "second" else 0
        pid = server.start(args, folder)
        wait_until(
            lambda grown=before: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > grown
        )
        os.kill(pid, signal.SIGTERM)
        result = server.wait()
        assert result.code == 75, result.err
        assert ("resumes after update" in result.out) == (life == "second")
    assert state(run) == "preempted"


@pytest.mark.slow
def test_the_new_task_predicts(folder: Path) -> None:
    assert run_here(["train", "--task", "./my_task.py", "run=mine", *SHORT], folder).code == 0
    result = run_here(["inference", "inference.samples=5"], folder)
    assert result.code == 0, result.err
    text = (folder / "outputs" / "mine" / "predictions" / "val.csv").read_text()
    assert text in result.out
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 5
    assert all((float(row["probability"]) > 0.5) == (row["inside"] == "1") for row in rows)


@pytest.mark.slow
def test_the_model_of_the_new_task_can_be_exported(folder: Path) -> None:
    assert run_here(["train", "--task", "./my_task.py", "run=mine", *SHORT], folder).code == 0
    result = run_here("export mine format=safetensors,program", folder)
    assert result.code == 0, result.err
    assert result.out.count("largest difference") == 2


@pytest.mark.slow
def test_the_new_task_can_be_swept(folder: Path) -> None:
    args = ["train", "-m", "--task", "./my_task.py", "run=mine", "task.hidden=4,8", *SHORT]
    result = run_here(args, folder, env={"IMPORT_FIRST": "tests.forked_trials"})
    assert result.code == 0, result.err
    assert [state(folder / "outputs" / "mine" / f"mine-{number}") for number in (1, 2)] == ["done", "done"]
    assert re.search(r"val/loss:\s[\d.]+,\smine-[12]\s+task.hidden=", result.out), result.out


def test_new_never_overwrites_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_task.py").write_text("mine")
    assert main(["new", "my_task.py"]) == 73
    assert (folder / "my_task.py").read_text() == "mine"
    assert capsys.readouterr().err.split()[1] == "my_task.py:"


@pytest.mark.parametrize("name", ["task", "prediction", "f", "none", "__"])
def test_the_class_name_shadows_no_imported_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", f"{name}.py"]) == 0
    nodes = [*ast.walk(ast.parse((tmp_path / f"{name}.py").read_text()))]
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    imported = {alias.asname or alias.name for alias in imports}
    (defined,) = (node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert defined not in imported


BAD_NAMES = [
    "", "one.py two.py", "one.py size=3", "my-task.py", "3.py", "class.py", "task.txt", "task", "random.py", "torch.py",
    "nowhere/fresh_name.py",
]  # fmt: skip


def test_an_invalid_name_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], screen: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = []
    for args in BAD_NAMES:
        assert main(["new", *args.split()]) == (73 if args.startswith("nowhere/") else 78), args
        messages.append(f"$ accel-run new {args}\n{capsys.readouterr().err}")
    assert not list(tmp_path.iterdir())
    screen("\n".join(messages))
