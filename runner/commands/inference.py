"""`accel-run inference`: predict with the newest checkpoint of a run."""

from __future__ import annotations

from runner.commands.arguments import read_of_a_run

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

    return int(infer(read_of_a_run(words)))
