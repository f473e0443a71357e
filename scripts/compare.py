"""Whether two runs, or the same training at two commits, have the same losses, bit for bit.

    python scripts/compare.py RUN_A RUN_B
    python scripts/compare.py --commits A B -- task=gpt task.size=tiny updates=20

A run is a name in outputs/ or a folder. The rows of metrics.jsonl are compared by phase and update: losses, gradient
norms, metrics of evaluations and fits, learning rates; not times, memory and readings of the monitor. If an update has
several rows, as after a resume, the last one is used.

With --commits, each commit is checked out in a temporary folder and trains there, in this environment, with the
settings after `--`; each update has a row unless log_every= is set. Compare a commit with itself to find out whether
the training is repeatable.

Exit 0: identical. 1: different, or one has updates that the other lacks. 64: invalid command line. 66: no such run,
commit, or rows. If a training fails, its exit code is returned.
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
OURS = ("run", "output_root", "resume")  # settings that this script needs for itself
USUAL = ("log_every=1", "tracker=none")  # unless overridden

Update = tuple[str, int]  # phase, number
Numbers = dict[str, float | None]  # null stands for a number that is not finite


@dataclass(frozen=True)
class Rows:
    """What a run has told of its mathematics.

    updates   in the order of the file
    damaged   unreadable lines
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
        """The difference in units of the larger one; infinite where one of them is not finite."""
        if self.ours is None or self.theirs is None:
            return math.inf
        largest = max(abs(self.ours), abs(self.theirs))
        return abs(self.ours - self.theirs) / largest if largest else 0.0  # 0.0 and -0.0 have other bits


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common and what not.

    num_common   updates that both have
    differences  in the order of the first
    lacking      in words, the updates and metrics that the first does not have, and those that the second does not
    """

    num_common: int
    differences: Sequence[Difference]
    lacking: tuple[Sequence[str], Sequence[str]]

    @property
    def is_identical(self) -> bool:
        """True where each number of one is in the other too, with the same bits."""
        return not self.differences and not any(self.lacking)


def main(arguments: Sequence[str]) -> int:
    """Compare what the command line names; return the exit code."""
    given = list(arguments)
    words = given[given.index("--") + 1 :] if "--" in given else []
    try:
        parsed = _parser().parse_args(given[: given.index("--")] if "--" in given else given)
        if words and not parsed.commits:
            raise UsageError("settings are of a training, and runs are trained already", fix="use --commits A B")
        one, other = parsed.one, parsed.other
        if not parsed.commits:
            return _shown(read(RunDirectory.find(OUTPUTS, one)), read(RunDirectory.find(OUTPUTS, other)))
        for commit in (one, other):  # before one of them trains
            _must_be_there(commit)
        with private_folder() as folder:
            runs = [_trained(commit, folder / side, words) for side, commit in (("a", one), ("b", other))]
            return _shown(*(read(run, f"commit {commit}") for run, commit in zip(runs, (one, other), strict=True)))
    except AccelRunError as error:
        print(format_error(error), file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("stopped; nothing was compared", file=sys.stderr)
        return int(Exit.INTERRUPTED)


def read(run: RunDirectory, name: str = "") -> Rows:
    """Return what the run has told. Raises InputMissing where that is nothing."""
    updates: dict[Update, Numbers] = {}
    num_rows = 0
    for row in files.read_rows(run.metrics):
        phase, update, numbers = row.get("phase"), row.get("update"), _numbers(row)
        if not isinstance(phase, str) or type(update) is not int or not all(map(_is_said, numbers.values())):
            continue  # damaged
        num_rows += 1
        if numbers:
            updates.setdefault((phase, update), {}).update(numbers)
    if not updates:
        what = f"{run.metrics} must have rows with losses, but has none"
        raise InputMissing(what, fix="name a run that has trained")
    return Rows(name or f"run {run.path.name}", updates, _num_lines(run.metrics) - num_rows)


def compare(one: Rows, other: Rows) -> Comparison:
    """Return how the two differ, in the order of the first."""
    differences: list[Difference] = []
    lacks: tuple[list[str], list[str]] = ([], [])
    for update, ours in one.updates.items():
        theirs = other.updates.get(update)
        if theirs is None:
            continue
        for metric in (*ours, *(name for name in theirs if name not in ours)):
            if metric not in ours or metric not in theirs:
                lacks[metric in ours].append(f"{metric} of {_named(update)}")
            elif _bits(ours[metric]) != _bits(theirs[metric]):
                differences.append(Difference(update, metric, ours[metric], theirs[metric]))
    lacks[0][:0] = _in_words([update for update in other.updates if update not in one.updates])
    lacks[1][:0] = _in_words([update for update in one.updates if update not in other.updates])
    return Comparison(len(one.updates.keys() & other.updates.keys()), differences, lacks)


# ---------------------------------------------------------------- rows


def _numbers(row: Mapping[str, Any]) -> Numbers:
    return {key: value for key, value in row.items() if key == "lr" or key.startswith(MATHEMATICS)}


def _is_said(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _num_lines(path: Path) -> int:
    return len(files.read(path).splitlines())


def _bits(value: float | None) -> str:
    return "" if value is None else float(value).hex()


def _named(update: Update) -> str:
    phase, number = update
    return f"update {number:,} of {phase}"


def _in_words(updates: Sequence[Update]) -> list[str]:
    """Return the updates phase by phase: how many, and from which to which."""
    numbers: dict[str, list[int]] = {}
    for phase, number in updates:
        numbers.setdefault(phase, []).append(number)
    return [
        _named((phase, those[0]))
        if len(those) == 1
        else f"{len(those):,} updates of {phase}, {min(those):,} to {max(those):,}"
        for phase, those in numbers.items()
    ]


# ---------------------------------------------------------------- output


def _shown(one: Rows, other: Rows) -> int:
    """Print how the two compare; return the exit code."""
    found = compare(one, other)
    for side, rows in (("A", one), ("B", other)):
        damaged = f", {rows.damaged:,} damaged lines left out" if rows.damaged else ""
        print(f"{side}           {rows.name}: {len(rows.updates):,} updates with numbers{damaged}")
    for side, lacking in zip("AB", found.lacking, strict=True):
        for what in lacking[:MOST]:
            print(f"{side} lacks     {what}")
        if len(lacking) > MOST:
            print(f"{side} lacks     {len(lacking) - MOST:,} more")
    if found.differences:
        largest = max(found.differences, key=lambda difference: difference.relative)
        print(f"first       {_difference(found.differences[0])}")
        print(f"largest     {_difference(largest)}")
        num = len({difference.update for difference in found.differences})
        print(f"different   in {num:,} of the {found.num_common:,} updates that both have")
    else:
        whole = "" if found.is_identical else ", as far as both have them"
        print(f"identical   {found.num_common:,} updates, bit for bit{whole}")
    return 0 if found.is_identical else 1


def _difference(difference: Difference) -> str:
    ours, theirs = ("not finite" if value is None else repr(value) for value in (difference.ours, difference.theirs))
    where = f"{_named(difference.update)}: {difference.metric}"
    return f"{where} is {ours} in A, {theirs} in B ({difference.relative:.2g} relative)"


# ---------------------------------------------------------------- commits


def _trained(commit: str, folder: Path, words: Sequence[str]) -> RunDirectory:
    """Train at that commit; return the run. Raises AccelRunError with the exit code of a training that fails."""
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    taken = sorted(keys & set(OURS))
    if taken:
        raise UsageError(f"{', '.join(taken)} must be left to this script", fix="leave out what names the run")
    usual = [word for word in USUAL if word.partition("=")[0] not in keys]
    outputs = folder.with_name(f"{folder.name}-outputs")
    with _checked_out(commit, folder):
        # A safe path: neither the folder we are in nor that of a script comes before the commit's own code.
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        _must_be_used(folder, environment)
        print(f"trains at {commit}", file=sys.stderr, flush=True)
        line = [sys.executable, "-m", "runner", "train", *words, *usual, "run=compared", f"output_root={outputs}"]
        done = subprocess.run(line, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise _failed(commit, done.returncode)
    return RunDirectory.find(outputs, "compared")


def _must_be_there(commit: str) -> None:
    """Raise InputMissing where there is no such commit."""
    if _git("rev-parse", "--quiet", "--verify", "--end-of-options", f"{commit}^{{commit}}").returncode:
        raise InputMissing(f"there is no commit {commit} in {ROOT}", fix="see git log")


@contextmanager
def _checked_out(commit: str, folder: Path) -> Iterator[None]:
    """The folder holds the files of that commit, until the end of the block."""
    made = _git("worktree", "add", "--detach", str(folder), commit)
    if made.returncode:
        raise InputMissing(f"commit {commit} cannot be checked out: {made.stderr.strip()}", fix="see git worktree list")
    try:
        yield
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _must_be_used(folder: Path, environment: Mapping[str, str]) -> None:
    """Raise AccelRunError where Python would take the runner from somewhere else than the folder."""
    asked = [sys.executable, "-c", "import runner; print(runner.__file__)"]
    found = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(found).is_relative_to(folder):
        what = f"the code of the commit must be what runs, but Python takes {found or 'none'}"
        raise AccelRunError(what, where=str(folder), fix="run this with the Python of scripts/setup.sh")


def _failed(commit: str, code: int) -> AccelRunError:
    how = f"ended with {code}" if code > 0 else f"was killed by signal {-code}"
    error = AccelRunError(f"the training at {commit} {how}; its output is above", fix="fix the settings")
    error.exit_code = Exit(code) if code in set(Exit) else Exit.SOFTWARE
    return error


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


class _Parser(argparse.ArgumentParser):
    """Argparse with our exit code for an invalid command line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix="python scripts/compare.py --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", action="store_true", help="A and B are commits, to be trained with what follows")
    parser.add_argument("one", metavar="A", help="a run, or a commit")
    parser.add_argument("other", metavar="B", help="another one")
    return parser


MOST = 5  # lines of what one of them lacks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
