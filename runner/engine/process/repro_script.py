"""Write command.sh of a run directory: a shell script that repeats the run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from runner.base.secret import redact
from runner.config.request import Request


def script(request: Request, name: str, folder: Path, python: str, *, started_elsewhere: bool = False) -> bytes:
    """Return a POSIX shell script that repeats the run with the same settings and working directory under a new name.

    name               name of the original run
    folder             working directory of the command; paths in settings are relative to it
    python             interpreter of the run; if it no longer exists, accel-run is looked up in PATH
    started_elsewhere  torchrun or srun started the ranks, so the user must start the script in the same way
    The script passes -P so that a runner.py in `folder` does not shadow this package.
    `resume=fresh` is omitted: a new run has nothing to archive, and with the old name the script resumes.
    Settings contain no secrets (runner/base/secret.py rejects them) and the environment is not recorded; a secret in
    the name of a folder is removed.
    """
    kept = tuple(override for override in request.overrides if not _names_run(override))
    argv = replace(request, overrides=kept).train_arguments()
    lines = [
        "#!/bin/sh",
        f"# Repeats the run {name} with the same settings, as a new run. Further arguments are settings:",
        "#   sh command.sh run=second seed=1",
        f"# To resume {name} itself: sh command.sh run={name}",
        *(
            ["# Its ranks were started by torchrun or srun: start this script in the same way."]
            if started_elsewhere
            else []
        ),
        f"cd -- {shlex.quote(str(folder))} || exit",
        f'set -- {shlex.join(argv)} "$@"',
        f'[ ! -x {shlex.quote(python)} ] || exec {shlex.quote(python)} -P -m runner "$@"',
        'exec accel-run "$@"',
    ]
    return redact("".join(f"{line}\n" for line in lines)).encode(errors="surrogateescape")


def _names_run(override: str) -> bool:
    """Return whether the override applies to the original run only."""
    key, _, value = override.partition("=")
    return key.lstrip("+") == "run" or (key.lstrip("+") == "resume" and value.strip("'\"") == "fresh")
