"""Run as a SLURM job with one task per rank. The job is signaled before its time limit, and requeued if needed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Exit, Problem, SystemLimit
from runner.base.packages import require
from runner.base.rank_env import detect_rank
from runner.config.configuration import Configuration
from runner.durable.files import make_directory
from runner.engine.process.job import choose_run_name
from runner.launch.job_queue import EXIT_CODE_SUFFIX, JOB_FOLDER
from runner.plan.rank_devices import find_wrong_world_size
from runner.records.events import Console
from runner.trackers.tracker import SINGLE_RUN_VARIABLES


@dataclass(frozen=True)
class Slurm:
    """Resources requested from the cluster; documented at the options of `launcher=slurm`."""

    partition: str | None
    nodes: int
    gpus_per_node: int
    tasks_per_node: int
    cpus_per_task: int | None
    mem_gb: int | None
    time_min: int
    account: str | None
    qos: str | None
    constraint: str | None
    exclusive: bool
    signal_s: int
    requeue_times: int

    @property
    def num_tasks(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.tasks_per_node

    def launch(self, configuration: Configuration) -> int:
        """Submit the training job and print its ID; return 0.

        The output of the job goes to OUTPUT_ROOT/NAME/slurm. Raises ConfigError if the job could not work,
        MissingPackage without submitit, and SystemLimit if SLURM does not respond.
        """
        check_submittable([(self, configuration)])
        name = choose_run_name(configuration)
        folder = _make_job_folder(configuration.settings.root / name)
        command = shell_words(self.trial_arguments(configuration, name))
        job_id = self._submit_job(folder, name, command, _RESUME_LINES if _RESUME in command else [])
        info = Console().info
        info(f"submitted SLURM job {job_id} for run {name}: {self.summary()}")
        info(f"  output       tail -F {folder}/{job_id}_0_log.out")
        info(f"  status       squeue --job {job_id}; accel-run status run={name}{_root_override(configuration)}")
        info(f"  cancel       scancel {job_id} (leaves SLURM's KillWait, usually 30 s, for saving)")
        return int(Exit.DONE)

    def submit_array(self, parent: Path, commands: Mapping[int, str], limit: int | None) -> str:
        """Submit a job array with a job per trial and return its ID.

        parent    folder of the sweep; the output goes to its subfolder `slurm`
        commands  command line of each trial, quoted for the shell; keys are trial numbers, which are also array indices
        limit     maximum number of jobs that run concurrently; None: no limit
        """
        folder = _make_job_folder(parent)
        cases = [f"{number}) trial=({command}) ;;" for number, command in commands.items()]
        setup = [f"unset {' '.join(SINGLE_RUN_VARIABLES)}", *_RESUME_LINES]
        setup += ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]
        indices = _format_ranges(sorted(commands)) + (f"%{limit}" if limit else "")
        return self._submit_job(folder, parent.name, '"${trial[@]}"', setup, array=indices)

    def find_problems(self, configuration: Configuration) -> list[Problem]:
        """Return the reasons why the job could not work on any cluster."""
        problems = []
        if self.num_tasks > 1 and configuration.choices["parallelism"].uses("single"):
            fix = "use parallelism=ddp, or launcher.nodes=1 launcher.tasks_per_node=1"
            what = f"parallelism=single uses one process, but the job has {self.num_tasks} ranks"
            problems.append(Problem(what, "parallelism", fix))
        elif problem := find_wrong_world_size(configuration.choices["parallelism"], self.num_tasks):
            problems.append(problem)
        if self.signal_s >= self.time_min * 60:
            what = f"must be less than the time limit of the job ({self.time_min * 60} s), but is {self.signal_s}"
            problems.append(Problem(what, "launcher.signal_s"))
        return problems

    def trial_arguments(self, configuration: Configuration, name: str) -> list[str]:
        """Return the command line of a task of the job, the same for every rank."""
        overrides = ["launcher=local", f"run={name}"]
        if configuration.choices["checkpoint"].options["grace_s"] is None:
            overrides.append(f"checkpoint.grace_s={self.signal_s}")
        if configuration.settings.resume == "fresh":
            overrides.append("resume=fresh")
        return [sys.executable, "-m", "runner", *configuration.request.train_arguments(overrides)]

    def _submit_job(self, folder: Path, name: str, command: str, setup: list[str], array: str = "") -> str:
        submitit = require("submitit", "slurm")
        executor = submitit.SlurmExecutor(folder=folder)
        executor.update_parameters(
            job_name=name,
            partition=self.partition,
            nodes=self.nodes,
            ntasks_per_node=self.tasks_per_node,
            gpus_per_node=self.gpus_per_node or None,
            cpus_per_task=self.cpus_per_task,
            mem=self.mem_gb and f"{self.mem_gb}G",
            time=self.time_min,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            exclusive=self.exclusive or None,
            stderr_to_stdout=True,
            additional_parameters={"signal": f"USR1@{self.signal_s}", "requeue": True}
            | ({"array": array} if array else {}),
            wckey=None,  # submitit's default is a key that clusters with wckeys reject
            srun_args=self._srun_arguments(),
            setup=setup or None,
            teardown=_requeue_lines(self.requeue_times, folder if array else None),
        )
        if array:
            executor.parameters["map_count"] = 1  # submitit names output by array and index; `array` has the indices
        try:
            # Not `submit`: it would pickle a function and hide the exit code of the run.
            with redirect_stderr(StringIO()):  # submitit prints the message of sbatch, which the error contains
                return str(executor._submit_command(command).job_id)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            for file in folder.glob(".submission_file_*.sh"):
                if not file.is_symlink():
                    file.unlink()
            with suppress(OSError):  # the folder is not empty if the run exists
                folder.rmdir()
                folder.parent.rmdir()
            raise _sbatch_error(error) from error

    def _srun_arguments(self) -> list[str]:
        """Return the srun options that are not inherited from the job, and those that apply when a rank exits.

        A rank that exits must not end ranks that are still saving, but the job must not wait for them forever.
        """
        cores = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        return ["--open-mode=append", "--kill-on-bad-exit=0", f"--wait={self.signal_s}", *cores]

    def summary(self) -> str:
        """Describe the resources of a job."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        gpus = (
            f" with {self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''} each" if self.gpus_per_node else ""
        )
        requeues = f"requeued up to {self.requeue_times} times" if self.requeue_times else "not requeued"
        ranks = f"{self.num_tasks} rank{'s' if self.num_tasks > 1 else ''}"
        return f"{ranks} on {nodes}{gpus}, {self.time_min} min, {requeues}"


