"""Derive the state of a run from its record, even if the process that wrote it has died."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from runner.base.stopwatch import THROUGHPUT
from runner.durable.directory import is_run_name
from runner.durable.files import read_last_row
from runner.host.process_tree import process_identity
from runner.records.run_record import ProcessRecord, RunRecord

StateName = Literal["finished", "running", "submitted", "preempted", "interrupted", "failed", "killed", "unknown"]


@dataclass(frozen=True)
class RunState:
    """State of a run.

    sentence   description for the user, with the command to resume, if it can be resumed
    exit_code  exit code of its last process; None while it runs, or if it could not be recorded
    """

    word: StateName
    sentence: str
    exit_code: int | None = None


def process_state_name(process: ProcessRecord) -> StateName:
    """Return the state of this process; if it is recorded as running but no longer exists, it was killed."""
    if process.state == "running":
        return "running" if _is_on_other_host(process) or _is_alive(process) else "killed"
    names: dict[str | None, StateName] = {
        "done": "finished",
        "submitted": "submitted",
        "preempted": "preempted",
        "interrupted": "interrupted",
        "failed": "failed",
    }
    return names.get(process.state, "unknown")


def derive_state(record: RunRecord, folder: Path | None = None) -> RunState:
    """Return the state of a run. If `folder` is given, the command to resume works in any directory."""
    process, name = record.process, process_state_name(record.process)
    if name == "running" and _is_on_other_host(process):
        return RunState(name, f"running on {process.host}, unless it was killed there")
    sentences: dict[StateName, str] = {
        "running": "running",
        "killed": f"killed; resume it with: {resume_command(record, folder)}",
        "finished": "finished",
        "submitted": "submitted to a scheduler; see the state of its trials",
        "preempted": f"saved and stopped; resume it with: {resume_command(record, folder)}",
        "interrupted": "stopped before its first checkpoint; the same command starts at update 0",
        "failed": f"failed (exit {process.exit_code})",
        "unknown": process.state or "unknown",
    }
    return RunState(name, sentences[name], None if process.state == "running" else process.exit_code)


def resume_command(record: RunRecord, folder: Path | None = None) -> str:
    """Return the command that resumes a run: by name, or, if `folder` is given, by folder and with its task file."""
    if folder is not None:
        task_file = record.origin.task_file
        return shlex.join(["accel-run", "resume", str(folder), *(["--task", str(task_file)] if task_file else [])])
    name = record.name if record.name is not None and is_run_name(record.name) else "NAME"
    roots = [override for override in record.origin.overrides or () if override.startswith("output_root=")]
    return shlex.join(["accel-run", "resume", name, *roots[-1:]])


def read_throughput(folder: Path, record: RunRecord) -> float | None:
    """Return the items per second of the run in `folder`, or None if unknown.

    While a process runs, only its own measurements count, because an earlier process may have used another device.
    """
    is_running = process_state_name(record.process) == "running"
    start = max(0, record.process.metrics_bytes) if is_running else 0
    row = read_last_row(folder / "metrics.jsonl", THROUGHPUT, start)
    is_known = bool(row) or record.current_evidence is not None or not is_running
    return record.throughput(row) if is_known else None


def _is_on_other_host(process: ProcessRecord) -> bool:
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
        running = psutil.Process(process.pid)
        return bool(
            running.create_time() <= started + 1.0 and running.status() != psutil.STATUS_ZOMBIE
        )  # tolerance of 1 s between clocks
    except psutil.AccessDenied:
        return True
    except (psutil.Error, TypeError, ValueError, OverflowError):
        return False
