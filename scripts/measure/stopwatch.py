"""Measure the overhead of timing the parts of an update: host microseconds of the laps of an update, by device.

An update has two micro-batches that are copied to the device: twelve laps and a stop. On a GPU, each lap records an
event, which is read after its completion. A matrix product runs between updates, so that the GPU lags behind the host
as in training.
Run: python scripts/measure/stopwatch.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from runner.base.stopwatch import Stopwatch, new_stopwatch

LAPS = ("hooks", *("data", "transfer", "data", "forward", "backward") * 2, "optimizer")


def microseconds(stopwatch: Stopwatch, updates: int, rounds: int, work: torch.Tensor) -> list[float]:
    """Return the host microseconds of the laps of an update, one figure per round."""
    per_update = []
    number = 0
    for _ in range(rounds):
        spent = 0.0
        for _ in range(updates):
            number += 1
            torch.mm(work, work)
            began = time.perf_counter()
            for part in LAPS:
                stopwatch.lap(part)
            stopwatch.stop(number)
            spent += time.perf_counter() - began
        stopwatch.bookmark()()  # as for a row of metrics
        per_update.append(1e6 * spent / updates)
    return per_update


def main() -> int:
    """Print a line per device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    print(f"torch {torch.__version__}, {len(LAPS)} laps per update, {arguments.rounds} rounds of {arguments.updates}")
    for device in devices:
        work = torch.randn(64 if device.type == "cpu" else 2048, 64 if device.type == "cpu" else 2048, device=device)
        times = sorted(microseconds(new_stopwatch(device), arguments.updates, arguments.rounds, work)[2:])
        low, high = times[len(times) // 10], times[-1 - len(times) // 10]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        median = statistics.median(times)
        print(f"{name}: {median:.1f} us per update (80 % of rounds {low:.1f} to {high:.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
