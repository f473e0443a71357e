"""Ends that nobody asked for: a fault of ours, Ctrl-C at any moment, a reader that goes away, a full disk."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from runner.cli import main
from tests.forkserver import ForkServer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

# A task that makes our own code fail, in a place where none of the task's lines is on the stack.
SABOTAGE = """
import functools
import torch
import runner.engine.train
from runner import Task

runner.engine.train.Meter.__call__ = functools.partial(int, "three")

SETTINGS = {"updates": 3, "global_batch_size": 4}

def build(*, size: int = 2) -> Task:
    return Mine()

class Mine(Task):
    def __init__(self):
        self.model = torch.nn.Linear(2, 1)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.zeros(8, 2))
    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
"""


def test_a_fault_of_ours_is_one_line_of_cause_and_the_traceback_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: list[str]) -> NoReturn:
        raise KeyError("two\nlines")

    monkeypatch.setattr("runner.commands.plan.run", broken)
    assert main(["plan"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:3] == [
        "accel-run: KeyError: 'two\\nlines'",
        "           this is a fault of accel-run, not yours; please report it with what follows",
        "Traceback (most recent call last):",
    ]
    assert "in broken" in err


def test_a_fault_of_ours_in_a_run_is_one_line_and_the_traceback_in_error_json(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    ended = server.run("train --task ./sabotage.py run=mine device=cpu monitor=off", tmp_path)
    assert ended.code == 70
    assert ended.err.splitlines() == [
        "accel-run: TypeError: 'StepInfo' object cannot be interpreted as an integer",
        "           this is a fault of accel-run, not yours; please report it with outputs/mine/error.json",
        "           no checkpoint yet (1 update is repeated)",
    ]
    error = json.loads((tmp_path / "outputs" / "mine" / "error.json").read_text())
    assert error["cause"] == "TypeError: 'StepInfo' object cannot be interpreted as an integer"
    assert error["exit_code"] == 70
    assert error["traceback"].startswith("Traceback")
    assert "runner/engine/train.py" in error["traceback"]


def accel_run(*words: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *words], cwd=folder, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def until(process: subprocess.Popen[str], library: str) -> None:
    """Wait until the process has this file in its memory."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if library in Path(f"/proc/{process.pid}/maps").read_text():
                return
        except OSError:
            pass
        time.sleep(0.002)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the memory of a process can be read on Linux only")
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("libtorch_cpu", signal.SIGINT),
        ("libtorch_python", signal.SIGTERM),
        ("_multiarray_umath", signal.SIGHUP),
    ],
)
def test_who_is_asked_to_stop_in_the_middle_of_an_import_leaves_quietly_with_130(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = accel_run("train", "run=mine", folder=tmp_path)
    try:
        until(process, moment)
        time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()  # one that goes on after all would train for an hour
    assert process.returncode == 130, err
    assert err == "\naccel-run: interrupted\n"
    assert not (tmp_path / "outputs" / "mine" / "error.json").exists()


def test_a_reader_that_goes_away_is_not_an_error(tmp_path: Path) -> None:
    process = accel_run("plan", folder=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    "words", [["both", "run=mine"], ["train", "-m", "run=mine", "seed=1,2"]], ids=["both", "sweep"]
)
def test_what_is_under_way_goes_on_when_its_reader_goes_away(
    words: list[str], server: ForkServer, tmp_path: Path
) -> None:
    quiet = ROOT / "tests" / "end_to_end" / "task_with_everything.py"
    task = tmp_path / "task.py"
    task.write_text(quiet.read_text().replace("x, y = batch", "x, y = batch; print(len(x), flush=True)"))
    os.mkfifo(tmp_path / ".out")
    reader = os.open(tmp_path / ".out", os.O_RDONLY | os.O_NONBLOCK)
    server.start([*words, "--task", str(task), "device=cpu", "monitor=off", "updates=20"], tmp_path)
    select.select([reader], [], [], 60)  # until the first words are there
    os.close(reader)
    (tmp_path / ".out").unlink()
    (tmp_path / ".out").write_text("")
    ended = server.wait()
    assert (ended.code, ended.err) == (0, "")
    runs = sorted(path.parent for path in (tmp_path / "outputs").rglob("run.json"))
    assert [run.name for run in runs] == (["mine"] if words[0] == "both" else ["mine-1", "mine-2"])
    assert {json.loads((run / "run.json").read_text())["state"] for run in runs} == {"done"}
    assert (runs[0] / "predictions" / "summary.json").is_file() == (words[0] == "both")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_exit_74(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "runner", "--help"], cwd=tmp_path, env=ENVIRONMENT, check=False,
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 74
    assert done.stderr == "accel-run: standard output cannot be written: No space left on device\n"


def test_closed_streams_are_not_an_error(tmp_path: Path) -> None:
    program = f'"{sys.executable}" -m runner'
    line = f"{program} explain precision >&- 2>&-; echo $?; {program} frobnicate 2>&-; echo $?"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "78"]
