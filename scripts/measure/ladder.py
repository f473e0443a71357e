"""Whether the ladder is right while another job runs: techniques planted in a task, and how often each is judged right.

nothing   does what the baseline does: `no clear change`, in at least 19 of 20 repetitions
slow      sleeps for a tenth of the baseline's update besides: `worse`, each time
wrong     has other gradients: flagged, each time

The task computes (tests/tools/measure/planted/layers.py); a second job keeps a core busy meanwhile. Prints one line per
repetition and the counts. Exit 1 where they are fewer.
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
SHARE = 0.1  # of the baseline's update, that `slow` sleeps


def main() -> int:
    """Repeat, count, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=60.0)
    arguments = parser.parse_args()
    counts = dict.fromkeys(("nothing", "slow", "wrong"), 0)
    other = multiprocessing.Process(target=_second_job, daemon=True)
    other.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _plant(Path(folder), 0.0)
            plain_ms = _row(_measured(Path(folder), ["nothing"], arguments.budget_s), "baseline")["update_ms"]
            _plant(Path(folder), SHARE * plain_ms)
            for number in range(arguments.repetitions):
                data = _measured(Path(folder), list(counts), arguments.budget_s)
                rows = {name: _row(data, name) for name in counts}
                counts["nothing"] += rows["nothing"]["verdict"] == "no clear change"
                counts["slow"] += rows["slow"]["verdict"] == "worse"
                counts["wrong"] += rows["wrong"]["is_wrong"] is True
                told = ", ".join(f"{name}: {row['verdict']} {_interval(row)}" for name, row in rows.items())
                print(f"{number + 1:>3}  {told}", flush=True)
    finally:
        other.kill()
    num = arguments.repetitions
    print(f"right of {num}: {', '.join(f'{name} {right}' for name, right in counts.items())}")
    is_right = counts["nothing"] >= 0.95 * num and counts["slow"] == counts["wrong"] == num
    return 0 if is_right else 1


def _plant(folder: Path, sleep_ms: float) -> None:
    """Write the techniques into the folder."""
    techniques = folder / "benchmark" / "technique"
    techniques.mkdir(parents=True, exist_ok=True)
    words = {"nothing": "task.sleep_ms=0.0", "slow": f"task.sleep_ms={sleep_ms}", "wrong": "task.gradient=3.0"}
    for name, word in words.items():
        (techniques / f"{name}.yaml").write_text(f"overrides: [{word}]\n")


def _measured(folder: Path, names: list[str], budget_s: float) -> dict[str, Any]:
    """Return what `accel-run benchmark --json` reports for these techniques, each alone."""
    words = [*names, "--task", str(TASK), "--config-dir", str(folder), *SETTINGS]
    words += [f"budget_s={budget_s}", f"folder={folder / 'results'}", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", "benchmark", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


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
