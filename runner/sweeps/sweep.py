"""Sweeps: train every combination of values in a new process; a failed trial does not stop the others."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, IncompatibleResume, Problem
from runner.base.text import abbreviate, terminal_width
from runner.config.configuration import Configuration
from runner.config.request import Request, format_override, merge_overrides, override_key
from runner.durable import files
from runner.durable.directory import LAST, SWEEP, RunDirectory, check_run_name, generate_run_name
from runner.durable.record_files import read_record
from runner.durable.run_state import process_state_name
from runner.durable.weight_source import resolve_run_names
from runner.host.resources import affinity
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import take_inventory
from runner.plan.planner import make_plan
from runner.records.events import LEVEL_VARIABLE, OLD_LEVEL_VARIABLE, Console
from runner.records.run_record import ProcessRecord
from runner.records.sweep_record import Goal, SweepRecord
from runner.sweeps.job_pool import JobPlacement, uses_jobs
from runner.sweeps.pool import ALONE, LocalPool, Slot, TrialPool
from runner.sweeps.sweep_syntax import SearchSpace, compose_all, expand_sweep, plain_number
from runner.sweeps.trials import (
    STOPPED,
    Result,
    Sweep,
    Trial,
    explain_missing_metric,
    find_best,
    format_result,
    format_summary,
    format_trial_table,
    is_launcher_override,
    is_repetition,
)
from runner.trackers.tracker import require_installed


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep besides its settings.

    metric    metric by which trials are compared; None: early_stopping.metric if it is set, otherwise checkpoint.best
    best_is   whether lower (min) or higher (max) is better; None: the best_is of the group that names the metric
    together  number of trials that run concurrently; None: one, or for a sweep whose trials are cluster jobs, all
    retry     run failed trials again
    """

    metric: str | None = None
    best_is: Literal["min", "max"] | None = None
    together: int | None = None
    retry: bool = False


class Source(Protocol):
    """Chooses the trials of a sweep or search one by one, and receives their results."""

    def next(self) -> Trial | None:
        """Return the next trial to run, None if there is none at present."""

    def ended(self, result: Result) -> None:
        """Record the result of a trial. Raises AccelRunError if no further trial can be requested."""

    @property
    def total(self) -> int:
        """Return the total number of trials."""


def sweep(request: Request, options: SweepOptions) -> int:
    """Train each combination in a subprocess or a job, print a table, and return the exit code of the first failure.

    With `run=NAME`, the runs are NAME-1, NAME-2, ... in the folder NAME; the same command resumes unfinished ones.
    On Ctrl-C, SIGTERM or SIGUSR1, or when a trial is stopped, the running trials save and the sweep ends with exit code
    75, or 130 if a trial could not save. Raises AccelRunError with the problems of every combination before anything
    is started, and RunInUse if another process has locked the folder.
    """
    requests = expand_sweep(request)
    if len(requests) > 1:
        # Printed first, because checking loads torch, which takes seconds.
        Console().info(f"sweep over {len(requests)} trials: checking their settings")
    else:
        what = "nothing to sweep over, so one run is trained"
        Console().warning(f"{what}; to sweep, list the values of a setting: optimizer.lr=0.001,0.003")
    configurations = compose_all(requests)
    placement = place_trials(configurations, options.together, len(configurations))
    columns = zip(*[combination.overrides for combination in requests], strict=True)
    varied = {override_key(column[0]) for column in columns if len(set(column)) > 1}
    fixed = tuple(override for override in requests[0].overrides if override_key(override) not in varied)
    choices = [
        tuple(override for override in combination.overrides if override_key(override) in varied)
        for combination in requests
    ]
    common = replace(request, overrides=fixed)
    words = dict.fromkeys(word for choice in choices for word in choice)
    with open_sweep("sweep", common, configurations[0], options, varied=words) as (directory, sweep):
        add_trials(sweep, choices, directory.name)
        return run_trials(directory, sweep, _Grid(sweep, retry=options.retry), placement, configurations[0])


