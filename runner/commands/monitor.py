"""`accel-run monitor`: monitor the machine live, or show the recorded metrics of a run."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from runner.base.errors import CannotCreate, ConfigError, DataError, DeviceMissing, InputMissing, Problem, StorageError
from runner.base.paths import parse_path
from runner.base.secret import sanitize
from runner.base.values import Interval, LocalPath, Positive
from runner.commands.arguments import parse_options, progress_printer

if TYPE_CHECKING:
    from runner.durable.signals import StopRequest
    from runner.monitor.alerts import Alert
    from runner.monitor.machine_display import MachineDisplay
    from runner.monitor.machine_screen import View
    from runner.monitor.monitor_thread import NoMonitor
    from runner.monitor.samples import MachineSamples, Summary

HELP = """usage: accel-run monitor [seconds=N] [interval_s=N] [log_dir=DIR] [--json] [run=NAME]

Shows GPUs, CPU, RAM and the processes on each GPU until Ctrl-C. Does not train. Without a GPU it shows the other
metrics and the reason. At the end it prints minimum, mean and maximum of each metric with an assessment, and writes
gpu.csv, monitor.json and plots to a new folder in gpu_logs. In a pipe it prints one line per sample.

  seconds=30          duration; default: until Ctrl-C
  interval_s=1        seconds between samples
  log_dir=DIR         folder in which the new folder is created; null: write nothing
  --json              print a JSON object per sample on standard output, and all messages on standard error
  run=last|NAME|DIR   show the recorded metrics of a run, finished or not, and write plots to its folder; with --json:
                      only print the summary as one object. output_root=DIR is the folder of the runs

examples
  accel-run monitor
  accel-run monitor seconds=30
  accel-run monitor --json log_dir=null | jq '.readings["gpu0/util"]'
  accel-run monitor run=last
