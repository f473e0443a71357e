"""Run as a SLURM job: one task per rank, signalled before the time limit, requeued until it is done."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from runner.base.configuration import Configuration, Request, merge_overrides
from runner.base.errors import ConfigError, Exit, Problem, SystemLimit
from runner.base.packages import require
from runner.base.rank_env import member_of
from runner.durable.directory import check_name, default_name
from runner.durable.files import make_directory
from runner.observe.events import Console


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
        """Ranks in all."""
        return self.nodes * self.tasks_per_node

    def submit(self, configuration: Configuration) -> int:
        """A job that trains waits in the queue, and the user knows its number; returns 0.

        The job's own output goes to OUTPUT_ROOT/NAME/slurm. Raises ConfigError where the job could not work,
        MissingPackage without submitit, SystemLimit where SLURM does not answer.
        """
        problems = [*self._problems(configuration), *_not_here()]
        if problems:
            raise ConfigError(problems)
        name = configuration.settings.run or default_name(configuration.choices["task"].name)
        check_name(name)
        folder = configuration.settings.root / name / "slurm"
        _refuse_unprintable(folder.absolute())
        make_directory(folder.parent)
        make_directory(folder)
        job_id = self._submitted(folder, name, self._words(configuration, name))
        say = Console().info
        say(f"submitted SLURM job {job_id} for run {name}: {self._in_words()}")
        say(f"  output       tail -F {folder}/{job_id}_0_log.out")
        say(f"  status       squeue --job {job_id}; accel-run status run={name}{_root(configuration)}")
        say(f"  cancel       scancel {job_id} (saves within KillWait, usually 30 s)")
        return int(Exit.DONE)

    def _problems(self, configuration: Configuration) -> list[Problem]:
        """Return why the job could not work on any cluster."""
        problems = []
        if self.num_tasks > 1 and configuration.choices["parallelism"].function == "single":
            fix = "use parallelism=ddp, or launcher.nodes=1 launcher.tasks_per_node=1"
            what = f"must use all {self.num_tasks} ranks of the job, but is single"
            problems.append(Problem(what, "parallelism", fix))
        if self.signal_s >= self.time_min * 60:
            what = f"must be less than the time limit of the job ({self.time_min * 60} s), but is {self.signal_s}"
            problems.append(Problem(what, "launcher.signal_s"))
        return problems

    def _words(self, configuration: Configuration, name: str) -> str:
        """Return the shell words that train in a task of the job, the same for every rank."""
        own = ["launcher=local", f"run={name}"]
        if configuration.choices["checkpoint"].options["grace_s"] is None:
            own.append(f"checkpoint.grace_s={self.signal_s}")
        if configuration.settings.resume == "fresh":
            own.append("resume=fresh")
        return _in_shell(configuration.request, own)

    def _submitted(self, folder: Path, name: str, words: str) -> str:
        """Return the number of the submitted job."""
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
            additional_parameters={"signal": f"USR1@{self.signal_s}", "requeue": True},
            wckey=None,
            srun_args=self._srun_arguments(),
            setup=_RESUME_ANEW if '"$resume"' in words else None,
            teardown=_queue_again(self.requeue_times),
        )
        try:
            # Not `submit`: it would pickle a function here to unpickle it there, and hide its exit code.
            with redirect_stderr(StringIO()):  # it repeats what sbatch says, which the error holds
                return str(executor._submit_command(words).job_id)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            _leave_nothing(folder)
            raise _refused(error) from error

    def _srun_arguments(self) -> list[str]:
        """Return what srun does not take over from the job, and how ranks leave.

        One that has left must not take those with it that are still saving; nor may they wait for it for ever.
        """
        cores = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        return ["--open-mode=append", "--kill-on-bad-exit=0", f"--wait={self.signal_s}", *cores]

    def _in_words(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        gpus = (
            f" with {self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''} each" if self.gpus_per_node else ""
        )
        again = f"requeued up to {self.requeue_times} times" if self.requeue_times else "not requeued"
        return (
            f"{self.num_tasks} rank{'s' if self.num_tasks > 1 else ''} on {nodes}{gpus}, {self.time_min} min, {again}"
        )


def _in_shell(request: Request, own: list[str]) -> str:
    words = [sys.executable, "-m", "runner", "train", *merge_overrides(request.overrides, own)]
    words += ["--task", str(request.task_file)] if request.task_file else []
    words += ["--config-dir", str(request.config_dir)] if request.config_dir else []
    return " ".join('"$resume"' if word == "resume=fresh" else shlex.quote(word) for word in words)


_RESUME_ANEW = [
    "resume=resume=fresh",
    'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=resume=auto; fi',
]


def _queue_again(times: int) -> list[str]:
    """Return the lines of the job's script that put it back in the queue where the run was told to stop.

    A rank that was told before it listened, in its first seconds, was ended by the signal.
    """
    told = f"[ $code -eq {int(Exit.PREEMPTED)} ] || [ $code -eq {128 + signal.SIGUSR1} ]"
    return [
        "code=$?",
        f'if {{ {told}; }} && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {times} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]


def _refuse_unprintable(folder: Path) -> None:
    """Raise ConfigError where the name of the job's folder would end the line of the script in which it stands."""
    if not str(folder).isprintable():
        what = "must be one line of printable characters for a SLURM script"
        raise ConfigError(Problem(what, str(folder), "use another output_root, or start in another folder"))


