"""Measure phase 1 of hyperspectral, the statistics pass, against loops over pixels and against reading the data.

loop     Welford's update pixel by pixel in numpy, timed on a subset of the pixels and extrapolated linearly
memory   reads every value once from memory: a float32 sum of each batch
files    the same data in the page cache, one .npy file per cube, read as in a run, with the same sum
disk     the same files, removed from the page cache: the cost for a dataset larger than memory
pass     phase 1 with the same batches, from memory, files and disk

Each round times all variants in one process; ratios are medians over rounds.
Run: python scripts/measure/statistics_pass.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 8
Batches = Callable[[], Iterator[dict[str, torch.Tensor]]]


def loop(pixels: np.ndarray[Any, Any]) -> None:
    """Compute count, mean, co-moment and extremes in a loop over the pixels."""
    channels = pixels.shape[1]
    mean, comoment = np.zeros(channels), np.zeros((channels, channels))
    low, high = np.full(channels, np.inf), np.full(channels, -np.inf)
    for count, pixel in enumerate(pixels, start=1):
        away = pixel - mean
        mean += away / count
        comoment += np.outer(away, pixel - mean)
        low, high = np.minimum(low, pixel), np.maximum(high, pixel)


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def forget(paths: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only pages that are on disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    shape: tuple[int, int, int, int], rounds: int, loop_pixels: int, dtype: torch.dtype
) -> dict[str, list[float]]:
    """Return the seconds by name, one per round, without the first round, which is the warm-up."""
    from runner.tasks.hyperspectral.data import Files
    from runner.tasks.hyperspectral.scenes import SyntheticScenes
    from runner.tasks.hyperspectral.statistics import PixelStatistics

    num_cubes, height, width, channels = shape
    scenes = SyntheticScenes("train", num_cubes, height, width, channels)
    orders = [list(range(first, min(first + BATCH, num_cubes))) for first in range(0, num_cubes, BATCH)]
    in_memory = [scenes.__getitems__(order) for order in orders]
    fit = PixelStatistics(channels, dtype)
    nothing = torch.nn.Identity()

    def read(batches: Batches) -> Callable[[], None]:
        def work() -> None:
            for batch in batches():
                batch["cube"].sum()

        return work

    def gather(batches: Batches) -> Callable[[], None]:
        def work() -> None:
            state = fit.start()
            for batch in batches():
                state, _ = fit.add(nothing, state, batch)

        return work

    sample = in_memory[0]["cube"].reshape(-1, channels)[:loop_pixels].numpy().astype(np.float64)
    share = len(sample) / (num_cubes * height * width)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"cube-{number:04d}.npy" for number in range(num_cubes)]
        for order, batch in zip(orders, in_memory, strict=True):
            for number, cube in zip(order, batch["cube"].numpy(), strict=True):
                np.save(paths[number], cube)
        files = Files(paths, (height, width, channels))

        def from_memory() -> Iterator[dict[str, torch.Tensor]]:
            return iter(in_memory)

        def from_files() -> Iterator[dict[str, torch.Tensor]]:
            return (files.__getitems__(order) for order in orders)

        works: dict[str, Callable[[], None]] = {
            "read, memory": read(from_memory),
            "pass, memory": gather(from_memory),
            "read, files": read(from_files),
            "pass, files": gather(from_files),
            "read, disk": read(from_files),
            "pass, disk": gather(from_files),
        }
        for round_ in range(rounds + 1):
            found = {}
            for name, work in works.items():
                if name.endswith("disk"):
                    forget(paths)
                found[name] = seconds(work)
            found["loop"] = seconds(lambda: loop(sample)) / share
            if round_:
                for name, spent in found.items():
                    times.setdefault(name, []).append(spent)
    return times


def main() -> int:
    """Print the table; exit 1 if a ratio misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(200, 128, 128, 50), metavar=tuple("NHWC"))
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float32",
        help="number format of products, see task.statistics",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loop-pixels", type=int, default=20000, help="pixels on which the loop is timed")
    parser.add_argument(
        "--least", type=float, default=None, help="exit 1 if the loop is less than this many times slower"
    )
    parser.add_argument(
        "--most",
        type=float,
        default=None,
        help="exit 1 if the pass takes more than this many times as long as reading the disk",
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    times = measure(tuple(arguments.shape), arguments.rounds, arguments.loop_pixels, getattr(torch, arguments.dtype))
    ratios = {
        name: statistics.median(one / other for one, other in zip(times[over], times[under], strict=True))
        for name, (over, under) in {
            "loop / pass, memory": ("loop", "pass, memory"),
            "pass / read, memory": ("pass, memory", "read, memory"),
            "pass / read, files": ("pass, files", "read, files"),
            "pass / read, disk": ("pass, disk", "read, disk"),
        }.items()
    }
    shape = " x ".join(map(str, arguments.shape))
    print(f"torch {torch.__version__}, numpy {np.__version__}, {torch.get_num_threads()} threads, {shape} float32")
    for name, spent in times.items():
        note = f" (from {arguments.loop_pixels} pixels)" if name == "loop" else ""
        print(f"{name:20} {1e3 * statistics.median(spent):10.1f} ms{note}")
    for name, ratio in ratios.items():
        print(f"{name:20} {ratio:10.2f}")
    too_slow = arguments.least is not None and ratios["loop / pass, memory"] < arguments.least
    return int(too_slow or (arguments.most is not None and ratios["pass / read, disk"] > arguments.most))


if __name__ == "__main__":
    sys.exit(main())
