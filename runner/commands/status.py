"""`accel-run status`: progress, checkpoints and last error of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from runner.base.json_numbers import metric_text
from runner.base.secret import fit_to_show
from runner.base.stopwatch import THROUGHPUT
from runner.base.text import columns_of, for_terminal, rate
from runner.commands.arguments import read_of_a_run, teller
from runner.durable.files import TEMPORARY, mapped, read_object, read_rows

HELP = """usage: accel-run status [last|NAME|DIR] [output_root=DIR]

Shows the state of a run: progress of each phase, whether each checkpoint is valid or damaged and why, and the last
error. For a sweep or search it shows the table of trials.

examples
  accel-run status
  accel-run status first
  accel-run status outputs/first
"""


def run(words: list[str]) -> int:
    """Print the state of a run."""
    from runner.base.configuration import compose
    from runner.durable.directory import LAST, RunDirectory, find_sweep
    from runner.durable.run_request import say_skipped
    from runner.durable.run_state import standing

    settings = compose(read_of_a_run(words)).settings
    if folder := find_sweep(settings.root, settings.run or LAST):
        return _of_sweep(folder)
    directory = RunDirectory.find(settings.root, settings.run or LAST)
    say_skipped(directory, teller("status"))
    record = read_object(directory.run_json)
    _print(f"{directory.name}: {standing(record).sentence}   ({directory.shown})")
    _print(
        f"  task        {record.get('task', 'unknown')}"
        + (f" ({record['task_file']})" if record.get("task_file") else "")
    )
    _print(f"  command     {record.get('command', 'unknown')}")
    _phases(directory)
    _checkpoints(directory)
    if record.get("state") not in _WELL or _is_newer(directory.error, directory.run_json):
        _last_error(directory, record)
    return 0


def _of_sweep(folder: Path) -> int:
    """Print the trials of a sweep or a search."""
    from runner.durable.run_state import standing
    from runner.launch.trials import Sweep, summary, table

    sweep = Sweep.read(folder)
    results = sweep.results()
    word = standing(sweep.record).word
    to_resume = f"; to resume, run the same command with run={folder.name}" if word in ("preempted", "killed") else ""
    _print(f"{folder.name}: {'stopped' if to_resume else word}{to_resume}   ({folder})")
    _print(f"  {sweep.kind:<10}  {sweep.task}: {summary(results, sweep.goal)}")
    _print(f"  command     {sweep.command or 'unknown'}")
    _print("\n".join(["", *table(results, sweep.goal, columns_of())]))
    return 0


def _last_error(directory: Any, record: dict[str, Any]) -> None:
    """Print the error of the last attempt; of an earlier one if the last attempt is running or was killed."""
    error = read_object(directory.error)
    if not error:
        return
    where = f"{error['where']}: " if error.get("where") else ""
    is_newer = _is_newer(directory.error, directory.run_json)  # a refused attempt does not change the state of the run
    earlier = " (a later attempt)" if is_newer and record.get("state") != "failed" else " (an earlier attempt)"
    earlier = "" if record.get("state") == "failed" else earlier
    cause, *more = f"{where}{error.get('cause', '')} (exit {error.get('exit_code')}){earlier}".splitlines()
    _print(f"  last error  {cause}")
    for line in [*more, *str(error.get("fix") or "").splitlines()]:
        _print(f"              {line.strip()}")


def _is_newer(one: Path, other: Path) -> bool:
    try:
        return one.lstat().st_mtime_ns > other.lstat().st_mtime_ns
    except OSError:
        return False


_WELL = ("done", "preempted")  # states without an error


def _print(text: str) -> None:
    """Print text from the files of a run, which may be untrusted."""
    print(for_terminal(fit_to_show(text)))


def _phases(directory: Any) -> None:
    from runner.engine.evidence import evidence_in, throughput

    plan = read_object(directory.plan)
    reached: dict[str, dict[str, Any]] = {}
    losses: dict[str, dict[str, float | None]] = {}
    record = read_object(directory.run_json)
    last: dict[str, Any] = {}
    ended = mapped(record.get("phases"))
    for row in read_rows(directory.metrics):
        last = row if row.get(THROUGHPUT) is not None else last
        phase = str(row.get("phase"))
        reached[phase] = row
        seen = losses.setdefault(phase, {})
        seen |= {
            key: value for key, value in row.items() if key.endswith("loss") and (value is None or _is_number(value))
        }
    totals = {
        str(row.get("phase")): row.get("total") for row in read_rows(directory.events) if row.get("kind") == "phase"
    }
    for phase, row in reached.items():
        total = totals.get(phase) or plan.get("updates") or "?"
        shown = "  ".join(f"{name} {metric_text(value)}" for name, value in losses[phase].items())
        early = ", finished" if mapped(ended.get(phase)).get("finished") and row.get("update") != total else ""
        _print(f"  phase       {phase}: update {row.get('update')} of {total}{early}   {shown}")
    if not reached:
        _print("  phase       no update yet")
    found = throughput(evidence_in(record), last)
    if found is not None:
        _print(f"  throughput  {rate(found)} items/s, first update excluded")


def _is_number(value: Any) -> bool:
    """Return whether this can be shown as a loss; an integer of 400 digits cannot."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _checkpoints(directory: Any) -> None:
    from runner.durable.checkpoint import verify

    found = sorted(directory.checkpoints.glob("*update-*")) if directory.checkpoints.is_dir() else []
    if not found:
        _print("  checkpoints none yet")
    run = directory.owner
    for number, path in enumerate(found):
        lead = "checkpoints" if number == 0 else ""
        if path.name.startswith("update-"):
            problems = verify(path, run)
            _print(f"  {lead:<11} {path.name}: {'damaged: ' + '; '.join(problems) if problems else 'valid'}")
        else:
            is_begun = path.name.startswith(TEMPORARY)
            _print(f"  {lead:<11} {path.name}: {'incomplete, removed at the next start' if is_begun else 'set aside'}")
