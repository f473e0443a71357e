"""With a stopped terminal or an unread pipe, a run still completes all updates, handles signals, and ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.durable.checkpoint import newest_valid
from tests.forkserver import ForkServer
from tests.waiting import wait_until

TASK = Path(__file__).with_name("task_of_words.py")
BASE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "log_every=1", "backend.threads=1", "run=mine"]
# Redirects output as a shell does; the terminal does not become the controlling one.
TO = "import os; there = os.open({path!r}, os.O_WRONLY | os.O_NOCTTY); os.dup2(there, 1); os.dup2(there, 2)"


@contextmanager
def unread_pipe(folder: Path) -> Iterator[str]:
    path = folder / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield str(path)
    os.close(reader)


@contextmanager
def stopped_terminal(folder: Path) -> Iterator[str]:
    """Yield the path of a terminal that is stopped by Ctrl-S and has no reader."""
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    yield os.ttyname(slave)
    os.close(slave)
    os.close(master)


PLACES = {"pipe": unread_pipe, "terminal": stopped_terminal}


def ranks(count: int) -> list[str]:
    return ["parallelism=ddp", f"parallelism.world_size={count}"] if count > 1 else []


def updates(run: Path) -> list[int]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [int(json.loads(line)["update"]) for line in lines if line.endswith("}") and "train/loss" in line]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("num_ranks", "loader"),
    [(1, "dataloader.num_workers=0"), (1, "dataloader.num_workers=2"), (2, "dataloader.num_workers=1")],
)
def test_training_completes_while_output_is_stalled(
    server: ForkServer, tmp_path: Path, place: str, num_ranks: int, loader: str
) -> None:
    with PLACES[place](tmp_path) as path:
        args = [*BASE, *ranks(num_ranks), loader, "updates=100", "evaluate.every=50"]
        result = server.run(args, tmp_path, before=TO.format(path=path))
    run = tmp_path / "outputs" / "mine"
    assert result.code == 0, json.loads((run / "error.json").read_text())["cause"]
    assert updates(run) == list(range(1, 101))
    assert json.loads((run / "run.json").read_text())["state"] == "done"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stop_signal_is_handled_while_output_is_stalled(
    server: ForkServer, tmp_path: Path, place: str, num_ranks: int
) -> None:
    run = tmp_path / "outputs" / "mine"
    with PLACES[place](tmp_path) as path:
        args = [*BASE, *ranks(num_ranks), "dataloader.num_workers=1", "updates=1000000"]
        pid = server.start(args, tmp_path, before=TO.format(path=path))
        # the output so far exceeds the buffer of a pipe or a terminal
        wait_until(lambda: len(updates(run)) >= 60, "training continues while the output is not read")
        os.kill(pid, signal.SIGTERM)
        result = server.wait()
    assert result.code == 75
    saved = newest_valid(run / "checkpoints")
    assert saved is not None
    assert int(saved.name.removeprefix("update-")) == updates(run)[-1]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_second_signal_exits_immediately_while_output_is_stalled(
    server: ForkServer, tmp_path: Path, place: str
) -> None:
    with PLACES[place](tmp_path) as path:
        args = [*BASE, "dataloader.num_workers=0", "updates=1000000", "evaluate.every=0"]
        pid = server.start(args, tmp_path, before=TO.format(path=path) + SLOW_TO_SAVE)
        wait_until(
            lambda: len(updates(tmp_path / "outputs" / "mine")) >= 60, "training continues while the output is not read"
        )
        os.kill(pid, signal.SIGTERM)
        wait_until((tmp_path / "saving").exists, "the run is saving")
        os.kill(pid, signal.SIGTERM)
        result = server.wait()
    assert result.code == 130


# The second signal must arrive before the run ends.
SLOW_TO_SAVE = """
import pathlib, threading
from runner.durable import signals
real = signals.StopRequest._handle
def handle(self, number, frame):
    if self.requested is not None:
        return real(self, number, frame)
    real(self, number, frame)
    pathlib.Path("saving").touch()
    threading.Event().wait(60)
signals.StopRequest._handle = handle
"""


def test_an_error_is_recorded_while_output_is_stalled(server: ForkServer, tmp_path: Path) -> None:
    with unread_pipe(tmp_path) as path:
        before = TO.format(path=path) + FAILS_LATE
        result = server.run([*BASE, "dataloader.num_workers=0", "updates=200"], tmp_path, before=before)
    assert result.code == 70
    assert json.loads((tmp_path / "outputs" / "mine" / "error.json").read_text())["exit_code"] == 70


FAILS_LATE = """
import torch.nn.functional as F
real, calls = F.cross_entropy, []
def cross_entropy(*given, **named):
    calls.append(1)
    if len(calls) == 100:
        raise ValueError("planted")
    return real(*given, **named)
F.cross_entropy = cross_entropy
"""


def test_a_full_disk_for_the_log_does_not_block_training(server: ForkServer, tmp_path: Path) -> None:
    result = server.run([*BASE, "dataloader.num_workers=0", "updates=20"], tmp_path, before=FULL_DISK)
    run = tmp_path / "outputs" / "mine"
    assert result.code == 0, result.err
    assert updates(run) == list(range(1, 21))
    assert (run / "console.log").read_text() == ""
    assert str(run.relative_to(tmp_path)) in result.out


FULL_DISK = """
import errno, os
real = os.write
def write(descriptor, data):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/console.log"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(descriptor, data)
os.write = write
"""
