"""Compare each project of tests/projects with its plain loop; print a table for docs/results.

    python scripts/measure/project_distances.py [PROJECT ...]

Like `tests/projects/test_projects.py`, it trains each project in float64: in one process, after a SIGKILL, and on two
ranks with unequal shares. Distances of weights are relative to the largest weight, those of metrics to the metric. A
project whose package is not installed is listed without results.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.forkserver import ForkServer
from tests.projects.test_projects import PROJECTS, compare, missing_packages

HEADER = "| project | one process: weights, metrics | two ranks: weights, metrics | resumed at | resumed: weights |"


def row_of(name: str, server: ForkServer) -> str:
    """Return the row of a project."""
    if missing := missing_packages(name):
        return f"| {name} | not run: {', '.join(missing)} is not installed | | | |"
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        result = compare(name, server, Path(folder))
    pairs = (f"{weights:.1e}, {metrics:.1e}" for weights, metrics in (result.loop, result.ranks))
    resumed = "equal" if result.resumed == 0 else f"{result.resumed:.1e}"
    return f"| {name} | {' | '.join(pairs)} | {result.resumed_at} of {result.total} | {resumed} |"


def main() -> None:
    """Print the table, row by row."""
    print(HEADER, "|---" * HEADER.count(" |") + "|", sep="\n")
    with ForkServer.started() as server:
        for name in sys.argv[1:] or PROJECTS:
            print(row_of(name, server), flush=True)


if __name__ == "__main__":
    main()
