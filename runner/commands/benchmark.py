"""`accel-run benchmark`: measure the speedup of settings on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.secret import sanitize
from runner.base.text import terminal_width, wrap_for_terminal
from runner.commands.arguments import JSON, parse_arguments, parse_budget, parse_command_keys, progress_printer
from runner.config.configuration import compose
from runner.config.schema import did_you_mean
from runner.tools.measure.suites import SUITES

_SUITES_SHOWN = "\n".join(f"  {name:<12}  {suite.answers}" for name, suite in SUITES.items())
HELP = f"""usage: accel-run benchmark [suite=NAME] [NAME ...] [key=value ...] [budget_s=300] [--json]

Compares settings by measurement. Each variant trains in a separate process from the same weights on the same samples.
The variants are interleaved in blocks of updates, so that order and load affect all of them equally. The
result is a ratio with its confidence interval; if the interval includes 1, there is no clear change.

suites
{_SUITES_SHOWN}

  budget_s=300        approximate total time in seconds
  folder=benchmarks   where results and plots are written
  prefix=             prefix of the names of the result files
  --json              print all measurements as JSON

options of the ladder suite; add your own techniques in CONFIG_DIR/benchmark/technique/NAME.yaml
  NAME ...            measure only these techniques, each alone; results of others are kept
  all                 measure everything and draw the plots
  init, reset, clean  create an empty table of results; empty the table; delete the table and its plots
  plots               draw the results
  techniques=all      or [bf16,compile]: techniques to measure, in the order in which they are stacked
  modes=all           isolated: each alone; cumulative: each on top of the previous ones
  steps=50            updates per variant that the table lists; rounds=60: maximum number of blocks per variant
  batch=N             global_batch_size, the samples per update

settings of the run, as for accel-run train: task=, --task FILE, hardware=, global_batch_size=, ...
"""


COMMAND_KEYS = {"suite": "ladder", "budget_s": "300", "folder": "benchmarks", "prefix": ""}  # options of all suites


def run(argv: list[str]) -> int:
    """Run a suite and print its report."""
    from runner.tools.measure.results import Results
    from runner.tools.measure.suite import screen

    suite, request, as_json = parse_benchmark_arguments(argv)
    Results(request.folder, request.prefix).check()  # fail before measuring
    report = import_module(f"runner.tools.measure.suites.{suite}").run(request)
    if as_json:
        print(json.dumps(dict(report.data), indent=2), flush=True)
    else:
        print(wrap_for_terminal(sanitize("\n".join(screen(report, terminal_width())))), flush=True)
    return 0


def parse_benchmark_arguments(argv: list[str]) -> tuple[str, Any, bool]:
    """Return the name of the suite, its request, and whether to print JSON. Raises ConfigError."""
    from runner.tools.measure.suite import SuiteRequest

    values = {key: value for key, has_value, value in (arg.partition("=") for arg in argv) if has_value}
    suite = values.get("suite", COMMAND_KEYS["suite"])
    if suite not in SUITES:
        what = f"must be one of {', '.join(SUITES)}"
        raise ConfigError(Problem(what, f"suite={suite}", did_you_mean(suite, SUITES)))
    keys, rest, as_json = parse_command_keys(argv, {**COMMAND_KEYS, **SUITES[suite].options}, JSON)
    budget_s = parse_budget(keys["budget_s"], COMMAND_KEYS["budget_s"])
    arguments = parse_arguments(rest, positional=len(rest), command_keys=(*keys, JSON))
    compose(arguments.request)  # report invalid settings before measuring
    options = {key: keys[key] for key in SUITES[suite].options}
    suite_request = SuiteRequest(
        arguments.request,
        arguments.positional,
        options,
        Path(keys["folder"]).expanduser().absolute(),
        keys["prefix"],
        budget_s,
    )
    return suite, replace(suite_request, log=progress_printer("benchmark")), as_json
