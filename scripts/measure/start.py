"""Measure the time from process start to the first update, against a plain script with the same model and data.

bare   imports torch, builds gpt tiny, reads one batch from the prepared tokens, makes one AdamW update
ours   accel-run train with wandb offline: composes, plans, locks the run directory, builds, makes one update

Both are started in turns; the ratio is that of the medians. Run: python scripts/measure/start.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import sys, time
import numpy as np
import torch
import torch.nn.functional as F
sys.path.insert(0, sys.argv[2])
from tasks.gpt.model import Shape, Transformer

torch.manual_seed(0)
tokens = np.memmap(sys.argv[1], dtype=np.uint8, mode="r")
model = Transformer(Shape(num_layers=4, num_heads=4, width=128, block_size=128, vocab_size=256))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
starts = np.random.default_rng(0).integers(0, len(tokens) - 129, 32)
rows = torch.from_numpy(np.stack([tokens[start : start + 129] for start in starts]).astype(np.int64))
logits = model(rows[:, :-1])
F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1)).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(time.time())
"""


def start_bare(tokens: Path, root: Path) -> float:
    """Return the seconds to the first update of the bare script."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tokens), str(root)], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout) - began


def start_ours(folder: Path, number: int, extra: list[str]) -> float:
    """Return the seconds to the first update of accel-run."""
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "runner", "train", f"output_root={folder}", f"run=start-{number}", "updates=1",
         "evaluate.samples=32", "device=cpu", *extra],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / f"start-{number}" / "events.jsonl").read_text().splitlines()]
    return float(next(row["unix_s"] for row in rows if row["kind"] == "first update")) - began


def main() -> int:
    """Print the table; exit 1 if the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=None, help="maximum of ours / bare; exit 1 above")
    arguments = parser.parse_args()
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root))
    from runner.base.paths import cache_folder

    times: dict[str, list[float]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start_ours(folder, 0, [])  # prepares the tokens and warms the disk cache
        tokens = max((cache_folder() / "gpt").rglob("train*"), key=lambda path: path.stat().st_mtime)
        start_bare(tokens, root)
        for number in range(1, arguments.rounds + 1):
            times["bare"].append(start_bare(tokens, root))
            times["ours"].append(start_ours(folder, number, ["tracker=wandb"]))
    base = statistics.median(times["bare"])
    for name, seconds in times.items():
        print(f"{name:<5} {statistics.median(seconds):.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f})"
              f"   {statistics.median(seconds) / base:.2f} of bare")  # fmt: skip
    ratio = statistics.median(times["ours"]) / base
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
