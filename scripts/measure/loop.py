"""Cost of the loop on a model so small that little else is left: accel-run against loops written by hand.

Workload: MLP 64-64-10, batch 32, one thread, AdamW, clipping to 1.0, a linear schedule, the loss logged every 10.

hand    the loop a person types: DataLoader with its default collate, AdamW's defaults, clip_grad_norm_, LambdaLR
tuned   the same with a fused optimizer, batched reading and a schedule by hand: what is possible in plain torch
ours    accel-run's own Phase, with its meter, screen, evaluation and saving in place

All three advance in turns within one process; the ratio is that of the medians. Run: python scripts/measure/loop.py
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

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(4096, 64, generator=generator)
        self.y = torch.randint(0, 10, (4096,), generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.y[index]
    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return self.x.index_select(0, rows), self.y.index_select(0, rows)

class Tiny(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    def dataset(self, split):
        return Rows()
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
        "device=cpu", f"output_root={folder}", "run=tiny", "evaluate.every=0", "monitor=off", "optimizer.lr=0.001",
        # The mathematics of AdamW's own defaults, as in the other two.
        "optimizer.weight_decay=0.01", "optimizer.betas=[0.9,0.999]", "optimizer.decay_1d=true",
    )  # fmt: skip
    phase = stack.enter_context(open_phase(Request(settings, folder / "tiny_mlp.py")))
    return phase.updates()


def measure(contestants: dict[str, Iterator[object]], block: int, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per update of each contestant, one per round; they advance in turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for round_ in range(rounds + 2):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            advance: Callable[[], object] = contestants[name].__next__
            began = time.perf_counter()
            for _ in range(block):
                advance()
            spent = 1e6 * (time.perf_counter() - began) / block
            if round_ >= 2:  # two rounds to warm up
                times[name].append(spent)
    return times


def main() -> int:
    """Print the table; exit 1 where the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=200)
    parser.add_argument("--limit", type=float, default=None, help="exit 1 when ours / hand is above this")
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
    base = statistics.median(times["hand"])
    print(f"torch {torch.__version__}, 1 thread, {arguments.rounds} rounds of {arguments.block} updates")
    for name, spent in times.items():
        ratios = sorted(mine / hand for mine, hand in zip(spent, times["hand"], strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        median = statistics.median(spent)
        spread = f"80 % of rounds: {low:.2f} to {high:.2f}"
        print(f"{name:<6} {median:7.1f} us/update   {median / base:.2f} of hand   ({spread})")
    ratio = statistics.median(times["ours"]) / base
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
