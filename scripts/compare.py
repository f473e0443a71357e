"""Compare the losses of two runs, or of the same training at two commits, bit for bit.

    python scripts/compare.py RUN_A RUN_B
    python scripts/compare.py --commits A B -- task=gpt task.size=tiny updates=20

A run is a name in outputs/ or a folder. The rows of metrics.jsonl are compared by phase and update: losses, gradient
norms, metrics of evaluations and fits, learning rates; not times, memory and monitor readings. If an update has
several rows, as after a resume, the last one is used.

With --commits, each commit is checked out in a temporary folder and trains there, in this environment, with the
settings after `--`; each update has a row unless log_every= is set. Compare a commit with itself to find out whether
the training is repeatable.

Exit 0: identical. 1: different, or one has updates that the other lacks. 64: invalid command line. 66: no such run or
commit, or no rows. If training fails, its exit code is returned.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runner.base.errors import AccelRunError, Exit, InputMissing, UsageError, format_error
from runner.durable import files
from runner.durable.directory import RunDirectory
from runner.host.scratch import private_folder

ROOT = Path(__file__).resolve().parents[1]
MATHEMATICS = ("train/", "val/", "fit/")
OUTPUTS = Path("outputs")
RESERVED = ("run", "output_root", "resume")  # settings that this script sets
DEFAULTS = ("log_every=1", "tracker=none")  # unless overridden

Update = tuple[str, int]  # phase, number
Numbers = dict[str, float | None]  # null stands for a number that is not finite


@dataclass(frozen=True)
class Rows:
    """The recorded mathematics of a run: losses, metrics and learning rates by update.

    updates   in the order of the file
    damaged   number of unreadable lines
    """

    name: str
    updates: Mapping[Update, Numbers]
    damaged: int


@dataclass(frozen=True)
class Difference:
    """A number that differs; None if it is not finite."""

    update: Update
    metric: str
    ours: float | None
    theirs: float | None

    @property
    def relative(self) -> float:
        """The difference relative to the larger value; infinite if one of them is not finite."""
        if self.ours is None or self.theirs is None:
            return math.inf
        largest = max(abs(self.ours), abs(self.theirs))
        return abs(self.ours - self.theirs) / largest if largest else 0.0  # 0.0 and -0.0 differ in their bits


@dataclass(frozen=True)
class Comparison:
    """The common updates of two runs, and their differences.

    num_common   number of updates in both
    differences  in the order of the first run
    lacking      descriptions of the updates and metrics that are missing in the first run, and in the second
    """

    num_common: int
    differences: Sequence[Difference]
    lacking: tuple[Sequence[str], Sequence[str]]

    @property
    def is_identical(self) -> bool:
        """True if both have bit-identical numbers."""
        return not self.differences and not any(self.lacking)


def main(arguments: Sequence[str]) -> int:
    """Compare the runs or commits of the command line; return the exit code."""
    given = list(arguments)
    settings = given[given.index("--") + 1 :] if "--" in given else []
    try:
        parsed = _parser().parse_args(given[: given.index("--")] if "--" in given else given)
        if settings and not parsed.commits:
            raise UsageError(
                "settings apply only to --commits, because runs are already trained", fix="use --commits A B"
            )
        one, other = parsed.one, parsed.other
        if not parsed.commits:
            return _print_comparison(read(RunDirectory.find(OUTPUTS, one)), read(RunDirectory.find(OUTPUTS, other)))
        for commit in (one, other):  # check both before the first one trains
            _check_commit(commit)
        with private_folder() as folder:
            runs = [_train_at(commit, folder / side, settings) for side, commit in (("a", one), ("b", other))]
            return _print_comparison(
                *(read(run, f"commit {commit}") for run, commit in zip(runs, (one, other), strict=True))
            )
    except AccelRunError as error:
        print(format_error(error), file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("stopped; nothing was compared", file=sys.stderr)
        return int(Exit.INTERRUPTED)


def read(run: RunDirectory, name: str = "") -> Rows:
    """Read the metrics of a run. Raises InputMissing if there are none."""
    updates: dict[Update, Numbers] = {}
    num_rows = 0
    for row in files.read_rows(run.metrics):
        phase, update, numbers = row.get("phase"), row.get("update"), _select_numbers(row)
        if not isinstance(phase, str) or type(update) is not int or not all(map(_is_number, numbers.values())):
            continue  # damaged
        num_rows += 1
        if numbers:
            updates.setdefault((phase, update), {}).update(numbers)
    if not updates:
        what = f"{run.metrics} must have rows with losses, but has none"
        raise InputMissing(what, fix="name a run that has trained")
    return Rows(name or f"run {run.path.name}", updates, _num_lines(run.metrics) - num_rows)


def compare(one: Rows, other: Rows) -> Comparison:
    """Return the differences of two runs, in the order of the first."""
    differences: list[Difference] = []
    lacks: tuple[list[str], list[str]] = ([], [])
    for update, ours in one.updates.items():
        theirs = other.updates.get(update)
        if theirs is None:
            continue
        for metric in (*ours, *(name for name in theirs if name not in ours)):
            if metric not in ours or metric not in theirs:
                lacks[metric in ours].append(f"{metric} of {_format_update(update)}")
            elif _bits(ours[metric]) != _bits(theirs[metric]):
                differences.append(Difference(update, metric, ours[metric], theirs[metric]))
    lacks[0][:0] = _describe_updates([update for update in other.updates if update not in one.updates])
    lacks[1][:0] = _describe_updates([update for update in one.updates if update not in other.updates])
    return Comparison(len(one.updates.keys() & other.updates.keys()), differences, lacks)


# ---------------------------------------------------------------- rows


def _select_numbers(row: Mapping[str, Any]) -> Numbers:
    return {key: value for key, value in row.items() if key == "lr" or key.startswith(MATHEMATICS)}


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _num_lines(path: Path) -> int:
    return len(files.read(path).splitlines())


def _bits(value: float | None) -> str:
    return "" if value is None else float(value).hex()


def _format_update(update: Update) -> str:
    phase, number = update
    return f"update {number:,} of {phase}"


def _describe_updates(updates: Sequence[Update]) -> list[str]:
    """Describe the updates of each phase: their number, the first and the last."""
    numbers: dict[str, list[int]] = {}
    for phase, number in updates:
        numbers.setdefault(phase, []).append(number)
    return [
        _format_update((phase, those[0]))
        if len(those) == 1
        else f"{len(those):,} updates of {phase}, {min(those):,} to {max(those):,}"
        for phase, those in numbers.items()
    ]


# ---------------------------------------------------------------- output


def _print_comparison(one: Rows, other: Rows) -> int:
    """Print the comparison; return the exit code."""
    found = compare(one, other)
    for side, rows in (("A", one), ("B", other)):
        damaged = f", {rows.damaged:,} damaged lines skipped" if rows.damaged else ""
        print(f"{side}           {rows.name}: {len(rows.updates):,} updates with numbers{damaged}")
    for side, lacking in zip("AB", found.lacking, strict=True):
        for what in lacking[:MAX_LACKING]:
            print(f"{side} lacks     {what}")
        if len(lacking) > MAX_LACKING:
            print(f"{side} lacks     {len(lacking) - MAX_LACKING:,} more")
    if found.differences:
        largest = max(found.differences, key=lambda difference: difference.relative)
        print(f"first       {_format_difference(found.differences[0])}")
        print(f"largest     {_format_difference(largest)}")
        num = len({difference.update for difference in found.differences})
        print(f"different   in {num:,} of the {found.num_common:,} updates that both have")
    else:
        whole = "" if found.is_identical else ", except for what one of them lacks"
        print(f"identical   {found.num_common:,} updates, bit for bit{whole}")
    return 0 if found.is_identical else 1


def _format_difference(difference: Difference) -> str:
    ours, theirs = ("not finite" if value is None else repr(value) for value in (difference.ours, difference.theirs))
    where = f"{_format_update(difference.update)}: {difference.metric}"
    return f"{where} is {ours} in A, {theirs} in B ({difference.relative:.2g} relative)"


# ---------------------------------------------------------------- commits


def _train_at(commit: str, folder: Path, settings: Sequence[str]) -> RunDirectory:
    """Train at that commit; return the run. Raises AccelRunError with the exit code of training if it fails."""
    keys = {word.partition("=")[0].lstrip("+") for word in settings}
    taken = sorted(keys & set(RESERVED))
    if taken:
        raise UsageError(f"{', '.join(taken)} cannot be set, because this script sets it", fix="leave it out")
    usual = [word for word in DEFAULTS if word.partition("=")[0] not in keys]
    outputs = folder.with_name(f"{folder.name}-outputs")
    with _check_out(commit, folder):
        # With PYTHONSAFEPATH, neither the current folder nor that of the script precedes the code of the commit.
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        _check_import(folder, environment)
        print(f"training at {commit}", file=sys.stderr, flush=True)
        line = [sys.executable, "-m", "runner", "train", *settings, *usual, "run=compared", f"output_root={outputs}"]
        done = subprocess.run(line, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise _training_error(commit, done.returncode)
    return RunDirectory.find(outputs, "compared")


def _check_commit(commit: str) -> None:
    """Raise InputMissing if there is no such commit."""
    if _git("rev-parse", "--quiet", "--verify", "--end-of-options", f"{commit}^{{commit}}").returncode:
        raise InputMissing(f"there is no commit {commit} in {ROOT}", fix="see git log")


@contextmanager
def _check_out(commit: str, folder: Path) -> Iterator[None]:
    """Check out the commit in the folder, until the end of the block."""
    made = _git("worktree", "add", "--detach", str(folder), commit)
    if made.returncode:
        raise InputMissing(f"commit {commit} cannot be checked out: {made.stderr.strip()}", fix="see git worktree list")
    try:
        yield
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _check_import(folder: Path, environment: Mapping[str, str]) -> None:
    """Raise AccelRunError if Python would import the runner from outside of the folder."""
    command = [sys.executable, "-c", "import runner; print(runner.__file__)"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(found).is_relative_to(folder):
        what = f"the code of the commit must be imported, but Python imports {found or 'none'}"
        raise AccelRunError(what, where=str(folder), fix="run this with the Python of scripts/setup.sh")


def _training_error(commit: str, code: int) -> AccelRunError:
    how = f"ended with {code}" if code > 0 else f"was killed by signal {-code}"
    error = AccelRunError(f"the training at {commit} {how}; its output is above", fix="fix the settings")
    error.exit_code = Exit(code) if code in set(Exit) else Exit.SOFTWARE
    return error


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


class _Parser(argparse.ArgumentParser):
    """An argument parser with the exit code of accel-run for an invalid command line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix="python scripts/compare.py --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--commits", action="store_true", help="A and B are commits; train each with the settings after --"
    )
    parser.add_argument("one", metavar="A", help="a run, or a commit")
    parser.add_argument("other", metavar="B", help="the other run or commit")
    return parser


MAX_LACKING = 5  # lines about missing updates and metrics of a run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
