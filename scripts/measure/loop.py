"""Measure the overhead of the training loop with a very small model: accel-run against handwritten loops.

Workload: MLP 64-64-10, batch 32, one thread, AdamW, clipping to 1.0, a linear schedule, loss logged every 10 updates.

hand    a typical handwritten loop: DataLoader with default collate, AdamW's defaults, clip_grad_norm_, LambdaLR
tuned   the same with a fused optimizer, batched reading and a handwritten schedule: the best that plain torch allows
ours    the Phase of accel-run, including its meter, monitor, screen and checkpoints, but without evaluations

hand and ours read a TensorDataset of the same shape. All three are interleaved in one process. A ratio is the median
over rounds of the ratio within a round. It is printed for the wall-clock time and for the thread's CPU time, which is
less sensitive to other processes. On a GPU, hand and tuned copy pinned batches with non_blocking=True, and a block ends
with a synchronization.
Run: python scripts/measure/loop.py [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BATCH, FEATURES, CLASSES, SAMPLES = 32, 64, 10, 4096
SETTINGS = (
    f"global_batch_size={BATCH}", "scheduler=linear", "scheduler.warmup=0", "optimizer.lr=0.001", "precision=fp32",
    "optimizer.weight_decay=0.01", "optimizer.betas=[0.9,0.999]", "optimizer.decay_1d=true",  # AdamW's defaults
)  # fmt: skip

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from runner import Task

def build() -> Task:
    return Tiny()

class Tiny(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
        return torch.utils.data.TensorDataset(x, y)
    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)
"""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def by_hand(total: int, device: torch.device) -> Iterator[None]:
    """A typical handwritten loop."""
    is_gpu = device.type == "cuda"
    dataset = torch.utils.data.TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, pin_memory=is_gpu)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / total)
    log = []
    step = 0
    while True:
        for batch in loader:
            x, y = (each.to(device, non_blocking=is_gpu) for each in batch)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                log.append(json.dumps({"step": step, "loss": loss.item(), "lr": scheduler.get_last_lr()[0]}))
            yield


def tuned(
    total: int,
    device: torch.device,
    *,
    batch: int = BATCH,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Iterator[None]:
    """The same work with the fastest functions of plain torch; `wrap` is applied to the model."""
    x_all, y_all = torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,))
    model = make_model().to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    model = wrap(model)
    log = []
    step = 0
    while True:
        order = torch.randperm(SAMPLES)
        for start in range(0, SAMPLES, batch):
            rows = order[start : start + batch]
            x, y = x_all.index_select(0, rows), y_all.index_select(0, rows)
            if device.type == "cuda":
                x, y = (each.pin_memory().to(device, non_blocking=True) for each in (x, y))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.param_groups[0]["lr"] = 1e-3 * (1.0 - step / total)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                log.append(json.dumps({"step": step, "loss": loss.item()}))
            yield


def ours(total: int, device: torch.device, stack: ExitStack) -> Iterator[int]:
    """Return the updates of accel-run's phase, opened as the command line does."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "tiny_mlp.py").write_text(TASK)
    settings = (*SETTINGS, f"updates={total}", "backend.threads=1", f"device={device.type}", f"output_root={folder}",
                "run=tiny", "evaluate.every=0")  # fmt: skip
    phase = stack.enter_context(open_phase(Request(settings, folder / "tiny_mlp.py")))
    return phase.updates()


def measure(
    variants: dict[str, Iterator[object]], block: int, rounds: int, device: torch.device
) -> dict[str, list[tuple[float, float]]]:
    """Return the wall-clock and CPU microseconds per update of each variant, one pair per round; interleaved."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(rounds + 2):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            advance: Callable[[], object] = variants[name].__next__
            began = time.perf_counter(), time.thread_time()
            for _ in range(block):
                advance()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ended = time.perf_counter(), time.thread_time()
            if round_ >= 2:  # two rounds to warm up
                wall, cpu = (1e6 * (end - begin) / block for begin, end in zip(began, ended, strict=True))
                times[name].append((wall, cpu))
    return times


def main() -> int:
    """Print the table; exit 1 if the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=200)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=None, help="maximum of ours / hand in CPU time; exit 1 above")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    total = (arguments.rounds + 3) * arguments.block
    with ExitStack() as stack:
        quiet = stack.enter_context(Path(os.devnull).open("w"))
        with redirect_stdout(quiet):
            variants: dict[str, Iterator[object]] = {
                "hand": by_hand(total, device),
                "tuned": tuned(total, device),
                "ours": ours(total, device, stack),
            }
            times = measure(variants, arguments.block, arguments.rounds, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}, 1 thread, {arguments.rounds} rounds of {arguments.block} updates")
    ours_ratio = 0.0
    for name, spent in times.items():
        columns = []
        for place, clock in enumerate(("wall-clock", "CPU")):
            ratios = sorted(mine[place] / hand[place] for mine, hand in zip(spent, times["hand"], strict=True))
            low, middle, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9))
            median = statistics.median(pair[place] for pair in spent)
            columns.append(f"{clock} {median:7.1f} us, {middle:.2f} of hand ({low:.2f} to {high:.2f})")
        ours_ratio = middle
        print(f"{name:<6} {';  '.join(columns)}")
    print("per update; in parentheses the range of 80 % of the rounds")
    return int(arguments.limit is not None and ours_ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
