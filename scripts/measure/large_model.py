"""Plan a model of 30 billion parameters, and build a few of its layers, at full width, in shards over CPU ranks.

plan   `accel-run plan` for the complete model (48 layers of width 7168, 56 heads) on 8 GPUs of a profile: memory of a
       rank by part, and the time that planning takes
build  on this machine: as many layers as fit, with a small vocabulary. Each rank builds the model on the meta device
       and initializes its shards (parallelism.init=meta). Nothing is trained, because a forward pass would gather a
       block of 2.5 GB on each rank

Peaks are those of a rank's resident memory: in total, and relative to its value before the build. The script stops all
ranks if together they exceed --limit GiB.

Run: python scripts/measure/large_model.py --layers 2 --ranks 8
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sharded_memory import parallel_bytes, peak_of, resident
from torch import nn

GIB = 1 << 30
WIDTH, HEADS, LAYERS, BLOCK, VOCABULARY = 7168, 56, 48, 1024, 50257

TASK = f"""
import torch
import torch.nn.functional as F
from runner import Task
from runner.tasks.gpt.model import Shape, Transformer


class Large(Task):
    def __init__(self):
        self.model = Transformer(Shape({LAYERS}, {HEADS}, {WIDTH}, {BLOCK}, {VOCABULARY}))

    def dataset(self, split):
        return [(torch.zeros({BLOCK}, dtype=torch.int64), torch.zeros({BLOCK}, dtype=torch.int64))] * 64

    def loss(self, model, batch):
        tokens, targets = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    def blocks(self):
        return list(self.model.blocks)


def build(context):
    return Large()
"""


def measure_plan(options: argparse.Namespace) -> None:
    """Plan the complete model; print what `accel-run plan` prints."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "large.py"
        task.write_text(TASK)
        words = ["--task", str(task), f"+hardware={options.profile}", "parallelism=fsdp", "parallelism.world_size=8"]
        words += ["global_batch_size=8", "micro_batch_size=1", "memory=checkpoint", *options.override]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "runner", "plan", *words], capture_output=True, text=True, check=False
        )
        print(done.stdout, done.stderr)
        print(f"planned in {time.perf_counter() - start:.0f} s")


def measure_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Build the shards of one rank."""
    from runner.tasks.gpt.model import Shape, Transformer

    from runner.base.rank_env import RankInfo
    from runner.distributed.deferred_init import DeferredInit
    from runner.distributed.join import join_process_group
    from runner.distributed.shard_init import DeferredModel
    from runner.distributed.sharded import Sharded

    member = RankInfo(options.rank, options.rank, options.ranks, options.ranks, f"file://{options.folder}/store")
    torch.set_num_threads(1)
    with join_process_group(member, torch.device("cpu"), timeout_s=3600.0) as world:

        def build() -> nn.Module:
            torch.manual_seed(0)
            parallel = Sharded(world, shard_size=options.shard_size)
            with DeferredInit() as recording:
                model = Transformer(Shape(options.layers, HEADS, WIDTH, BLOCK, options.vocabulary))
            parallel.deferred = DeferredModel(recording)
            return parallel.wrap(model, list, list(model.blocks))

        start = time.perf_counter()
        model, above = peak_of(build)
        seconds, total = time.perf_counter() - start, resident("VmHWM")
        count = sum(weight.numel() for weight in model.parameters())
        return {"shards": parallel_bytes(model), "above": above, "total": total, "s": seconds, "parameters": count}


def measure_build(options: argparse.Namespace) -> None:
    """Build the shards on all ranks; print a table."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("layers", "vocabulary", "ranks", "shard_size")
        words = [f"--{name.replace('_', '-')}={value}" for name in names if (value := getattr(options, name))]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *words, "--folder", folder, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        peak = 0
        while any(rank.poll() is None for rank in ranks):
            peak = max(peak, sum(_resident_of(rank.pid) for rank in ranks))
            if peak > options.limit * GIB:
                for rank in ranks:
                    rank.kill()
                sys.exit(f"the ranks exceed {options.limit} GiB")
            time.sleep(0.1)
        results = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    top = {name: max(result[name] for result in results) for name in results[0]}
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}; GiB, the largest of all ranks")
    print("ranks  layers  parameters  shards  peak of a rank  above its start  all ranks together  seconds")
    print(
        f"{options.ranks:5}  {options.layers:6}  {top['parameters'] / 1e9:8.2f} B  {top['shards'] / GIB:6.2f}"
        f"  {top['total'] / GIB:14.2f}  {top['above'] / GIB:15.2f}  {peak / GIB:18.2f}  {top['s']:7.0f}"
    )


def _resident_of(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * int(next((line.split()[1] for line in lines if line.startswith("VmRSS:")), 0))


def main() -> None:
    """Plan the complete model, then build what fits; or build the shards of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--override", action="append", default=[], help="further settings of the plan")
    parser.add_argument("--layers", type=int, default=2, help="0: only plan")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shard-size", type=int)
    parser.add_argument("--limit", type=float, default=16.0)
    parser.add_argument("--only", choices=["plan", "build"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure_rank(options)))
        return
    if options.only != "build":
        measure_plan(options)
    if options.only != "plan":
        measure_build(options)


if __name__ == "__main__":
    main()
