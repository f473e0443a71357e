"""Measure overhead and speedup of several ranks on this machine: two forked ranks over gloo.

step      an update of gpt tiny on 2 equal ranks, against a loop with DistributedDataParallel written by hand
start     from starting the process to the first update of 2 ranks, against torchrun and a bare script
slow      one rank 2 and 3 times slower: equal shares, a proportional split, measured shares, and the best there is
flip      the slow rank and the fast one change places in mid-run
alone     a rank so slow that it costs more than it brings: measured shares against the better rank alone
name      who is slow, and where: seeded trials with an injected delay
overhead  what measuring costs: updates with it and without it, in turns

Run: python scripts/measure/ranks.py step --rounds 20
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - a script that compares with loops written by hand
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[2]
BATCH = 32
SLOW_TASK = '''
"""gpt tiny with one rank that is slower in proportion to its samples, like a slower device."""
import time
import torch.distributed as dist
from runner import Context, Task
from runner.tasks.gpt.task import build as build_gpt

def build(context: Context, *, factor: float = 1.0, ms_per_sample: float = 1.0, flip_at: int = 0) -> Task:
    task = build_gpt(context, size="tiny")
    inner, state = task.loss, {"update": 0}
    rank = dist.get_rank() if dist.is_initialized() else 0

    def loss(model, batch):
        slow = 0 if flip_at and state["update"] >= flip_at else 1
        if model.training and rank == slow:
            time.sleep(len(batch[0]) * ms_per_sample / 1e3 * (factor - 1))
        return inner(model, batch)

    task.loss = loss
    task.begin_update = lambda progress: state.update(update=progress.update)
    return task
'''
DELAYED_TASK = '''
"""A small model of which one part takes longer on one rank."""
import time
import torch, torch.nn.functional as F
import torch.distributed as dist
from torch import nn
from runner import Task

class Data(torch.utils.data.Dataset):
    def __init__(self, delay): self.delay = delay
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.full((64,), index / 4096), index % 4
    def __getitems__(self, indices):
        time.sleep(self.delay)
        return [self[index] for index in indices]

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delay):
        ctx.delay = delay
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.delay)
        return gradient, None

class Delayed(Task):
    def __init__(self, part, rank, seconds):
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
        self.delays = {part: seconds} if dist.get_rank() == rank else {}
        if "optimizer" in self.delays:
            from torch.optim.optimizer import register_optimizer_step_pre_hook
            register_optimizer_step_pre_hook(lambda *_: time.sleep(seconds))
    def dataset(self, split): return Data(self.delays.get("data", 0.0) if split == "train" else 0.0)
    def loss(self, model, batch):
        x, y = batch
        time.sleep(self.delays.get("forward", 0.0))
        return F.cross_entropy(Slow.apply(model(x), self.delays.get("backward", 0.0)), y, reduction="sum"), len(y)

def build(*, part: str = "forward", rank: int = 0, delay_ms: float = 0.0) -> Task:
    return Delayed(part, rank, delay_ms / 1e3)
'''
BARE = """
import sys, time
import numpy as np
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[2])
from tasks.gpt.model import Shape, Transformer

dist.init_process_group("gloo")
torch.manual_seed(0)
tokens = np.memmap(sys.argv[1], dtype=np.uint8, mode="r")
model = Transformer(Shape(num_layers=4, num_heads=4, width=128, block_size=64, vocab_size=256))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
starts = np.random.default_rng(dist.get_rank()).integers(0, len(tokens) - 65, 8)
rows = torch.from_numpy(np.stack([tokens[start : start + 65] for start in starts]).astype(np.int64))
logits = ddp(rows[:, :-1])
F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1)).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if dist.get_rank() == 0:
    print(time.time())
"""


def on_two_ranks(function: Callable[[Any], Any]) -> Any:
    """Run `function(world)` on two forked ranks; return the result of rank 0."""
    from runner.tools.measure.forked_ranks import run_on_ranks

    return run_on_ranks(function, 2)


def phase(world: Any, stack: ExitStack, *words: str, task: str = "") -> Any:
    """Open a run on this rank, silently, in a separate folder."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    folder = world.broadcast(stack.enter_context(tempfile.TemporaryDirectory()))
    file = Path(folder) / "task_of_script.py"
    if task and world.is_first:
        file.write_text(task)
    dist.barrier()
    settings = (f"output_root={folder}", "run=m", "evaluate.every=0", "evaluate.samples=32", "monitor=off",
                "parallelism=ddp", "device=cpu", f"global_batch_size={BATCH}", *words)  # fmt: skip
    stack.enter_context(redirect_stdout(io.StringIO()))
    return stack.enter_context(open_phase(Request(settings, file if task else None), world))


