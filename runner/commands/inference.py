"""`accel-run inference`: predict with a checkpoint of a run."""

from __future__ import annotations

from dataclasses import replace

from runner.base.errors import AccelRunError
from runner.commands.arguments import CHECKPOINT_HELP, parse_arguments, parse_run_request, pop_checkpoint_choice
from runner.commands.complete import TypedLine
from runner.config.request import Request
from runner.durable.run_request import find_run, load_run_request

HELP = f"""usage: accel-run inference [last|NAME|DIR] [checkpoint=best|last|N] [key=value ...]
       (short: accel-run infer)

Loads a checkpoint of a run, predicts with its task, and writes the results to the run's predictions folder. Latency
and throughput are in predictions/summary.json.

settings
  last, NAME or DIR            the most recent run (default), a run by name, or its folder; also as run=NAME
{CHECKPOINT_HELP}
  inference.KEY=VALUE          options of the task, for example inference.prompt="def " inference.samples=5
  inference.seed=0             random seed; the same seed gives the same predictions
  device=auto                  auto selects the GPU with the most free memory

examples
  accel-run inference
  accel-run infer first inference.samples=5
"""


def run(argv: list[str]) -> int:
    """Predict and write the predictions."""
    checkpoint, rest = pop_checkpoint_choice(argv)
    request = parse_run_request(rest, _inference_keys(rest))

    from runner.launch.trained_ranks import start_inference  # loads torch, so the arguments are checked first

    return int(start_inference(request, checkpoint))


def _inference_keys(argv: list[str]) -> tuple[str, ...]:
    """Return the inference keys, such as inference.samples, as suggestions if an argument may be a misspelled key.

    They are read from the file of --task, else from the task of the run, or from the default task if there is no run.
    """
    arguments = parse_arguments(argv, positional=1)
    request = arguments.request
    if all(arg.startswith(("inference.", "run=", "output_root=", "device=")) for arg in request.overrides):
        return ()
    run_overrides = tuple(arg for arg in request.overrides if arg.startswith(("run=", "output_root=")))
    run_request = replace(request, overrides=(*run_overrides, *(f"run={name}" for name in arguments.positional)))
    line = ["inference", *([] if request.task_file else _task_arguments(run_request)), *argv]
    return tuple(TypedLine.read(line, "inference.").keys("inference."))


def _task_arguments(request: Request) -> list[str]:
    try:
        directory, root = find_run(request, lambda text: None)
        origin = load_run_request(directory, root, request)
    except (AccelRunError, OSError):  # reported where the run is used
        return []
    if origin.task_file is not None:
        return ["--task", str(origin.task_file)]
    return [arg for arg in origin.overrides if arg.startswith("task=")]