def place_trials(
    configurations: Sequence[Configuration], together: int | None, num_trials: int
) -> Packing | JobPlacement:
    """Return where the trials run. Raises AccelRunError if they cannot; jobs are planned later, where they run.

    configurations  those of all trials of a sweep, or of both ends of a search space, whose trials are not known yet
    """
    if uses_jobs(configurations):
        return JobPlacement(together)
    check_plannable(configurations)
    return assign_slots(configurations, min(together or 1, num_trials))


@contextmanager
def open_sweep(
    kind: Literal["sweep", "search"],
    fixed: Request,
    configuration: Configuration,
    options: SweepOptions,
    axes: Sequence[SearchSpace] = (),
    varied: Collection[str] = (),
) -> Iterator[tuple[RunDirectory, Sweep]]:
    """Create or open the folder of a sweep, lock it, and check that its earlier trials have the requested settings.

    fixed          settings that all trials have in common
    configuration  configuration of one trial
    varied         overrides that differ between trials, except those in `axes`
    Raises IncompatibleResume if the folder has a sweep with other settings, DataError if its file is damaged.
    """
    settings, task = configuration.settings, configuration.choices["task"].name
    name = settings.run or generate_run_name(f"{task}-{kind}")
    check_run_name(name)
    with RunDirectory.create_or_open(settings.root, name, for_sweep=True) as directory:
        earlier = Sweep.read(directory.path)
        axes = [axis.as_recorded(earlier.record.space.get(axis.key, "")) for axis in axes]
        overrides = (*fixed.overrides, *varied, *(value for axis in axes for value in axis.values))
        record = SweepRecord(
            kind=kind,
            task=task,
            task_file=str(fixed.task_file) if fixed.task_file else None,
            config_dir=str(fixed.config_dir) if fixed.config_dir else None,
            command=fixed.command_line,
            fixed=tuple(override for override in fixed.overrides if not _is_location(override)),
            goal=_choose_goal(options, configuration, varied),
            space={axis.key: str(axis) for axis in axes},
            runs=_find_named_runs(overrides, settings.root, earlier.record.runs),
            process=ProcessRecord(started=earlier.record.process.started),
        )
        if files.exists(directory.path / SWEEP):
            if not earlier.is_intact:  # otherwise, trials would be restarted with other settings
                fix = "restore a copy of it, or remove it; the results of the trials are in their own folders"
                raise DataError(f"{SWEEP} is damaged", where=str(earlier.folder), fix=fix)
            _check_compatible(earlier, record, name)
        yield directory, Sweep(directory.path, record, earlier.trials, earlier.codes, earlier.record, earlier.jobs)


def run_trials(
    directory: RunDirectory,
    sweep: Sweep,
    source: Source,
    placement: Packing | JobPlacement,
    configuration: Configuration,
) -> int:
    """Run the trials of the source, record their results, and print the table; return the exit code."""
    console = Console()  # does not fail on a broken pipe, as in `| head`
    info = console.info
    sweep.record = replace(sweep.record, together=placement.why)
    if placement.why:
        info(placement.why)
    sweep.save(directory, "running")
    runs = sweep.record.runs
    fixed = [runs.get(override, override) for override in sweep.record.fixed or ()]
    deadlines: dict[int, float] = {}  # number of a trial that another process has locked -> time to give up

    launcher = [override for override in configuration.request.overrides if is_launcher_override(override)]

    def start(trial: Trial) -> None:
        keys = {override_key(word) for word in trial.words}
        common = (*fixed, *(override for override in launcher if override_key(override) not in keys))
        overrides = merge_overrides(
            (*common, *(runs.get(word, word) for word in trial.words)),
            [format_override("output_root", str(directory.shown)), f"run={trial.name}"],
        )
        pool.start(trial, replace(configuration.request, overrides=overrides))

    with placement.open_pool(sweep, lambda: sweep.save(directory, "running")) as pool:
        while True:
            while pool.has_free_slot and (trial := source.next()) is not None:
                info(f"[{trial.number}/{source.total}] {trial.label}")
                if pool.stops_trials:
                    _wait_for(trial, sweep, pool, info)
                if sweep.forget_process(trial) or sweep.record.kind == "search":
                    sweep.save(directory, "running")  # needed to resume after a kill
                start(trial)
            if not pool or (ended := pool.wait()) is None:
                break
            trial, code = ended
            if code == Exit.IN_USE:  # the process of an earlier, killed sweep is still saving the trial
                if not pool.is_stopped and time.monotonic() < deadlines.setdefault(
                    trial.number, time.monotonic() + LOCK_TIMEOUT_S
                ):
                    time.sleep(1.0)
                    start(trial)
                continue
            _record_end(trial, code, sweep, pool)
            sweep.save(directory, "running")
            result = sweep.result(trial)
            info(f"[{trial.number}/{source.total}] {trial.name}  {format_result(result, sweep.goal)}")
            if sweep.record.kind == "sweep" and result.state == "finished" and result.last is None and result.metrics:
                console.warn_once(explain_missing_metric([result], sweep.goal))
            source.ended(result)
        is_stopped = pool.is_stopped
    return _finish(directory, sweep, source, info, is_stopped=is_stopped)


