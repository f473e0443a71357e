"""`accel-run report`: write an HTML page about a run, several runs, or a sweep."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, Problem
from runner.base.secret import sanitize
from runner.commands.arguments import parse_command_keys, progress_printer
from runner.config.overrides import EMPTY_RUN

if TYPE_CHECKING:
    from runner.durable.directory import RunDirectory
    from runner.tools.report.watch import Content

HELP = """usage: accel-run report [last|NAME|DIR ...] [out=FILE.html] [output_root=outputs] [--watch [every_s=5]]

Writes a self-contained HTML page: task and machine, key figures, the bottleneck, training curves, time and memory by
part, machine metrics over time, predictions, settings, and how to reproduce the run. Missing data is listed with the
reason. With several runs, the page compares their curves, figures and differing settings. Runs are not changed, and
need not be finished.

  last, NAME, DIR   the most recent run (default), runs by name, or their folders; also as run=NAME; for a sweep or
                    search: the table of its trials and a comparison of the best ones
  out=FILE.html     output file (default: report.html in the run's folder; for several runs comparison.html beside the
                    first one)
  --watch           rewrite the page every 5 s, or every_s=N, until training has ended; a page that is open in a
                    browser reloads itself

examples
  accel-run report
  accel-run report --watch
  accel-run report first second
  accel-run report outputs/first out=first.html