def _not_here() -> list[Problem]:
    """Return why nothing can be submitted from this process."""
    problems = []
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        what = f"needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed here"
        fix = "submit from a login node of the cluster, or use launcher=local"
        problems.append(Problem(what, "launcher=slurm", fix))
    if member_of(os.environ) is not None:
        what = "must be local in a rank started by torchrun or srun"
        problems.append(Problem(what, "launcher=slurm", "submit from a shell, or use launcher=local"))
    return problems


def _leave_nothing(folder: Path) -> None:
    """The script that was refused is gone, and the folder of a run that never was; those of other jobs stay."""
    for file in folder.glob(".submission_file_*.sh"):
        if not file.is_symlink():
            file.unlink()
    with suppress(OSError):  # not empty: the run is there
        folder.rmdir()
        folder.parent.rmdir()


def _refused(error: Exception) -> ConfigError | SystemLimit:
    """Return sbatch's own words as an error of ours, the fatal ones first: they ended it."""
    lines = [line.removeprefix("sbatch: ") for line in str(error).splitlines() if line.startswith("sbatch: ")]
    fatal = [line.removeprefix("fatal: ") for line in lines if line.startswith("fatal: ")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = "; ".join([*fatal, *errors]) or str(error).strip()
    for words, fix in ((_NO_CLUSTER, _WHERE_TO_SUBMIT), (_NO_ANSWER, _WHEN_TO_SUBMIT)):
        if any(word in said for word in words):
            return SystemLimit(f"SLURM cannot be reached: {said}", where="sbatch", fix=fix)
    what = f"SLURM rejected the job: {said}"
    return ConfigError(Problem(what, "sbatch", "sinfo shows the partitions, their nodes and limits"))


_NO_ANSWER: Sequence[str] = (
    "Unable to contact",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes",
)
_WHEN_TO_SUBMIT = "try again when the controller responds: scontrol ping"

_NO_CLUSTER: Sequence[str] = ("configuration source", "process configuration file", "failed to fetch config")
"""What sbatch says that finds neither a slurm.conf it can use nor a controller that would give it one: SLURM 22.05."""
_WHERE_TO_SUBMIT = (
    "submit from a login node of the cluster, or set the path of its slurm.conf: SLURM_CONF=/etc/slurm/slurm.conf"
)


def _root(configuration: Configuration) -> str:
    root: Any = configuration.settings.output_root
    return "" if root == "outputs" else f" output_root={shlex.quote(root)}"
