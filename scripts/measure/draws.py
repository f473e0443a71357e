"""Measure the overhead of deriving the random numbers of a sample from seed, epoch and index.

One process reads micro-batches of 32 samples with and without the streams of runner/base/sample_rng.py, interleaved.
The figures are minima of CPU time over all rounds, because other programs only increase it.

rows       samples (64 numbers, label) from memory, with torch's default collate; draws no random numbers
together   the same samples, read by `__getitems__` with one selection per batch; draws no random numbers
transform  like rows, with a few operations, as in a light augmentation without random numbers
draws      like rows, with one random number from each of torch, NumPy and Python

The script first prints the time of each function that reads or seeds the state of a generator.

The columns `a batch` and `a sample` show the overhead per micro-batch and per sample. The column `share` shows it
relative to a complete update: reading, forward and backward pass, and a fused AdamW step of an MLP 64-64-10.
Run: python scripts/measure/draws.py
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.order import MicroBatchKey
from runner.base.sample_rng import NoSeeding, global_generators
from runner.base.task import Task
from runner.loading.fetcher import Fetcher

SAMPLES, BATCH = 4096, 32


class Rows:
    """Samples in memory; `change` is applied to each."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 64, generator=generator)
        self.y = torch.randint(0, 10, (SAMPLES,), generator=generator)
        self.change = change

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.change(self.x[index]), self.y[index]


class Together(Rows):
    """The same samples, read as a batch."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices)
        return self.x.index_select(0, rows), self.y.index_select(0, rows)


def identity(x: Tensor) -> Tensor:
    """Return x."""
    return x


def transform(x: Tensor) -> Tensor:
    """Flip, scale and shift by fixed amounts."""
    return x.flip(0).mul(1.1).sub(x.mean()).clamp(-3, 3)


def draws(x: Tensor) -> Tensor:
    """Add random numbers from all global generators."""
    return x + (torch.rand(()) + np.random.random() + random.random())


DATA: dict[str, Callable[[], Rows]] = {
    "rows": lambda: Rows(identity),
    "together": lambda: Together(identity),
    "transform": lambda: Rows(transform),
    "draws": lambda: Rows(draws),
}


def reader(dataset: Rows, *, streams: bool) -> Callable[[int], Any]:
    """Return a function that reads micro-batch number n, warmed up until the generators in use have been detected."""
    fetcher = Fetcher(dataset, Task().collate, bad_samples="stop")
    if not streams:
        fetcher.streams = NoSeeding()
    keys = [MicroBatchKey(0, list(range(first, first + BATCH)), last=True) for first in range(0, SAMPLES, BATCH)]

    def read(number: int) -> Any:
        return fetcher[keys[number % len(keys)]].batch

    for number in range(8):
        read(number)
    return read


def update() -> Callable[[Any], None]:
    """Return a function that runs an update of a small model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cpu_us(work: Callable[[int], object], block: int) -> float:
    """Return the CPU time of a call in microseconds."""
    began = time.thread_time()
    for number in range(block):
        work(number)
    return 1e6 * (time.thread_time() - began) / block


CALLS: dict[str, Callable[[], object]] = {
    "torch.get_rng_state": torch.get_rng_state,
    "torch.manual_seed": lambda: torch.manual_seed(1),
    "numpy.random.get_state": lambda: np.random.get_state(legacy=False),
    "random.getstate": random.getstate,
    **{
        f"{type(generator).__name__}.{name}": call
        for generator in global_generators()
        for name, call in (("get_state", generator.get_state), ("seed", partial(generator.seed, b"12345678")))
    },
}


def main() -> int:
    """Print the table; exit 1 if the overhead without draws is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--block", type=int, default=100)
    parser.add_argument("--limit", type=float, default=None, help="maximum overhead in percent of an update")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    print(
        f"torch {torch.__version__}, 1 thread, {arguments.rounds} rounds of {arguments.block} micro-batches of {BATCH}"
    )
    for name, call in CALLS.items():
        print(f"{name:26} {min(cpu_us(lambda _, call=call: call(), 1000) for _ in range(arguments.rounds)):7.2f} us")
    print(f"{'':10} {'without':>9} {'with':>9} {'a batch':>9} {'a sample':>9} {'update':>9} {'share':>7}   in us")
    worst = 0.0
    for name, make in DATA.items():
        dataset, step = make(), update()
        bare, guarded = reader(dataset, streams=False), reader(dataset, streams=True)
        batch = bare(0)
        times: dict[str, list[float]] = {"bare": [], "guarded": [], "step": []}
        for round_ in range(arguments.rounds):
            turns = [("bare", bare), ("guarded", guarded), ("step", lambda _, step=step, batch=batch: step(batch))]
            for who, work in turns[round_ % 3 :] + turns[: round_ % 3]:
                times[who].append(cpu_us(work, arguments.block))
            gc.collect()
        without, with_, step_us = (min(times[who]) for who in ("bare", "guarded", "step"))
        cost = with_ - without
        share = 100 * cost / (without + step_us)
        worst = max(worst, share) if name != "draws" else worst
        columns = (without, with_, cost, cost / BATCH, without + step_us)
        print(f"{name:10} {' '.join(f'{number:9.2f}' for number in columns)} {share:6.1f}%")
    return int(arguments.limit is not None and worst > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
