"""Cost of the loop on a model so small that little else is left: accel-run against loops written by hand.

Workload: MLP 64-64-10, batch 32, one thread, AdamW, clipping to 1.0, a linear schedule, the loss logged every 10.

hand    the loop a person types: DataLoader with its default collate, AdamW's defaults, clip_grad_norm_, LambdaLR
tuned   the same with a fused optimizer, batched reading and a schedule by hand: what is possible in plain torch
ours    accel-run's own Phase, with its meter, monitor, screen, evaluation and saving in place

hand and ours read the same TensorDataset. All three are interleaved in one process; the ratios are those of the
medians: of wall-clock time, and of the CPU time of the thread, which other processes disturb less.
Run: python scripts/measure/loop.py
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


def by_hand(total: int) -> Iterator[None]:
    """The loop a person types."""
    dataset = torch.utils.data.TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / total)
    log = []
    step = 0
    while True:
        for x, y in loader:
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


def tuned(total: int) -> Iterator[None]:
    """The same work with what plain torch offers for speed."""
    x_all, y_all = torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,))
    model = make_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    log = []
    step = 0
    while True:
        order = torch.randperm(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            rows = order[start : start + BATCH]
            loss = F.cross_entropy(model(x_all.index_select(0, rows)), y_all.index_select(0, rows))
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.param_groups[0]["lr"] = 1e-3 * (1.0 - step / total)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                log.append(json.dumps({"step": step, "loss": loss.item()}))
            yield


def ours(total: int, stack: ExitStack) -> Iterator[int]:
    """accel-run, through the same door as the command line."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "tiny_mlp.py").write_text(TASK)
    settings = (
        f"updates={total}", f"global_batch_size={BATCH}", "scheduler=linear", "scheduler.warmup=0", "backend.threads=1",
        "device=cpu", f"output_root={folder}", "run=tiny", "evaluate.every=0", "optimizer.lr=0.001",
        # The mathematics of AdamW's own defaults, as in the other two.
        "optimizer.weight_decay=0.01", "optimizer.betas=[0.9,0.999]", "optimizer.decay_1d=true",
    )  # fmt: skip
    phase = stack.enter_context(open_phase(Request(settings, folder / "tiny_mlp.py")))
    return phase.updates()


def measure(contestants: dict[str, Iterator[object]], block: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return microseconds per update, wall-clock and CPU time, of each contestant, one per round; interleaved."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    names = list(contestants)
    for round_ in range(rounds + 2):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            advance: Callable[[], object] = contestants[name].__next__
            began = time.perf_counter(), time.thread_time()
            for _ in range(block):
                advance()
            ended = time.perf_counter(), time.thread_time()
            if round_ >= 2:  # two rounds to warm up
                wall, cpu = (1e6 * (end - begin) / block for begin, end in zip(began, ended, strict=True))
                times[name].append((wall, cpu))
    return times


def main() -> int:
    """Print the table; exit 1 where the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=200)
    parser.add_argument("--limit", type=float, default=None, help="exit 1 when ours / hand of CPU time is above this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    total = (arguments.rounds + 3) * arguments.block
    with ExitStack() as stack:
        quiet = stack.enter_context(Path(os.devnull).open("w"))
        with redirect_stdout(quiet):
            contestants = {
                "hand": by_hand(total),
                "tuned": tuned(total),
                "ours": ours(total, stack),
            }
            times = measure(contestants, arguments.block, arguments.rounds)
    print(f"torch {torch.__version__}, 1 thread, {arguments.rounds} rounds of {arguments.block} updates")
    of_ours = 0.0
    for name, spent in times.items():
        columns = []
        for place, clock in enumerate(("wall-clock", "CPU")):
            ratios = sorted(mine[place] / hand[place] for mine, hand in zip(spent, times["hand"], strict=True))
            low, middle, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9))
            median = statistics.median(pair[place] for pair in spent)
            columns.append(f"{clock} {median:7.1f} us, {middle:.2f} of hand ({low:.2f} to {high:.2f})")
        of_ours = middle
        print(f"{name:<6} {';  '.join(columns)}")
    print("an update; in parentheses 80 % of rounds")
    return int(arguments.limit is not None and of_ours > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
