"""State of a run, derived from its record by any process, also if the writer has died."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from runner.durable.directory import is_name
from runner.host.process_identity import process_identity
from runner.records.run_record import ProcessRecord, RunRecord

Word = Literal["finished", "running", "submitted", "preempted", "interrupted", "failed", "killed", "unknown"]


@dataclass(frozen=True)
class RunState:
    """State of a run.

    sentence   description for the user, with what can be done
    exit_code  of its last process; None while it runs, and if it could not be recorded
    """

    word: Word
    sentence: str
    exit_code: int | None = None


def process_state_name(process: ProcessRecord) -> Word:
    """Return the state of this process; one that vanished was killed."""
    if process.state == "running":
        return "running" if _is_elsewhere(process) or _is_alive(process) else "killed"
    known: dict[str | None, Word] = {
        "done": "finished",
        "submitted": "submitted",
        "preempted": "preempted",
        "interrupted": "interrupted",
        "failed": "failed",
    }
    return known.get(process.state, "unknown")


def state_of(record: RunRecord) -> RunState:
    """Return the state of a run."""
    process, word = record.process, process_state_name(record.process)
    if word == "running" and _is_elsewhere(process):
        return RunState(word, f"running on {process.host}, if it was not killed there")
    sentences: dict[Word, str] = {
        "running": "running",
        "killed": f"killed; resume it with: {_resume_command(record)}",
        "finished": "done",
        "submitted": "submitted to a scheduler; see the state of its trials",
        "preempted": f"saved and stopped; resume it with: {_resume_command(record)}",
        "interrupted": "stopped before its first checkpoint; the same command starts at update 0",
        "failed": f"failed (exit {process.exit_code})",
        "unknown": process.state or "unknown",
    }
    return RunState(word, sentences[word], None if process.state == "running" else process.exit_code)


def _resume_command(record: RunRecord) -> str:
    """Return the command that resumes the run: its name may have been generated."""
    name = record.name if record.name is not None and is_name(record.name) else "NAME"
    roots = [word for word in record.origin.overrides or () if word.startswith("output_root=")]
    return shlex.join(["accel-run", "resume", name, *roots[-1:]])


def _is_elsewhere(process: ProcessRecord) -> bool:
    return process.host not in (None, socket.gethostname())


def _is_alive(process: ProcessRecord) -> bool:
    """Return whether the recorded process is alive, and its PID was not reused."""
    import psutil  # type: ignore[import-untyped]

    if process.pid is None:
        return False
    try:
        if process.birth:  # independent of the clock, which may have been set since
            return process_identity(process.pid) == process.birth
        started = datetime.fromisoformat(process.started or "").timestamp()
        found = psutil.Process(process.pid)
        return bool(
            found.create_time() <= started + 1.0 and found.status() != psutil.STATUS_ZOMBIE
        )  # tolerance of 1 s between clocks
    except psutil.AccessDenied:
        return True
    except (psutil.Error, TypeError, ValueError, OverflowError):
        return False
