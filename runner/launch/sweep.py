"""Sweeps: every combination of comma lists, one fresh process at a time; a failure does not stop the rest."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from runner.base.configuration import Configuration, Request, compose, expand_sweep, merge_overrides
from runner.base.errors import AccelRunError, ConfigError, Exit, Problem
from runner.durable.directory import check_name, default_name
from runner.durable.files import read_object
from runner.launch.apart import apart
from runner.observe.events import Console
from runner.plan.inventory import take_inventory
from runner.plan.plan import make_plan


@dataclass(frozen=True)
class Trial:
    """One combination: the name and folder of its run, and the words that tell it from the others."""

    request: Request
    name: str
    folder: Path
    words: str

    @property
    def label(self) -> str:
        """Name and words."""
        return f"{self.name}  {self.words}".rstrip()


def sweep(request: Request) -> int:
    """Train each combination in a process of its own and print a table; 0 when all ended well, else the first failure.

    The runs are called NAME-1, NAME-2, ... after `run=NAME`; the same command with the same name resumes those not
    finished. Ctrl-C, SIGTERM or SIGUSR1 lets the trial under way save, and ends the sweep with 75; so does a trial
    that was stopped. Raises AccelRunError, before anything is started, with the problems of every
    combination.
    """
    trials = _trials(request)
    say = Console().info  # goes on when nobody reads any more, as in `| head`
    rows: list[tuple[Trial, int]] = []
    with _OneAtATime() as process:
        for number, trial in enumerate(trials, 1):
            lead = f"[{number}/{len(trials)}] {trial.label}"
            if _is_finished(trial):
                say(f"{lead}: finished already")
                rows.append((trial, 0))
                continue
            say(lead)
            rows.append((trial, process.run(_command(trial))))
            if process.is_stopped() or rows[-1][1] in _STOPPED:
                break
    say(_table(rows))
    last = rows[-1][1]
    if (process.is_stopped() or last in _STOPPED) and (last or len(rows) < len(trials)):
        say(f"\nstopped; the same command with run={trials[0].name.rpartition('-')[0]} goes on")
        return int(Exit.INTERRUPTED if last == Exit.INTERRUPTED else Exit.PREEMPTED)
    return next((code for _, code in rows if code), 0)


def _trials(request: Request) -> list[Trial]:
    """Return the combinations. Raises AccelRunError with every problem of all of them."""
    requests = expand_sweep(request)
    varied = _varied([one.overrides for one in requests])
    configurations, errors = _composed(requests)
    errors += [
        ConfigError(Problem("names the sweep, so it has one value", key))
        for key in ("run", "output_root")
        if key in varied
    ]
    errors += [] if errors else _not_plannable(configurations)
    if errors:
        found = ConfigError(dict.fromkeys(problem for error in errors for problem in error.problems))
        found.exit_code = errors[0].exit_code
        raise found
    settings = configurations[0].settings
    name = settings.run or default_name(f"{configurations[0].choices['task'].name}-sweep")
    check_name(name)
    return [
        Trial(
            Request(merge_overrides(one.overrides, [f"run={name}-{number}"]), one.task_file, one.config_dir),
            f"{name}-{number}",
            settings.root / f"{name}-{number}",
            " ".join(word for word in one.overrides if _key(word) in varied),
        )
        for number, one in enumerate(requests, 1)
    ]


def _composed(requests: Sequence[Request]) -> tuple[list[Configuration], list[AccelRunError]]:
    configurations: list[Configuration] = []
    errors: list[AccelRunError] = []
    for request in requests:
        try:
            configurations.append(compose(request))
        except ConfigError as error:
            errors.append(error)
    return configurations, errors


def _not_plannable(configurations: list[Configuration]) -> list[AccelRunError]:
    """Return what this machine cannot do, found in a process of its own: this one must not hold a GPU meanwhile."""
    try:
        return apart(_plan_all, configurations)
    except BrokenProcessPool:
        return []  # the trials will tell


def _plan_all(configurations: list[Configuration]) -> list[AccelRunError]:
    inventory = take_inventory()
    errors: list[AccelRunError] = []
    for configuration in configurations:
        try:
            make_plan(configuration, inventory)
        except AccelRunError as error:
            errors.append(error)
    return errors


def _varied(combinations: Sequence[tuple[str, ...]]) -> set[str]:
    """Return the keys whose words differ."""
    columns = zip(*combinations, strict=True)
    return {_key(column[0]) for column in columns if len(set(column)) > 1}


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _command(trial: Trial) -> list[str]:
    words = [sys.executable, "-m", "runner", "train", *trial.request.overrides]
    if trial.request.task_file:
        words += ["--task", str(trial.request.task_file)]
    if trial.request.config_dir:
        words += ["--config-dir", str(trial.request.config_dir)]
    return words


class _OneAtATime:
    """Runs processes, and hands on the signals that ask to stop."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def is_stopped(self) -> bool:
        """Tell whether somebody asked to stop."""
        return self.num_asked > 0

    def __enter__(self) -> _OneAtATime:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, words: list[str]) -> int:
        """Run a process to its end and return its exit code, 128 + n for signal n."""
        if self.is_stopped():
            return int(Exit.PREEMPTED)
        with subprocess.Popen(words) as self._process:
            if self.is_stopped():  # between the line above and the process
                self._process.send_signal(signal.SIGUSR1)
            code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """A terminal or a scheduler may have signalled the trial too, which would leave at once at a second SIGTERM.

        SIGUSR1 asks it to save and stop, and does not count as a first.
        """
        self.num_asked += 1
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1 if self.num_asked == 1 else signal.SIGTERM)


# ---------------------------------------------------------------- what the runs say of themselves


def _is_finished(trial: Trial) -> bool:
    """Tell whether the run was made by the same words and is done; anything else is for the run itself to judge."""
    record, asked = _record(trial), trial.request
    return (
        record.get("state") == "done"
        and set(record.get("overrides") or ()) == set(asked.overrides)
        and record.get("task_file") == (str(asked.task_file) if asked.task_file else None)
        and record.get("config_dir") == (str(asked.config_dir) if asked.config_dir else None)
        and not any(_key(word) == "resume" for word in asked.overrides)
    )


def _record(trial: Trial) -> Mapping[str, Any]:
    return read_object(trial.folder / "run.json")


def _table(rows: Sequence[tuple[Trial, int]]) -> str:
    """Return a line per trial: how it ended, and the metrics of its last evaluation."""
    width = max(len(trial.label) for trial, _ in rows)
    lines, losses = [""], {}
    for trial, code in rows:
        metrics = dict(_record(trial).get("metrics") or {})
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        lines.append(f"{trial.label:<{width}}  {_ENDED.get(code, f'exit {code}'):<8}  {shown}".rstrip())
        if code == 0 and "val/loss" in metrics:
            losses[trial.label] = metrics["val/loss"]
    if len(losses) > 1:
        lines.append(f"lowest val/loss: {min(losses, key=lambda label: losses[label])}")
    return "\n".join(lines)


_STOPPED = (Exit.PREEMPTED, Exit.INTERRUPTED)
_ENDED = {0: "done", int(Exit.PREEMPTED): "stopped"}
