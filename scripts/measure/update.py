"""Time and memory of an update of gpt: accel-run and the best handwritten loop with the same model.

hand   fused AdamW in two groups, batched reading, foreach clipping, a cosine schedule, the loss read every 10
ours   accel-run's own Phase, with its meter, screen, evaluation and saving in place

Time: both are interleaved in one process; the ratio is that of the medians. Memory: separate processes, peak
resident sets. Run: python scripts/measure/update.py
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 32


def by_hand(total: int) -> Iterator[None]:
    """A hand-written loop by an expert in torch."""
    from runner.tasks.gpt.task import build

    from runner.base.paths import cache_folder
    from runner.base.task import Context

    torch.manual_seed(0)
    task = build(Context(0, None, cache_folder()), size="tiny")
    model, dataset = task.model, task.dataset("train")
    parameters = list(model.parameters())
    groups = [
        {"params": [weight for weight in parameters if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in parameters if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    step = 0
    while True:
        order = torch.randperm(len(dataset)).tolist()
        for start in range(0, len(order) - BATCH, BATCH):
            x, y = dataset.__getitems__(order[start : start + BATCH])
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            for group in groups:
                group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / total))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                loss.item()
            yield


def ours(total: int, stack: ExitStack) -> Iterator[int]:
    """accel-run, through the same door as the command line."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    settings = (
        "task=gpt", "task.size=tiny", f"updates={total}", f"global_batch_size={BATCH}", "device=cpu",
        f"output_root={folder}", "run=update", "evaluate.every=0", "precision=fp32", "optimizer.lr=0.0003",
        "optimizer.weight_decay=0.1",
    )  # fmt: skip
    return stack.enter_context(open_phase(Request(settings))).updates()


def time_both(rounds: int, block: int) -> dict[str, list[float]]:
    """Return milliseconds per update, one per round."""
    total = (rounds + 2) * block
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        loops: dict[str, Iterator[object]] = {"hand": by_hand(total), "ours": ours(total, stack)}
        for round_ in range(rounds + 1):
            for name in sorted(loops, reverse=bool(round_ % 2)):
                began = time.perf_counter()
                for _ in range(block):
                    next(loops[name])
                if round_:  # the first warms up
                    times[name].append(1e3 * (time.perf_counter() - began) / block)
    return times


def peak_mib(which: str, updates: int) -> float:
    """Return the peak resident set of a process that makes some updates."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", which, "--block", str(updates)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def alone(which: str, updates: int) -> None:
    """Make some updates and print the peak of the resident set in MiB."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        loop: Iterator[object] = by_hand(updates + 1) if which == "hand" else ours(updates + 1, stack)
        for _ in range(updates):
            next(loop)
    with contextlib.suppress(BrokenPipeError):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> int:
    """Print the table; exit 1 where a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--limit", type=float, default=None, help="exit 1 when the ratio of the times is above this")
    parser.add_argument("--alone", choices=["hand", "ours"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if arguments.alone:
        alone(arguments.alone, arguments.block)
        return 0
    times = time_both(arguments.rounds, arguments.block)
    ratios = sorted(mine / hand for mine, hand in zip(times["ours"], times["hand"], strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    ratio = statistics.median(times["ours"]) / statistics.median(times["hand"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, gpt tiny, batch {BATCH}")
    for name, spent in times.items():
        print(f"{name}  {statistics.median(spent):.1f} ms/update")
    print(
        f"time    {ratio:.3f} of hand (paired {statistics.median(ratios):.3f}, 80 % of rounds {low:.3f} to {high:.3f})"
    )
    memory = {name: min(peak_mib(name, 20) for _ in range(2)) for name in ("hand", "ours")}
    print(f"memory  {memory['ours'] / memory['hand']:.3f} of hand ({memory['ours']:.0f} of {memory['hand']:.0f} MiB)")
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
