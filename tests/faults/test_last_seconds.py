"""A stop signal after the last save changes neither the exit code nor the state of the run."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forkserver import ForkServer
from tests.waiting import wait_until

TASK = Path(__file__).with_name("task_to_attack.py")
BASE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "dataloader.num_workers=0", "run=mine"]

# Shutdown blocks until the file `go` exists, as if a tracker server were slow.
SLOW_END = """
import pathlib
from runner.trackers.tracker import Tracker
from tests.waiting import wait_until
def finish(self, timeout_s=0.0, **named):
    pathlib.Path("ending").touch()
    wait_until(pathlib.Path("go").exists)
Tracker.finish = finish
"""
# Flushing the output, the last step of a run, blocks forever.
SLOW_OUTPUT = """
import os, pathlib, signal
from runner.host import output
real, process = output.finish, os.getpid()
def finish(*given):
    if os.getpid() != process:
        return real(*given)
    pathlib.Path("ending").touch()
    while True:
        signal.pause()
output.finish = finish
"""


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_ranks", "watchdog"), [(1, "default"), (1, "off"), (2, "default"), (2, "off")])
def test_a_second_signal_after_the_last_save_does_not_change_the_exit_code(
    num_ranks: int, watchdog: str, server: ForkServer, tmp_path: Path
) -> None:
    ranks = ["parallelism=ddp", "parallelism.world_size=2"] if num_ranks > 1 else []
    run = tmp_path / "outputs" / "mine"
    args = [*BASE, *ranks, f"watchdog={watchdog}", "log_every=1", "updates=1000000"]
    pid = server.start(args, tmp_path, before=SLOW_END)
    wait_until((run / "metrics.jsonl").exists)
    os.kill(pid, signal.SIGTERM)
    wait_until((tmp_path / "ending").exists)
    os.kill(pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert server.wait().code == 75
    assert json.loads((run / "run.json").read_text())["state"] == "preempted"


def test_a_third_signal_ends_a_slow_shutdown(server: ForkServer, tmp_path: Path) -> None:
    pid = server.start([*BASE, "updates=3"], tmp_path, before=SLOW_END)
    wait_until((tmp_path / "ending").exists)
    with suppress(ProcessLookupError):  # the process has exited
        # Repeated, because a SIGTERM is dropped while one is pending.
        wait_until(lambda: os.kill(pid, signal.SIGTERM), "the run exits")
    assert server.wait().code == 130


def test_a_signal_during_the_last_output_keeps_the_exit_code(server: ForkServer, tmp_path: Path) -> None:
    pid = server.start([*BASE, "updates=3"], tmp_path, before=SLOW_OUTPUT)
    wait_until((tmp_path / "ending").exists)
    os.kill(pid, signal.SIGTERM)
    assert server.wait().code == 0
    assert json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())["state"] == "done"
