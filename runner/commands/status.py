"""`accel-run status`: what a run has reached, which checkpoints are whole, and its last error."""

from __future__ import annotations

import json
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.commands.arguments import read
from runner.durable.files import read_object

HELP = """usage: accel-run status [last|NAME|DIR] [output_root=DIR]

Shows the state of a run: progress by phase, every checkpoint with valid or damaged and why, the last error.

examples
  accel-run status
  accel-run status first
  accel-run status outputs/first
"""


def run(words: list[str]) -> int:
    """Print the state of a run."""
    from runner.base.configuration import compose
    from runner.durable.directory import RunDirectory

    arguments = read(words, positional=1)
    settings = compose(arguments.request).settings
    wanted = arguments.positional[0] if arguments.positional else settings.run or "last"
    directory = RunDirectory.find(Path(settings.output_root), wanted)
    record = read_object(directory.run_json)
    print(f"{directory.name}: {_state(record)}   ({directory.path})")
    print(
        f"  task        {record.get('task', 'unknown')}"
        + (f" ({record['task_file']})" if record.get("task_file") else "")
    )
    print(f"  command     {record.get('command', 'unknown')}")
    _phases(directory)
    _checkpoints(directory)
    error = read_object(directory.error)
    if error:
        where = f"{error['where']}: " if error.get("where") else ""
        earlier = "" if record.get("state") == "failed" else " (an earlier attempt)"
        print(f"  last error  {where}{error.get('cause', '')} (exit {error.get('exit_code')}){earlier}")
        for line in str(error.get("fix") or "").splitlines():
            print(f"              {line.strip()}")
    return 0


def _state(record: dict[str, Any]) -> str:
    state = str(record.get("state", "unknown"))
    if state == "running" and record.get("host") not in (None, socket.gethostname()):
        return f"running on {record['host']}, if it was not killed there"
    if state == "running" and not _is_alive(record):
        return "killed; the same command with the same run name goes on where it stopped"
    return {
        "preempted": "saved and stopped; the same command goes on",
        "failed": f"failed (exit {record.get('exit_code')})",
    }.get(state, state)


def _is_alive(record: dict[str, Any]) -> bool:
    """Tell whether the process that wrote run.json is still there, and no later one has got its number."""
    import psutil  # type: ignore[import-untyped]

    try:
        started = datetime.fromisoformat(record["started"]).timestamp()
        process = psutil.Process(int(record["pid"]))
        return bool(
            process.create_time() <= started + 1.0 and process.status() != psutil.STATUS_ZOMBIE
        )  # 1 s: clocks differ
    except psutil.AccessDenied:
        return True
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _phases(directory: Any) -> None:
    plan = read_object(directory.plan)
    reached: dict[str, dict[str, Any]] = {}
    losses: dict[str, dict[str, float]] = {}
    ended = read_object(directory.run_json).get("phases") or {}
    for row in _rows(directory.metrics):
        phase = str(row.get("phase"))
        reached[phase] = row
        seen = losses.setdefault(phase, {})
        seen |= {key: value for key, value in row.items() if key.endswith("loss") and value is not None}
    totals = {row.get("phase"): row.get("total") for row in _rows(directory.events) if row.get("kind") == "phase"}
    for phase, row in reached.items():
        total = totals.get(phase) or plan.get("updates") or "?"
        shown = "  ".join(f"{name} {value:.4g}" for name, value in losses[phase].items())
        early = ", finished" if ended.get(phase, {}).get("finished") and row.get("update") != total else ""
        print(f"  phase       {phase}: update {row.get('update')} of {total}{early}   {shown}")
    if not reached:
        print("  phase       no update reported yet")


def _checkpoints(directory: Any) -> None:
    from runner.durable.checkpoint import verify

    found = sorted(directory.checkpoints.glob("*update-*")) if directory.checkpoints.is_dir() else []
    if not found:
        print("  checkpoints none yet")
    for number, path in enumerate(found):
        lead = "checkpoints" if number == 0 else ""
        if path.name.startswith("update-"):
            problems = verify(path)
            print(f"  {lead:<11} {path.name}: {'damaged: ' + '; '.join(problems) if problems else 'valid'}")
        else:
            print(f"  {lead:<11} {path.name}: put aside")


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    except OSError:
        pass
    return rows
