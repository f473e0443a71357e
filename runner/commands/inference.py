"""`accel-run inference`: predict with the newest checkpoint of a run."""

from __future__ import annotations

from runner.commands.arguments import read, read_of_a_run
from runner.commands.complete import candidates

HELP = """usage: accel-run inference [last|NAME|DIR] [key=value ...]      (short: accel-run infer)

Loads the newest valid checkpoint of the run, predicts with the task it was trained on, and writes into its
predictions folder, with latency and throughput in predictions/summary.json.

settings
  last, NAME or DIR            the run trained last (default), a run's name, or its folder; also as run=NAME
  inference.KEY=VALUE          what the task offers, e.g. inference.prompt="def " inference.samples=5
  inference.seed=0             the same seed predicts the same
  device=auto                  auto takes the GPU with the most free memory

examples
  accel-run inference
  accel-run infer first inference.samples=5
"""


def run(words: list[str]) -> int:
    """Predict and write the predictions."""
    from runner.engine.infer import infer

    return int(infer(read_of_a_run(words, _own_keys(words))))


def _own_keys(words: list[str]) -> tuple[str, ...]:
    """Return the keys of the prediction, such as inference.samples, where a word may have meant one of them.

    They are those of the run's task, or of the default task where there is no such run.
    """
    arguments = read(words, positional=1)
    overrides = arguments.request.overrides
    if all(word.startswith(("inference.", "run=", "output_root=", "device=")) for word in overrides):
        return ()
    run = [word for word in overrides if word.startswith(("run=", "output_root="))]
    flags = [f"--task={arguments.request.task_file}"] if arguments.request.task_file else []
    found = candidates(["inference", *flags, *run, *arguments.positional, "inference."])
    return tuple(word.removesuffix("=") for word in found)
