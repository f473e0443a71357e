"""Compare the cost of a run between two checkouts, such as before and after a change, in CPU time and memory.

    python scripts/measure/versions.py BEFORE AFTER [--rounds 4] [--updates 151]

Each checkout is a folder with an installed .venv; both train task=gpt with one thread, interleaved. Ratios are after /
before within a round: the median, and the range over the rounds.

start   a run of one update
update  an update: the time of a run of many updates minus that of the start, divided by the number of updates
save    a save: the time of the same run with a checkpoint after every update minus the time without them, divided by
        the number of updates
memory  peak resident memory of the run of many updates
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMMON = ("task=gpt", "device=cpu", "backend.threads=1", "evaluate.samples=16", "run=r")


def measure(checkout: Path, words: Sequence[str]) -> tuple[float, float]:
    """Return the CPU seconds and the peak MiB of a run, with its child processes."""
    with tempfile.TemporaryDirectory() as folder:
        line = [checkout / ".venv/bin/python", "-m", "runner", "train", *COMMON, f"output_root={folder}", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(line, cwd=checkout, env=environment, **quiet)  # type: ignore[call-overload]
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{checkout}: exit code {os.waitstatus_to_exitcode(status)}: {' '.join(map(str, line))}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def figures(checkout: Path, updates: int) -> dict[str, float]:
    """Return the cost of each part: milliseconds, or MiB for memory."""
    start, _ = measure(checkout, ["updates=1"])
    train, memory = measure(checkout, [f"updates={updates}"])
    saved, _ = measure(checkout, [f"updates={updates}", "checkpoint.every=1"])
    update, save = (train - start) / (updates - 1), (saved - train) / (updates - 1)
    return {"start, ms": 1e3 * start, "update, ms": 1e3 * update, "save, ms": 1e3 * save, "memory, MiB": memory}


def main(argv: Sequence[str]) -> int:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--updates", type=int, default=151)
    options = parser.parse_args(argv)
    checkouts = [options.before.resolve(), options.after.resolve()]
    found: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for number in range(options.rounds):
        for checkout in checkouts if number % 2 else reversed(checkouts):
            found[checkout].append(figures(checkout, options.updates))
    before, after = (found[checkout] for checkout in checkouts)
    for part in before[0]:
        ratios = sorted(new[part] / old[part] for old, new in zip(before, after, strict=True))
        middles = [statistics.median(each[part] for each in rounds) for rounds in (before, after)]
        low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
        print(f"{part:12} {middles[0]:8.1f} -> {middles[1]:8.1f}   {middle:.3f} [{low:.3f}, {high:.3f}]")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