def _record_end(trial: Trial, code: int, sweep: Sweep, pool: TrialPool) -> None:
    """Record the exit code of a trial. If it was stopped, also stop the other trials on this machine."""
    if pool.stops_trials and pool.is_stopped and code > Exit.INTERRUPTED:  # ended by our signals, so not a failure
        has_started = code != 128 + signal.SIGUSR1  # otherwise SIGUSR1 ended it before it handled the signal
        code = int(Exit.INTERRUPTED if has_started else Exit.PREEMPTED)
    sweep.codes[trial.number] = code
    if code in STOPPED and pool.stops_trials:
        pool.stop()


def _finish(
    directory: RunDirectory, sweep: Sweep, source: Source, info: Callable[[str], None], *, is_stopped: bool
) -> int:
    """Save the state of the sweep, print its table, and return its exit code."""
    results = sweep.results()
    info(
        "\n".join(
            ["", *format_trial_table(results, sweep.goal, terminal_width()), "", format_summary(results, sweep.goal)]
        )
    )
    is_stopped = is_stopped or any(code in STOPPED for code in sweep.codes.values())
    is_cut = is_stopped and (len(results) < source.total or any(result.state in OPEN for result in results))
    is_submitted = any(result.state == "submitted" for result in results)
    sweep.save(directory, "submitted" if is_submitted else "preempted" if is_cut else "done")
    if is_cut:
        info(f"stopped; to resume, run the same command with run={directory.name}")
        return int(Exit.INTERRUPTED if Exit.INTERRUPTED in sweep.codes.values() else Exit.PREEMPTED)
    info(f"table: {directory.shown}/results.csv; for a report: accel-run report {_run_argument(directory)}")
    if sweep.record.kind == "search" and find_best(results, sweep.goal):
        return int(Exit.DONE)
    code = next((code for result in results if (code := _exit_code(result))), 0)
    return code or int(Exit.NUMERIC if sweep.record.kind == "search" and results else Exit.DONE)


def _wait_for(trial: Trial, sweep: Sweep, pool: TrialPool, info: Callable[[str], None]) -> None:
    deadline, is_announced = time.monotonic() + LOCK_TIMEOUT_S, False
    while not pool.is_stopped and time.monotonic() < deadline:
        process = read_record(sweep.folder / trial.name).process
        if process_state_name(process) != "running":
            return
        if not is_announced:
            info(f"waiting up to {LOCK_TIMEOUT_S:.0f} s for {trial.name}: process {process.pid} is still saving it")
        is_announced = True
        time.sleep(0.2)


def check_plannable(configurations: Sequence[Configuration]) -> None:
    """Plan all trials in a subprocess, so that this process loads neither torch nor CUDA; raise all errors."""
    try:
        errors = run_in_subprocess(_plan_all, configurations)
    except BrokenProcessPool:
        return  # each trial reports the error itself
    if errors:
        error = ConfigError(dict.fromkeys(problem for found in errors for problem in found.problems))
        error.exit_code = errors[0].exit_code
        raise error


class _Grid:
    """The unfinished trials of a sweep, in order."""

    def __init__(self, sweep: Sweep, *, retry: bool) -> None:
        self.total = len(sweep.trials)
        states = (*OPEN, "failed") if retry else OPEN
        self._remaining = [result.trial for result in sweep.results() if result.state in states]

    def next(self) -> Trial | None:
        return self._remaining.pop(0) if self._remaining else None

    def ended(self, result: Result) -> None:
        """Continue with the next trial, regardless of the result."""


