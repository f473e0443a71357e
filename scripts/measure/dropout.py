"""Measure the cost of per-sample dropout: forward and backward pass of gpt for one micro-batch.

Variants are interleaved in one process on one thread; each figure is the minimum over all rounds, in milliseconds of
CPU time. "device's generator" is task.dropout=0.1 with F.dropout.

Run: python scripts/measure/dropout.py [--rounds 30] [--samples 16] [--block-size 64]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from runner.tasks.gpt.data import Corpus
from runner.tasks.gpt.task import GPT, SHAPES
from runner.tasks.gpt.tokenizer import Bytes
from torch import Tensor

from runner.base import noise
from runner.base.batch import BatchSamples

RATES = {
    "no dropout": {},
    "device's generator": {"dropout": 0.1},
    "task.dropout=0.1": {"dropout": 0.1},
    "task.attention_dropout=0.1": {"attention_dropout": 0.1},
    "both": {"dropout": 0.1, "attention_dropout": 0.1},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=SHAPES["tiny"].block_size)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = replace(SHAPES["tiny"], block_size=arguments.block_size)
    corpus = Corpus({}, np.uint8, Bytes(), None, Path())
    tasks = {name: GPT(corpus, shape, **rates) for name, rates in RATES.items()}
    tokens = torch.randint(256, (arguments.samples, arguments.block_size + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    minima = dict.fromkeys(tasks, float("inf"))
    for number in range(arguments.rounds):
        for name, task in tasks.items():
            noise.start_pass(BatchSamples(0, number, range(arguments.samples), range(arguments.samples)))
            with global_draws(name == "device's generator"):
                began = time.process_time()
                loss, _ = task.loss(task.model, batch)
                loss.backward()
                minima[name] = min(minima[name], time.process_time() - began)
            task.model.zero_grad()
    for name, seconds in minima.items():
        print(f"{name:28}{seconds * 1e3:8.1f} ms{seconds / minima['no dropout'] - 1:+8.0%}")
    return 0


@contextmanager
def global_draws(wanted: bool) -> Iterator[None]:
    """Replace per-sample dropout by F.dropout, which draws from the global generator, if `wanted`."""
    before = noise.SampleNoise.dropout

    def dropout(_: noise.SampleNoise, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)

    if wanted:
        noise.SampleNoise.dropout = dropout  # type: ignore[method-assign]
    try:
        yield
    finally:
        noise.SampleNoise.dropout = before  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