def check_submittable(jobs: Sequence[tuple[Slurm, Configuration]], *programs: str) -> None:
    """Raise ConfigError if jobs with these resources could not work, or cannot be submitted by this process.

    programs  SLURM commands needed besides sbatch and srun
    Raises MissingPackage without submitit.
    """
    problems = [problem for slurm, configuration in jobs for problem in slurm.find_problems(configuration)]
    problems += _find_local_problems(("sbatch", "srun", *programs))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    require("submitit", "slurm")


def shell_words(command: Sequence[str]) -> str:
    """Quote a command for the job script; resume=fresh applies to the first start only, not after a requeue."""
    return " ".join(_RESUME if argument == "resume=fresh" else shlex.quote(argument) for argument in command)


_RESUME = '"$resume"'
_RESUME_LINES = ["resume=resume=fresh", 'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=resume=auto; fi']


def _requeue_lines(times: int, folder: Path | None) -> list[str]:
    """Return the lines of the job script that requeue the job if the run was signaled to stop.

    In its first seconds a rank has no signal handler yet, so the signal kills it; such a job is requeued, too.
    folder  where a job of an array leaves its exit code unless it is requeued (see job_queue.py)
    """
    is_stopped = f"[ $code -eq {int(Exit.PREEMPTED)} ] || [ $code -eq {128 + signal.SIGUSR1} ]"
    return [
        "code=$?",
        f'if {{ {is_stopped}; }} && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {times} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        *(["else", *_exit_code_lines(folder)] if folder else []),
        "fi",
        "exit $code",
    ]


def _exit_code_lines(folder: Path) -> list[str]:
    path = shlex.quote(str(folder.absolute())) + '/"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    return [f"    echo $code >{path}.tmp && mv {path}.tmp {path}{EXIT_CODE_SUFFIX}"]


def _format_ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _make_job_folder(parent: Path) -> Path:
    """Create and return the folder for scripts and output of the jobs of a run or a sweep."""
    folder = parent / JOB_FOLDER
    _check_printable(folder.absolute())
    make_directory(parent)
    make_directory(folder)
    return folder


def _check_printable(folder: Path) -> None:
    """Raise ConfigError if the path of the job's folder would break the line of the script that contains it."""
    if not str(folder).isprintable():
        what = "must be one line of printable characters for a SLURM script"
        raise ConfigError(Problem(what, str(folder), "use another output_root, or start in another folder"))


def _find_local_problems(programs: Sequence[str]) -> list[Problem]:
    problems = []
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        what = f"needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed here"
        fix = "submit from a login node of the cluster, or use launcher=local"
        problems.append(Problem(what, "launcher=slurm", fix))
    if detect_rank(os.environ) is not None:
        what = "must be local in a rank started by torchrun or srun"
        problems.append(Problem(what, "launcher=slurm", "submit from a shell, or use launcher=local"))
    return problems


def _sbatch_error(error: Exception) -> ConfigError | SystemLimit:
    lines = [line.removeprefix("sbatch: ") for line in str(error).splitlines() if line.startswith("sbatch: ")]
    fatal = [line.removeprefix("fatal: ") for line in lines if line.startswith("fatal: ")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = "; ".join([*fatal, *errors]) or str(error).strip()
    for messages, fix in ((_NO_CLUSTER, _NO_CLUSTER_FIX), (_NO_ANSWER, _NO_ANSWER_FIX)):
        if any(text in message for text in messages):
            return SystemLimit(f"SLURM cannot be reached: {message}", where="sbatch", fix=fix)
    what = f"SLURM rejected the job: {message}"
    return ConfigError(Problem(what, "sbatch", "run sinfo to see the partitions, their nodes and limits"))


_NO_ANSWER: Sequence[str] = ("Unable to contact", "Socket timed out", "Connection refused", "Zero Bytes")
_NO_ANSWER_FIX = "try again when the controller responds to scontrol ping"

_NO_CLUSTER: Sequence[str] = ("configuration source", "process configuration file", "failed to fetch config")
"""Messages of sbatch if it finds neither a slurm.conf nor a controller that provides one (SLURM 22.05)."""
_NO_CLUSTER_FIX = (
    "submit from a login node of the cluster, or set the path of its slurm.conf: SLURM_CONF=/etc/slurm/slurm.conf"
)


def _root_override(configuration: Configuration) -> str:
    root: Any = configuration.settings.output_root
    return "" if root == "outputs" else f" output_root={shlex.quote(root)}"
