"""`accel-run inference`: predict with a checkpoint of a run."""

from __future__ import annotations

from runner.commands.arguments import CHECKPOINT_HELP, checkpoint_choice, read, read_of_a_run
from runner.commands.complete import TypedLine

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
    from runner.launch.infer_ranks import infer

    checkpoint, rest = checkpoint_choice(argv)
    return int(infer(read_of_a_run(rest, _own_keys(rest)), checkpoint))


def _own_keys(argv: list[str]) -> tuple[str, ...]:
    """Return the inference keys, such as inference.samples, if an argument may have meant one of them.

    They are those of --task, or of the default task.
    """
    arguments = read(argv, positional=1)
    overrides = arguments.request.overrides
    if all(arg.startswith(("inference.", "run=", "output_root=", "device=")) for arg in overrides):
        return ()
    return tuple(TypedLine.read(["inference", *argv], "inference.").keys("inference."))
