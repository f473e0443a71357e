"""`accel-run report`: a page about a run, about several beside each other, or about a sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.secret import fit_to_show
from runner.commands.arguments import own_words, teller

if TYPE_CHECKING:
    from runner.durable.directory import RunDirectory

HELP = """usage: accel-run report [last|NAME|DIR ...] [out=FILE.html] [benchmarks=DIR] [output_root=outputs]

Writes one HTML page that needs nothing but itself: what was run and where, its figures, what limited it, its curves,
time and memory by part, the machine over time, what it predicts, its settings, and how to repeat it. What is not known
is named with the reason. With several runs they are compared: curves over each other, figures, differing settings.
Runs are read and not changed, finished or not.

  last, NAME, DIR   the run written to last (default), runs by name, or their folders; also as run=NAME; or a sweep or
                    search: the table of its trials, what they reached, and the best of them compared
  out=FILE.html     where the page goes (default: report.html in the run's folder; of several runs
                    comparison.html beside the first of them)
  benchmarks=DIR    show the results of accel-run benchmark in that folder too (default: those in the run's folder)


examples
  accel-run report
  accel-run report first second
  accel-run report outputs/first benchmarks=benchmarks out=first.html
"""

OWN = {"out": "", "benchmarks": "", "output_root": "outputs", "run": ""}


def run(words: list[str]) -> int:
    """Write the page, and say where it is."""
    from runner.base.places import as_path
    from runner.durable.directory import LAST, RunDirectory, find_sweep
    from runner.durable.origin import say_skipped

    own, rest = read_words(words)
    root = as_path(own["output_root"])
    if len(rest) == 1 and (folder := find_sweep(root, rest[0])):
        return _of_sweep(folder, own["out"])
    directories = [RunDirectory.find(root, wanted) for wanted in rest or [LAST]]
    for directory in directories:
        say_skipped(directory, teller("report"))
    _refuse_twice(directories, rest)
    benchmarks = as_path(own["benchmarks"]) if own["benchmarks"] else None
    if benchmarks is not None and not benchmarks.is_dir():
        raise InputMissing("there is no such folder", where=f"benchmarks={own['benchmarks']}", fix="leave it out")
    if benchmarks is not None and not (benchmarks / "results.csv").is_file():
        what = "has no results.csv, which accel-run benchmark writes"
        raise InputMissing(what, where=f"benchmarks={own['benchmarks']}", fix="name the folder that has it")
    out = as_path(own["out"]) if own["out"] else _usual_place(directories)
    _refuse_place(out)
    from runner.report.comparison import comparison_of
    from runner.report.page import html_of, page_of
    from runner.report.story import read_story

    stories = [read_story(directory) for directory in directories]
    html = html_of(page_of(stories[0], benchmarks) if len(stories) == 1 else comparison_of(stories))
    shown = _written(html, out, directories[0])
    print(fit_to_show(f"written to {shown} ({len(html.encode()) / 1000:.0f} KB)"))
    for story in stories:
        if story.missing:
            lead = f"{story.name}: " if len(stories) > 1 else ""
            print(fit_to_show(f"{lead}note: {'; '.join(story.missing.values())}"), file=sys.stderr)
    return 0


def _of_sweep(folder: Path, given: str) -> int:
    """Write the page about a sweep or a search, and say where it is."""
    from runner.base.places import as_path
    from runner.durable import files
    from runner.launch.trials import Sweep
    from runner.report.page import html_of
    from runner.report.sweeps import page_of_sweep

    out = as_path(given) if given else folder / "report.html"
    _refuse_place(out)
    html = html_of(page_of_sweep(Sweep.read(folder)))
    files.atomic_write(out.absolute(), html)
    print(fit_to_show(f"written to {out} ({len(html.encode()) / 1000:.0f} KB)"))
    return 0


def read_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the command's keys, and the runs. Raises ConfigError with every slip."""
    from runner.base.schema import did_you_mean

    own, rest, _ = own_words(words, OWN)
    problems = []
    for word in words:
        key, has_value, _ = word.partition("=")
        if word.startswith("-"):
            problems.append(Problem("unknown option", word, "use accel-run report --help"))
        elif has_value and key not in OWN and not Path(word).is_dir():
            problems.append(Problem("unknown key", word, did_you_mean(key, OWN) or f"known: {', '.join(OWN)}"))
    if own["run"] and rest:
        problems.append(Problem(f"names a second run, besides {rest[0]}", f"run={own['run']}", "leave out run="))
    if own["benchmarks"] and len(rest) > 1:
        problems.append(Problem("is for the page of one run", f"benchmarks={own['benchmarks']}", "leave it out"))
    if own["out"] and not own["out"].endswith(".html"):
        problems.append(Problem("must end with .html", f"out={own['out']}", f"use out={own['out'] or 'report'}.html"))
    if problems:
        raise ConfigError(problems)
    return own, rest or ([own["run"]] if own["run"] else [])


def _refuse_twice(directories: list[RunDirectory], words: list[str]) -> None:
    """Raise ConfigError where a run is named twice: there is nothing to be compared with itself."""
    paths = [directory.path.resolve() for directory in directories]
    if twice := [word for at, word in enumerate(words) if paths[at] in paths[:at]]:
        raise ConfigError(Problem("is a run that was named before", word, "name another one") for word in twice)


def _usual_place(directories: list[RunDirectory]) -> Path:
    first = directories[0].shown
    return first / "report.html" if len(directories) == 1 else first.parent / "comparison.html"


def _refuse_place(out: Path) -> None:
    """Raise CannotCreate where there is no such folder, and ConfigError where what is there is no report.

    Somebody else's work is not written over.
    """
    from runner.base.errors import CannotCreate
    from runner.durable import files
    from runner.report.page import MARK, MOST_BYTES

    if not out.absolute().parent.is_dir():
        raise CannotCreate("there is no such folder", where=str(out.parent), fix="make it, or choose another out=")
    if files.exists(out):
        is_small = files.is_plain_file(out) and files.size_of(out) < 2 * MOST_BYTES
        is_ours = is_small and MARK.encode() in files.read(out)[:4096]
        if not is_ours:
            raise ConfigError(Problem("is there already, and is no report", f"out={out}", "choose another name"))


def _written(html: str, out: Path, directory: RunDirectory) -> Path:
    """Write the page; the folder of a run is written to through its own door. Returns the path as it was given."""
    from runner.base.errors import StorageError
    from runner.durable import files

    is_of_the_run = out.absolute() == directory.report
    try:
        if is_of_the_run:
            directory.write("report.html", html)
        else:
            files.atomic_write(out.absolute(), html)
    except StorageError as error:  # such as a run that is not ours to write to
        fix = error.problems[0].fix or "use out=FILE.html, in a folder that you may write to"
        raise StorageError(error.problems[0].what, where=str(out), fix=fix) from error
    return directory.shown / "report.html" if is_of_the_run else out
