"""The state of a run depends on its record, and on whether its process is alive."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from runner.durable.run_state import RunState
from runner.durable.run_state import derive_state as state_of_record
from runner.host.process_tree import process_identity
from runner.records.run_record import RunRecord

HOST = socket.gethostname()


def state_of(content: dict[str, Any]) -> RunState:
    return state_of_record(RunRecord.decode(json.dumps(content).encode()))


def running(pid: int, **other: Any) -> dict[str, Any]:
    return {"state": "running", "host": HOST, "pid": pid, "birth": process_identity(pid), "name": "mine", **other}


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("done", "finished"), ("submitted", "submitted"), ("preempted", "preempted"),
        ("interrupted", "interrupted"), ("failed", "failed"), ("strange", "unknown"),
    ],
)  # fmt: skip
def test_an_ended_run_has_its_recorded_state(state: str, word: str) -> None:
    """A live process with the recorded PID is ignored, because the PID has been reused."""
    for pid in (os.getpid(), 2**22 + 1):
        result = state_of({"state": state, "host": HOST, "pid": pid, "exit_code": 3})
        assert (result.word, result.exit_code) == (word, 3)


def test_a_run_without_a_process_was_killed() -> None:
    """A run whose process is alive is running."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = running(process.pid)
        by_clock = {**record, "birth": None, "started": datetime.now(UTC).isoformat()}
        assert state_of(record).word == state_of(by_clock).word == "running"
        process.communicate()
    assert state_of(record).word == state_of(by_clock).word == "killed"


def test_a_process_with_a_reused_pid_is_ignored() -> None:
    assert state_of(running(os.getpid(), birth="another")).word == "killed"
    assert state_of(running(os.getpid(), birth=None, started="2001-01-01T00:00:00+00:00")).word == "killed"


def test_a_run_on_another_machine_is_not_reported_as_killed() -> None:
    result = state_of(running(os.getpid(), host="another", birth="another"))
    assert result.word == "running"
    assert "another" in result.sentence


@pytest.mark.parametrize("record", [{}, {"state": "running"}, {"state": "running", "pid": "x"}, {"state": 3}])
def test_reading_a_damaged_record_does_not_raise(record: dict[str, Any]) -> None:
    assert state_of(record).word in ("unknown", "killed")
