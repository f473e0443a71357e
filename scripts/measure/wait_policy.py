"""Compare spinning with sleeping OpenMP threads, on free cores and while other processes run.

Each process imports torch with one policy and measures updates of a small MLP, a small convolutional network or a small
transformer, with one thread per core. The policies are interleaved. Prints the median milliseconds per update of
all rounds, and the ratio of sleeping to spinning; below 1, sleeping is faster.

Run: python scripts/measure/wait_policy.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

POLICIES = {"spinning": {}, "sleeping": {"OMP_WAIT_POLICY": "passive"}}
MODELS = ("mlp", "convolution", "transformer")
ROUND_S = 1.0


def make_update(name: str) -> Callable[[], None]:
    """Return a function that runs one update."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        model, batch = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)), torch.randn(64, 256)
    elif name == "convolution":
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        model = nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.Flatten(), nn.Linear(64 * 256, 10))
        batch = torch.randn(32, 3, 32, 32)
    else:
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(128 * 64, 10))
        batch = torch.randn(8, 64, 128)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    targets = torch.zeros(len(batch), dtype=torch.long)

    def update() -> None:
        F.cross_entropy(model(batch), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def measure(name: str, rounds: int) -> list[float]:
    """Return milliseconds per update of each round, in this process."""
    update = make_update(name)
    for _ in range(5):
        update()
    found = []
    for _ in range(rounds):
        start, number = time.perf_counter(), 0
        while time.perf_counter() - start < ROUND_S:
            update()
            number += 1
        found.append(1e3 * (time.perf_counter() - start) / number)
    return found


def compare(name: str, rounds: int) -> None:
    """Print a line for a model: both policies in turn, in new processes."""
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        for policy in list(POLICIES)[:: 1 if turn % 2 else -1]:
            command = [sys.executable, __file__, "--worker", name, "--rounds", "3"]
            reply = subprocess.run(command, env={**os.environ, **POLICIES[policy]}, capture_output=True, check=True)
            times[policy] += json.loads(reply.stdout)
    spinning, sleeping = (statistics.median(times[policy]) for policy in POLICIES)
    print(f"{name:12} {spinning:9.2f} {sleeping:9.2f} {sleeping / spinning:7.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="processes of each policy")
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 1], help="numbers of other busy processes")
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.rounds)))
        return
    for number in arguments.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
        try:
            print(f"{len(os.sched_getaffinity(0))} cores, {number} busy processes: ms per update")
            print(f"{'':12} {'spinning':>9} {'sleeping':>9} {'ratio':>7}")
            for name in MODELS:
                compare(name, arguments.rounds)
        finally:
            for other in others:
                other.kill()


if __name__ == "__main__":
    main()
