"""Measure the CPU time of interactive commands: help, completion, and the message about a typo.

    python scripts/measure/command_line.py

Prints a line per command: the minimum CPU time of six starts, and its limit. The tests count the modules that these
commands load instead (tests/commands/test_typos.py, test_completion.py), because times depend on the machine.
Exit 0: all are below their limits. 1: some are not.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runner.commands import COMMANDS  # noqa: E402 - from this checkout

HELP_S, COMPLETION_S, ERROR_S = 0.15, 0.2, 0.6
COMPLETED = ("train optim", "train precision=", "train optimizer.", "inference inference.", "status ", "benchmark ")
TYPOS = ("train lrr=3", "train updates=0 seed=-1 optimizer.lr=-1 precsion=fp32")


def main() -> int:
    """Print the figures; return the exit code."""
    commands = [(["--help"], HELP_S)]
    commands += [([name, "--help"], HELP_S) for name in COMMANDS if name != "complete"]
    commands += [(["complete", "--", *line.split(" ")], COMPLETION_S) for line in COMPLETED]
    commands += [(line.split(), ERROR_S) for line in TYPOS]
    num_over = 0
    for args, limit_s in commands:
        spent_s = min(cpu_s(args) for _ in range(6))
        num_over += spent_s >= limit_s
        print(f"{1e3 * spent_s:6.0f} ms of {1e3 * limit_s:4.0f}  accel-run {' '.join(args)}")
    return int(num_over > 0)


def cpu_s(args: list[str]) -> float:
    """Return the CPU time of one start, user and system."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "runner", *args]
        subprocess.run(line, cwd=folder, env=environment, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
