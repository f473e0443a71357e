"""`accel-run profile`: what an update of a task is made of, found in a short training of its own."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from runner.base.configuration import Request
from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, read

HELP = f"""usage: accel-run profile [key=value ...]

Trains for a few updates and shows what they are made of: the ten operators that take most, the time of each module
forward and backward, who holds memory when, how much of the time the device works, and the lines of the task that
wait for it. Tables, a picture of the memory and a trace for ui.perfetto.dev go to outputs/profiles/<run name>/profile.
Nothing is evaluated or saved, and other runs are left as they are.

of the profile
  skip=5                       updates that pass first
  updates=10                   updates timed as they are; as many with operators recorded, as many with modules timed
  depth=3                      modules deeper than this count as part of the one that holds them
  sort_by=self|total|calls     what the ten operators have most of
  with_stack=true              name the line of the task for each operator; record_shapes=true: tell shapes apart

of the training, as for accel-run train; checkpoint and tracker have no effect
{SETTINGS_HELP.partition(chr(10))[2].replace("  updates=N or epochs=N        how long" + chr(10), "")}
examples
  accel-run profile
  accel-run profile task=nmt precision=bf16 updates=20
  accel-run profile --task ./my_task.py with_stack=true
  accel-run profile task=dynamo phases=[pretrain]
"""


def run(words: list[str]) -> int:
    """Train for a profile; return 0, or 130 when it was broken off, with what there was until then."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read once; its allocator would warn of what is older
    given = read(words, own=OWN).request
    request = as_training(given)
    unheard = [word for word in given.overrides if _is_without_effect(word)]
    if unheard:
        print(f"profile: {' '.join(unheard)}: no effect here, nothing is saved or sent", file=sys.stderr, flush=True)
    from runner.launch.start import train

    return int(train(request)[0])


def as_training(request: Request) -> Request:
    """Return the request for the training that makes the profile, in a folder beside the runs.

    Raises ConfigError where another profiler, or none, is asked for.
    """
    overrides: list[str] = []
    root, resume = "outputs", ""
    for word in request.overrides:
        key, has_value, value = word.lstrip("+").partition("=")
        if not has_value or _is_without_effect(word):
            overrides += [] if has_value else [word]
        elif key == "output_root":
            root = value
        elif key == "resume":
            resume = value
        elif key == "profiler" and value != "trace":
            raise ConfigError(Problem("a profile is made by profiler=trace", word, "leave it out"))
        elif key != "profiler":
            overrides.append(f"profiler.{key}={value}" if key in OWN else word)
    if resume and resume not in ("auto", "fresh"):
        overrides.append(f"resume={_of_a_run(root, resume)}")
        if not any(word.startswith("resume_allow=") for word in overrides):
            overrides.append("resume_allow=[updates,epochs]")
    elsewhere = f"output_root={root.rstrip('/')}/{FOLDER}"
    fixed = [elsewhere, "profiler=trace", "profiler.only=true", "checkpoint=off", "tracker=none"]
    return dataclasses.replace(request, overrides=(*overrides, *fixed))


def _is_without_effect(word: str) -> bool:
    return word.lstrip("+").partition("=")[0].partition(".")[0] in _WITHOUT_EFFECT


def _of_a_run(root: str, resume: str) -> str:
    """Return the run to start from by its path: it does not lie where profiles do."""
    path = Path(root).expanduser() / resume
    return str(path) if path.is_dir() else resume


FOLDER = "profiles"  # in output_root, so that no profile is ever the last run
OWN = ("skip", "updates", "depth", "sort_by", "with_stack", "record_shapes")
_WITHOUT_EFFECT = ("checkpoint", "tracker")
