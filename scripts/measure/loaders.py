#!/usr/bin/env python3
"""Compare `dataloader.num_workers=auto` on a CPU with numbers of workers that are set by hand.

    scripts/measure/loaders.py [--budget 40] [--models mlp residual] [--reads storage] [--limit]

For each of 12 combinations of a model and a dataset (scripts/measure/loader_task.py), the variants are measured
interleaved, each in a separate process. Prints the speed of auto relative to each number of workers: above 1, auto is
faster. With --limit, exits with 1 if auto is more than 3 % slower than the fastest one, beyond the uncertainty.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from runner.config.request import Request
from runner.tools.measure.compare import CompareLimits, Comparison
from runner.tools.measure.comparison_result import Variant

TASK = Path(__file__).with_name("loader_task.py")
WORKERS = (0, 1, 2, 4)
MIN_SPEED = 0.97  # of auto, relative to the fastest number of workers


def measure(model: str, reads: str, budget_s: float) -> bool:
    """Print a line of the table; return whether auto is fast enough."""
    request = Request((f"task.model={model}", f"task.reads={reads}"), task_file=TASK)
    variants = [Variant("auto"), *(Variant(str(num), (f"dataloader.num_workers={num}",)) for num in WORKERS)]
    with Comparison(request) as comparison:
        result = comparison.compare(variants, CompareLimits(budget_s=budget_s, block_s=1.0), lambda _: None)
    ratios = {trial.name: result.ratio(trial) for trial in result.variants[1:]}
    cells = [f"{1 / ratio.middle:.2f}" if ratio else "-" for ratio in ratios.values()]
    is_fast = all(ratio is None or ratio.low < 1 / MIN_SPEED for ratio in ratios.values())
    print(f"| {model} | {reads} | {result.baseline.median_ms:.3g} ms | {' | '.join(cells)} |", flush=True)
    return is_fast


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each combination")
    parser.add_argument("--models", nargs="+", default=["mlp", "convolutional", "residual", "transformer"])
    parser.add_argument("--reads", nargs="+", default=["memory", "compute", "storage"])
    parser.add_argument("--limit", action="store_true", help="exit with 1 if auto is too slow")
    args = parser.parse_args()
    print(f"| model | reading | auto | {' | '.join(f'auto / {num}' for num in WORKERS)} |")
    print("|---" * (3 + len(WORKERS)) + "|")
    fast = [measure(model, reads, args.budget) for model in args.models for reads in args.reads]
    return int(args.limit and not all(fast))


if __name__ == "__main__":
    sys.exit(main())
