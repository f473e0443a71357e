"""Sweeps: train every combination of values in a new process; a failure does not stop the rest."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, IncompatibleResume
from runner.base.text import abbreviate, terminal_width
from runner.config.configuration import Configuration
from runner.config.request import Request, format_override, merge_overrides, override_key
from runner.durable import files
from runner.durable.directory import SWEEP, RunDirectory, check_run_name, generate_run_name
from runner.durable.record_files import read_record
from runner.durable.run_state import process_state_name
from runner.durable.weight_source import resolve_run_names
from runner.engine.repro_script import build_argv
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import take_inventory
from runner.plan.planner import make_plan
from runner.plan.run_plan import Plan
from runner.records.events import LEVEL_VARIABLE, Console
from runner.records.run_record import ProcessRecord
from runner.records.sweep_record import Goal, SweepRecord
from runner.sweeps.packing import Packing, packed
from runner.sweeps.pool import Pool
from runner.sweeps.sweep_syntax import SearchSpace, composed, expand_sweep
from runner.sweeps.trials import STOPPED, Result, Sweep, Trial, summary, table, told, winner, without_metric


@dataclass(frozen=True)
class SweepRequest:
    """Options of a sweep besides its settings.

    metric    metric that compares trials, and best_is its direction; None: those of early_stopping
    together  number of concurrent trials
    retry     run failed trials again
    """

    metric: str | None = None
    best_is: Literal["min", "max"] | None = None
    together: int = 1
    retry: bool = False


class Source(Protocol):
    """Source of trials."""

    def next(self) -> Trial | None:
        """Return the next trial to run, None if there is none at present."""

    def ended(self, result: Result) -> None:
        """Record the result of a trial. Raises AccelRunError if no further trial can be requested."""

    @property
    def total(self) -> int:
        """Return the total number of trials."""


def sweep(request: Request, wish: SweepRequest) -> int:
    """Train each combination in a subprocess and print a table; 0 if all succeeded, else the first failure.

    The runs are named NAME-1, NAME-2, ... in the folder NAME, after `run=NAME`; the same command resumes unfinished
    ones. Ctrl-C, SIGTERM or SIGUSR1 let the running trials save, and end the sweep with 75; so does a trial that was
    stopped. Raises AccelRunError with the problems of every combination before anything is started, and RunInUse if
    another process has locked the folder.
    """
    requests = expand_sweep(request)
    configurations = composed(requests)
    must_be_plannable(configurations)
    varied = _varied([one.overrides for one in requests])
    fixed = tuple(word for word in requests[0].overrides if override_key(word) not in varied)
    choices = [tuple(word for word in one.overrides if override_key(word) in varied) for one in requests]
    packing = packed(configurations, wish.together)
    with opened("sweep", replace(request, overrides=fixed), configurations[0], wish) as (directory, found):
        enlist(found, choices, directory.name)
        return walk(directory, found, _Grid(found, retry=wish.retry), packing, configurations[0])


class opened:  # noqa: N801 - used as a function
    """Create or open the folder of a sweep, lock it, and check that its trials have the same settings.

    fixed          settings that all trials have in common
    configuration  configuration of one trial
    Raises IncompatibleResume if the folder has a sweep with other settings, DataError if its file is damaged.
    """

    def __init__(
        self,
        kind: Literal["sweep", "search"],
        fixed: Request,
        configuration: Configuration,
        wish: SweepRequest,
        axes: Sequence[SearchSpace] = (),
    ) -> None:
        settings, task = configuration.settings, configuration.choices["task"].name
        name = settings.run or generate_run_name(f"{task}-{kind}")
        check_run_name(name)
        self.directory = RunDirectory.create_or_open(settings.root, name, for_sweep=True)
        early = settings.early_stopping
        before = Sweep.read(self.directory.path)
        record = SweepRecord(
            kind=kind,
            task=task,
            task_file=str(fixed.task_file) if fixed.task_file else None,
            config_dir=str(fixed.config_dir) if fixed.config_dir else None,
            launcher=configuration.choices["launcher"].name,
            command=shlex.join(["accel-run", *sys.argv[1:]]),
            fixed=tuple(word for word in fixed.overrides if override_key(word) not in _PLACE),
            goal=Goal(wish.metric or early.metric, wish.best_is or early.best_is),
            space={axis.key: str(axis) for axis in axes},
            process=ProcessRecord(started=before.record.process.started),
        )
        self.sweep = Sweep(self.directory.path, record, before.trials, before.codes, before.record)
        try:
            if files.exists(self.directory.path / SWEEP):
                _must_be_whole(before)
                _must_agree(before, record, name)
        except AccelRunError:
            self.directory.release()
            raise

    def __enter__(self) -> tuple[RunDirectory, Sweep]:
        return self.directory, self.sweep

    def __exit__(self, *_: object) -> None:
        self.directory.release()


def walk(directory: RunDirectory, found: Sweep, source: Source, packing: Packing, configuration: Configuration) -> int:
    """Run the trials of the source, record their results, and print the table; return the exit code."""
    console = Console()  # does not fail on a broken pipe, as in `| head`
    say = console.info
    found.record = replace(found.record, together=packing.why)
    if packing.why:
        say(packing.why)
    found.save(directory, "running")
    root = configuration.settings.root
    fixed = resolve_run_names(found.record.fixed or (), root)  # once: trials change which run is the last one
    held: dict[int, float] = {}  # number of a trial that another process holds -> deadline of waiting for it

    def start(trial: Trial) -> None:
        words = merge_overrides(
            (*fixed, *resolve_run_names(trial.words, root)),
            [format_override("output_root", str(directory.shown)), f"run={trial.name}"],
        )
        pool.start(trial, build_argv(replace(configuration.request, overrides=words)))

    # The full output of a trial is in its console.log; with a launcher, only the location of the job is printed.
    with Pool(packing.slots, TERSE if found.record.launcher == "local" else None) as pool:
        while True:
            while pool.has_room and (trial := source.next()) is not None:
                say(f"[{trial.number}/{source.total}] {trial.label}")
                if found.record.launcher == "local":
                    _wait_for(trial, found, pool, say)
                if found.begin(trial) or found.record.kind == "search":
                    found.save(directory, "running")  # needed to resume after a kill
                start(trial)
            if not pool:
                break
            trial, code = pool.wait()
            if code == Exit.IN_USE:  # the sweep was killed, and the trial is still saving
                if not pool.is_stopped and time.monotonic() < held.setdefault(
                    trial.number, time.monotonic() + _PATIENCE_S
                ):
                    time.sleep(1.0)
                    start(trial)
                continue
            if pool.is_stopped and code > Exit.INTERRUPTED:  # ended by our signals: not the trial's own failure
                has_begun = code != 128 + signal.SIGUSR1  # the first trial, before it had anything to save
                code = int(Exit.INTERRUPTED if has_begun else Exit.PREEMPTED)
            found.codes[trial.number] = code
            if code in STOPPED:
                pool.stop()
            found.save(directory, "running")
            result = found.result(trial)
            say(f"[{trial.number}/{source.total}] {trial.name}  {told(result, found.goal)}")
            if found.record.kind == "sweep" and result.state == "done" and result.last is None and result.metrics:
                console.warn_once(without_metric([result], found.goal))
            source.ended(result)
        is_stopped = pool.is_stopped
    results = found.results()
    say("\n".join(["", *table(results, found.goal, terminal_width()), "", summary(results, found.goal)]))
    is_submitted = any(each.state == "submitted" for each in results)
    is_cut = is_stopped and (len(results) < source.total or any(each.state in OPEN for each in results))
    found.save(directory, "preempted" if is_cut else "submitted" if is_submitted else "done")
    if is_cut:
        say(f"stopped; to resume, run the same command with run={directory.name}")
        return int(Exit.INTERRUPTED if Exit.INTERRUPTED in found.codes.values() else Exit.PREEMPTED)
    say(f"table: {directory.shown}/results.csv; for a report: accel-run report {_said(directory)}")
    if found.record.kind == "search" and winner(results, found.goal):
        return int(Exit.DONE)
    code = next((code for each in results if (code := _code_of(each))), 0)
    return code or int(Exit.NUMERIC if found.record.kind == "search" and results else Exit.DONE)


def _wait_for(trial: Trial, found: Sweep, pool: Pool, say: Callable[[str], None]) -> None:
    """Wait while the process of a killed sweep is still saving the trial."""
    until, is_said = time.monotonic() + _PATIENCE_S, False
    while not pool.is_stopped and time.monotonic() < until:
        process = read_record(found.folder / trial.name).process
        if process_state_name(process) != "running":
            return
        if not is_said:
            say(f"waiting up to {_PATIENCE_S:.0f} s for {trial.name}: process {process.pid} is still saving it")
        is_said = True
        time.sleep(0.2)


def must_be_plannable(configurations: Sequence[Configuration]) -> None:
    """Raise the planning errors, found in a subprocess: this process must load neither torch nor CUDA."""
    try:
        errors = run_in_subprocess(_plan_all, configurations)
    except BrokenProcessPool:
        return  # the trials report it themselves
    if errors:
        found = ConfigError(dict.fromkeys(problem for error in errors for problem in error.problems))
        found.exit_code = errors[0].exit_code
        raise found


class _Grid:
    """The unfinished trials of a sweep, in order."""

    def __init__(self, found: Sweep, *, retry: bool) -> None:
        self.total = len(found.trials)
        again = (*OPEN, "failed") if retry else OPEN
        self._left = [each.trial for each in found.results() if each.state in again]

    def next(self) -> Trial | None:
        return self._left.pop(0) if self._left else None

    def ended(self, result: Result) -> None:
        """Continue with the next trial, whatever the result."""


def enlist(found: Sweep, choices: Sequence[tuple[str, ...]], name: str) -> None:
    """Create a trial for each new choice; existing trials are kept."""
    before = {frozenset((*(found.before.fixed or ()), *trial.words)): trial for trial in found.trials}
    asked = {frozenset((*(found.record.fixed or ()), *words)): words for words in choices}
    lost = [trial.label for whole, trial in before.items() if whole not in asked]
    if lost and {trial.words for trial in found.trials} <= set(choices):
        old, new = set(found.before.fixed or ()), set(found.record.fixed or ())
        was, now = (" ".join(sorted(words)) or "nothing" for words in (old - new, new - old))
        what = f"the common settings were {was} when it started, but are {now} now"
        raise IncompatibleResume(what, where=f"run={name}", fix="use the same settings, or another run=NAME")
    if lost:
        fix = "use the same settings (you may add values to the lists), or another run=NAME"
        raise IncompatibleResume(
            f"the sweep has {abbreviate(lost)}, which is not requested now", where=f"run={name}", fix=fix
        )
    trials = {whole: replace(trial, words=asked[whole]) for whole, trial in before.items()}
    for whole, words in asked.items():
        number = len(trials) + 1
        trials.setdefault(whole, Trial(number, f"{name}-{number}", words))
    found.trials = list(trials.values())


def _must_be_whole(before: Sweep) -> None:
    """Raise DataError if sweep.json is damaged, so that trials are not restarted with other settings."""
    if not before.is_whole:
        fix = "restore a copy of it, or remove it; the results of the trials are in their own folders"
        raise DataError(f"{SWEEP} is damaged", where=str(before.folder), fix=fix)


def _must_agree(sweep: Sweep, now: SweepRecord, name: str) -> None:
    """Raise IncompatibleResume if the folder contains trials of another kind or task."""
    before = sweep.record
    pairs = {
        "the kind": (before.kind, now.kind),
        "the task": (before.task, now.task),
        "--task": (before.task_file, now.task_file),
        "--config-dir": (before.config_dir, now.config_dir),
    }
    if now.kind == "search":
        pairs["the common settings"] = (shlex.join(sorted(before.fixed or ())), shlex.join(sorted(now.fixed or ())))
        pairs["the search space"] = (_spaced(before.space), _spaced(now.space))
    if now.kind == "search" and any(each.value is not None for each in sweep.results()):  # reported to Optuna
        pairs["the goal"] = (str(before.goal), str(now.goal))
    for what, (old, new) in pairs.items():
        if old != new:
            fix = "use another run=NAME"
            raise IncompatibleResume(
                f"{what} was {old or 'none'} when it started, but is {new or 'none'} now", where=f"run={name}", fix=fix
            )


def _spaced(space: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {told}" for key, told in space.items())


def _plan_all(configurations: Sequence[Configuration]) -> list[AccelRunError]:
    inventory = take_inventory()
    errors: list[AccelRunError] = []
    for configuration in configurations:
        try:
            plan = make_plan(configuration, inventory)
            if configuration.choices["launcher"].name == "local":  # another machine may have other devices
                _packages_must_be_installed(plan)
        except AccelRunError as error:
            errors.append(error)
    return errors


def _packages_must_be_installed(plan: Plan) -> None:
    import torch

    from runner.axes.optimizer import check_library as require_optimizer_library
    from runner.trackers.tracker import require_installed

    require_installed(plan.choices["tracker"].function)
    for phase in plan.selected:
        require_optimizer_library(phase.optimizer.function, phase.optimizer.options, torch.device(plan.device))


def _varied(combinations: Sequence[tuple[str, ...]]) -> set[str]:
    """Return the keys whose values differ."""
    columns = zip(*combinations, strict=True)
    return {override_key(column[0]) for column in columns if len(set(column)) > 1}


def _said(directory: RunDirectory) -> str:
    """Return the argument that names the sweep, for a command to paste."""
    is_usual = directory.shown.parent == Path("outputs")
    return directory.name if is_usual else shlex.quote(str(directory.shown))


def _code_of(result: Result) -> int:
    """Return the exit code that this trial contributes to the sweep; 0 for none."""
    if result.state == "failed":
        return result.exit_code or int(Exit.SOFTWARE)
    if result.state in OPEN:
        return int(Exit.IN_USE if result.state == "running" else Exit.SOFTWARE)
    return 0


OPEN = ("waiting", "running", "stopped")  # resumed by the same command
TERSE = {LEVEL_VARIABLE: "warning"}
_PLACE = ("run", "output_root")
_PATIENCE_S = 60.0
