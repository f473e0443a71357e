"""Train every task at its tiny size, and print its metrics next to those of a trivial model.

    scripts/task_table [TASK...] [--seeds 0,1,2] [--root DIR]

Each task runs as a user would run it: `accel-run both task=NAME`, with default settings, as a new run. The
table has the wall time, the metrics that have a baseline, and whether each metric meets its bound (BOUNDS). With
several seeds, a figure is the mean and the standard deviation over them, and a bound must hold for each seed. Prepared
data is kept between runs; --cold prepares it from scratch. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
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
    """A required result: a metric, a description of its bound, and the test of (metrics, baselines, phases)."""

    metric: str
    words: str
    holds: Callable[[Metrics, Metrics, Mapping[str, Any]], bool]


def at_least(metric: str, *, times: float = 1.0, plus: float = 0.0, of: str = "the trivial model") -> Bound:
    """Return the bound that a metric is at least `times` its baseline + `plus`."""
    words = "at least" if times == 1.0 else f"at least {times:g} x"
    more = f" + {plus:g}" if plus else ""
    return Bound(metric, f"{words} {of}{more}", lambda got, base, _: got[metric] >= times * base[metric] + plus)


def at_most(metric: str, *, times: float = 1.0, of: str = "the trivial model") -> Bound:
    """Return the bound that a metric is at most `times` its baseline."""
    return Bound(metric, f"at most {times:g} x {of}", lambda got, base, _: got[metric] <= times * base[metric])


STRAIGHT = at_most("mdf_mm", times=0.6, of="a straight line")
# arguments of a run -> required results
BOUNDS: Mapping[str, tuple[Bound, ...]] = {
    "gpt": (at_most("bits_per_byte", of="bigram"),),
    "tractodiff": (STRAIGHT,),
    "tractodiff task.data=bundles": (STRAIGHT,),
    "cape": (at_least("pck", plus=0.15, of="copying the support"),),
    "nmt": (at_least("token_accuracy", times=2, of="the most frequent token"),),
    "hyperspectral": (at_least("iou", of="RX"), at_least("auroc", of="RX")),
    "dynamo": (
        Bound("routing", "at least 0.95", lambda got, base, phases: got["routing"] >= 0.95),
        *(at_least(task, of="the majority") for task in ("classification", "qa", "summary", "code", "translation")),
        Bound(
            "score",
            "joint not below lora",
            lambda got, base, phases: got["score"] >= phases["lora"]["metrics"]["val/score"],
        ),
    ),
    "dynamo task.requests=held_out": (at_least("routing", of="one task for all"),),
}
MINUTES = 3.0


def main() -> int:
    """Print the table; return 0 if every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="names of tasks; default: all")
    parser.add_argument("--root", type=Path, help="folder for the runs; default: a temporary one, which is kept")
    parser.add_argument("--cold", action="store_true", help="prepare the tasks' data from scratch")
    parser.add_argument("--seeds", default="0", help="seeds of the runs, such as 0,1,2")
    parser.add_argument("--busy", action="store_true", help="the machine is busy: times are shown but not checked")
    given = parser.parse_args()
    unknown = [task for task in given.tasks if task not in {run.split()[0] for run in BOUNDS}]
    if unknown:
        parser.error(f"unknown tasks: {', '.join(unknown)}")
    root = given.root or Path(tempfile.mkdtemp(prefix="task-table-"))
    root.mkdir(parents=True, exist_ok=True)
    table = Table(title=f"{time.strftime('%Y-%m-%d')}, {_machine()}, seeds {given.seeds}")
    for column in ("task", "train s", "all s", "metric", "reached", "baseline", "bound", ""):
        table.add_column(column, justify="right" if column in ("train s", "all s", "reached", "baseline") else "left")
    wanted = [run for run in BOUNDS if not given.tasks or run.split()[0] in given.tasks]
    results: dict[str, list[dict[str, Any]]] = {}
    ok = True
    for run in wanted:
        results[run] = [_train(run, seed, root, cold=given.cold) for seed in given.seeds.split(",")]
        (root / "task_table.json").write_text(json.dumps(results, indent=2) + "\n")
        rows, met = _rows(run, results[run], timed=not given.busy)
        ok = ok and met
        for row in rows:
            table.add_row(*row)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(f"runs and task_table.json in {root}")
    return 0 if ok else 1


