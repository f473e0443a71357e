"""`accel-run report`: write an HTML page about a run, several runs, or a sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, Problem
from runner.base.secret import fit_to_show
from runner.commands.arguments import own_arguments, teller

if TYPE_CHECKING:
    from runner.durable.directory import RunDirectory

HELP = """usage: accel-run report [last|NAME|DIR ...] [out=FILE.html] [output_root=outputs]

Writes a self-contained HTML page: task and machine, key figures, the bottleneck, training curves, time and memory by
part, machine metrics over time, predictions, settings, and how to reproduce the run. Missing data is listed with the
reason. With several runs, the page compares their curves, figures and differing settings. Runs are only read, finished
or not.

  last, NAME, DIR   the most recent run (default), runs by name, or their folders; also as run=NAME; for a sweep or
                    search: the table of its trials and a comparison of the best ones
  out=FILE.html     output file (default: report.html in the run's folder; for several runs comparison.html beside the
                    first one)

examples
  accel-run report
  accel-run report first second
  accel-run report outputs/first out=first.html
"""

OWN = {"out": "", "output_root": "outputs", "run": ""}


def run(words: list[str]) -> int:
    """Write the page and print its path."""
    from runner.base.paths import as_path
    from runner.durable.directory import LAST, RunDirectory, find_sweep
    from runner.durable.run_request import say_skipped

    own, rest = read_words(words)
    root = as_path(own["output_root"])
    if len(rest) == 1 and (folder := find_sweep(root, rest[0])):
        return _of_sweep(folder, own["out"])
    directories = [RunDirectory.find(root, wanted) for wanted in rest or [LAST]]
    for directory in directories:
        say_skipped(directory, teller("report"))
    _refuse_twice(directories, rest)
    out = as_path(own["out"]) if own["out"] else _usual_place(directories)
    _refuse_place(out)
    from runner.tools.report.comparison import comparison_of
    from runner.tools.report.page import html_of
    from runner.tools.report.run_data import read_story
    from runner.tools.report.run_page import page_of

    stories = [read_story(directory) for directory in directories]
    html = html_of(page_of(stories[0]) if len(stories) == 1 else comparison_of(stories))
    shown = _written(html, out, directories[0])
    print(fit_to_show(f"written to {shown} ({len(html.encode()) / 1000:.0f} KB)"))
    for story in stories:
        if story.missing:
            lead = f"{story.name}: " if len(stories) > 1 else ""
            print(fit_to_show(f"{lead}note: {'; '.join(story.missing.values())}"), file=sys.stderr)
    return 0


def _of_sweep(folder: Path, given: str) -> int:
    """Write the page about a sweep or a search and print its path."""
    from runner.base.paths import as_path
    from runner.durable import files
    from runner.sweeps.trials import Sweep
    from runner.tools.report.page import html_of
    from runner.tools.report.sweep_page import page_of_sweep

    out = as_path(given) if given else folder / "report.html"
    _refuse_place(out)
    html = html_of(page_of_sweep(Sweep.read(folder)))
    files.atomic_write(out.absolute(), html)
    print(fit_to_show(f"written to {out} ({len(html.encode()) / 1000:.0f} KB)"))
    return 0


def read_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the command's keys, and the runs. Raises ConfigError listing all problems."""
    from runner.config.schema import did_you_mean

    own, rest, _ = own_arguments(words, OWN)
    problems = []
    for word in words:
        key, has_value, _ = word.partition("=")
        if word.startswith("-"):
            problems.append(Problem("unknown option", word, "use accel-run report --help"))
        elif has_value and key not in OWN and not Path(word).is_dir():
            problems.append(Problem("unknown key", word, did_you_mean(key, OWN) or f"known: {', '.join(OWN)}"))
    if own["run"] and rest:
        problems.append(Problem(f"names a second run in addition to {rest[0]}", f"run={own['run']}", "leave out run="))
    if own["out"] and not own["out"].endswith(".html"):
        problems.append(Problem("must end with .html", f"out={own['out']}", f"use out={own['out'] or 'report'}.html"))
    if problems:
        raise ConfigError(problems)
    return own, rest or ([own["run"]] if own["run"] else [])


def _refuse_twice(directories: list[RunDirectory], words: list[str]) -> None:
    """Raise ConfigError if a run is given twice."""
    paths = [directory.path.resolve() for directory in directories]
    if twice := [word for at, word in enumerate(words) if paths[at] in paths[:at]]:
        raise ConfigError(Problem("is the same run as an earlier argument", word, "remove it") for word in twice)


def _usual_place(directories: list[RunDirectory]) -> Path:
    first = directories[0].shown
    return first / "report.html" if len(directories) == 1 else first.parent / "comparison.html"


def _refuse_place(out: Path) -> None:
    """Raise CannotCreate if the folder does not exist, and ConfigError if the file exists and is not a report.

    Other files are never overwritten.
    """
    from runner.base.errors import CannotCreate
    from runner.durable import files
    from runner.tools.report.page import MARK, MOST_BYTES

    if not out.absolute().parent.is_dir():
        raise CannotCreate("folder not found", where=str(out.parent), fix="create it, or choose another out=")
    if files.exists(out):
        is_small = files.is_plain_file(out) and files.size_of(out) < 2 * MOST_BYTES
        is_ours = is_small and MARK.encode() in files.read(out)[:4096]
        if not is_ours:
            raise ConfigError(Problem("already exists and is not a report", f"out={out}", "choose another name"))


def _written(html: str, out: Path, directory: RunDirectory) -> Path:
    """Write the page, through RunDirectory if it belongs to the run. Returns the path as given."""
    from runner.base.errors import StorageError
    from runner.durable import files

    is_of_the_run = out.absolute() == directory.report
    try:
        if is_of_the_run:
            directory.write("report.html", html)
        else:
            files.atomic_write(out.absolute(), html)
    except StorageError as error:  # for example no write permission in the run's folder
        fix = error.problems[0].fix or "use out=FILE.html in a writable folder"
        raise StorageError(error.problems[0].what, where=str(out), fix=fix) from error
    return directory.shown / "report.html" if is_of_the_run else out