def measure_ms_per_update(updates: Iterator[Any], number: int) -> float:
    """Run some updates; return their mean milliseconds."""
    began = time.perf_counter()
    for _ in range(number):
        next(updates)
    return 1e3 * (time.perf_counter() - began) / number


# ---------------------------------------------------------------- step


def hand_loop(world: Any, total: int) -> Iterator[None]:
    """Return a hand-written loop by an expert in torch."""
    from runner.tasks.gpt.task import build
    from torch.nn.parallel import DistributedDataParallel

    from runner.base.paths import cache_folder
    from runner.base.task import Context

    torch.manual_seed(0)
    task = build(Context(0, None, cache_folder()), size="tiny")
    dataset, model = task.dataset("train"), DistributedDataParallel(task.model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    groups = [
        {"params": [weight for weight in parameters if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in parameters if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    mine = BATCH // world.world_size
    step = 0
    while True:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[world.rank :: 2].tolist()
        for start in range(0, len(order) - mine, mine):
            x, y = dataset.__getitems__(order[start : start + mine])
            logits = model(x)
            F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1)).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            for group in groups:
                group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / total))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            yield


def step(arguments: argparse.Namespace) -> float:
    """Print both times of an update and their ratio."""

    def both(world: Any) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"hand": [], "ours": []}
        with ExitStack() as stack:
            total = (arguments.rounds + 2) * arguments.block
            ours = phase(world, stack, "task.size=tiny", f"updates={total}", "precision=fp32").updates()
            loops = {"hand": hand_loop(world, total), "ours": ours}
            for round_ in range(arguments.rounds + 1):
                for name in sorted(loops, reverse=bool(round_ % 2)):
                    dist.barrier()
                    spent = measure_ms_per_update(loops[name], arguments.block)
                    if round_:  # the first warms up
                        times[name].append(spent)
        return times

    return told("DistributedDataParallel", on_two_ranks(both))


