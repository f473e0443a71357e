"""`accel-run runs`: list the runs of a folder with their state."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError
from runner.base.json_values import is_number
from runner.base.secret import sanitize
from runner.base.text import format_bytes, format_metric, format_rate, format_table, terminal_width, wrap_for_terminal
from runner.base.values import LocalPath
from runner.commands.arguments import parse_options

HELP = """usage: accel-run runs [output_root=outputs] [--json]

Lists the runs, most recently written first: task, state, updates, last value of the metric checkpoint.best,
throughput, time of the last write, and size on disk. Commands that take a run accept a name from this list, `last`, or
a folder. A sweep or search is one row with its best trial; status and report show its trials.

examples
  accel-run runs
  accel-run runs output_root=/data/outputs --json
"""

COMMAND_KEYS = ("output_root",)


@dataclass(frozen=True)
class RunsOptions:
    """Options of the form key=value."""

    output_root: LocalPath = "outputs"


@dataclass(frozen=True)
class RunRow:
    """A row of the list; None means unknown or not applicable.

    phase    the current or last phase if the run has several; "trials" for a sweep
    update   number of completed updates of that phase, or of finished trials of a sweep, out of `total`
    metrics  metrics of the last evaluation (None for a metric without items), that of `checkpoint.best` first; before
             the first evaluation, the training loss
    items_per_s  throughput
    written  time of the last write, in seconds since 1970
    """

    name: str
    path: str
    task: str | None
    state: str
    exit_code: int | None
    phase: str | None
    update: int | None
    total: int | None
    metrics: Mapping[str, float | None]
    written: float
    bytes: int
    items_per_s: float | None = None


def run(argv: list[str]) -> int:
    from runner.base.paths import parse_path
    from runner.durable.directory import list_runs, list_sweeps

    parsed, problems = parse_options(argv, RunsOptions, ("--json",), lambda arg: f"accel-run status {arg}")
    if problems:
        raise ConfigError(problems)
    root, is_json = parse_path(RunsOptions(**parsed.given).output_root), "--json" in parsed.flags
    rows = [read_run_row(path) for path in list_runs(root, include_sweeps=False)] + [
        read_sweep_row(path) for path in list_sweeps(root)
    ]
    rows.sort(key=lambda row: -row.written)
    if is_json:
        print(json.dumps([_row_to_json(row) for row in rows], indent=2))
    elif rows:
        print(wrap_for_terminal("\n".join(format_runs(rows, time.time(), terminal_width()))))
    else:
        print(f"no runs in {root} yet; start one with: accel-run train", file=sys.stderr)
    return 0


def read_run_row(path: Path) -> RunRow:
    """Read the files of a run; damaged or missing values are None."""
    from runner.durable.directory import last_modified
    from runner.durable.files import read_last_row
    from runner.durable.record_files import read_plan, read_record
    from runner.durable.run_state import derive_state, read_throughput

    record, plan = read_record(path), read_plan(path)
    last = read_last_row(path / "metrics.jsonl")
    state = derive_state(record)
    reached = [*record.result.phases.values()][-1:]  # fallback if the run stopped before its first row of metrics
    phase = last.get("phase") if last or not reached else reached[0].name
    update = record.num_updates(str(phase), last)
    metrics = record.result.metrics or _read_metrics(path / "metrics.jsonl")
    best = plan.choice("checkpoint").options.get("best")
    totals = {phase_plan.name: phase_plan.updates for phase_plan in plan.phases}
    return RunRow(
        path.name,
        str(path),
        record.origin.task,
        state.word,
        state.exit_code,
        phase if isinstance(phase, str) and len(totals) > 1 else None,
        update if isinstance(update, int) else None,
        totals.get(str(phase)),
        {best: metrics[best], **metrics} if isinstance(best, str) and metrics.get(best) is not None else metrics,
        last_modified(path),
        _folder_size(path),
        read_throughput(path, record),
    )


def _read_metrics(path: Path) -> dict[str, float | None]:
    """Return the metrics of the last evaluation in metrics.jsonl; before the first one, the training loss."""
    from runner.durable.files import read_last_row

    for lead in ("val/", "train/loss"):
        row = read_last_row(path, lead=lead)
        if metrics := {
            name: value for name, value in row.items() if name.startswith(lead) and (value is None or is_number(value))
        }:
            return metrics
    return {}


def read_sweep_row(path: Path) -> RunRow:
    """Return a sweep or search as a row: trials instead of updates, and the best value of the metric."""
    from runner.durable.directory import SWEEP
    from runner.durable.run_state import process_state_name
    from runner.sweeps.trials import Sweep, find_best

    sweep = Sweep.read(path)
    results = sweep.results()
    best = find_best(results, sweep.goal)
    num_finished = sum(result.state in ("finished", "failed") for result in results)
    try:
        written = (path / SWEEP).stat().st_mtime
    except OSError:
        written = 0.0
    metrics = {} if best is None else {sweep.goal.metric: best.mean}
    return RunRow(
        path.name,
        str(path),
        sweep.record.task or None,
        process_state_name(sweep.record.process),
        None,
        "trials",
        num_finished,
        len(results),
        metrics,
        written,
        _folder_size(path),
    )


def format_runs(runs: Sequence[RunRow], now: float, columns: int = 0) -> list[str]:
    """Return a header and a line per run, escaped for the terminal, because folder names may be untrusted.

    now      seconds since 1970
    columns  width of the terminal; 0: unlimited
    """
    header = ("run", "task", "state", "updates", "metric", "items/s", "written", "size")
    rows = [header, *(_format_row(row, now) for row in runs)]
    return format_table(rows, "<<<><>>>", ("size", "items/s", "written", "task", "updates", "metric"), columns)


def _format_row(row: RunRow, now: float) -> tuple[str, ...]:
    code = f" ({row.exit_code})" if row.exit_code and row.state in ("failed", "preempted", "interrupted") else ""
    progress = "-" if row.update is None else str(row.update)
    progress += f"/{row.total}" if row.total is not None and row.update is not None else ""
    metric_names = [*(name for name, value in row.metrics.items() if value is not None), *row.metrics]
    cells = (
        row.name,
        row.task or "-",
        f"{row.state}{code}",
        f"{row.phase} {progress}" if row.phase else progress,
        f"{metric_names[0]} {format_metric(row.metrics[metric_names[0]])}" if metric_names else "-",
        "-" if row.items_per_s is None else format_rate(row.items_per_s),
        _format_age(now - row.written) if row.written else "-",
        format_bytes(row.bytes),
    )
    return tuple(sanitize(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in cells)


def _format_age(seconds: float) -> str:
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800), ("days", 86400, math.inf)):
        if seconds < most:
            return f"{max(0, int(seconds / size))} {unit} ago"
    return "-"


def _folder_size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # removed in the meantime
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - faster than Path
    return total


def _row_to_json(row: RunRow) -> dict[str, Any]:
    written = datetime.fromtimestamp(row.written, UTC).isoformat(timespec="seconds") if row.written else None
    return {**asdict(row), "written": written}