"""


@dataclass(frozen=True)
class MonitorOptions:
    """Options of the form key=value."""

    seconds: Positive | None = None
    interval_s: Interval = 1.0
    log_dir: LocalPath | None = "gpu_logs"
    run: str | None = None
    output_root: LocalPath = "outputs"


def run(argv: list[str]) -> int:
    """Monitor the machine, or show recorded metrics."""
    options, given_keys, flags = parse_monitor_arguments(argv)
    if options.run is not None:
        return _show_run(parse_path(options.output_root), options.run, as_json="--json" in flags)
    folder = _create_folder(options.log_dir, is_required="log_dir" in given_keys) if options.log_dir else None
    return _monitor_live(options, folder, as_json="--json" in flags)


# ---------------------------------------------------------------- live


def _monitor_live(options: MonitorOptions, folder: Path | None, *, as_json: bool) -> int:
    from runner.durable.signals import StopRequest
    from runner.monitor.machine_display import make_display
    from runner.monitor.machine_screen import View
    from runner.monitor.monitor_thread import Monitor
    from runner.monitor.samples_file import read_samples

    view = View(interval_s=options.interval_s)
    display = make_display(sys.stdout, sys.stderr, as_json=as_json)
    with StopRequest("Stopped immediately, without a summary.", display.close) as stop, closing(display):
        with Monitor(folder / "gpu.csv" if folder else None, options.interval_s) as monitor:
            _follow(monitor, view, display, stop, options.seconds)
        stop.begin_shutdown()  # a second Ctrl-C must not interrupt the display while it restores the terminal
        if monitor.latest() is not view.latest:
            _add_sample(view, monitor.latest(), monitor)
            display.sample(view)
    if not view.latest:
        why = "; ".join(monitor.notes) or "the driver does not respond"
        fix = "to find the reason, run accel-run doctor"
        raise DeviceMissing(f"the machine cannot be monitored: {why}", where="monitor", fix=fix)
    errors = tuple(alert.text for alert in view.alerts)
    summary = replace(monitor.summary(), notes=(*errors, *view.missing))
    print_line = _print_err if as_json else _print_out
    _print_assessment(summary, print_line, view.alerts, of_run=False)
    if folder is not None:
        problems = [monitor.lost] if monitor.lost else []

        def contents() -> Iterator[tuple[str, bytes]]:
            yield "monitor.json", (json.dumps(summary.to_json(), indent=2) + "\n").encode()
            try:
                yield from _draw_plots("", read_samples(folder / "gpu.csv"))
            except (InputMissing, DataError) as error:
                problems.append(f"plots were not drawn (gpu.csv: {error.problems[0].what})")

        written = [] if monitor.lost else ["gpu.csv"]
        _write_files(contents(), partial(_write_file, folder), folder, print_line, problems, written, fix=_FIX_FILES)
    return 0


def _follow(monitor: NoMonitor, view: View, display: MachineDisplay, stop: StopRequest, seconds: float | None) -> None:
    started_s = drawn_s = time.monotonic()
    tick = min(0.1, view.interval_s / 4)
    while not stop.requested and not display.is_gone:
        now = time.monotonic()
        view.seconds = now - started_s
        if seconds is not None:
            view.remaining = max(0.0, seconds - view.seconds)
            if view.seconds >= seconds + min(0.15, view.interval_s / 2):  # leave time for the last sample
                break
        readings = monitor.latest()
        if readings and readings is not view.latest:
            _add_sample(view, readings, monitor)
            display.sample(view)
            drawn_s = now
        elif display.is_resized() or now - drawn_s >= 1.0:
            _add_alerts(monitor, view)
            view.is_waiting = not view.latest and view.seconds > _SLOW_START_S
            display.draw(view)
            drawn_s = now
        time.sleep(tick)


def _add_sample(view: View, readings: Mapping[str, float], monitor: NoMonitor) -> None:
    if readings:
        view.add(readings)
        view.gpus, view.users = monitor.devices(), monitor.users() or None
        _add_alerts(monitor, view)


def _add_alerts(monitor: NoMonitor, view: View) -> None:
    for notice in monitor.new_alerts():
        if notice.kind in _GPU_ERRORS and notice.level == "warning":
            view.alerts.append(notice)
        elif notice.kind not in _ALWAYS_SHOWN:
            lead = "no GPU is monitored: " if notice.level == "debug" and not monitor.devices() else ""
            view.missing.append(lead + notice.text)


# ---------------------------------------------------------------- at the end


def _show_run(root: Path, name: str, *, as_json: bool) -> int:
    from runner.durable.directory import RunDirectory
    from runner.durable.record_files import read_plan
    from runner.durable.run_request import report_skipped
    from runner.monitor.sample_columns import summarize_samples
    from runner.monitor.samples_file import read_samples

    directory = RunDirectory.find(root, name)
    report_skipped(directory, progress_printer("monitor"))
    machines = {"": read_samples(directory.gpu_csv)}  # prefix of file names, empty for the first machine -> samples
    if not len(machines[""]):
        what = "contains no samples yet"
        raise InputMissing(what, where=str(directory.gpu_csv), fix="wait until the run has started")
    for path in sorted(directory.path.glob("gpu-rank*.csv"), key=_rank_in_name):
        if len(samples := read_samples(path)):
            machines[f"rank{_rank_in_name(path)}-"] = samples
    summaries = {prefix: summarize_samples(samples) for prefix, samples in machines.items()}
    if as_json:
        other_machines = {prefix[:-1]: summary.to_json() for prefix, summary in summaries.items() if prefix}
        print(json.dumps(summaries[""].to_json() | ({"machines": other_machines} if other_machines else {})))
        return 0
    on_gpu = not read_plan(directory.path).device.startswith("cpu")
    for prefix, summary in summaries.items():
        rank = prefix[:-1]
        file = directory.shown / (f"gpu-{rank}.csv" if rank else "gpu.csv")
        _print_out(f"\nmachine of rank {rank[4:]}: {file}" if rank else f"{directory.name}: {file}")
        events = directory.path / f"events-{rank}.jsonl" if rank else directory.events
        _print_assessment(summary, _print_out, _read_alerts(events), of_run=True, on_gpu=on_gpu)
    plots = chain.from_iterable(_draw_plots(prefix, samples) for prefix, samples in machines.items())
    plot_folder = directory.shown / "plots"
    _write_files(plots, lambda name, content: directory.write(f"plots/{name}", content), plot_folder, _print_out)
    return 0


def _rank_in_name(path: Path) -> int:
    """Return the number in gpu-rank8.csv."""
    digits = path.stem.removeprefix("gpu-rank")
    return int(digits) if digits.isdecimal() else 0


def _read_alerts(events: Path) -> list[Alert]:
    from runner.durable.files import read_rows
    from runner.monitor.alerts import Alert

    rows = [row for row in read_rows(events) if row.get("kind") == "machine" and row.get("what") in _GPU_ERRORS]
    return [Alert(str(row["what"]), str(row.get("text", "")), "warning", row) for row in rows]


def _print_assessment(
    summary: Summary, print_line: Callable[[str], None], alerts: Sequence[Alert], *, of_run: bool, on_gpu: bool = True
) -> None:
    """Print the figures and their assessment, wrapped to the width of a terminal."""
    from runner.monitor.health_rules import format_assessment

    columns = max(30, os.get_terminal_size(1).columns or 80) if sys.stdout.isatty() else 0
    for line in format_assessment(summary, alerts, of_run=of_run, on_gpu=on_gpu):
        is_prose = columns and line.startswith(("high ", "low ", "note ", "good "))
        print_line(
            textwrap.fill(line, columns, subsequent_indent=" " * 6, break_on_hyphens=False) if is_prose else line
        )


def _draw_plots(prefix: str, samples: MachineSamples) -> Iterator[tuple[str, bytes]]:
    from runner.monitor.machine_plots import draw_png_files

    yield from ((f"{prefix}{name}", content) for name, content in draw_png_files(samples).items())


def _write_file(folder: Path, name: str, content: bytes) -> None:
    from runner.durable import files

    files.atomic_write(folder / name, content)


def _write_files(
    contents: Iterable[tuple[str, bytes]],
    write: Callable[[str, bytes], object],
    folder: Path,
    print_line: Callable[[str], None],
    failures: list[str] | None = None,
    already_written: Sequence[str] = (),
    *,
    fix: str = "free space there",
) -> None:
    """Write the files and print their names.

    failures         earlier problems; `contents` may add more
    already_written  files that were written before
    fix              advice for a file that cannot be written
    If a file cannot be written, writes the others and then raises StorageError.
    """
    failures, names = failures if failures is not None else [], list(already_written)
    for name, content in contents:
        try:
            write(name, content)
            names.append(name)
        except StorageError as error:
            failures.append(f"{name} was not written: {error.problems[0].what}")
    if names:
        print_line(f"\nwritten to {folder}: {', '.join(names)}")
    if failures:
        raise StorageError("; ".join(failures), where=str(folder), fix=fix)


def _create_folder(log_dir: str, *, is_required: bool) -> Path | None:
    """Return a new folder in `log_dir`, named after the current time.

    Failure is an error if log_dir was given; otherwise it is only reported, because monitoring works without a folder.
    """
    from runner.durable import files

    parent = parse_path(log_dir)
    timestamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        files.make_directory(parent.absolute())
        for number in range(1, 1000):
            folder = parent / (timestamp if number == 1 else f"{timestamp}-{number}")
            if not files.exists(folder):
                files.new_directory(folder)
                return folder
    except StorageError as error:
        if is_required:
            raise CannotCreate(error.problems[0].what, where=error.problems[0].where, fix=_FIX_LOG_DIR) from error
        _print_err(f"no files are written ({error.problems[0].where}: {error.problems[0].what})")
    return None


# ---------------------------------------------------------------- arguments


def parse_monitor_arguments(argv: Sequence[str]) -> tuple[MonitorOptions, set[str], set[str]]:
    """Return the options, the given keys, and the flags. Raises ConfigError listing all problems."""
    parsed, problems = parse_options(argv, MonitorOptions, FLAGS, _guess_setting)
    given = parsed.given
    if given.get("run") == "" or "run=" in argv:
        problems.append(Problem("needs a value", "run=", "use run=last, or the name of a run"))
    elif "run" in given and (unused := [key for key in ("seconds", "interval_s", "log_dir") if key in given]):
        what = f"has no effect with run={given['run']}, which shows recorded metrics"
        problems.append(Problem(what, ", ".join(unused), "leave it out"))
    if problems:
        raise ConfigError(problems)
    return MonitorOptions(**given), set(given), parsed.flags


def _guess_setting(arg: str) -> str:
    return f"seconds={arg}" if arg.replace(".", "", 1).isdecimal() else f"run={arg}"


def _print_out(text: str) -> None:
    _print_line(text, sys.stdout)


def _print_err(text: str) -> None:
    _print_line(text, sys.stderr)


def _print_line(text: str, stream: TextIO) -> None:
    with suppress(BrokenPipeError):  # on a broken pipe the files are still written
        print(sanitize(text), file=stream, flush=True)


FLAGS = ("--json",)
COMMAND_KEYS = ("seconds", "interval_s", "log_dir", "run", "output_root")
_SLOW_START_S = 5.0  # time after which the screen says that it waits for the first sample
_ALWAYS_SHOWN = ("slowed", "shared")  # kinds of notices already visible in the figures and the process table
_GPU_ERRORS = ("lost", "xid", "ecc")  # kinds of notices about a GPU itself
_FIX_LOG_DIR = "set log_dir to a writable folder, or to null"
_FIX_FILES = (
    "free space there, or use log_dir=DIR; samples that were not written are lost, but the figures are complete"
)
