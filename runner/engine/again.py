"""command.sh of a run directory: the line that makes the run again, in any shell, with nothing to be edited."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from runner.base.configuration import Request
from runner.base.secret import redacted


def script(request: Request, name: str, folder: Path, python: str, *, started_elsewhere: bool = False) -> bytes:
    """Return a POSIX shell script that trains with the same settings, from the same folder, under a new name.

    name               of the run it lies in
    folder             in which the command was given: paths in settings are relative to it
    python             the interpreter with everything the run needs; where it is gone, accel-run of the PATH is taken
    started_elsewhere  the ranks were started by torchrun or srun, which the script does not
    -P: no runner.py of that folder is taken for ours.
    `resume=fresh` is left out: a new run has nothing to put aside, and with the old name it is to go on.
    Settings hold no secrets (runner/base/secret.py refuses them), and of the environment nothing is kept; a folder's
    name that holds one is written without it.
    """
    words = words_of(replace(request, overrides=tuple(word for word in request.overrides if not _is_of_that_run(word))))
    lines = [
        "#!/bin/sh",
        f"# Trains with the settings of the run {name} again, as a new run. Words after it are settings too:",
        "#   sh command.sh run=second seed=1",
        f"# To go on with {name} itself where it stopped: sh command.sh run={name}",
        *(["# Its ranks were started by torchrun or srun: start this line with it too."] if started_elsewhere else []),
        f"cd -- {shlex.quote(str(folder))} || exit",
        f'set -- {shlex.join(words)} "$@"',
        f'[ ! -x {shlex.quote(python)} ] || exec {shlex.quote(python)} -P -m runner "$@"',
        'exec accel-run "$@"',
    ]
    return redacted("".join(f"{line}\n" for line in lines)).encode(errors="surrogateescape")


def words_of(request: Request) -> list[str]:
    """Return what is typed after `accel-run` for this request."""
    words = ["train"]
    words += ["--task", str(request.task_file)] if request.task_file else []
    words += ["--config-dir", str(request.config_dir)] if request.config_dir else []
    return [*words, *request.overrides]


def _is_of_that_run(word: str) -> bool:
    key, _, value = word.partition("=")
    return key.lstrip("+") == "run" or (key.lstrip("+") == "resume" and value.strip("'\"") == "fresh")
