"""Sweeps: every combination of comma lists, one fresh process at a time; a failure does not stop the rest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.base.configuration import Request, compose, expand_sweep, merge_overrides
from runner.base.errors import ConfigError, Exit, Problem
from runner.durable.directory import check_name, default_name


def sweep(request: Request) -> int:
    """Train each combination in a process of its own and print a table; 0 when all ended well, else the first failure.

    The runs are called NAME-1, NAME-2, ... after `run=NAME`; the same command with the same name resumes those not
    finished. A stop (75) or Ctrl-C ends the sweep. Raises ConfigError, before anything is started, with the problems
    of every combination.
    """
    trials = expand_sweep(request)
    problems: dict[Problem, None] = {}
    configurations = []
    for trial in trials:
        try:
            configurations.append(compose(trial))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(problems)
    name = configurations[0].settings.run or default_name(f"{configurations[0].choices['task'].name}-sweep")
    check_name(name)
    root = Path(configurations[0].settings.output_root)
    varied = [word.partition("=")[0] for word, *_ in _columns(trials)]
    rows: list[tuple[str, int, Mapping[str, Any]]] = []
    code = 0
    for number, trial in enumerate(trials, 1):
        run = f"{name}-{number}"
        values = [word for word in trial.overrides if word.partition("=")[0] in varied]
        print(f"[{number}/{len(trials)}] {run}: {' '.join(values)}", flush=True)
        ended = _start(trial, run)
        rows.append((f"{run}  {' '.join(values)}", ended, _metrics(root / run)))
        code = code or ended
        if ended in (Exit.PREEMPTED, Exit.INTERRUPTED):
            print(f"stopped; the same command with run={name} goes on")
            break
    print(_table(rows))
    return code


def _start(trial: Request, run: str) -> int:
    words = [sys.executable, "-m", "runner", "train", *merge_overrides(trial.overrides, [f"run={run}"])]
    if trial.task_file:
        words += ["--task", str(trial.task_file)]
    if trial.config_dir:
        words += ["--config-dir", str(trial.config_dir)]
    with subprocess.Popen(words) as process:
        # The terminal sends Ctrl-C to both; a signal to this process alone is handed on. The trial decides.
        previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda got, _: process.send_signal(got)),
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        }
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _columns(trials: list[Request]) -> list[tuple[str, ...]]:
    """Return the overrides that differ between trials, one tuple per position."""
    return [column for column in zip(*(trial.overrides for trial in trials), strict=True) if len(set(column)) > 1]


def _metrics(directory: Path) -> Mapping[str, Any]:
    try:
        record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        return dict(record.get("metrics") or {})
    except (OSError, ValueError, AttributeError):
        return {}


def _table(rows: list[tuple[str, int, Mapping[str, Any]]]) -> str:
    width = max(len(row[0]) for row in rows)
    lines = []
    for label, code, metrics in rows:
        ended = "done" if code == 0 else f"exit {code}"
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        lines.append(f"{label:<{width}}  {ended:<8}  {shown}".rstrip())
    with_loss = [row for row in rows if "val/loss" in row[2]]
    if len(with_loss) > 1:
        best = min(with_loss, key=lambda row: row[2]["val/loss"])
        lines.append(f"lowest val/loss: {best[0]}")
    return "\n".join(["", *lines])
