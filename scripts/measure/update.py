"""Measure time and memory of an update of gpt: accel-run and the best handwritten loop with the same model.

hand   fused AdamW in two groups, batched reading, foreach clipping, a cosine schedule, the loss read every 10 updates;
       on a GPU, also pinned batches with non-blocking copies
half   with --precision bf16: like hand, but with a bfloat16 loss. The log-softmax of F.cross_entropy is then faster,
       but its probabilities are rounded to 8 bits. hand and ours convert the logits to float32
ours   the Phase of accel-run, including its meter, screen and checkpoints, but without evaluations

Time is measured interleaved in one process; the ratio is that of the medians. Memory is measured in separate processes:
the peak resident set or, on a GPU, the peak of allocated memory. For a GPU with a hardware profile, the model FLOP
utilization is also printed: floating-point operations of the model (not of recomputation) per second, relative to the
peak of the number format.

    python scripts/measure/update.py
    python scripts/measure/update.py --device cuda --size 124m --precision bf16 --batch 16 [--compile] [WORD...]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """What both loops train.

    batch, micro   number of samples of an update, and of a micro-batch
    words_of_ours  more settings of accel-run
    """

    device: torch.device
    size: str
    precision: str
    batch: int
    micro: int
    is_compiled: bool
    words_of_ours: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """The command-line options of this case."""
        words = ["--device", self.device.type, "--size", self.size, "--precision", self.precision]
        words += ["--batch", str(self.batch), "--micro", str(self.micro)]
        return [*words, *(["--compile"] if self.is_compiled else []), *self.words_of_ours]


def by_hand(
    case: Case, total: int, *, has_half_loss: bool = False, wrap: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """A handwritten loop by an expert in torch; `wrap` is applied to the model."""
    task = _build(case)
    device, dataset = case.device, task.dataset("train")
    model = task.model.to(device)
    model = wrap(model) if wrap else model
    parameters = list(model.parameters())  # after fully_shard, which replaces them
    model = torch.compile(model) if case.is_compiled else model
    groups = [
        {"params": [weight for weight in parameters if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in parameters if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=case.precision == "bf16")
    torch.backends.cuda.matmul.allow_tf32 = case.precision == "bf16"
    passes, step = case.batch // case.micro, 0
    while True:
        order = torch.randperm(len(dataset)).tolist()
        for start in range(0, len(order) - case.batch, case.batch):
            for first in range(start, start + case.batch, case.micro):
                x, y = dataset.__getitems__(order[first : first + case.micro])
                if device.type == "cuda":
                    x, y = (each.pin_memory().to(device, non_blocking=True) for each in (x, y))
                with autocast():
                    loss = _loss(model, x, y, has_half_loss=has_half_loss) / passes
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            for group in groups:
                group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / total))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                loss.item()
            yield


def _loss(model: Any, x: Tensor, y: Tensor, *, has_half_loss: bool) -> Tensor:
    """Return the mean loss; when this function returns, logits that the backward pass does not need are freed."""
    logits = model(x) if has_half_loss else model(x).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def _build(case: Case) -> Any:
    from runner.tasks.gpt.task import build

    from runner.base.paths import cache_folder
    from runner.base.task import Context

    torch.manual_seed(0)
    return build(Context(0, None, cache_folder()), size=case.size)


def ours(case: Case, total: int, stack: ExitStack) -> Iterator[int]:
    """Return the updates of accel-run's phase, opened as the command line does."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    settings = (
        "task=gpt", f"task.size={case.size}", f"updates={total}", f"global_batch_size={case.batch}",
        f"micro_batch_size={case.micro}", f"device={case.device.type}", f"output_root={folder}", "run=update",
        "evaluate.every=0", f"precision={case.precision}", "optimizer.lr=0.0003", "optimizer.weight_decay=0.1",
        f"compile={'default' if case.is_compiled else 'off'}", *case.words_of_ours,
    )  # fmt: skip
    return stack.enter_context(open_phase(Request(settings))).updates()