def told(other: str, times: dict[str, list[float]]) -> float:
    """Print the medians of two interleaved loops, and return the ratio."""
    first, second = times
    ratios = sorted(mine / theirs for mine, theirs in zip(times[second], times[first], strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    for name, spent in times.items():
        print(f"{name:<9} {statistics.median(spent):.1f} ms per update")
    ratio = statistics.median(times[second]) / statistics.median(times[first])
    print(f"{second} / {first} ({other}): {ratio:.3f} (paired {statistics.median(ratios):.3f}, 80 % of rounds {low:.3f}"
          f" to {high:.3f})")  # fmt: skip
    return statistics.median(ratios)


# ---------------------------------------------------------------- start


def start(arguments: argparse.Namespace) -> float:
    """Print the seconds until the first update of two ranks, with accel-run and with torchrun."""
    from runner.base.paths import cache_folder

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    times: dict[str, list[float]] = {"torchrun": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)

        def bare() -> float:
            tokens = max((cache_folder() / "gpt").rglob("train*"), key=lambda path: path.stat().st_mtime)
            words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
            began = time.time()
            done = subprocess.run(
                [sys.executable, "-m", *words, str(tokens), str(ROOT)],
                capture_output=True, text=True, timeout=120, env=environment, check=False,
            )  # fmt: skip
            return float(done.stdout.split()[0]) - began

        def ours(number: int) -> float:
            words = ["train", f"output_root={folder}", f"run=s{number}", "updates=1", "evaluate.samples=16",
                     "device=cpu", "parallelism=ddp", "parallelism.world_size=2"]  # fmt: skip
            began = time.time()
            subprocess.run(
                [sys.executable, "-m", "runner", *words],
                capture_output=True, text=True, check=True, timeout=120, env=environment,
            )  # fmt: skip
            rows = [json.loads(line) for line in (Path(folder) / f"s{number}/events.jsonl").read_text().splitlines()]
            return float(next(row["unix_s"] for row in rows if row["kind"] == "first update")) - began

        ours(0)  # prepares the tokens and warms the disk cache
        bare()
        for number in range(1, arguments.rounds + 1):
            times["torchrun"].append(bare())
            times["ours"].append(ours(number))
    for name, seconds in times.items():
        print(f"{name:<9} {statistics.median(seconds):.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f})")
    ratio = statistics.median(times["ours"]) / statistics.median(times["torchrun"])
    print(f"ours / torchrun: {ratio:.2f}")
    return ratio


# ---------------------------------------------------------------- slow ranks


def per_sample_ms(world: Any) -> float:
    """Return the milliseconds per sample of gpt tiny on a rank while both are busy."""
    with ExitStack() as stack:
        opened = phase(world, stack, "task.size=tiny", "updates=100", "precision=fp32")
        updates = opened.updates()
        measure_ms_per_update(updates, 10)
        spent = measure_ms_per_update(updates, 30) / (BATCH / 2)
    return float(world.broadcast(spent))


def settled(world: Any, shares: str, updates: int, **options: Any) -> dict[str, Any]:
    """Train with one slow rank; return the milliseconds of an update at the end, and the fitted lines of the ranks."""
    with ExitStack() as stack:
        words = [f"task.{key}={value}" for key, value in options.items()]
        total = updates + 200
        opened = phase(world, stack, f"updates={total}", f"parallelism.shares={shares}", "precision=fp32",
                       "scheduler=constant", "log_every=10000", *words, task=SLOW_TASK)  # fmt: skip
        made = opened.updates()
        measure_ms_per_update(made, updates)
        blocks = [measure_ms_per_update(made, 10) for _ in range(12)]
        balance = getattr(opened.shares, "balance", None)
        known = [[line.fixed_s, line.per_sample_s] for line in balance.lines] if balance else []
        now = list(balance.shares) if balance else list(opened.order.shares)
        waits = [min(there["wait"] for there in update) for update in opened.parts_of_ranks[-120:]]
        exchange = 1e3 * statistics.median(waits)
        return {
            "exchange_ms": exchange,
            "ms": statistics.median(blocks),
            "lines": known,
            "shares": now,
        }


def optimum_ms(lines: list[list[float]]) -> float:
    """Return the minimum milliseconds per update for the fitted lines, without communication."""
    from runner.base.share_solver import RankTiming, fastest_shares, slowest_seconds

    known = [RankTiming(*line) for line in lines]
    return 1e3 * slowest_seconds(known, fastest_shares(BATCH, known))


def slow(arguments: argparse.Namespace) -> float:
    """Print the speedup by shares with a rank that is 2 and 3 times slower."""
    cost = on_two_ranks(per_sample_ms)
    print(f"a sample takes {cost:.2f} ms on each of two ranks")
    worst = 0.0
    for factor in (2.0, 3.0):
        options = {"factor": factor, "ms_per_sample": round(cost, 3)}
        fast_share = round(BATCH * factor / (factor + 1))
        found = {
            name: on_two_ranks(partial(settled, shares=shares, updates=80, **options))
            for name, shares in (
                ("equal", "equal"), ("proportional", f"[{fast_share},{BATCH - fast_share}]"), ("speed", "speed"),
            )
        }  # fmt: skip
        exchange = found["speed"]["exchange_ms"]
        best = optimum_ms(found["speed"]["lines"]) + exchange
        print(f"rank 1 is {factor:g} times slower; best by the measured a and c: {best - exchange:.1f} ms, and"
              f" {exchange:.1f} ms of exchange")  # fmt: skip
        for name, result in found.items():
            print(f"  {name:<13} {result['ms']:7.1f} ms per update, shares {result['shares']},"
                  f" {found['equal']['ms'] / result['ms']:.2f} times as fast as equal,"
                  f" {result['ms'] / best:.3f} of the best")  # fmt: skip
        worst = max(worst, found["speed"]["ms"] / best)
    return worst


def flip(arguments: argparse.Namespace) -> float:
    """Print the time of an update after the slow rank became the fast one, three solutions later."""
    cost = on_two_ranks(per_sample_ms)
    options = {"factor": 3.0, "ms_per_sample": round(cost, 3)}
    before = on_two_ranks(lambda world: settled(world, "speed", 80, **options))
    after = on_two_ranks(lambda world: settled(world, "speed", 80 + 60, flip_at=80, **options))
    lines = list(reversed(before["lines"]))
    best = optimum_ms(lines) + after["exchange_ms"]
    ratio = after["ms"] / best
    print(f"before {before['ms']:.1f} ms, shares {before['shares']}; 60 updates after the flip {after['ms']:.1f} ms,"
          f" shares {after['shares']}; {ratio:.3f} of the new best ({best:.1f} ms with exchange)")  # fmt: skip
    return ratio


def alone(arguments: argparse.Namespace) -> float:
    """Print the time of an update with a rank that is 60 times slower, and with the faster rank alone."""
    cost = on_two_ranks(per_sample_ms)
    folder = tempfile.mkdtemp()
    task = Path(folder) / "task_of_script.py"
    task.write_text(SLOW_TASK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    times: dict[str, list[float]] = {}
    for name, words in (
        ("alone", ["parallelism=single", "task.factor=1"]),
        ("ranks", ["parallelism=ddp", "parallelism.shares=speed", "task.factor=60"]),
    ):
        subprocess.run(
            [sys.executable, "-m", "runner", "train", "--task", str(task), f"output_root={folder}", f"run={name}",
             "updates=400", "evaluate.every=0", "evaluate.samples=32", f"global_batch_size={BATCH}", "precision=fp32",
             f"task.ms_per_sample={cost:.3f}", "scheduler=constant", "log_every=10", *words],
            check=True, env=environment, capture_output=not arguments.verbose, timeout=600,
        )  # fmt: skip
        rows = [json.loads(line) for line in (Path(folder) / name / "metrics.jsonl").read_text().splitlines()]
        times[name] = [row["perf/step_time_ms"] for row in rows if row.get("update", 0) > 250 and "train/loss" in row]
    ratio = statistics.median(times["ranks"]) / statistics.median(times["alone"])
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    print(f"alone {medians['alone']:.1f} ms, measured shares {medians['ranks']:.1f} ms"
          f" an update after 250 updates: {ratio:.3f}")  # fmt: skip
    return ratio


# ---------------------------------------------------------------- naming


def name(arguments: argparse.Namespace) -> float:
    """Print in how many seeded trials the slow rank and part were named correctly."""
    right, wrong = 0, []
    for seed in range(arguments.rounds):
        drawn = random.Random(seed)
        part, rank = drawn.choice(["data", "forward", "backward", "optimizer"]), drawn.randrange(2)
        words = (f"task.part={part}", f"task.rank={rank}", "task.delay_ms=10", "updates=60", "scheduler=constant")

        def trial(world: Any, words: tuple[str, ...] = words) -> list[Any]:
            with ExitStack() as stack:
                opened = phase(world, stack, *words, task=DELAYED_TASK)
                made = opened.updates()
                for _ in range(50):
                    next(made)
                found = opened.slow.found
                return [found.rank, found.part] if found else []

        found = on_two_ranks(trial)
        right += found == [rank, part]
        wrong += [] if found == [rank, part] else [f"seed {seed}: {part} of rank {rank} was called {found}"]
    print(f"{right} of {arguments.rounds} named correctly")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1.0 - right / arguments.rounds


def overhead(arguments: argparse.Namespace) -> float:
    """Print the time of an update with and without timing, interleaved."""

    def both(world: Any) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"without": [], "with": []}
        with ExitStack() as stack:
            total = (2 * arguments.rounds + 4) * arguments.block
            opened = phase(world, stack, "task.size=tiny", f"updates={total}", "precision=fp32")
            made, heed = opened.updates(), opened._heed
            for round_ in range(arguments.rounds + 1):
                for which in sorted(times, reverse=bool(round_ % 2)):
                    opened._heed = heed if which == "with" else (lambda step: None)
                    spent = measure_ms_per_update(made, arguments.block)
                    if round_:
                        times[which].append(spent)
        return times

    return told("not telling each other", on_two_ranks(both))


MEASUREMENTS = {
    "step": step, "start": start, "slow": slow, "flip": flip, "alone": alone, "name": name, "overhead": overhead,
}  # fmt: skip


def main() -> int:
    """Print the measurement; exit 1 if its figure is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--limit", type=float, default=None, help="maximum of the figure; exit 1 above")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, 2 ranks of 1 thread over gloo, {time.strftime('%Y-%m-%d')}")
    figure = MEASUREMENTS[arguments.what](arguments)
    return int(arguments.limit is not None and figure > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
