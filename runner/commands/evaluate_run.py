"""`accel-run evaluate`: evaluate a checkpoint of a run, or a weights file, on a split."""

from __future__ import annotations

import json
from contextlib import nullcontext

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import (
    CHECKPOINT_HELP,
    JSON,
    parse_command_keys,
    parse_run_request,
    pop_checkpoint_choice,
)

HELP = f"""usage: accel-run evaluate [last|NAME|DIR] [split=val] [checkpoint=best|last|N] [key=value ...] [--json]
       accel-run evaluate weights=FILE [split=val] [key=value ...] [--json]

Evaluates a checkpoint of a run, or a weights file, on one split, using the same devices and ranks as training. On the
val split, the metrics equal those of the evaluation during training. They are also saved in the run directory, in
evaluations/SPLIT-CHECKPOINT.json.

  last, NAME or DIR            the most recent run (default), the name of a run, or its folder; run=NAME also works
  split=val                    the split: train, val, test, or one that the task declares in `splits`
{CHECKPOINT_HELP}
  weights=FILE                 evaluate these weights instead of a run; run=NAME names the results folder
  evaluate.samples=N           number of samples, evenly spaced; null: all
  --json                       print the metrics as JSON, and nothing else on standard output

examples
  accel-run evaluate split=test
  accel-run evaluate first split=test checkpoint=last
  accel-run evaluate task=gpt weights=model.safetensors
"""

COMMAND_KEYS = {"split": "val"}


def run(argv: list[str]) -> int:
    """Evaluate; return the exit code."""
    keys, rest, as_json = parse_command_keys(argv, COMMAND_KEYS, JSON)
    checkpoint, rest = pop_checkpoint_choice(rest)
    request = parse_run_request(rest, (*keys, JSON))
    from runner.durable.directory import is_safe_path

    if "/" in keys["split"] or not is_safe_path(keys["split"]):
        what = "must consist of letters, digits, '.', '_' and '-'"
        raise ConfigError(Problem(what, f"split={keys['split']}", "use split=test"))
    from runner.host.output import stdout_to_stderr
    from runner.launch.trained_ranks import start_evaluation

    with stdout_to_stderr() if as_json else nullcontext():
        code, record = start_evaluation(request, keys["split"], checkpoint, "warning" if as_json else None)
    if as_json and record is not None:
        print(json.dumps(record, indent=2))
    return int(code)
