"""State of a run, read from its run.json by any process, also if the writer has died."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from runner.base.process_identity import birth_of
from runner.durable.directory import is_name

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


def standing(record: Mapping[str, Any]) -> RunState:
    """Return the state of the run of this run.json; a process that vanished was killed."""
    state, code = str(record.get("state", "unknown")), record.get("exit_code")
    code = code if isinstance(code, int) else None
    if state == "running" and record.get("host") not in (None, socket.gethostname()):
        return RunState("running", f"running on {record['host']}, if it was not killed there")
    if state == "running" and not _is_alive(record):
        return RunState("killed", f"killed; resume it with: {_going_on(record)}")
    known: dict[str, tuple[Word, str]] = {
        "running": ("running", "running"),
        "done": ("finished", "done"),
        "submitted": ("submitted", "submitted to a scheduler; see the state of its trials"),
        "preempted": ("preempted", f"saved and stopped; resume it with: {_going_on(record)}"),
        "interrupted": ("interrupted", "stopped before its first checkpoint; the same command starts at update 0"),
        "failed": ("failed", f"failed (exit {code})"),
    }
    word, sentence = known.get(state, ("unknown", state))
    return RunState(word, sentence, code)


def _going_on(record: Mapping[str, Any]) -> str:
    """Return the command that resumes the run: its name may have been generated."""
    name, words = record.get("name"), record.get("overrides")
    named = name if isinstance(name, str) and is_name(name) else "NAME"
    roots = [word for word in words if str(word).startswith("output_root=")] if isinstance(words, list) else []
    return shlex.join(["accel-run", "resume", named, *roots[-1:]])


def _is_alive(record: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote run.json is alive, and its PID was not reused."""
    import psutil  # type: ignore[import-untyped]

    try:
        if record.get("birth"):  # independent of the clock, which may have been set since
            return birth_of(int(record["pid"])) == str(record["birth"])
        started = datetime.fromisoformat(record["started"]).timestamp()
        process = psutil.Process(int(record["pid"]))
        return bool(
            process.create_time() <= started + 1.0 and process.status() != psutil.STATUS_ZOMBIE
        )  # tolerance of 1 s between clocks
    except psutil.AccessDenied:
        return True
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False
