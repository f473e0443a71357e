"""`accel-run evaluate`: the metrics of a trained run on a split."""

from __future__ import annotations

import json
from contextlib import nullcontext

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import CHECKPOINT_HELP, checkpoint_choice, own_arguments, read_of_a_run

HELP = f"""usage: accel-run evaluate [last|NAME|DIR] [split=val] [checkpoint=best|last|N] [key=value ...] [--json]
       accel-run evaluate weights=FILE [split=val] [key=value ...] [--json]

Computes the task's metrics on a split with a trained run, or with given weights, on all devices and ranks that
training uses. On the val split the result equals that of the evaluation during training. The metrics are also in
evaluations/SPLIT-CHECKPOINT.json of the run directory.

  last, NAME or DIR            the most recent run (default), a run by name, or its folder; also as run=NAME
  split=val                    the split: train, val, test, or another that the task's dataset(split) returns
{CHECKPOINT_HELP}
  weights=FILE                 no run: the task with these weights; run=NAME names the folder of the results
  evaluate.samples=N           number of samples, evenly spaced; null: all
  --json                       print the record as JSON, and nothing else on standard output

examples
  accel-run evaluate split=test
  accel-run evaluate first split=test checkpoint=last
  accel-run evaluate task=gpt weights=model.safetensors
"""

OWN = {"split": "val"}


def run(argv: list[str]) -> int:
    """Evaluate; return 0, or 130 after a signal."""
    own, rest, as_json = own_arguments(argv, OWN)
    checkpoint, rest = checkpoint_choice(rest)
    request = read_of_a_run(rest, OWN)
    from runner.durable.directory import is_plain_path

    if "/" in own["split"] or not is_plain_path(own["split"]):
        what = "must be a name of letters, digits, '.', '_' and '-'"
        raise ConfigError(Problem(what, f"split={own['split']}", "use split=test"))
    from runner.host.output import stdout_to_stderr
    from runner.launch.evaluate_ranks import evaluate

    with stdout_to_stderr() if as_json else nullcontext():
        code, record = evaluate(request, own["split"], checkpoint, "warning" if as_json else None)
    if as_json and record is not None:
        print(json.dumps(record, indent=2))
    return int(code)
