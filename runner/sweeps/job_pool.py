"""Run trials as SLURM jobs and follow them until they leave the queue; trials that start together form a job array."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.base.errors import ConfigError, Exit, Problem, SystemLimit
from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.durable.record_files import read_error
from runner.launch.job_queue import output_file, queued_jobs, read_exit_code
from runner.launch.launcher import slurm_resources
from runner.launch.slurm import Slurm, check_submittable, shell_words
from runner.records.events import Console
from runner.sweeps.pool import TrialPool
from runner.sweeps.trials import STOPPED, Sweep, Trial


@dataclass(frozen=True)
class JobPlacement:
    """Trials run as SLURM jobs, at most `together` at once; None: one trial of a search, or all trials of a sweep."""

    together: int | None = None

    @property
    def why(self) -> str:
        """Describe the limit; empty if there is none."""
        return f"at most {self.together} SLURM job{'s' * (self.together > 1)} at once" if self.together else ""

    def open_pool(self, sweep: Sweep, save: Callable[[], object]) -> JobPool:
        """Return the pool; it calls `save` after each submission, so that a sweep that was killed finds its jobs."""
        return JobPool(sweep, save, self.together)


def uses_jobs(configurations: Sequence[Configuration]) -> bool:
    """Return whether trials run as SLURM jobs. Raises ConfigError if only some do, or if jobs cannot be submitted."""
    resources = [slurm_resources(configuration) for configuration in configurations]
    jobs = [(slurm, trial) for slurm, trial in zip(resources, configurations, strict=True) if slurm is not None]
    if jobs and len(jobs) < len(configurations):
        what = "must run all trials on this machine, or all on a cluster"
        raise ConfigError(Problem(what, "launcher", "use one launcher, or a separate sweep for each"))
    if jobs:
        check_submittable(jobs, "squeue")
    return bool(jobs)


class JobPool(TrialPool):
    """Runs each trial as a job.

    A sweep submits all trials at once and leaves the limit to SLURM; a search submits as many as may run. Trials with
    different resources are in different arrays. A stop request does not affect jobs; to follow them again, repeat the
    command.
    """

    stops_trials = False

    def __init__(self, sweep: Sweep, save: Callable[[], object], together: int | None) -> None:
        super().__init__()
        is_search = sweep.record.kind == "search"
        self._capacity = (together or 1) if is_search else len(sweep.trials)
        self._limit = None if is_search else together
        self._sweep, self._save = sweep, save
        self._submitted_before: dict[int, str] | None = None  # jobs in the queue when the command started
        self._pending: defaultdict[Slurm, list[tuple[Trial, str]]] = defaultdict(list)  # trials and their commands
        self._followed: dict[int, Trial] = {}
        self._deadlines: dict[int, float] = {}  # trial whose job left the queue -> until when to wait for its exit code
        self._ended: list[tuple[Trial, int]] = []

    @property
    def has_free_slot(self) -> bool:
        num_pending = sum(map(len, self._pending.values()))
        return num_pending + len(self._followed) + len(self._ended) < self._capacity and not self.is_stopped

    def __bool__(self) -> bool:
        return bool(self._pending or self._followed or self._ended)

    def start(self, trial: Trial, request: Request) -> None:
        """Submit the trial at the next `wait`, unless its job from an earlier command is still in the queue."""
        if self._submitted_before is None:
            self._submitted_before = queued_jobs(self._sweep.folder)
        job = self._submitted_before.pop(trial.number, None)
        if job is not None:
            self._followed[trial.number], self._sweep.jobs[trial.number] = trial, job
            Console().info(f"{trial.name} was already submitted as SLURM job {job}")
            return
        configuration = compose(request)
        slurm = slurm_resources(configuration)
        assert slurm is not None, "all trials use the same kind of launcher"
        command = slurm.trial_arguments(configuration, trial.name)
        self._pending[slurm].append((trial, shell_words(command)))

    def wait(self) -> tuple[Trial, int] | None:
        if not self.is_stopped:
            for slurm, trials in self._pending.items():
                commands = {trial.number: command for trial, command in trials}
                array = slurm.submit_array(self._sweep.folder, commands, self._limit)
                self._sweep.jobs.update({number: f"{array}_{number}" for number in commands})
                self._followed.update({trial.number: trial for trial, _ in trials})
                self._save()
                jobs = f"{len(commands)} job{'s' * (len(commands) > 1)}"
                output = output_file(self._sweep.folder, f"{array}_N")
                Console().info(f"submitted SLURM job array {array} with {jobs}; each: {slurm.summary()}")
                Console().info(f"  output of trial N: {output}")
            self._pending.clear()
        while not self._ended and not self.is_stopped:
            self._poll()
            deadline = time.monotonic() + POLL_S
            while not (self._ended or self.is_stopped) and time.monotonic() < deadline:
                time.sleep(min(POLL_S, 0.1))
        if self._ended:
            return self._ended.pop(0)
        arrays = sorted({self._sweep.jobs[number].partition("_")[0] for number in self._followed})
        if arrays:
            Console().info(f"the jobs continue; to cancel them: scancel {' '.join(arrays)}")
        return None

    def _poll(self) -> None:
        try:
            queued = queued_jobs(self._sweep.folder)
        except SystemLimit as error:
            Console().warn_once(f"{error.problems[0].what}; retrying every {POLL_S:.0f} s")
            return
        for number in sorted(self._followed.keys() - queued.keys()):
            code = read_exit_code(self._sweep.folder, self._sweep.jobs[number])
            deadline = self._deadlines.setdefault(number, time.monotonic() + EXIT_CODE_DELAY_S)
            if code is None and time.monotonic() < deadline:
                continue
            trial = self._followed.pop(number)
            del self._deadlines[number]
            # A job without an exit code was canceled or killed by SLURM; the same command runs its trial again.
            self._ended.append((trial, int(Exit.PREEMPTED) if code is None else code))
            self._print_error(trial, self._ended[-1][1])

    def _print_error(self, trial: Trial, code: int) -> None:
        if not code or code in STOPPED:
            return
        error, console = read_error(self._sweep.folder / trial.name), Console()
        for problem in error.problems if error is not None and error.exit_code == code else ():
            console.error(f"{trial.name} | {problem}")
        console.error(f"{trial.name} | output: {output_file(self._sweep.folder, self._sweep.jobs[trial.number])}")


POLL_S = 10.0  # not shorter, because the controller serves all users of the cluster
EXIT_CODE_DELAY_S = 30.0  # how late the file with the exit code may appear on a network file system
