"""Measure the time from process start to the first update, against a plain script with the same model and data.

bare   imports torch, builds gpt tiny, reads one batch from the prepared tokens, runs one AdamW update. Several ranks
       are started by torchrun and use DistributedDataParallel over gloo
ours   accel-run train: composes, plans, locks the run directory, builds, runs one update; one rank also uses wandb
       offline

Both are started alternately; the ratio is that of the medians. Run: python scripts/measure/start.py [--ranks 2]
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

ROOT = Path(__file__).parents[2]
BARE = """
import os, sys, time
import numpy as np
import torch
import torch.nn.functional as F
sys.path.insert(0, sys.argv[2])
from tasks.gpt.model import Shape, Transformer

rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
tokens = np.memmap(sys.argv[1], dtype=np.uint8, mode="r")
model = Transformer(Shape(num_layers=4, num_heads=4, width=128, block_size=64, vocab_size=256))
if num_ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
starts = np.random.default_rng(rank).integers(0, len(tokens) - 65, 32 // num_ranks)
rows = torch.from_numpy(np.stack([tokens[start : start + 65] for start in starts]).astype(np.int64))
logits = model(rows[:, :-1])
F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1)).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if rank == 0:
    print(time.time())
"""


def start_bare(folder: Path, tokens: Path, num_ranks: int) -> float:
    """Return the seconds to the first update of the bare script."""
    script = folder / "bare.py"
    script.write_text(BARE)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    line = [sys.executable, *(launcher if num_ranks > 1 else []), str(script), str(tokens), str(ROOT)]
    began = time.time()
    return float(_run(line, num_ranks).split()[0]) - began


def start_ours(folder: Path, name: str, num_ranks: int) -> float:
    """Return the seconds to the first update of accel-run."""
    extra = ["parallelism=ddp", f"parallelism.world_size={num_ranks}"] if num_ranks > 1 else ["tracker=wandb"]
    settings = [f"output_root={folder}", f"run={name}", "updates=1", "evaluate.samples=32", "device=cpu", *extra]
    began = time.time()
    _run([sys.executable, "-m", "runner", "train", *settings], num_ranks)
    rows = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    return float(next(row["unix_s"] for row in rows if row["kind"] == "first update")) - began


def _run(line: list[str], num_ranks: int) -> str:
    """Run a command; several ranks get one thread each. Return its output."""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1"} if num_ranks > 1 else {}
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout


def main() -> int:
    """Print the table; exit 1 if the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=None, help="maximum of ours / bare; exit 1 above")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from runner.base.paths import cache_folder

    times: dict[str, list[float]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start_ours(folder, "first", arguments.ranks)  # prepares the tokens and warms the disk cache
        tokens = max((cache_folder() / "gpt").rglob("train*"), key=lambda path: path.stat().st_mtime)
        start_bare(folder, tokens, arguments.ranks)
        for number in range(arguments.rounds):
            times["bare"].append(start_bare(folder, tokens, arguments.ranks))
            times["ours"].append(start_ours(folder, f"start-{number}", arguments.ranks))
    base = statistics.median(times["bare"])
    for name, seconds in times.items():
        print(f"{name:<5} {statistics.median(seconds):.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f})"
              f"   {statistics.median(seconds) / base:.2f} of bare")  # fmt: skip
    ratio = statistics.median(times["ours"]) / base
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
