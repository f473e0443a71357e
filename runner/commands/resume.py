"""`accel-run resume`: go on with a run that was stopped, from any folder, with the words that made it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.base.configuration import key_of, word_of
from runner.base.errors import ConfigError, Problem
from runner.base.places import as_path
from runner.commands.arguments import read_of_a_run, teller

HELP = """usage: accel-run resume [last|NAME|DIR] [key=value ...]

Goes on with a run where it stopped, with the settings it was begun with, in the folder it was begun in: what the same
command with the same run=NAME does. A run that is finished stays as it is. It trains; then: accel-run inference

  last, NAME or DIR            the run written to last (default), a run's name, or its folder; also as run=NAME
  key=value                    mechanics may differ: micro_batch_size, dataloader, parallelism, device, checkpoint, ...
  updates=N resume_allow=[updates]      also optimizer.*, scheduler, precision and the like, each by its name
  --task FILE                  the task, where the run lies in another folder: it does not say what code is run

Paths among the settings are relative to the folder the run was begun in. What makes it another run, such as the seed,
the batch or the data, is refused (exit 88).

examples
  accel-run resume
  accel-run resume first dataloader.num_workers=4
  accel-run resume first updates=2000 resume_allow=[updates]
  accel-run resume /data/outputs/first
"""


def run(words: list[str]) -> int:
    """Train on; return 0, or 75 when it was saved and stopped."""
    given = read_of_a_run(words)
    if begins := [word for word in given.overrides if word.partition("=")[0] == "resume"]:
        fix = "to begin it anew: accel-run train run=NAME resume=fresh, with its settings"
        raise ConfigError(Problem("the run named goes on from its own checkpoints", begins[-1], fix))
    from runner.commands.train import train_and_point
    from runner.durable.origin import find_run, origin_of
    from runner.engine.again import words_of

    say = teller("resume")
    directory, root = find_run(given, say)
    origin = origin_of(directory, root, given)
    own = tuple(word for word in given.overrides if key_of(word) not in ("run", "output_root"))
    if origin.folder is not None and origin.folder.is_dir():
        os.chdir(origin.folder)
    elif origin.folder is not None:
        say(f"{origin.folder}, where this run was begun, is gone: paths in its settings are relative to this folder")
    named = (f"run={directory.name}", *_root_of(directory.path.parent, origin.overrides))
    request = origin.request(replace(given, overrides=(*own, *named)), without=_not_kept(origin.overrides, own))
    say(f"{shlex.join(['accel-run', *words_of(request)])}   (in {Path.cwd()})")
    return train_and_point(request)


def _not_kept(overrides: Sequence[str], own: Sequence[str]) -> set[str]:
    """Return keys whose words are left out: a new length takes the place of the old one, also in its other unit."""
    is_longer = {"updates", "epochs"} & set(map(key_of, own))
    return {"run", *(["resume"] if "resume=fresh" in overrides else []), *(["updates", "epochs"] if is_longer else [])}


def _root_of(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the word for the folder that holds the run, unless the run's own words lead there."""
    recorded = [word.partition("=")[2].strip("'\"") for word in overrides if key_of(word) == "output_root"]
    if as_path((recorded or ["outputs"])[-1]).resolve() == folder.resolve():
        return []
    return [word_of("output_root", str(folder))]