def _train(run: str, seed: str, root: Path, *, cold: bool) -> dict[str, Any]:
    """Train a task and predict with it; return its metrics, baselines and times, or the log of a failed run."""
    task, *options = run.split()
    name = "-".join([task, *(option.rpartition("=")[2] for option in options), seed])
    words = [sys.executable, "-m", "runner", "both", f"task={task}", *options, f"run={name}", f"output_root={root}"]
    words += [f"seed={seed}", "resume=fresh"]
    environment = {**os.environ, **({"XDG_CACHE_HOME": str(root / "cache")} if cold else {})}
    began = time.perf_counter()
    with (root / f"{name}.log").open("w") as log:
        code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    seconds = time.perf_counter() - began
    if code:
        return {"seed": seed, "error": f"exit {code}: {root / name}.log", "all_seconds": seconds}
    record = json.loads((root / name / "run.json").read_text())
    metrics, baselines = (
        {name.removeprefix("val/"): value for name, value in record[part].items()} for part in ("metrics", "baselines")
    )
    return {
        "seed": seed,
        "seconds": sum(phase["seconds"] for phase in record["phases"].values()),
        "all_seconds": seconds,
        "metrics": metrics,
        "baselines": baselines,
        "phases": record["phases"],
    }


def _rows(run: str, trained: list[dict[str, Any]], *, timed: bool) -> tuple[list[tuple[str, ...]], bool]:
    """Return the rows of a task in the table and whether every bound holds for every seed."""
    failed = [each["error"] for each in trained if "error" in each]
    if failed:
        return [(run, "", "", error, "", "", "", "FAIL") for error in failed], False
    checks = {bound.metric: bound for bound in BOUNDS[run]}
    base = trained[0]["baselines"]
    shown = [*checks, *(name for name in base if name in trained[0]["metrics"] and name not in checks)]
    rows: list[tuple[str, ...]] = []
    ok = True
    for name in shown:
        holds = name not in checks or all(
            checks[name].holds(each["metrics"], each["baselines"], each["phases"]) for each in trained
        )
        ok = ok and holds
        first = (run, *(_mean([each[key] for each in trained], "0f") for key in ("seconds", "all_seconds")))
        words = checks[name].words if name in checks else ""
        verdict = ("ok" if holds else "MISSED") if name in checks else ""
        reached = _mean([each["metrics"][name] for each in trained])
        known = f"{base[name]:.4g}" if name in base else ""
        rows.append((*(first if not rows else ("", "", "")), name, reached, known, words, verdict))
    rows += [("", "", "", name, "", f"{value:.4g}", "", "") for name, value in base.items() if name not in shown]
    if timed:
        in_time = all(each["seconds"] <= 60 * MINUTES for each in trained)
        longest = max(each["seconds"] for each in trained)
        verdict = "ok" if in_time else "MISSED"
        rows.append(("", "", "", "train s", f"{longest:.0f}", "", f"at most {60 * MINUTES:.0f}", verdict))
        ok = ok and in_time
    return rows, ok


def _mean(values: list[float], form: str = "4g") -> str:
    """Return a value, or the mean and standard deviation of several."""
    if len(values) == 1:
        return f"{values[0]:.{form}}"
    return f"{statistics.mean(values):.{form}} ± {statistics.stdev(values):.2g}"


def _machine() -> str:
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({platform.machine()}){gpu}, {software}"


if __name__ == "__main__":
    sys.exit(main())
