"""Compare the predicted peak memory with the counted memory of a real run on the CPU, and print a table.

    python scripts/measure/memory.py [--tasks gpt,nmt] [--precisions fp32,bf16] [--optimizers adamw,sgd,adamw8bit]
                                     [--batches 4,8] [SETTING ...]

The count is independent of the prediction: a dispatch mode intercepts every operation of two real updates, adds the
memory of their results, and subtracts it when it is freed. Neither includes temporary memory inside kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import resource
import statistics
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import AccelRunError
from runner.base.order import Order
from runner.base.task import Progress
from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.engine.parts.assemble import Parts, assemble
from runner.engine.parts.objective_phase import make_phase_kind
from runner.engine.update.loop import Position
from runner.forecast.memory_forecast import forecast
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Cpu, Inventory
from runner.plan.memory_trace import Traced
from runner.plan.planner import make_plan
from runner.plan.run_plan import PhasePlan
from runner.workload.division import Batch

HERE = Inventory((), Cpu("this processor", os.cpu_count() or 1, os.cpu_count() or 1, 0))
TASKS = ("gpt", "nmt", "cape", "dynamo", "hyperspectral", "tractodiff")


class ByteCount(TorchDispatchMode):
    """Counts the bytes of the results of operations until they are freed; `peak` is the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, once."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self.known and memory.nbytes():
            self.known[key] = memory.nbytes()
            weakref.finalize(memory, self.freed, key)
            self.now += memory.nbytes()
            self.peak = max(self.peak, self.now)

    def freed(self, key: int) -> None:
        """Subtract the memory."""
        self.now -= self.known.pop(key)


def counted(configuration: Configuration, micros: Sequence[int]) -> dict[tuple[str, int], int]:
    """Run two updates of two micro-batches in this process; return (phase, micro-batch) -> peak bytes."""
    plan = make_plan(configuration, HERE)
    peaks = {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = assemble(plan, stack)
        for phase in plan.selected:
            for micro in micros:
                batch = Batch(2 * micro, micro, (2 * micro,))
                peaks[phase.name, micro] = _count_of(
                    parts, dataclasses.replace(phase, batch=batch, updates=2, epochs=None)
                )
    return peaks


def _count_of(parts: Parts, phase: PhasePlan) -> int:
    parts.task.begin_phase(phase.name)
    fetcher, batch = parts.splits.fetcher("train"), phase.batch
    order = Order(len(fetcher), batch.global_batch_size, batch.micro_batch_size, parts.plan.settings.seed)
    keys = order.from_update(0)
    ready = [fetcher[next(keys)] for _ in range(2 * batch.accumulation_steps)]
    count = ByteCount()

    def batches() -> Iterator[MicroBatch]:
        while ready:
            item = ready.pop(0)
            map_tensors(count.add, item.batch)
            yield item  # kept until the next one is requested, as in a run on a CPU

    for tensor in (*parts.bare.parameters(), *parts.bare.buffers()):
        count.add(tensor)
    with count:
        position = Position(phase.name)
        work = make_phase_kind(phase, parts, order, position)
        handed = batches()
        for _ in range(2):
            parts.task.begin_update(Progress(phase.name, position.update, 2, 0.0))
            next(work.updates(handed))
    work.release()
    return count.peak


def compared(words: Sequence[str], micros: Sequence[int]) -> list[tuple[Traced, int, float]]:
    """Return the prediction, the count, and the duration of the prediction for each phase and micro-batch."""
    sizes = (f"micro_batch_size={max(micros)}", f"global_batch_size={2 * max(micros)}")
    configuration = compose(Request((*words, *sizes, "device=cpu")))
    began = time.perf_counter()
    traced = run_in_subprocess(forecast, configuration, HERE, micros)
    seconds = (time.perf_counter() - began) / len(traced)
    real = run_in_subprocess(counted, configuration, micros)
    return [(one, real[one.phase, one.micro_batch_size], seconds) for one in traced]


def main() -> None:
    """Print the table and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--optimizers", default="adamw,sgd,adamw8bit")
    parser.add_argument("--batches", default="4,8")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    micros = [int(size) for size in given.batches.split(",")]
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{'task':<14}{'phase':<10}{'precision':<10}{'optimizer':<11}{'batch':>5}{'predicted':>13}{'counted':>13}"
          f"{'ratio':>9}{'s':>7}")  # fmt: skip
    ratios = []
    for task in given.tasks.split(","):
        for precision in given.precisions.split(","):
            for optimizer in given.optimizers.split(","):
                words = [f"task={task}", f"precision={precision}", f"optimizer={optimizer}", *given.words]
                head = f"{precision:<10}{optimizer:<11}"
                try:
                    rows = compared(words, micros)
                except AccelRunError as error:
                    print(f"{task:<14}{'':<10}{head}  {error.problems[0]}", flush=True)
                    continue
                for traced, real, seconds in rows:
                    ratios.append(traced.peak.total / real)
                    sizes = f"{traced.micro_batch_size:>5}{traced.peak.total:>13,}{real:>13,}"
                    row = f"{task:<14}{traced.phase:<10}{head}{sizes}"
                    print(f"{row}{ratios[-1]:>9.4f}{seconds:>7.1f}  {traced.why_not}".rstrip(), flush=True)
    if ratios:
        exact = sum(ratio == 1.0 for ratio in ratios)
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        print(
            f"{len(ratios)} rows: {exact} equal to the byte, median {statistics.median(ratios):.4f}, worst {worst:.4f}"
        )
    print(f"peak memory of a child process: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
