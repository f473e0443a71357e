"""Abnormal exits: internal errors, Ctrl-C at any moment, a closed pipe, and a full disk."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from runner.cli import main
from tests.forkserver import ForkServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

# A task that causes an error in the runner while no line of the task is on the call stack.
SABOTAGE = """
import functools
import torch
import runner.engine.evaluation.meter
from runner import Task

runner.engine.evaluation.meter.Meter.__call__ = functools.partial(int, "three")

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


def test_an_internal_error_prints_one_line_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "two\nlines"

    def broken(_: list[str]) -> NoReturn:
        raise KeyError(text)

    monkeypatch.setattr("runner.commands.plan.run", broken)
    assert main(["plan"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    cause, _, traceback, *_ = err.splitlines()
    assert cause == f"accel-run: KeyError: {text!r}"
    assert traceback.startswith("Traceback")
    assert "in broken" in err


def test_an_internal_error_in_a_run_writes_error_json(server: ForkServer, tmp_path: Path) -> None:
    """The terminal shows one line; error.json has the traceback."""
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    result = server.run("train --task ./sabotage.py run=mine device=cpu monitor=off", tmp_path)
    assert result.code == 70
    cause, report, saved = result.err.splitlines()
    error = json.loads((tmp_path / "outputs" / "mine" / "error.json").read_text())
    assert error["cause"].startswith("TypeError: ")
    assert cause == f"accel-run: {error['cause']}"
    assert report.split()[-1] == "outputs/mine/error.json"
    assert "no checkpoint" in saved
    assert error["exit_code"] == 70
    assert error["traceback"].startswith("Traceback")
    assert "runner/engine/training.py" in error["traceback"]


def accel_run(*args: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *args], cwd=folder, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def has_loaded(process: subprocess.Popen[str], library: str) -> bool:
    """Return whether the process has mapped this library or has exited."""
    try:
        return library in Path(f"/proc/{process.pid}/maps").read_text() or process.poll() is not None
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the memory of a process can be read on Linux only")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("libtorch_cpu", signal.SIGINT),
        ("libtorch_python", signal.SIGTERM),
        ("_multiarray_umath", signal.SIGHUP),
    ],
)
def test_an_interrupt_during_an_import_exits_with_130(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    process = accel_run("train", "run=mine", folder=tmp_path)
    try:
        wait_until(lambda: has_loaded(process, moment))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()  # if the process ignored the signal, it would train for an hour
    assert process.returncode == 130, err
    assert err == "\naccel-run: interrupted\n"
    assert not (tmp_path / "outputs" / "mine" / "error.json").exists()


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(server: ForkServer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".out")
    reader = os.open(tmp_path / ".out", os.O_RDONLY | os.O_NONBLOCK)
    pid = server.start(["plan", "task.size=tiny", "micro_batch_size=4"], tmp_path)
    wait_until(lambda: Path(f"/proc/{pid}/fd/1").readlink().name == ".out", "the command opened its output")
    os.close(reader)
    (tmp_path / ".out").unlink()
    (tmp_path / ".out").write_text("")
    result = server.wait()
    assert result.code == 0
    # slow steps print what they do
    assert [line for line in result.err.splitlines() if not line.startswith("plan: ")] == []


@pytest.mark.slow
@pytest.mark.parametrize("args", [["both", "run=mine"], ["train", "-m", "run=mine", "seed=1,2"]], ids=["both", "sweep"])
def test_training_continues_when_the_pipe_reader_exits(args: list[str], server: ForkServer, tmp_path: Path) -> None:
    quiet = ROOT / "tests" / "end_to_end" / "task_with_everything.py"
    task = tmp_path / "task.py"
    task.write_text(quiet.read_text().replace("x, y = batch", "x, y = batch; print(len(x), flush=True)"))
    os.mkfifo(tmp_path / ".out")
    reader = os.open(tmp_path / ".out", os.O_RDONLY | os.O_NONBLOCK)
    given = [*args, "--task", str(task), "device=cpu", "monitor=off", "updates=20"]
    server.start(given, tmp_path, {"IMPORT_FIRST": "tests.forked_trials"})
    select.select([reader], [], [], 60)  # wait until there is output
    os.close(reader)
    (tmp_path / ".out").unlink()
    (tmp_path / ".out").write_text("")
    result = server.wait()
    assert (result.code, result.err) == (0, "")
    runs = sorted(path.parent for path in (tmp_path / "outputs").rglob("run.json"))
    assert [run.name for run in runs] == (["mine"] if args[0] == "both" else ["mine-1", "mine-2"])
    assert {json.loads((run / "run.json").read_text())["state"] for run in runs} == {"done"}
    assert (runs[0] / "predictions" / "summary.json").is_file() == (args[0] == "both")


@pytest.mark.slow
def test_train_runs_without_standard_streams(tmp_path: Path) -> None:
    """The test starts a real process, because Python opens the standard streams when it starts."""
    task = ROOT / "tests" / "faults" / "task_to_attack.py"
    args = ["train", "--task", str(task), "device=cpu", "monitor=off", "updates=1", "run=mine"]
    line = 'exec "$0" -m runner "$@" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", line, sys.executable, *args], cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())["state"] == "done"
    assert "finished" in (tmp_path / "outputs" / "mine" / "console.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_exit_code_is_74_if_standard_output_is_full(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "runner", "--help"], cwd=tmp_path, env=ENVIRONMENT, check=False,
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 74
    assert done.stderr.startswith("accel-run: ")
    assert os.strerror(errno.ENOSPC) in done.stderr


@pytest.mark.slow
def test_closed_output_streams_do_not_change_the_exit_code(tmp_path: Path) -> None:
    program = f'"{sys.executable}" -m runner'
    line = f"{program} explain precision >&- 2>&-; echo $?; {program} frobnicate 2>&-; echo $?"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "78"]
