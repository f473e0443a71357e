"""`accel-run profile`: profile the updates of a task in a short, separate training run."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, parse_arguments
from runner.config.request import Request

HELP = f"""usage: accel-run profile [key=value ...]

Profiles a few updates of a training run: the ten most expensive operators, forward and backward time of each module,
and the lines of the task that wait for the device. Writes tables and a trace for ui.perfetto.dev to
outputs/profiles/<run name>/profile. Nothing is evaluated or saved, and other runs are not changed.

options of the profiler
  skip=5                       warm-up updates that are not recorded
  updates=10                   updates to time; the same number is then recorded by operator, and again by module
  depth=3                      modules nested deeper than this count toward their parent
  sort_by=self|total|calls     sort order of the operator table
  with_stack=true              show the line of the task for each operator; record_shapes=true: separate rows per shape

settings of the training, as for accel-run train; checkpoint and tracker have no effect
{SETTINGS_HELP.partition(chr(10))[2].replace("  updates=N or epochs=N        length of the training" + chr(10), "")}
examples
  accel-run profile
  accel-run profile task=nmt precision=bf16 updates=20
  accel-run profile --task ./my_task.py with_stack=true
  accel-run profile task=dynamo phases=[pretrain]
"""


def run(argv: list[str]) -> int:
    """Profile a short training run. Return 0, or 130 if interrupted; the results so far are then written."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read once by torch; hides warnings of its allocator
    parsed = parse_arguments(argv, command_keys=COMMAND_KEYS).request
    request = profiled_request(parsed)
    ignored = [arg for arg in parsed.overrides if _has_no_effect(arg)]
    if ignored:
        print(f"no effect in a profile: {' '.join(ignored)}", file=sys.stderr, flush=True)
    from runner.launch.start import start_training

    return int(start_training(dataclasses.replace(request, command=("profile", *argv))))


def profiled_request(request: Request) -> Request:
    """Return the request for the profiled training, which is stored in a separate folder of output_root.

    Raises ConfigError if another profiler, or none, is requested.
    """
    overrides: list[str] = []
    root, resume = "outputs", ""
    for arg in request.overrides:
        key, has_value, value = arg.lstrip("+").partition("=")
        if not has_value or _has_no_effect(arg):
            overrides += [] if has_value else [arg]
        elif key == "output_root":
            root = value
        elif key == "resume":
            resume = value
        elif key == "profiler" and value != "trace":
            raise ConfigError(Problem("accel-run profile always uses profiler=trace", arg, "leave it out"))
        elif key != "profiler":
            overrides.append(f"profiler.{key}={value}" if key in COMMAND_KEYS else arg)
    if resume and resume not in ("auto", "fresh"):
        overrides.append(f"resume={_run_path(root, resume)}")
        if not any(arg.startswith("resume_allow=") for arg in overrides):
            overrides.append("resume_allow=[updates,epochs]")
    profile_root = f"output_root={root.rstrip('/')}/{FOLDER}"
    forced = [profile_root, "profiler=trace", "profiler.only=true", "checkpoint=off", "tracker=none"]
    return dataclasses.replace(request, overrides=(*overrides, *forced))


def _has_no_effect(arg: str) -> bool:
    return arg.lstrip("+").partition("=")[0].partition(".")[0] in _WITHOUT_EFFECT


def _run_path(root: str, resume: str) -> str:
    """Return the run to start from as a path, because profiles are stored in another folder."""
    path = Path(root).expanduser() / resume
    return str(path) if path.is_dir() else resume


FOLDER = "profiles"  # in output_root, so that no profile is ever the last run
COMMAND_KEYS = ("skip", "updates", "depth", "sort_by", "with_stack", "record_shapes")
_WITHOUT_EFFECT = ("checkpoint", "tracker")