def add_trials(sweep: Sweep, choices: Sequence[tuple[str, ...]], name: str) -> None:
    """Create a trial for each new choice; existing trials are kept."""
    # Earlier versions passed 1e-3 to a string setting as 0.001; such a trial keeps that string.
    recorded = {word for trial in sweep.trials for word in trial.words}
    choices = [tuple(_as_recorded(override, recorded) for override in overrides) for overrides in choices]
    earlier = {frozenset((*(sweep.earlier.fixed or ()), *trial.words)): trial for trial in sweep.trials}
    requested = {frozenset((*(sweep.record.fixed or ()), *overrides)): overrides for overrides in choices}
    missing = [trial.label for settings, trial in earlier.items() if settings not in requested]
    if missing and {trial.words for trial in sweep.trials} <= set(choices):
        old, new = set(sweep.earlier.fixed or ()), set(sweep.record.fixed or ())
        old_settings, new_settings = (" ".join(sorted(overrides)) or "nothing" for overrides in (old - new, new - old))
        what = f"the common settings changed since the sweep started: {old_settings} -> {new_settings}"
        raise IncompatibleResume(what, where=f"run={name}", fix="use the same settings, or another run=NAME")
    if missing:
        fix = "use the same settings (you may add values to the lists), or another run=NAME"
        raise IncompatibleResume(
            f"the sweep has {abbreviate(missing)}, which the command no longer requests", where=f"run={name}", fix=fix
        )
    trials = {settings: replace(trial, words=requested[settings]) for settings, trial in earlier.items()}
    for settings, overrides in requested.items():
        number = len(trials) + 1
        trials.setdefault(settings, Trial(number, f"{name}-{number}", overrides))
    sweep.trials = list(trials.values())


def _find_named_runs(overrides: Sequence[str], root: Path, earlier: Mapping[str, str]) -> dict[str, str]:
    """Return override -> the override with the folder of the run that it names; unchanged ones are left out.

    earlier  result when the sweep started. It applies while the folder exists, and to `last` even if the folder is
             gone, because trials change which run is last
    """
    found = dict(zip(overrides, resolve_run_names(overrides, root), strict=True))
    for override in found:
        path = earlier.get(override, "").partition("=")[2].strip('"')
        if path and (override.endswith(f"={LAST}") or Path(path).exists()):
            found[override] = earlier[override]
    return {override: path for override, path in found.items() if path != override}


def _as_recorded(override: str, recorded: Collection[str]) -> str:
    key, _, text = override.partition("=")
    plain = f"{key}={plain_number(text)}"
    return plain if override not in recorded and plain in recorded else override


def _choose_goal(options: SweepOptions, configuration: Configuration, varied: Collection[str]) -> Goal:
    early, saves = configuration.settings.early_stopping, configuration.choices["checkpoint"].options
    goals = [Goal(early.metric, early.best_is)]
    if saves.get("best"):  # null: no checkpoint is kept as the best
        is_set = not configuration.sources.keys().isdisjoint({"early_stopping.metric", "early_stopping.best_is"})
        goals.insert(1 if is_set else 0, Goal(saves["best"], saves["best_is"]))
    metric = options.metric or goals[0].metric
    best_is = next((goal.best_is for goal in goals if goal.metric == metric), early.best_is)
    over = dict.fromkeys(key for key in map(override_key, varied) if is_repetition(key))
    return Goal(metric, options.best_is or best_is, tuple(over))


def _check_compatible(sweep: Sweep, record: SweepRecord, name: str) -> None:
    earlier = sweep.record
    pairs = {
        "the kind (sweep or search)": (earlier.kind, record.kind),
        "the task": (earlier.task, record.task),
        "--task": (earlier.task_file, record.task_file),
        "--config-dir": (earlier.config_dir, record.config_dir),
    }
    if record.kind == "search":
        pairs["the common settings"] = (shlex.join(sorted(earlier.fixed or ())), shlex.join(sorted(record.fixed or ())))
        pairs["the search space"] = (_format_space(earlier.space), _format_space(record.space))
    if record.kind == "search" and any(result.value is not None for result in sweep.results()):  # Optuna has values
        pairs["the goal"] = (str(earlier.goal), str(record.goal))
    for what, (old, new) in pairs.items():
        if old != new:
            fix = "use another run=NAME"
            raise IncompatibleResume(
                f"{what} changed since the {earlier.kind} started: {old or 'none'} -> {new or 'none'}",
                where=f"run={name}",
                fix=fix,
            )


