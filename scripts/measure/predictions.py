"""Compare the predicted memory and update time of runs with measurements, and train the full size of every task.

    python scripts/measure/predictions.py [WORD ...] [--device cuda|cpu] [--updates 30]
    python scripts/measure/predictions.py [WORD ...] --predict FILE [--hardware PROFILE]
    python scripts/measure/predictions.py [WORD ...] --predicted FILE

Measures the rows whose name contains one of the words. Each row is predicted as in `accel-run plan`, then trained as in
`accel-run train` in a separate process. On a CPU, only the full sizes are trained, with a small batch, so that 24 GiB
of memory suffice. Prints predicted / measured and their ratio for each training phase. Exits with 1 if a run fails or a
loss is not finite. Predicting full sizes can take longer than training them. Therefore, --predict only writes the
predictions for a hardware profile, possibly on another machine, and --predicted reads them.

allocated  peak memory of torch's allocator, without the context. On a CPU: peak resident memory of the process, which
           includes the training data and evaluation, and never falls from one phase to the next
reserved   peak memory that torch's allocator has obtained from the driver
update     median time of an update over all rows of metrics but the first; predicted only for devices that a hardware
           profile lists
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runner.config.request import Request, merge_overrides

GIB = 2**30
GPT = ("task=gpt", "task.size=124m", "precision=bf16", "global_batch_size=16", "micro_batch_size=16")
GPU_ROWS: dict[str, tuple[str, ...]] = {
    "gpt 124m": GPT,
    "gpt 124m fp32": merge_overrides(GPT, ["precision=fp32"]),
    "gpt 124m fp16": merge_overrides(GPT, ["precision=fp16"]),
    "gpt 124m accumulation": merge_overrides(GPT, ["global_batch_size=32", "micro_batch_size=8"]),
    "gpt 124m checkpoint": merge_overrides(GPT, ["memory=checkpoint"]),
    "gpt 124m selective": merge_overrides(GPT, ["memory=selective"]),
    "gpt 124m compiled": merge_overrides(GPT, ["compile=default"]),
    "gpt 124m averaging": merge_overrides(GPT, ["averaging=ema"]),
    "gpt tiny": ("task=gpt",),
    "nmt bf16": ("task=nmt", "task.size=full", "task.data=random", "global_batch_size=256", "precision=bf16"),
    "cape bf16": ("task=cape", "task.size=full", "global_batch_size=16", "precision=bf16"),
}
# Full sizes: settings, and the settings that replace them on a CPU.
FULL_SIZES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cape": (("task=cape", "global_batch_size=16"), ("global_batch_size=2",)),
    "tractodiff": (("task=tractodiff",), ("global_batch_size=32",)),
    "tractodiff unet": (("task=tractodiff", "task.denoiser=unet"), ("global_batch_size=32",)),
    "nmt": (("task=nmt", "global_batch_size=256"), ("global_batch_size=4",)),
    "nmt random": (
        ("task=nmt", "task.data=random", "task.packed=false", "global_batch_size=256"),
        ("global_batch_size=4",),
    ),
    "dynamo": (("task=dynamo",), ("global_batch_size=2", "micro_batch_size=2")),
    "hyperspectral": (
        ("task=hyperspectral", "task.data=synthetic", "task.num_cubes=40"),
        ("global_batch_size=2", "micro_batch_size=2"),
    ),
}
COMMON = ("checkpoint=off", "evaluate.every=0", "evaluate.samples=16")


@dataclasses.dataclass(frozen=True)
class Figures:
    """Predicted or measured figures of a phase; NaN: not predicted, or not measured."""

    allocated_gib: float = math.nan
    reserved_gib: float = math.nan
    update_ms: float = math.nan


def rows(device: str, updates: int) -> dict[str, tuple[str, ...]]:
    """Return row -> overrides."""
    common = (*COMMON, f"device={device}", f"updates={updates}", f"log_every={5 if device == 'cuda' else 1}")
    full = {
        name: ("task.size=full", *merge_overrides(settings, of_cpu if device == "cpu" else ()))
        for name, (settings, of_cpu) in FULL_SIZES.items()
    }
    return {name: (*words, *common) for name, words in {**(GPU_ROWS if device == "cuda" else {}), **full}.items()}


def predict(overrides: tuple[str, ...]) -> dict[str, Figures] | str:
    """Return training phase -> predicted figures, or why nothing was predicted."""
    from runner.config.config_files import profile_facts
    from runner.config.configuration import compose
    from runner.forecast.demand import trace_memory_needs
    from runner.plan.memory_fit import predict_memory
    from runner.plan.planner import make_plan, planning_inventory
    from runner.plan.update_time import find_rank_rates, predict_phase_time

    try:
        configuration = compose(Request(overrides))
        inventory, _ = planning_inventory(configuration)
        needs = trace_memory_needs(configuration, inventory)
        plan = make_plan(configuration, inventory, needs=needs)
    except Exception as error:  # a failed row must not stop the others
        return f"{type(error).__name__}: {error}"
    rank = dataclasses.replace(plan.ranks[0], unseen=0.0)  # without the margin for memory that a trace does not record
    rates = find_rank_rates(plan, list(profile_facts().values()))
    predicted = {}
    for phase in plan.phases:
        if (demand := needs.demands.get(phase.name)) is None:
            continue
        parts = dict(predict_memory(demand, phase.batch.micro_batch_size, rank).parts)
        reserve, libraries = parts.pop("allocator"), parts.pop("libraries")
        tensors = sum(parts.values()) + (0 if rank.is_gpu else libraries)  # torch does not count libraries on a GPU
        time = predict_phase_time(plan, phase, demand, rates)
        predicted[phase.name] = Figures(
            tensors / GIB, (tensors + reserve) / GIB, 1e3 * time.seconds if time else math.nan
        )
    return predicted or needs.why_not


def train(overrides: tuple[str, ...]) -> dict[str, tuple[Figures, list[float]]] | str:
    """Return training phase -> measured figures and losses, or the error."""
    from runner.durable.record_files import read_record

    with tempfile.TemporaryDirectory() as root:
        line = [sys.executable, "-m", "runner", "train", *overrides, f"output_root={root}", "run=row"]
        done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            return f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
        phases = read_record(Path(root) / "row").result.phases
        lines = (Path(root) / "row" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = {}
    for name, record in phases.items():
        trained = [row for row in map(json.loads, lines) if row["phase"] == name and "train/loss" in row]
        times = [row["perf/step_time_ms"] for row in trained[1:] if row.get("perf/step_time_ms") is not None]
        on_gpu = record.peak_device_gib is not None
        figures = Figures(
            record.peak_device_gib if on_gpu else record.peak_host_gib,
            record.peak_reserved_gib or math.nan,
            statistics.median(times) if times else math.nan,
        )
        found |= {name: (figures, [row["train/loss"] for row in trained])} if trained else {}
    return found


def compare(predicted: Figures, measured: Figures) -> str:
    """Return the measured figures; if they were also predicted, as `predicted / measured = ratio`."""
    columns = []
    for field in dataclasses.fields(Figures):
        expected, found = vars(predicted)[field.name], vars(measured)[field.name]
        name, unit = field.name.removesuffix("_gib").removesuffix("_ms"), "ms" if field.name == "update_ms" else "GiB"
        if math.isfinite(expected) and math.isfinite(found):
            columns.append(f"{name} {expected:.3f} / {found:.3f} {unit} = {expected / found:.2f}")
        elif math.isfinite(found):
            columns.append(f"{name} {found:.3f} {unit}, not predicted")
    return ";  ".join(columns)


def load(path: Path) -> dict[str, dict[str, Figures] | str]:
    """Return the predictions written by --predict."""
    return {
        name: row if isinstance(row, str) else {phase: Figures(**figures) for phase, figures in row.items()}
        for name, row in json.loads(path.read_text(encoding="utf-8")).items()
    }


def main() -> int:
    """Print a line per phase; exit 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--hardware", help="profile of the device to predict for; default: this machine")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--predict", type=Path, metavar="FILE")
    files.add_argument("--predicted", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    selected = {
        name: overrides
        for name, overrides in rows(arguments.device, arguments.updates).items()
        if not arguments.words or any(word in name for word in arguments.words)
    }
    if arguments.predicted:
        predictions = load(arguments.predicted)
    else:
        profile = (f"hardware={arguments.hardware}",) if arguments.hardware else ()
        # The workers of multiprocessing.Pool are daemons, which may not start the process that queries the GPUs.
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            lines = [(*overrides, *profile) for overrides in selected.values()]
            predictions = dict(zip(selected, pool.map(predict, lines), strict=True))
    if arguments.predict:
        found = {
            name: row if isinstance(row, str) else {phase: vars(figures) for phase, figures in row.items()}
            for name, row in predictions.items()
        }
        arguments.predict.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return int(any(isinstance(row, str) for row in predictions.values()))
    is_complete = True
    for name, overrides in selected.items():
        predicted, measured = predictions[name], train(overrides)
        if isinstance(measured, str) or isinstance(predicted, str):
            is_complete = is_complete and not isinstance(measured, str)
            print(f"{name}: predicted {predicted}, measured {measured}", flush=True)
            continue
        for phase, (figures, losses) in measured.items():
            is_complete = is_complete and all(map(math.isfinite, losses))
            loss = f"loss {losses[0]:.4g} -> {losses[-1]:.4g}"
            print(f"{name:22} {phase:9} {compare(predicted.get(phase, Figures()), figures)};  {loss}", flush=True)
    return int(not is_complete)


if __name__ == "__main__":
    sys.exit(main())
