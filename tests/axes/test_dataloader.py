"""Laws of data workers: no request to stop reaches them, and they end when they are closed or with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runner.axes.dataloader import Fetcher, default
from runner.base.order import Micro
from runner.base.words import RaisedElsewhere
from tests.axes.worker_data import Owner

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PARENT = """
import os, signal, sys, time
import torch
from runner.axes.dataloader import Fetcher, default
from runner.base.order import Micro
from tests.axes.worker_data import Numbers

method, hangs_at = sys.argv[1], int(sys.argv[2])
heard = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: heard.append(number))
fetcher = Fetcher(Numbers(hangs_at), torch.tensor, bad_samples="stop")
loader = default(fetcher, torch.device("cpu"), num_workers=2, pin_memory=False, start_method=method)
batches = loader.batches(Micro(0, [index], last=True) for index in range(100))
print("started", *(worker.pid for worker in loader._open[0]._workers), flush=True)
for index, batch in enumerate(batches):
    assert batch.batch.tolist() == [index], batch
    print("batch", index, len(heard), flush=True)
    if index == hangs_at - 10:
        break
    sys.stdin.readline()
before = time.monotonic()
loader.close()
print("closed", round(time.monotonic() - before, 1), flush=True)
sys.stdin.readline()
"""


def started(method: str, hangs_at: int = 110) -> tuple[subprocess.Popen[str], list[int]]:
    """Return a process with two workers, in a group of its own, and the numbers of the workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, method, str(hangs_at)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return process, [int(word) for word in heard(process, "started")]


def heard(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[:1] == [word], (line, process.communicate(timeout=20))
    return line[1:]


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def group_of(leader: int) -> list[int]:
    """Return the processes of the group that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[2]) == leader and words[0] != "Z":
            found.append(int(folder.name))
    return found


def assert_gone(numbers: list[int], within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    left = numbers
    while left and time.monotonic() < until:
        left = [number for number in left if Path(f"/proc/{number}").exists()]
        left = [number for number in left if ") Z " not in Path(f"/proc/{number}/stat").read_text()]
        time.sleep(0.02)
    assert left == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_outlive_requests_to_stop_from_their_first_instruction_on(method: str) -> None:
    process, workers = started(method)
    for number in SIGNALS:  # at once: spawned workers have not even imported Python's signal module yet
        os.killpg(process.pid, number)
    assert heard(process, "batch")[0] == "0"
    for index in range(1, 10):
        os.killpg(process.pid, SIGNALS[index % len(SIGNALS)])
        for member in group_of(process.pid):
            os.kill(member, SIGNALS[index % len(SIGNALS)])
        say(process)
        assert heard(process, "batch")[0] == str(index)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert_gone([*workers, *group_of(process.pid)])
    out, err = process.communicate(timeout=10)
    assert "Traceback" not in err, err
    assert out == ""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_hangs_is_gone_when_it_is_closed(method: str) -> None:
    process, workers = started(method, hangs_at=12)  # read ahead: two batches each
    for index in range(3):
        assert heard(process, "batch")[0] == str(index)
        if index < 2:
            say(process)
    seconds = float(heard(process, "closed")[0])
    assert seconds < 4
    assert_gone(workers)
    say(process)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err, err


def test_the_model_of_the_task_does_not_travel_to_spawned_workers() -> None:
    """It may lie on a GPU or in shards, and be of a class that cannot be sent."""
    owner = Owner()
    fetcher = Fetcher(owner.dataset(), owner.collate, bad_samples="stop", model=owner.model)
    loader = default(fetcher, torch.device("cpu"), num_workers=1, pin_memory=False, start_method="spawn")
    try:
        batches = loader.batches(Micro(0, [index], last=True) for index in range(2))
        assert next(batches).batch.tolist() == [0]
        with pytest.raises(RaisedElsewhere, match="the model is not in data workers that are spawned"):
            next(batches)
    finally:
        loader.close()
