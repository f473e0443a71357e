"""Train every task at its tiny size, one after another, and print what each reached beside a trivial model.

    scripts/task_table [TASK...] [--root DIR]

Each task is trained and used as a user would: `accel-run both task=NAME`, default settings, a new run. The table gives
wall time, the metrics that have a baseline, and whether the metric is on the right side of the bound written below.
Prepared data is kept between runs, as for a user; --cold prepares it anew. Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Bound:
    """What a task must reach: a metric, the bound in words, and the test of (metrics by phase, baselines)."""

    metric: str
    words: str
    holds: Callable[[Metrics, Metrics], bool]


BOUNDS: Mapping[str, tuple[Bound, ...]] = {
    "gpt": (Bound("bits_per_byte", "below bigram", lambda got, base: got["bits_per_byte"] < base["bits_per_byte"]),),
    "tractodiff": (
        Bound("mdf_mm", "at most 0.6 of a straight line", lambda got, base: got["mdf_mm"] <= 0.6 * base["mdf_mm"]),
    ),
    "cape": (Bound("pck", "15 points above copying the support", lambda got, base: got["pck"] >= base["pck"] + 0.15),),
    "nmt": (
        Bound(
            "token_accuracy",
            "twice the most frequent token",
            lambda got, base: got["token_accuracy"] >= 2 * base["token_accuracy"],
        ),
    ),
    "hyperspectral": (
        Bound("iou", "above RX", lambda got, base: got["iou"] > base["iou"]),
        Bound("auroc", "above RX", lambda got, base: got["auroc"] > base["auroc"]),
    ),
    "dynamo": (),
}
MINUTES = 3.0


def main() -> int:
    """Print the table; 0 where every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=[*BOUNDS], help=f"default: {' '.join(BOUNDS)}")
    parser.add_argument("--root", type=Path, help="folder for the runs; default: a temporary one, which is kept")
    parser.add_argument("--cold", action="store_true", help="prepare the tasks' data anew")
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="task-table-"))
    table = Table(title=f"{time.strftime('%Y-%m-%d')}, {_machine()}")
    for column in ("task", "train s", "all s", "metric", "reached", "baseline", "bound", ""):
        table.add_column(column, justify="right" if column in ("train s", "all s", "reached", "baseline") else "left")
    results = [_measure(task, root, cold=given.cold) for task in given.tasks]
    for result in results:
        for row in result["rows"]:
            table.add_row(*row)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    (root / "task_table.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"runs and task_table.json in {root}")
    return 0 if all(result["ok"] for result in results) else 1


def _measure(task: str, root: Path, *, cold: bool) -> dict[str, Any]:
    """Train a task and predict with it; return the rows of the table."""
    words = [
        sys.executable,
        "-m",
        "runner",
        "both",
        f"task={task}",
        f"run={task}",
        f"output_root={root}",
        "resume=fresh",
    ]
    environment = {**os.environ, **({"XDG_CACHE_HOME": str(root / "cache")} if cold else {})}
    began = time.perf_counter()
    with (root / f"{task}.log").open("w") as log:
        code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    seconds = time.perf_counter() - began
    if code:
        return {
            "task": task,
            "ok": False,
            "rows": [(task, "", f"{seconds:.0f}", f"exit {code}: {root / task}.log", "", "", "", "FAIL")],
        }
    record = json.loads((root / task / "run.json").read_text())
    trained = sum(phase["seconds"] for phase in record["phases"].values())
    got, base = (
        {name.removeprefix("val/"): value for name, value in record[part].items()} for part in ("metrics", "baselines")
    )
    checks = {bound.metric: bound for bound in BOUNDS[task]}
    rows, ok = [], True
    for name in [*checks, *(name for name in base if name in got and name not in checks)]:
        holds = name not in checks or checks[name].holds(got, base)
        ok = ok and holds
        words_of = checks[name].words if name in checks else ""
        verdict = ("ok" if holds else "MISSED") if name in checks else ""
        first = (task, f"{trained:.0f}", f"{seconds:.0f}") if not rows else ("", "", "")
        rows.append((*first, name, f"{got[name]:.4g}", f"{base[name]:.4g}" if name in base else "", words_of, verdict))
    in_time = trained <= 60 * MINUTES
    rows.append(
        ("", "", "", "train s", f"{trained:.0f}", "", f"at most {60 * MINUTES:.0f}", "ok" if in_time else "MISSED")
    )
    return {
        "task": task,
        "ok": ok and in_time,
        "rows": rows,
        "seconds": trained,
        "all_seconds": seconds,
        "metrics": got,
        "baselines": base,
        "phases": record["phases"],
    }


def _machine() -> str:
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({platform.machine()}){gpu}, {software}"


if __name__ == "__main__":
    sys.exit(main())