def time_both(case: Case, rounds: int, block: int) -> dict[str, list[float]]:
    """Return milliseconds per update, one per round."""
    total = (rounds + 2) * block
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        loops: dict[str, Iterator[object]] = {"hand": by_hand(case, total), "ours": ours(case, total, stack)}
        if case.precision == "bf16":
            times["half"] = []
            loops["half"] = by_hand(case, total, has_half_loss=True)
        for round_ in range(rounds + 1):
            for name in sorted(loops, reverse=bool(round_ % 2)):
                _synchronize(case)
                began = time.perf_counter()
                for _ in range(block):
                    next(loops[name])
                _synchronize(case)
                if round_:  # the first warms up
                    times[name].append(1e3 * (time.perf_counter() - began) / block)
    return times


def _synchronize(case: Case) -> None:
    if case.device.type != "cpu":
        torch.accelerator.synchronize(case.device)


def peak_mib(case: Case, which: str, updates: int) -> float:
    """Return the peak memory of a process that runs some updates."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", which, "--block", str(updates), *case.words()],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def print_peak_memory(case: Case, which: str, updates: int) -> None:
    """Run some updates and print the peak memory in MiB."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        loop: Iterator[object] = by_hand(case, updates + 1) if which == "hand" else ours(case, updates + 1, stack)
        for _ in range(updates):
            next(loop)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if case.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(BrokenPipeError):
        print(peak)


def flops_of_update(case: Case) -> float:
    """Return the FLOP of the matrix products of an update: 6 per weight and token, and those of attention.

    Source: PaLM, appendix B: 6 N + 12 L d T per token, with the output layer, without the other embeddings.
    """
    task = _build(case)
    model = task.model
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    weights = sum(weight.numel() for weight in model.parameters()) - min(table.weight.numel() for table in tables)
    inputs, _ = task.dataset("train").__getitems__([0])
    length, width = int(inputs.shape[1]), tables[0].weight.shape[1]
    per_token = 6 * weights + 12 * len(model.blocks) * width * length
    return float(case.batch * length * per_token)


def peak_flops(case: Case) -> float | None:
    """Return the peak of the number format from the hardware profile of this GPU; None if there is no profile."""
    from runner.config.config_files import profile_facts
    from runner.plan.update_time import find_rates

    return find_rates(torch.cuda.get_device_name(case.device), case.precision, profile_facts().values()).flops_per_s


def _print_memory(case: Case) -> None:
    repetitions = 1 if case.device.type == "cuda" else 2  # allocated memory does not vary
    peaks = {name: min(peak_mib(case, name, 20) for _ in range(repetitions)) for name in ("hand", "ours")}
    print(f"memory  {peaks['ours'] / peaks['hand']:.3f} of hand ({peaks['ours']:.0f} of {peaks['hand']:.0f} MiB)")


def main() -> int:
    """Print the table; exit 1 if a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro", type=int, default=None, help="default: the batch")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--time-only", action="store_true", help="do not measure memory")
    parser.add_argument("--limit", type=float, default=None, help="maximum ratio of the times; exit 1 above")
    parser.add_argument("words", nargs="*", help="additional settings of accel-run")
    parser.add_argument("--alone", choices=["hand", "ours"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    case = Case(
        torch.device(arguments.device), arguments.size, arguments.precision, arguments.batch,
        arguments.micro or arguments.batch, arguments.compile, tuple(arguments.words),
    )  # fmt: skip
    if arguments.alone:
        print_peak_memory(case, arguments.alone, arguments.block)
        return 0
    times = time_both(case, arguments.rounds, arguments.block)
    ratios = sorted(mine / hand for mine, hand in zip(times["ours"], times["hand"], strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    ratio = statistics.median(times["ours"]) / statistics.median(times["hand"])
    where = f"{torch.get_num_threads()} threads" if case.device.type == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, {' '.join(case.words())}")
    peak = peak_flops(case) if case.device.type == "cuda" else None
    for name, spent in times.items():
        ms = statistics.median(spent)
        used = f", {1e3 * flops_of_update(case) / ms / peak:.1%} of {peak / 1e12:.0f} TFLOP/s" if peak else ""
        print(f"{name}  {ms:.2f} ms/update{used}")
    print(
        f"time    {ratio:.3f} of hand (paired {statistics.median(ratios):.3f}, 80 % of rounds {low:.3f} to {high:.3f})"
    )
    if not arguments.time_only:
        _print_memory(case)
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
