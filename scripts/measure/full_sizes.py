"""Train the full size of every task for a few updates, and compare memory and update time with the plan.

    scripts/measure/full_sizes.py [TASK ...] [--device cpu|cuda] [--updates 20] [--root DIR]

Each run is a separate process, started through the command line. On a CPU the batch is small, so that 24 GiB of memory
suffice; the model, its optimizer and the shape of a sample are those of the full size. On a GPU the batch is the
task's own. With --root, runs are kept there, and a stopped one is resumed. Exits with 1 if a run fails or a loss is not
finite.

peak    predicted by a trace on fake tensors beside measured. CPU: resident memory of the process, which includes the
        training data and evaluation, and never falls from one phase to the next. GPU: memory allocated by torch.
update  predicted time, where a hardware profile lists the device, beside the median of all updates but the first
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from runner.base.errors import AccelRunError
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.record_files import read_record
from runner.launch.traced_demand import trace_memory_needs
from runner.plan.memory_fit import predict_memory
from runner.plan.planner import make_plan, planning_inventory
from runner.plan.update_time import find_rank_rates, predict_phase_time

GIB = 2**30


@dataclass(frozen=True)
class FullSize:
    """A run of `task=NAME task.size=full`.

    cpu     settings of each training phase on a CPU
    phases  names of the training phases with separate settings
    """

    cpu: tuple[str, ...]
    phases: tuple[str, ...] = ()

    def list_overrides(self, device: str, updates: int) -> Iterator[str]:
        """Yield the overrides of every training phase."""
        for prefix in [f"phase.{phase}." for phase in self.phases] or [""]:
            for override in (f"updates={updates}", *(self.cpu if device == "cpu" else ())):
                yield prefix + override


# Arguments after `task=` -> run.
RUNS = {
    "cape": FullSize(("global_batch_size=2",)),
    "tractodiff": FullSize(("global_batch_size=32",)),
    "tractodiff task.denoiser=unet": FullSize(("global_batch_size=32",)),
    "nmt": FullSize(("global_batch_size=4",)),
    "nmt task.data=random task.packed=false": FullSize(("global_batch_size=4",)),
    "dynamo": FullSize(("global_batch_size=2", "micro_batch_size=2"), phases=("pretrain", "lora", "router", "joint")),
    "hyperspectral task.data=synthetic task.num_cubes=40": FullSize(
        ("global_batch_size=2", "micro_batch_size=2"), phases=("train",)
    ),
}
COMMON = "evaluate.every=0 evaluate.samples=4 log_every=1 dataloader.num_workers=0 checkpoint.every=10min"


@dataclass(frozen=True)
class PhaseFigures:
    """Predicted and measured figures of a phase; NaN: not predicted, or not measured."""

    losses: Sequence[float]
    predicted_gib: float
    measured_gib: float
    predicted_ms: float
    measured_ms: float

    def format_cells(self) -> list[str]:
        """Return the cells of the table."""
        loss = f"{self.losses[0]:.4g} -> {self.losses[-1]:.4g}"
        memory = f"{self.predicted_gib:.2f} / {self.measured_gib:.2f}"
        return [str(len(self.losses)), loss, memory, f"{self.predicted_ms:.4g} / {self.measured_ms:.4g}"]


def predict(arguments: Sequence[str], device: str) -> dict[str, tuple[float, float]]:
    """Return training phase -> predicted peak in GiB and time of an update in ms."""
    configuration = compose(Request(tuple(arguments)))
    inventory, _ = planning_inventory(configuration)
    needs = trace_memory_needs(configuration, inventory)
    plan = make_plan(configuration, inventory, needs=needs)
    rates = find_rank_rates(plan, list(profile_facts().values()))
    predicted = {}
    for phase in plan.phases:
        if (demand := needs.demands.get(phase.name)) is None:
            continue
        parts = predict_memory(demand, phase.batch.micro_batch_size, plan.ranks[0]).parts
        left_out = () if device == "cpu" else ("libraries", "allocator")  # torch does not count them as allocated
        peak = sum(size for part, size in parts.items() if part not in left_out)
        time = predict_phase_time(plan, phase, demand, rates)
        predicted[phase.name] = peak / GIB, 1e3 * time.seconds if time else math.nan
    return predicted


def train(arguments: Sequence[str], root: Path, run: str) -> Path:
    """Train, and return the folder of the run."""
    command = [sys.executable, "-m", "runner", "train", *arguments, f"output_root={root}", f"run={run}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "ACCEL_RUN_LOG_LEVEL": "warning"})
    return root / run


def read_figures(folder: Path, predicted: dict[str, tuple[float, float]]) -> dict[str, PhaseFigures]:
    """Return the figures of each training phase."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = {}
    for name, record in read_record(folder).result.phases.items():
        trained = [row for row in rows if row["phase"] == name and "train/loss" in row]
        if not trained:
            continue
        peak = record.peak_host_gib if record.peak_device_gib is None else record.peak_device_gib
        times = [row["perf/step_time_ms"] for row in trained[1:] if row.get("perf/step_time_ms") is not None]
        predicted_gib, predicted_ms = predicted.get(name, (math.nan, math.nan))
        measured_ms = statistics.median(times) if times else math.nan
        figures[name] = PhaseFigures(
            [row["train/loss"] for row in trained], predicted_gib, peak, predicted_ms, measured_ms
        )
    return figures


def main(argv: Sequence[str]) -> int:
    """Run the selected sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=[*RUNS], metavar="TASK")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--root", type=Path)
    options = parser.parse_args(argv)
    columns = ("run", "phase", "updates", "loss", "peak, GiB: predicted / measured", "update, ms: predicted / measured")
    table = Table(*columns, box=None)
    failed = False
    for name in options.tasks:
        settings = RUNS[name].list_overrides(options.device, options.updates)
        arguments = [*f"task={name} task.size=full".split(), *settings, *COMMON.split(), f"device={options.device}"]
        print("accel-run train", *arguments, flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            try:
                folder = train(arguments, options.root or Path(temporary), re.sub(r"\W+", "-", name))
                figures = read_figures(folder, predict(arguments, options.device))
            except (AccelRunError, subprocess.CalledProcessError, OSError) as error:
                table.add_row(name, f"failed: {error}")
                failed = True
                continue
        for phase, measured in figures.items():
            table.add_row(name, phase, *measured.format_cells())
            failed = failed or not all(map(math.isfinite, measured.losses))
            print("  ", phase, *measured.format_cells(), sep="  ", flush=True)
    Console(width=200).print(table)
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
