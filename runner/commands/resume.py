"""`accel-run resume`: resume a stopped run from any folder, with its original overrides."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, Problem
from runner.base.paths import parse_path, working_folder
from runner.base.rank_env import detect_rank
from runner.commands.arguments import parse_run_request, pop_checkpoint_choice, progress_printer
from runner.config.request import Request, format_override, override_key

if TYPE_CHECKING:
    from runner.durable.directory import RunDirectory
    from runner.durable.run_request import RunRequest

HELP = """usage: accel-run resume [last|NAME|DIR] [checkpoint=best|last|N] [key=value ...]

Resumes a stopped run with its original settings, in the folder where it was started. It is equivalent to repeating the
original command with the same run=NAME. A finished run is not changed. To predict afterwards, run accel-run inference.

  last, NAME or DIR            the most recent run (default), a run by name, or its folder; also as run=NAME
  checkpoint=best|last|N       go back to this checkpoint: the best by checkpoint.best, the last (default), or the one
                               of update N; later checkpoints are kept as checkpoints/earlier-*
  key=value                    settings that may change: micro_batch_size, dataloader, parallelism, device, checkpoint
  updates=N resume_allow=[updates]
                               settings that may change if resume_allow lists them: updates, optimizer.*, scheduler,
                               precision, ...; to change them again later, repeat resume_allow
  --task FILE                  the task file, if the run folder was copied from elsewhere: a run folder alone never
                               decides which code runs

Relative paths in the settings refer to the folder where the run was started. Changing the seed, the batch or the data
would make it a different run and is refused (exit 88).

examples
  accel-run resume
  accel-run resume first dataloader.num_workers=4
  accel-run resume first checkpoint=best
  accel-run resume first updates=2000 resume_allow=[updates]
  accel-run resume /data/outputs/first
"""


def run(argv: list[str]) -> int:
    """Resume training; return 0, or 75 if it was saved and stopped."""
    checkpoint, rest = pop_checkpoint_choice(argv)
    request = parse_run_request(rest)
    if resume_arguments := [arg for arg in request.overrides if arg.partition("=")[0] == "resume"]:
        fix = "to start over, use accel-run train run=NAME resume=fresh with the same settings"
        raise ConfigError(
            Problem("not allowed: accel-run resume continues from a checkpoint", resume_arguments[-1], fix)
        )
    from runner.durable.run_request import find_run, load_run_request

    print_progress = progress_printer("resume")
    directory, root = find_run(request, print_progress)
    origin = load_run_request(directory, root, request)
    overrides = tuple(arg for arg in request.overrides if override_key(arg) not in ("run", "output_root"))
    folder = origin.folder
    if folder is not None and not folder.is_dir():
        print_progress(
            f"{folder}, where this run was started, no longer exists: relative paths now refer to the current folder"
        )
        folder = None
    with working_folder(folder) if folder is not None else nullcontext():
        return _resume(directory, origin, replace(request, overrides=overrides), checkpoint)


def _resume(directory: RunDirectory, origin: RunRequest, request: Request, checkpoint: str | None) -> int:
    """Resume the run in the current working directory.

    request  contains only the settings that differ from those of the run
    """
    from runner.durable.rewind import rewind_run
    from runner.launch.start import start_training

    print_progress, overrides = progress_printer("resume"), request.overrides
    run_overrides = (f"run={directory.name}", *_root_override(directory.path.parent, origin.overrides))
    has_new_length = {"updates", "epochs"} & set(map(override_key, overrides))
    resumed = origin.request(
        replace(request, overrides=(*overrides, *run_overrides)),
        without={
            "run",
            "resume_allow",  # holds only for the command that contains it
            *(["resume"] if "resume=fresh" in origin.overrides else []),
            # A new length replaces the old one, even if one is given in updates and the other in epochs.
            *(["updates", "epochs"] if has_new_length else []),
        },
    )
    print_progress(f"{shlex.join(['accel-run', *resumed.train_arguments()])}   (in {Path.cwd()})")
    member = detect_rank(os.environ)
    is_first = member is None or member.rank == 0  # under torchrun, other ranks wait for rank 0
    with rewind_run(directory, checkpoint, print_progress) if checkpoint and is_first else nullcontext():
        return int(start_training(resumed))


def _root_override(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the override for the folder of the run, unless the run's own overrides give it."""
    recorded = [arg.partition("=")[2].strip("'\"") for arg in overrides if override_key(arg) == "output_root"]
    if parse_path((recorded or ["outputs"])[-1]).resolve() == folder.resolve():
        return []
    return [format_override("output_root", str(folder))]
