"""Measure the overhead and the speedup of training on two forked ranks with gloo on this machine.

step   an update of gpt tiny on 2 equal ranks, compared with a handwritten loop with DistributedDataParallel
small  as step, but with a 64-64-10 MLP, whose update takes less time than the messages between the ranks
shard  as step, but with parallelism=fsdp, compared with a handwritten loop with torch's fully_shard
slow   one rank is slowed down by a factor of 2, then 3: equal shares, fixed shares in proportion to speed, and
       parallelism.shares=speed, compared with the optimum

Run: python scripts/measure/ranks.py step --rounds 20
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import loop
import torch
import torch.distributed as dist  # noqa: TID251 - a script that compares with loops written by hand
from torch.distributed.fsdp import fully_shard  # noqa: TID251 - the same
from torch.nn.parallel import DistributedDataParallel
from update import Case, by_hand

ROOT = Path(__file__).parents[2]
BATCH = 32
SLOW_TASK = '''
"""gpt tiny with one rank that is slower in proportion to its samples, like a slower device."""
import time
import torch.distributed as dist
from runner import Context, Task
from runner.tasks.gpt.task import build as build_gpt

def build(context: Context, *, factor: float = 1.0, ms_per_sample: float = 1.0) -> Task:
    task = build_gpt(context, size="tiny")
    inner = task.loss

    def loss(model, batch):
        if model.training and dist.get_rank() == 1:
            time.sleep(len(batch[0]) * ms_per_sample / 1e3 * (factor - 1))
        return inner(model, batch)

    task.loss = loss
    return task
'''


def on_two_ranks(function: Callable[[Any], Any]) -> Any:
    """Run `function(world)` on two forked, single-threaded ranks; return the result of rank 0."""
    from runner.tools.measure.forked_ranks import run_on_forked_ranks

    def on_one_thread(world: Any) -> Any:
        torch.set_num_threads(1)
        return function(world)

    return run_on_forked_ranks(on_one_thread, 2)


def open_on_rank(world: Any, stack: ExitStack, *words: str, task: str = "") -> Any:
    """Open a run on this rank, silently, in a separate folder."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    folder = world.broadcast(stack.enter_context(tempfile.TemporaryDirectory()))
    file = Path(folder) / "task_of_script.py"
    if task and world.is_first:
        file.write_text(task)
    dist.barrier()
    settings = (f"output_root={folder}", "run=m", "evaluate.every=0", "evaluate.samples=32", "monitor=off",
                "device=cpu", f"global_batch_size={BATCH}", *words)  # fmt: skip
    stack.enter_context(redirect_stdout(io.StringIO()))
    return stack.enter_context(open_phase(Request(settings, file if task else None), world))


def measure_ms_per_update(updates: Iterator[Any], number: int) -> float:
    """Run some updates; return their mean time in milliseconds."""
    began = time.perf_counter()
    for _ in range(number):
        next(updates)
    return 1e3 * (time.perf_counter() - began) / number


def step(arguments: argparse.Namespace) -> float:
    """Measure an update of gpt tiny."""

    def hand(total: int, share: int) -> Iterator[Any]:
        case = Case(torch.device("cpu"), "tiny", "fp32", share, share, is_compiled=False)
        return by_hand(case, total, wrap=partial(DistributedDataParallel, gradient_as_bucket_view=True))

    return compare(arguments, hand, ("task.size=tiny", "precision=fp32", "parallelism=ddp"))


def small(arguments: argparse.Namespace) -> float:
    """Measure an update of a small MLP. Both loops read the data in batches and use a fused optimizer."""

    def hand(total: int, share: int) -> Iterator[Any]:
        wrap = partial(DistributedDataParallel, gradient_as_bucket_view=True)
        return loop.tuned(total, torch.device("cpu"), batch=share, wrap=wrap)

    return compare(arguments, hand, (*loop.SETTINGS, "parallelism=ddp"), loop.TASK)