def _format_space(space: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {text}" for key, text in space.items())


def _plan_all(configurations: Sequence[Configuration]) -> list[AccelRunError]:
    import torch

    from runner.axes.optimizer import check_library as require_optimizer_library

    inventory = take_inventory()
    errors: list[AccelRunError] = []
    for configuration in configurations:
        try:
            plan = make_plan(configuration, inventory)
            require_installed(plan.choices["tracker"].function)
            for phase in plan.selected:
                require_optimizer_library(phase.optimizer.function, phase.optimizer.options, torch.device(plan.device))
        except AccelRunError as error:
            errors.append(error)
    return errors


def _run_argument(directory: RunDirectory) -> str:
    is_usual = directory.shown.parent == Path("outputs")
    return directory.name if is_usual else shlex.quote(str(directory.shown))


def _exit_code(result: Result) -> int:
    if result.state == "failed":
        return result.exit_code or int(Exit.SOFTWARE)
    if result.state in OPEN:
        return int(Exit.IN_USE if result.state == "running" else Exit.SOFTWARE)
    return 0


def _is_location(override: str) -> bool:
    """Return whether the override states where trials are stored or run, which may change when a sweep resumes."""
    return override_key(override) in ("run", "output_root") or is_launcher_override(override)


OPEN = ("waiting", "running", "stopped", "submitted")  # states of trials that the same command resumes
LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Packing:
    """Slots for concurrent trials, and their description `why`, which is empty for a single slot."""

    slots: tuple[Slot, ...] = ALONE
    why: str = ""

    def open_pool(self, sweep: Sweep, save: Callable[[], object]) -> LocalPool:
        """Return a pool of these slots, whose trials print only warnings and errors, unless another level is set."""
        return LocalPool(self.slots, {LEVEL_VARIABLE: os.environ.get(OLD_LEVEL_VARIABLE) or "warning"})


def assign_slots(configurations: Sequence[Configuration], together: int) -> Packing:
    """Return the slots for concurrent trials. Raises ConfigError if several cannot run concurrently."""
    if together == 1:
        return Packing()
    try:
        devices = run_in_subprocess(_devices, configurations)
    except BrokenProcessPool:
        devices = [""]
    if isinstance(devices, str):
        what = f"must be 1 because a trial uses several devices with parallelism={devices}"
        raise ConfigError(Problem(what, f"together={together}", "use together=1, or parallelism=single"))
    return divide_resources(devices, len(affinity()), together)


def divide_resources(devices: Sequence[str], cores: int, count: int) -> Packing:
    """Return `count` slots, evenly distributed over the devices; trials derive workers and threads from their cores."""
    cores_per_trial = max(1, cores // count)
    core_numbers = itertools.cycle(sorted(affinity()))
    slots = []
    for device in itertools.islice(itertools.cycle(devices), count):
        environment = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        slots.append(
            Slot(
                {**environment, "OMP_NUM_THREADS": str(cores_per_trial)},
                frozenset(itertools.islice(core_numbers, cores_per_trial)),
            )
        )
    return Packing(tuple(slots), f"{count} trials at once, each with {cores_per_trial} of {cores} cores")


def _devices(configurations: Sequence[Configuration]) -> list[str] | str:
    """Return the values of CUDA_VISIBLE_DEVICES for the trials, "" to leave it unchanged. Loads torch.

    If trials use several devices, return the name of their strategy instead.
    """
    inventory = take_inventory()
    plans = [make_plan(configuration, inventory) for configuration in configurations]
    if strategies := {plan.choices["parallelism"].name for plan in plans} - {"single"}:
        return min(strategies)
    gpus = [device.uuid for device in inventory.usable if device.kind == "cuda" and device.uuid]
    is_free = {configuration.settings.device for configuration in configurations} <= {"auto", "cuda"}
    return gpus if len(gpus) > 1 and is_free and plans[0].ranks[0].is_gpu else [""]
