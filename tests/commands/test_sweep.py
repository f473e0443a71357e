"""`accel-run train -m`: every combination, each in a process of its own.

A trial starts a real process, which loads torch: few sweeps, and each is asked many things.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.cli import main
from runner.launch.sweep import _OneAtATime
from tests.forkserver import Ended, ForkServer

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
ON_CPU = ["--task", str(TASK), "device=cpu", "monitor=off", "evaluate.every=0"]


def record(folder: Path, name: str) -> dict[str, Any]:
    content = json.loads((folder / "outputs" / name / "run.json").read_text())
    assert isinstance(content, dict)
    return content


@dataclass(frozen=True)
class Swept:
    """A sweep over two lists whose first trial failed, and the same command again after what failed was mended."""

    folder: Path
    words: list[str]
    first: Ended
    pids: list[int]
    again: Ended


@pytest.fixture(scope="module")
def swept(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("swept")
    words = ["train", "-m", "run=mine", "task.fail_at=15,0", "updates=20,10", *ON_CPU]
    first = server.run(words, folder)
    (folder / "outputs" / "mine-1" / "kept").write_text("")
    pids = [record(folder, f"mine-{number}")["pid"] for number in (1, 2, 3, 4)]
    again = server.run(words, folder, env={"NO_KILL": "1"})
    return Swept(folder, words, first, pids, again)


def test_every_combination_is_trained_under_a_name_of_its_own(swept: Swept) -> None:
    assert sorted(path.name for path in (swept.folder / "outputs").iterdir()) == [f"mine-{n}" for n in (1, 2, 3, 4)]
    for number, (fail_at, updates) in enumerate([(15, 20), (15, 10), (0, 20), (0, 10)], 1):
        overrides = record(swept.folder, f"mine-{number}")["overrides"]
        assert {f"task.fail_at={fail_at}", f"updates={updates}", f"run=mine-{number}"} <= set(overrides)


def test_a_failure_does_not_stop_the_rest_and_its_code_is_that_of_the_sweep(swept: Swept) -> None:
    assert swept.first.code == 70
    ended = [line for line in swept.first.out.splitlines() if line.startswith("mine-")]
    assert [line.split("  ")[2].strip() for line in ended] == ["exit 70", "done", "done", "done"]
    assert swept.first.err.count("raised KeyError: 'points'") == 1


def test_the_table_has_words_end_and_metrics_of_every_trial(swept: Swept) -> None:
    lines = swept.again.out.splitlines()
    table = lines[lines.index("") :] if "" in lines else lines
    rows = [line for line in table if line.startswith("mine-")]
    for number, row in enumerate(rows, 1):
        metrics = record(swept.folder, f"mine-{number}")["metrics"]
        assert row.startswith(f"mine-{number}  task.fail_at=")
        assert row.endswith(f"done      val/loss {metrics['val/loss']:.4g}")
    losses = {f"mine-{n}": record(swept.folder, f"mine-{n}")["metrics"]["val/loss"] for n in (1, 2, 3, 4)}
    assert table[-1].startswith(f"lowest val/loss: {min(losses, key=lambda name: losses[name])}  ")


def test_the_same_command_resumes_what_is_not_finished_and_leaves_the_rest(swept: Swept) -> None:
    assert swept.again.code == 0, swept.again.err
    out = swept.again.out
    assert "[2/4] mine-2  task.fail_at=15 updates=10: finished already" in out
    assert out.count("finished already") == 3
    pids = [record(swept.folder, f"mine-{number}")["pid"] for number in (1, 2, 3, 4)]
    assert [new == old for new, old in zip(pids, swept.pids, strict=True)] == [False, True, True, True]
    assert (swept.folder / "outputs" / "mine-1" / "kept").exists()


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (
            "updates=0,10 optimizer.lr=-1,0.1 precision=fp32,bf17",
            ["updates=0: must be", "optimizer.lr=-1: must be", "precision=bf17: unknown precision"],
        ),
        ("micro_batch_size=7,5,12", ["7", "5"]),
        ("run=mine,yours", ["run: names the sweep, so it has one value"]),
        ("output_root=a,b", ["output_root: names the sweep, so it has one value"]),
        ("run=../mine seed=1,2", ["a run name must be"]),
        ("device=cuda,cpu", ["device=cuda: "]),
        ("seed=1,2 lrr=3", ["lrr=3: unknown key"]),
    ],
)
def test_all_problems_come_first_and_nothing_is_started(
    words: str, answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_cpu = [word for word in ON_CPU if not (word.startswith("device") and "device" in words)]
    if "device=cuda" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("device=cuda is right here")
    code = main(["train", "-m", *on_cpu, *words.split()])
    assert code in (69, 78)
    out, err = capsys.readouterr()
    assert out == ""
    for answer in answers:
        assert answer in err
    assert not (tmp_path / "outputs").exists()


def test_a_problem_that_several_trials_have_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", *ON_CPU, "seed=1,2,3,4", "optimizer.lr=-1"]) == 78
    assert capsys.readouterr().err == "accel-run: optimizer.lr=-1: must be a number above 0, but is -1\n"


@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["as a terminal does", "to the sweep alone"],
)
def test_a_signal_saves_the_trial_and_ends_the_sweep_with_75(
    number: signal.Signals, to_group: bool, server: ForkServer, tmp_path: Path
) -> None:
    words = ["train", "-m", "run=mine", "seed=1,2", "task.sleep_s=0.02", "updates=1000", "log_every=1", *ON_CPU]
    pid = server.start(words, tmp_path)
    metrics = tmp_path / "outputs" / "mine-1" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    (os.killpg if to_group else os.kill)(pid, number)
    ended = server.wait()
    assert ended.code == 75, ended.err
    assert ended.out.endswith("\nstopped; the same command with run=mine goes on\n")
    assert record(tmp_path, "mine-1")["state"] == "preempted"
    assert list((tmp_path / "outputs" / "mine-1" / "checkpoints").glob("update-*"))
    assert not (tmp_path / "outputs" / "mine-2").exists()


def test_a_signal_while_the_trial_starts_ends_the_sweep_too(server: ForkServer, tmp_path: Path) -> None:
    pid = server.start(["train", "-m", "run=mine", "seed=1,2", *ON_CPU], tmp_path)
    out = tmp_path / ".out"
    deadline = time.monotonic() + 60
    while not (out.exists() and "[1/2]" in out.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # the trial is a process now, far from ready to save
    os.kill(pid, signal.SIGTERM)
    ended = server.wait()
    assert ended.code == 75, ended.err
    assert "[2/2]" not in ended.out
    assert "stopped; the same command with run=mine goes on" in ended.out


def test_after_a_signal_between_trials_none_is_started(tmp_path: Path) -> None:
    with _OneAtATime() as process:
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.run(["touch", str(tmp_path / "started")]) == 75
    assert not list(tmp_path.iterdir())


def test_the_handlers_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with _OneAtATime():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