def shard(arguments: argparse.Namespace) -> float:
    """Measure an update of gpt tiny whose parameters are sharded block by block."""

    def wrap(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def hand(total: int, share: int) -> Iterator[Any]:
        case = Case(torch.device("cpu"), "tiny", "fp32", share, share, is_compiled=False)
        return by_hand(case, total, wrap=wrap)

    return compare(arguments, hand, ("task.size=tiny", "precision=fp32", "parallelism=fsdp"), by="fully_shard")


def compare(
    arguments: argparse.Namespace,
    hand: Callable[[int, int], Iterator[Any]],
    words: Sequence[str],
    task: str = "",
    by: str = "DistributedDataParallel",
) -> float:
    """Print the update times of accel-run and of the handwritten loop, and their ratio.

    In the handwritten loop, both ranks train on the same samples.

    hand  returns the updates of the handwritten loop, given (total updates, samples per rank)
    by    the torch class or function that the handwritten loop uses
    """

    def time_both_loops(world: Any) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"hand": [], "ours": []}
        with ExitStack() as stack:
            total = (arguments.rounds + 2) * arguments.block
            ours = open_on_rank(world, stack, *words, f"updates={total}", task=task).updates()
            loops: dict[str, Iterator[Any]] = {"hand": hand(total, BATCH // world.world_size), "ours": ours}
            for round_ in range(arguments.rounds + 1):
                for name in sorted(loops, reverse=bool(round_ % 2)):
                    dist.barrier()
                    spent = measure_ms_per_update(loops[name], arguments.block)
                    if round_:  # the first round is a warm-up
                        times[name].append(spent)
        return times

    times = on_two_ranks(time_both_loops)
    ratios = sorted(ours / hand for ours, hand in zip(times["ours"], times["hand"], strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    for name, spent in times.items():
        print(f"{name:<9} {statistics.median(spent):.3f} ms per update")
    ratio = statistics.median(times["ours"]) / statistics.median(times["hand"])
    print(f"ours / hand ({by}): {ratio:.3f} (paired {statistics.median(ratios):.3f}, 80 % of rounds"
          f" {low:.3f} to {high:.3f})")  # fmt: skip
    return statistics.median(ratios)


def per_sample_ms(world: Any) -> float:
    """Return the time per sample of gpt tiny, in milliseconds, on a rank while both ranks are busy."""
    with ExitStack() as stack:
        opened = open_on_rank(world, stack, "task.size=tiny", "updates=100", "precision=fp32", "parallelism=ddp")
        updates = opened.updates()
        measure_ms_per_update(updates, 10)
        spent = measure_ms_per_update(updates, 30) / (BATCH / 2)
    return float(world.broadcast(spent))


def train_with_slow_rank(world: Any, shares: str, updates: int, **options: Any) -> dict[str, Any]:
    """Train with one slow rank, and measure after `updates` updates, when the shares no longer change.

    Return the shares, the milliseconds per update (`ms`) and per exchange between the ranks (`exchange_ms`), and each
    rank's fitted time model (`lines`: fixed time and time per sample).
    """
    from runner.engine.hooks.rank_sync import RankSync

    with ExitStack() as stack:
        words = [f"task.{key}={value}" for key, value in options.items()]
        words += [f"updates={updates + 200}", f"parallelism.shares={shares}", "precision=fp32", "parallelism=ddp"]
        words += ["scheduler=constant", "log_every=10000"]
        opened = open_on_rank(world, stack, *words, task=SLOW_TASK)
        made, sync = opened.updates(), opened.hook(RankSync)
        measure_ms_per_update(made, updates)
        blocks, exchanges = [], []
        for _ in range(12):
            blocks.append(measure_ms_per_update(made, 10))
            exchanges.append(min(seconds["wait"] for seconds in sync.status.seconds))
        balance = opened.shares.solver if shares == "speed" else None
        return {
            "exchange_ms": 1e3 * statistics.median(exchanges),
            "ms": statistics.median(blocks),
            "lines": [[line.fixed_s, line.per_sample_s] for line in balance.lines] if balance else [],
            "shares": list(balance.shares if balance else opened.order.shares),
        }


def optimum_ms(lines: list[list[float]]) -> float:
    """Return the minimum time per update in milliseconds for these fitted time models, without communication."""
    from runner.workload.share_solver import RankTiming, fastest_shares, slowest_seconds

    known = [RankTiming(*line) for line in lines]
    return 1e3 * slowest_seconds(known, fastest_shares(BATCH, known))


def slow(arguments: argparse.Namespace) -> float:
    """Print the speedup of different shares with one rank slowed down by 2, then 3; return the worst ratio."""
    cost = on_two_ranks(per_sample_ms)
    print(f"a sample takes {cost:.2f} ms on each of two ranks")
    worst = 0.0
    for factor in (2.0, 3.0):
        options = {"factor": factor, "ms_per_sample": round(cost, 3)}
        fast_share = round(BATCH * factor / (factor + 1))
        found = {
            name: on_two_ranks(partial(train_with_slow_rank, shares=shares, updates=80, **options))
            for name, shares in (
                ("equal", "equal"), ("proportional", f"[{fast_share},{BATCH - fast_share}]"), ("speed", "speed"),
            )
        }  # fmt: skip
        exchange = found["speed"]["exchange_ms"]
        best = optimum_ms(found["speed"]["lines"]) + exchange
        print(f"rank 1 is {factor:g} times slower; optimum from the fitted times: {best - exchange:.1f} ms of"
              f" computation and {exchange:.1f} ms of communication")  # fmt: skip
        for name, result in found.items():
            print(f"  {name:<13} {result['ms']:7.1f} ms per update, shares {result['shares']},"
                  f" {found['equal']['ms'] / result['ms']:.2f} times as fast as equal,"
                  f" {result['ms'] / best:.3f} times the optimum")  # fmt: skip
        worst = max(worst, found["speed"]["ms"] / best)
    return worst


def main() -> int:
    """Print the measurement; exit with status 1 if the ratio exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "small", "shard", "slow"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--limit", type=float, default=None, help="exit with status 1 if the ratio exceeds this limit")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, 2 single-threaded ranks over gloo, {time.strftime('%Y-%m-%d')}")
    ratio = {"step": step, "small": small, "shard": shard, "slow": slow}[arguments.what](arguments)
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
