"""Jobs of a sweep in the queue of SLURM, and the exit codes of those that have left it.

The index of a job in its array is the number of the trial. A job belongs to a sweep if its script is in the sweep's
folder, so the queue lists the submitted trials even if the command was killed before it could record them. Exit codes
are files written by the job scripts: sacct needs an accounting database, and scontrol forgets jobs after a few minutes.
A script writes its file after the run has written its own files, so a visible exit code means that the result is
visible, also on a network file system.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from runner.base.errors import Exit, StorageError, SystemLimit
from runner.durable import files

JOB_FOLDER = "slurm"  # scripts, output and exit codes, in the folder of a run or a sweep
EXIT_CODE_SUFFIX = ".exit"


def queued_jobs(parent: Path) -> dict[int, str]:
    """Return trial number -> `JOB_INDEX` of the jobs of a sweep that are waiting or running.

    Raises SystemLimit if SLURM does not respond.
    """
    command = ["squeue", "--me", "--array", "--noheader", "--format=%F|%K|%o"]
    # Variables SQUEUE_* would change the output of squeue.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S,
            process_group=0,  # Ctrl-C must reach this process, but not squeue
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        fix = "try again when the controller responds to scontrol ping"
        raise SystemLimit(f"SLURM cannot be reached: {reason}", where="squeue", fix=fix) from error
    folder, jobs = (parent / JOB_FOLDER).resolve(), {}
    for line in result.stdout.splitlines():
        job, _, rest = line.partition("|")
        index, _, script = rest.partition("|")
        if index.isdecimal() and Path(script).parent.resolve() == folder:
            jobs[int(index)] = f"{job}_{index}"
    return jobs


def read_exit_code(parent: Path, job: str) -> int | None:
    """Return the exit code of a job; None if the job is not over, or SLURM killed it before it wrote the code.

    A run that was signalled in its first seconds has no signal handler yet; it counts as saved and stopped.
    """
    if not re.fullmatch(r"\d+_\d+", job):  # from a file that may be damaged
        return None
    path = parent / JOB_FOLDER / f"{job}{EXIT_CODE_SUFFIX}"
    try:
        text = files.read(path, at_most=16).decode(errors="replace").strip() if files.exists(path) else ""
    except StorageError:
        return None
    if not re.fullmatch(r"\d{1,3}", text):
        return None
    return int(Exit.PREEMPTED) if int(text) == 128 + signal.SIGUSR1 else int(text)


def output_file(parent: Path, job: str) -> Path:
    """Return the file with the output of a job."""
    return parent / JOB_FOLDER / f"{job}_0_log.out"


_TIMEOUT_S = 60.0
