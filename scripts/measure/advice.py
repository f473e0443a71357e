"""Whether advice is right: tasks with a bottleneck planted in them, what is advised first, and what it then brings.

For each case `accel-run advise --json` says what to do first and what that gains. Then the task is trained as it was
and as advised, in turns, by plain `accel-run train`; what is for the user to do in the code is done by
task.mended=true.

right      the first advice is for what was planted
predicted  times as fast, as the advice says
applied    times as fast, by the blocks of the runs
Exit 1 where fewer than nine in ten of the cases that could be measured are right, or are predicted within 20 % of what
applying them brings.
Two cases need a GPU (copies from memory that is not pinned, kernel search for shapes that vary): without one they are
listed as not measured; tests/tools/measure/test_rules.py judges the rules on given evidence.
Run on quiet cores: python scripts/measure/advice.py
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
    """What is planted: a task, the settings it is trained with, and the rules that see it.

    updates  of a run that measures what was gained
    """

    name: str
    task: str
    words: tuple[str, ...]
    rules: tuple[str, ...]
    updates: int = 200
    needs_gpu: bool = False


CASES = (
    Case("slow transform", "slow_transform", (), ("slow transform", "data wait"), 100),
    Case("workers 0", "far_away", ("dataloader.num_workers=0",), ("data wait",), 100),
    Case(".item() each step", "counts_items", ("backend.threads=1",), ("hidden device waits",), 400, needs_gpu=True),
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


def advised(case: Case, budget_s: float) -> dict[str, Any]:
    """Return what `accel-run advise` says."""
    words = command("advise", "--task", str(PLANTED / f"{case.task}.py"), *case.words, f"budget_s={budget_s}", "--json")
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def first_of(advice: dict[str, Any]) -> tuple[str, list[str], float]:
    """Return the rule of the first advice, the overrides that apply it, and its reported gain."""
    first = advice["advice"][0]
    words = first["tried"]["overrides"] if first["tried"] else ["task.mended=true"]
    return first["rule"], list(words), math.nan if first["gain"] is None else float(first["gain"])


def step_times(case: Case, words: Sequence[str], folder: Path, name: str) -> list[float]:
    """Return the milliseconds per update of the rows of metrics of a run, without the first one."""
    own = ("log_every=10", f"updates={case.updates}", f"run={name}", f"output_root={folder}", "evaluate.every=0")
    given = [word for word in case.words if word.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    line = command("train", "--task", str(PLANTED / f"{case.task}.py"), *given, *words, *own)
    subprocess.run(line, check=True, capture_output=True)
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row["perf/step_time_ms"] for row in rows if "perf/step_time_ms" in row][1:]


def applied(case: Case, words: Sequence[str], runs: int) -> float:
    """Return how many times as fast runs are that do what was advised; they take turns with those that do not."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            for does in (False, True) if number % 2 else (True, False):
                times[does] += step_times(case, words if does else (), Path(folder), f"run-{number}-{does}")
    return statistics.median(times[False]) / statistics.median(times[True])


def main() -> int:
    """Print the table; exit 1 where fewer are right than wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each advice")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--least", type=float, default=0.9, help="share of cases: exit 1 when fewer are right or close")
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
        advice = advised(case, arguments.budget)
        if not advice["advice"]:
            print(f"{case.name:<24}{'nothing':<24}{'no':<7}", flush=True)
            continue
        rule, words, predicted = first_of(advice)
        is_right = rule in case.rules
        gain = applied(case, words, arguments.runs)
        off = predicted / gain - 1
        num_right, num_close = num_right + is_right, num_close + (is_right and abs(off) <= 0.2)
        figures = f"{predicted:>9.2f}x{gain:>8.2f}x{off:>+7.0%}"
        row = f"{case.name:<24}{rule:<24}{'yes' if is_right else 'no':<7}{figures}"
        print(f"{row}  {' '.join(words)}", flush=True)
    print(f"of {num_measured} measured: right {num_right}, and predicted within 20 % {num_close}")
    return int(not num_measured or min(num_right, num_close) < arguments.least * num_measured)


if __name__ == "__main__":
    sys.exit(main())
