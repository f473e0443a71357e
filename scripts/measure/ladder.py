"""Count the repetitions in which `suite=ladder` classifies techniques with known effects correctly beside another job.

nothing   same as the baseline: `no clear change` in at least 19 of 20 repetitions
slow      also sleeps for a tenth of the baseline's update: always `worse`
wrong     has different gradients: always flagged

A second job keeps a core busy while the task trains (tests/tools/measure/planted/layers.py). Prints a line per
repetition and the counts. Exit 1 if a count is too low.
    python scripts/measure/ladder.py [--repetitions 20] [--budget-s 60]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "tests" / "tools" / "measure" / "planted" / "gradients.py"
SETTINGS = ("device=cpu", "backend.threads=1", "global_batch_size=64")
SHARE = 0.1  # fraction of the baseline's update that `slow` sleeps


def main() -> int:
    """Print the results; exit 1 if too few are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=60.0)
    arguments = parser.parse_args()
    counts = dict.fromkeys(("nothing", "slow", "wrong"), 0)
    other = multiprocessing.Process(target=_second_job, daemon=True)
    other.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write_techniques(Path(folder), 0.0)
            plain_ms = _row(_run_benchmark(Path(folder), ["nothing"], arguments.budget_s), "baseline")["update_ms"]
            _write_techniques(Path(folder), SHARE * plain_ms)
            for number in range(arguments.repetitions):
                data = _run_benchmark(Path(folder), list(counts), arguments.budget_s)
                rows = {name: _row(data, name) for name in counts}
                counts["nothing"] += rows["nothing"]["verdict"] == "no clear change"
                counts["slow"] += rows["slow"]["verdict"] == "worse"
                counts["wrong"] += rows["wrong"]["is_wrong"] is True
                summary = ", ".join(f"{name}: {row['verdict']} {_interval(row)}" for name, row in rows.items())
                print(f"{number + 1:>3}  {summary}", flush=True)
    finally:
        other.kill()
    num = arguments.repetitions
    print(f"right of {num}: {', '.join(f'{name} {right}' for name, right in counts.items())}")
    is_right = counts["nothing"] >= 0.95 * num and counts["slow"] == counts["wrong"] == num
    return 0 if is_right else 1


def _write_techniques(folder: Path, sleep_ms: float) -> None:
    """Write the techniques into the folder."""
    techniques = folder / "benchmark" / "technique"
    techniques.mkdir(parents=True, exist_ok=True)
    overrides = {"nothing": "task.sleep_ms=0.0", "slow": f"task.sleep_ms={sleep_ms}", "wrong": "task.gradient=3.0"}
    for name, override in overrides.items():
        (techniques / f"{name}.yaml").write_text(f"overrides: [{override}]\n")


def _run_benchmark(folder: Path, names: list[str], budget_s: float) -> dict[str, Any]:
    """Measure each of these techniques alone; return the JSON output of `accel-run benchmark`."""
    args = [*names, "--task", str(TASK), "--config-dir", str(folder), *SETTINGS]
    args += [f"budget_s={budget_s}", f"folder={folder / 'results'}", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", "benchmark", *args], stdout=subprocess.PIPE, text=True, check=True
    )
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def _row(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in data["rows"] if row["variant"] == name)


def _interval(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    return f"[{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else row["why_not"]


def _second_job() -> None:
    while True:
        sum(range(10_000))


if __name__ == "__main__":
    sys.exit(main())
