"""A run reports that its folder was moved, deleted or unlocked, and loses no data that can still be saved."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runner.durable import checkpoint
from runner.host.process_tree import process_identity
from tests.forkserver import CompletedCommand, ForkServer

TASK = Path(__file__).with_name("task_that_moves.py")
WORDS = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off"]


def run(server: ForkServer, folder: Path, act: str, *args: str) -> CompletedCommand:
    return server.run([*WORDS, *args], folder, {"ACT": act})


def saved_updates(run: Path) -> list[int]:
    return [checkpoint.load(path).update for path in sorted((run / "checkpoints").glob("update-*"))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("act", ["move", "replace"])
def test_a_run_continues_in_its_moved_folder(server: ForkServer, tmp_path: Path, act: str) -> None:
    result = run(server, tmp_path, act)
    assert result.code == 0, result.err
    moved, old = tmp_path / "outputs" / "moved", tmp_path / "outputs" / "mine"
    assert saved_updates(moved)[-1] == 60
    assert json.loads((moved / "run.json").read_text())["state"] == "done"
    rows = [json.loads(line)["update"] for line in (moved / "metrics.jsonl").read_text().splitlines()]
    assert max(rows) == 60
    assert (result.out + result.err).count(str(moved)) == 1, "the new location is reported once"
    assert [path.name for path in old.iterdir()] == ["kept"] if act == "replace" else not old.exists()
    again = server.run(["resume", "moved", "updates=70", "resume_allow=[updates]"], tmp_path)
    assert again.code == 0, again.err
    assert saved_updates(moved)[-1] == 70


def test_a_run_ends_at_the_next_save_after_its_folder_is_deleted(server: ForkServer, tmp_path: Path) -> None:
    result = run(server, tmp_path, "delete", "updates=1000000")
    assert result.code == 74, result.err
    assert "deleted" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "outputs" / "mine").exists()


@pytest.mark.slow
def test_a_removed_lock_is_reacquired(server: ForkServer, tmp_path: Path) -> None:
    result = run(server, tmp_path, "unlock")
    assert result.code == 0, result.err
    assert saved_updates(tmp_path / "outputs" / "mine")[-1] == 60
    assert (tmp_path / "outputs" / "mine" / ".lock").is_file()
    assert (result.out + result.err).count(".lock") == 1, "reported once"


def test_a_run_taken_over_by_another_process_stops_writing(server: ForkServer, tmp_path: Path) -> None:
    result = run(server, tmp_path, "take", "updates=1000000")
    assert result.code == 87, result.err
    assert saved_updates(tmp_path / "outputs" / "mine") == [10, 20]


@pytest.mark.slow
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_running_run_without_a_lock_is_not_started_twice(server: ForkServer, tmp_path: Path, is_alive: bool) -> None:
    assert run(server, tmp_path, "none").code == 0
    folder = tmp_path / "outputs" / "mine"
    (folder / ".lock").unlink()
    record = json.loads((folder / "run.json").read_text())
    pid = os.getpid()
    birth = process_identity(pid) if is_alive else "another"
    started = datetime.now(UTC).isoformat()
    record |= {"state": "running", "pid": pid, "birth": birth, "host": socket.gethostname(), "started": started}
    (folder / "run.json").write_text(json.dumps(record))
    result = run(server, tmp_path, "none", "updates=70", "resume_allow=[updates]")
    assert result.code == (87 if is_alive else 0), result.err
    assert saved_updates(folder)[-1] == (60 if is_alive else 70)
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock was released
