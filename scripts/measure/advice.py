"""Test the first advice of `accel-run advise`, and its predicted gain, on tasks with a known bottleneck.

For each case, `accel-run advise --json` reports the first advice and its gain. Then `accel-run train` trains the task
alternately without and with the advised settings; advice that requires a code change is applied by task.fixed=true.

right      the first advice addresses the known bottleneck
predicted  speedup reported by the advice
applied    speedup measured in the runs
Exit 1 if fewer than nine in ten of the measured cases are right, or fewer than nine in ten predictions are within 20 %
of the applied gain.
Some cases need a GPU; without one they are listed as not measured. tests/tools/measure/test_rules.py tests the rules on
given evidence.
Run on idle cores: python scripts/measure/advice.py
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLANTED = Path(__file__).resolve().parents[2] / "tests" / "tools" / "measure" / "planted"


@dataclass(frozen=True)
class Case:
    """A task with a bottleneck, its settings, and the rules that detect it.

    updates  number of updates of each run that measures the applied gain
    """

    name: str
    task: str
    settings: tuple[str, ...]
    rules: tuple[str, ...]
    updates: int = 200
    needs_gpu: bool = False


CASES = (
    Case("slow transform", "slow_transform", (), ("slow transform", "data wait"), 100),
    Case("workers 0", "far_away", ("dataloader.num_workers=0",), ("data wait",), 100),
    Case(
        "tiny micro-batch",
        "layers",
        ("task.depth=6", "global_batch_size=64", "micro_batch_size=1"),
        ("tiny micro-batches",),
        100,
    ),
    Case(
        "fp32 where bf16 pays",
        "layers",
        ("task.width=1024", "task.depth=3", "global_batch_size=256", "precision=fp32"),
        ("precision",),
        100,
    ),
    Case("checkpoint each update", "layers", ("task.width=512", "checkpoint.every=1"), ("checkpoints too often",), 100),
    Case("slow logger", "slow_logger", ("backend.threads=1",), ("slow hooks",), 300),
    Case(
        "too many threads",
        "layers",
        ("task.width=128", "task.depth=4", "backend.threads=16"),
        ("too many threads",),
        300,
    ),
    Case("unpinned", "layers", ("task.width=2048", "dataloader.pin_memory=false"), ("unpinned",), 300, needs_gpu=True),
    Case("varying shapes", "lengths", ("backend=fast",), ("varying shapes",), 300, needs_gpu=True),
)


def command(*words: str) -> list[str]:
    """Return the command line of accel-run."""
    return [sys.executable, "-m", "runner", *words]


def run_advise(case: Case, budget_s: float) -> dict[str, Any]:
    """Run `accel-run advise` and return its JSON output."""
    line = command(
        "advise", "--task", str(PLANTED / f"{case.task}.py"), *case.settings, f"budget_s={budget_s}", "--json"
    )
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    advice: dict[str, Any] = json.loads(done.stdout)
    return advice


def read_first(advice: dict[str, Any]) -> tuple[str, list[str], float]:
    """Return the rule of the first advice, the overrides that apply it, and its reported gain."""
    first = advice["advice"][0]
    words = first["tried"]["overrides"] if first["tried"] else ["task.fixed=true"]
    return first["rule"], list(words), math.nan if first["gain"] is None else float(first["gain"])


def step_times(case: Case, words: Sequence[str], folder: Path, name: str) -> list[float]:
    """Train, and return the milliseconds per update of each row of metrics but the first."""
    common = ("log_every=10", f"updates={case.updates}", f"run={name}", f"output_root={folder}", "evaluate.every=0")
    given = [word for word in case.settings if word.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    line = command("train", "--task", str(PLANTED / f"{case.task}.py"), *given, *words, *common)
    subprocess.run(line, check=True, capture_output=True)
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row["perf/step_time_ms"] for row in rows if "perf/step_time_ms" in row][1:]


def measure_applied(case: Case, words: Sequence[str], runs: int) -> float:
    """Return the speedup of runs with the advised settings over runs without them, measured alternately."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            for is_applied in (False, True) if number % 2 else (True, False):
                overrides = words if is_applied else ()
                times[is_applied] += step_times(case, overrides, Path(folder), f"run-{number}-{is_applied}")
    return statistics.median(times[False]) / statistics.median(times[True])


def main() -> int:
    """Print the table; exit 1 if too few cases are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each advice")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument(
        "--least", type=float, default=0.9, help="minimum fraction of cases that are right and close; exit 1 below"
    )
    arguments = parser.parse_args()
    import torch

    has_gpu = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, {'a GPU' if has_gpu else 'no GPU'}")
    print(f"{'planted':<24}{'first advice':<24}{'right':<7}{'predicted':>10}{'applied':>9}{'off':>7}  what")
    num_right = num_close = num_measured = 0
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        if case.needs_gpu and not has_gpu:
            print(f"{case.name:<24}not measured: needs a GPU")
            continue
        num_measured += 1
        advice = run_advise(case, arguments.budget)
        if not advice["advice"]:
            print(f"{case.name:<24}{'nothing':<24}{'no':<7}", flush=True)
            continue
        rule, words, predicted = read_first(advice)
        is_right = rule in case.rules
        gain = measure_applied(case, words, arguments.runs)
        off = predicted / gain - 1
        num_right, num_close = num_right + is_right, num_close + (is_right and abs(off) <= 0.2)
        figures = f"{predicted:>9.2f}x{gain:>8.2f}x{off:>+7.0%}"
        row = f"{case.name:<24}{rule:<24}{'yes' if is_right else 'no':<7}{figures}"
        print(f"{row}  {' '.join(words)}", flush=True)
    print(
        f"{num_right} of {num_measured} measured cases are right; {num_close} gains are within 20 % of the prediction"
    )
    return int(not num_measured or min(num_right, num_close) < arguments.least * num_measured)


if __name__ == "__main__":
    sys.exit(main())