"""

COMMAND_KEYS = {"out": "", "output_root": "outputs", "run": "", "every_s": "5"}
WATCH = "--watch"


def run(argv: list[str]) -> int:
    """Write the page and print its path; with --watch, rewrite the page until training has ended."""
    from runner.base.paths import parse_path
    from runner.durable.directory import LAST, RunDirectory, find_sweep
    from runner.durable.run_request import report_skipped
    from runner.tools.report.watch import watch

    keys, names = parse_report_arguments(argv)
    root = parse_path(keys["output_root"])
    out = parse_path(keys["out"]) if keys["out"] else None
    owner: RunDirectory | None = None
    if len(names) == 1 and (folder := find_sweep(root, names[0])):
        read = partial(_read_sweep, folder, is_watched=WATCH in argv)
        out = out or folder / "report.html"
    else:
        directories = [RunDirectory.find(root, name) for name in names or [LAST]]
        for directory in directories:
            report_skipped(directory, progress_printer("report"))
        paths = [directory.path.resolve() for directory in directories]
        if duplicates := [arg for index, arg in enumerate(names) if paths[index] in paths[:index]]:
            raise ConfigError(Problem("is the same run as an earlier argument", arg, "remove it") for arg in duplicates)
        read = partial(_read_runs, directories)
        out = out or _default_output(directories)
        owner = directories[0] if out.absolute() == directories[0].report else None
    _check_output(out)
    write = partial(_write_page, out, owner)
    if WATCH in argv:
        every_s = float(keys["every_s"])
        print(sanitize(f"updating {out} every {every_s:g} s while training runs; press Ctrl-C to stop"), flush=True)
        content, size = watch(read, write, every_s)
    else:
        content = read()
        size = write(content)
    print(sanitize(f"written to {out} ({size / 1000:.0f} KB)"))
    for note in content.notes:
        print(sanitize(note), file=sys.stderr)
    return 0


def _read_runs(directories: list[RunDirectory]) -> Content:
    """Return the page about a run, or the one that compares several."""
    from runner.tools.report.comparison import make_comparison_page
    from runner.tools.report.run_data import read_run_data
    from runner.tools.report.run_page import make_run_page
    from runner.tools.report.watch import Content

    runs = [read_run_data(directory) for directory in directories]
    page = make_run_page(runs[0]) if len(runs) == 1 else make_comparison_page(runs)
    notes = [
        f"{f'{run.name}: ' if len(runs) > 1 else ''}note: {'; '.join(run.missing.values())}"
        for run in runs
        if run.missing
    ]
    return Content(page, notes, is_live=any(run.state.word == "running" for run in runs))


def _read_sweep(folder: Path, *, is_watched: bool) -> Content:
    from runner.sweeps.trials import Sweep
    from runner.tools.report.sweep_page import make_sweep_page
    from runner.tools.report.watch import Content

    sweep = Sweep.read(folder)
    return Content(make_sweep_page(sweep), (), is_live=is_watched and sweep.is_live())


def _write_page(out: Path, owner: RunDirectory | None, content: Content, refresh_s: float | None = None) -> int:
    """Write the page and return its size in bytes.

    owner  run whose folder contains the page; None: the page is in another folder
    """
    from runner.base.errors import StorageError
    from runner.durable import files
    from runner.tools.report.page import render_html

    html = render_html(content.page, refresh_s)
    try:
        if owner is None:
            files.atomic_write(out.absolute(), html)
        else:
            owner.write("report.html", html)
    except StorageError as error:  # for example no write permission in the run's folder
        fix = error.problems[0].fix or "use out=FILE.html in a writable folder"
        raise StorageError(error.problems[0].what, where=str(out), fix=fix) from error
    return len(html.encode())


def parse_report_arguments(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the command's keys, and the runs. Raises ConfigError listing all problems."""
    from runner.config.schema import did_you_mean

    argv = [arg for arg in argv if arg != WATCH]
    keys, names, _ = parse_command_keys(argv, COMMAND_KEYS)
    problems = []
    if not _is_valid_period(keys["every_s"]):
        problems.append(
            Problem("must be a number of seconds, at least 1", f"every_s={keys['every_s']}", "use every_s=5")
        )
    for arg in argv:
        key, has_value, _ = arg.partition("=")
        if arg in ("run=", ""):
            problems.append(EMPTY_RUN)
        elif arg.startswith("-"):
            problems.append(
                Problem("unknown option", arg, did_you_mean(arg, (WATCH, "--help")) or "use accel-run report --help")
            )
        elif has_value and key not in COMMAND_KEYS and not Path(arg).is_dir():
            problems.append(
                Problem("unknown key", arg, did_you_mean(key, COMMAND_KEYS) or f"use one of {', '.join(COMMAND_KEYS)}")
            )
    if keys["run"] and names:
        problems.append(Problem(f"a run is given twice, here and as {names[0]}", f"run={keys['run']}", "remove run="))
    if keys["out"] and not keys["out"].endswith(".html"):
        problems.append(
            Problem("must end with .html", f"out={keys['out']}", f"use out={Path(keys['out']).with_suffix('.html')}")
        )
    if problems:
        raise ConfigError(problems)
    return keys, names or ([keys["run"]] if keys["run"] else [])


def _is_valid_period(text: str) -> bool:
    try:
        return 1 <= float(text) < float("inf")
    except ValueError:
        return False


def _default_output(directories: list[RunDirectory]) -> Path:
    first = directories[0].shown
    return first / "report.html" if len(directories) == 1 else first.parent / "comparison.html"


def _check_output(out: Path) -> None:
    """Raise CannotCreate if the folder does not exist, and ConfigError if the file exists and is not a report.

    Other files are never overwritten.
    """
    from runner.base.errors import CannotCreate
    from runner.durable import files
    from runner.tools.report.page import GENERATOR_TAG

    if not out.absolute().parent.is_dir():
        raise CannotCreate("folder not found", where=str(out.parent), fix="create it, or choose another out=")
    if files.exists(out):
        is_small = files.is_plain_file(out) and files.file_size(out) < _MAX_REPORT_BYTES
        is_ours = is_small and GENERATOR_TAG.encode() in files.read(out)[:4096]
        if not is_ours:
            raise ConfigError(Problem("already exists and is not a report", f"out={out}", "choose another name"))


_MAX_REPORT_BYTES = 10 << 20  # a larger file is not a report, and is not read
