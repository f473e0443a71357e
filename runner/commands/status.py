"""`accel-run status`: progress, checkpoints and last error of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.json_values import as_list, is_number
from runner.base.secret import sanitize
from runner.base.stopwatch import THROUGHPUT
from runner.base.text import abbreviate, format_metric, format_rate, terminal_width, wrap_for_terminal
from runner.commands.arguments import parse_run_request, progress_printer
from runner.durable.files import TEMPORARY, read_object, read_rows
from runner.durable.record_files import MIRROR, read_error, read_plan, read_record

if TYPE_CHECKING:
    from runner.durable.directory import RunDirectory
    from runner.records.run_record import RunRecord

HELP = """usage: accel-run status [last|NAME|DIR] [output_root=DIR]

Shows the state of a run: progress of each phase, whether each checkpoint is valid or damaged and why, which one is
the best and which the last, and the last error. For a sweep or search it shows the table of trials.

examples
  accel-run status
  accel-run status first
  accel-run status outputs/first
"""


def run(argv: list[str]) -> int:
    from runner.config.configuration import compose
    from runner.durable.directory import LAST, RunDirectory, find_sweep
    from runner.durable.run_request import report_skipped
    from runner.durable.run_state import derive_state

    settings = compose(parse_run_request(argv)).settings
    if folder := find_sweep(settings.root, settings.run or LAST):
        return _print_sweep(folder)
    directory = RunDirectory.find(settings.root, settings.run or LAST)
    report_skipped(directory, progress_printer("status"))
    record = read_record(directory.path)
    origin = record.origin
    # If the run was given as a path, the command to resume it contains the path, because output_root may lack its name.
    folder = directory.path if "/" in (settings.run or "") else None
    _print(f"{directory.name}: {derive_state(record, folder).sentence}   ({directory.shown})")
    _print(f"  task        {origin.task or 'unknown'}" + (f" ({origin.task_file})" if origin.task_file else ""))
    _print(f"  command     {origin.command or 'unknown'}")
    if record.problem:
        _print(f"  record      run.json {record.problem}")
    _print_phases(directory, record)
    _print_checkpoints(directory)
    _print_mirror(directory)
    if record.process.state not in _STATES_WITHOUT_ERROR or _is_newer(directory.error, directory.run_json):
        _print_last_error(directory, record)
    return 0


def _print_sweep(folder: Path) -> int:
    from runner.durable.run_state import process_state_name
    from runner.sweeps.trials import Sweep, format_summary, format_trial_table

    sweep = Sweep.read(folder)
    results = sweep.results()
    state = process_state_name(sweep.record.process)
    same_command = f"run the same command with run={folder.name}"
    hints = dict.fromkeys(("preempted", "killed"), f"stopped; to resume, {same_command}")
    hints["submitted"] = f"submitted; to follow the jobs, {same_command}"
    _print(f"{folder.name}: {hints.get(state, state)}   ({folder})")
    _print(f"  {sweep.record.kind:<10}  {sweep.record.task}: {format_summary(results, sweep.goal)}")
    _print(f"  command     {sweep.record.command or 'unknown'}")
    _print("\n".join(["", *format_trial_table(results, sweep.goal, terminal_width())]))
    return 0


def _print_last_error(directory: RunDirectory, record: RunRecord) -> None:
    """Print the last error, and whether it belongs to an earlier or later attempt than the recorded state."""
    error = read_error(directory.path)
    if error is None:
        return
    where = f"{error.where}: " if error.where else ""
    is_newer = _is_newer(directory.error, directory.run_json)  # a refused attempt does not change the state of the run
    earlier = " (a later attempt)" if is_newer else " (an earlier attempt)"
    earlier = "" if record.process.state == "failed" else earlier
    cause, *more = f"{where}{error.cause} (exit {error.exit_code}){earlier}".splitlines()
    _print(f"  last error  {cause}")
    for line in [*more, *error.fix.splitlines()]:
        _print(f"              {line.strip()}")


def _is_newer(path: Path, other: Path) -> bool:
    try:
        return path.lstat().st_mtime_ns > other.lstat().st_mtime_ns
    except OSError:
        return False


_STATES_WITHOUT_ERROR = ("done", "preempted")


def _print(text: str) -> None:
    """Print text from the files of a run, which may be untrusted."""
    print(wrap_for_terminal(sanitize(text)))


def _print_phases(directory: RunDirectory, record: RunRecord) -> None:
    from runner.durable.run_state import read_throughput

    plan = read_plan(directory.path)
    last_rows: dict[str, dict[str, Any]] = {}
    losses: dict[str, dict[str, float | None]] = {}
    ended_phases = record.result.phases
    measured = ""  # phase of the last row with a throughput
    for row in read_rows(directory.metrics):
        phase = str(row.get("phase"))
        last_rows[phase] = row
        measured = measured if row.get(THROUGHPUT) is None else phase
        phase_losses = losses.setdefault(phase, {})
        phase_losses |= {
            key: value for key, value in row.items() if key.endswith("loss") and (value is None or is_number(value))
        }
    starts = {str(row.get("phase")): row for row in read_rows(directory.events) if row.get("kind") == "phase"}
    names = dict.fromkeys([*ended_phases, *last_rows])  # a phase without metrics, such as a fit, has no row
    for phase in names:
        ended = ended_phases.get(phase)
        total = starts.get(phase, {}).get("total") or (ended and ended.total) or plan.updates or "?"
        update = record.num_updates(phase, last_rows.get(phase, {}))
        loss_text = "  ".join(f"{name} {format_metric(value)}" for name, value in losses.get(phase, {}).items())
        finished_note = ", finished" if ended and ended.finished and update != total else ""
        _print(f"  phase       {phase}: update {update} of {total}{finished_note}   {loss_text}".rstrip())
    if not names:
        _print("  phase       no update yet")
    items_per_s = read_throughput(directory.path, record)
    if items_per_s is not None:
        item = starts.get(measured, next(reversed(starts.values()), {})).get("item") or "item"
        _print(f"  throughput  {format_rate(items_per_s)} {item}s/s, first update excluded")


def _print_checkpoints(directory: RunDirectory) -> None:
    from runner.durable.checkpoint import verify
    from runner.durable.checkpoint_choice import label_checkpoints

    paths = sorted(directory.checkpoints.glob("*update-*")) if directory.checkpoints.is_dir() else []
    if not paths:
        _print("  checkpoints none yet")
    problems = {path: verify(path, directory.owner) for path in paths if path.name.startswith("update-")}
    labels = label_checkpoints([path for path, path_problems in problems.items() if not path_problems])
    for number, path in enumerate(paths):
        title = "checkpoints" if number == 0 else ""
        if path in problems:
            state = f"damaged: {'; '.join(problems[path])}" if problems[path] else "valid"
            state += f" ({', '.join(labels[path.name])})" if path.name in labels else ""
        else:
            state = "incomplete, removed at the next start" if path.name.startswith(TEMPORARY) else "set aside"
        _print(f"  {title:<11} {path.name}: {state}")


def _print_mirror(directory: RunDirectory) -> None:
    """Print what the last process has copied to `checkpoint.mirror`."""
    mirror = read_object(directory.path / MIRROR)
    if not mirror:
        return
    copied = [str(name) for name in as_list(mirror.get("copied"))]
    missing = sorted({path.name for path in directory.checkpoints.glob("update-*")} - {*copied})
    _print(f"  mirror      {mirror.get('url')}: has {abbreviate(copied, 5) or 'no checkpoint'}")
    if missing:
        _print(f"              not copied: {abbreviate(missing, 5)}")
    if mirror.get("skipped"):
        _print(f"              {mirror['skipped']} removed from the run before they were copied")
    if mirror.get("problem"):
        _print(f"              {mirror['problem']}")
