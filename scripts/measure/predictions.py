"""Compare the predicted memory and update time of runs with those measured on the GPU of this machine.

    python scripts/measure/predictions.py [WORD ...] [--updates 30]     rows whose name contains one of the words

Each row is predicted as by `accel-run plan`, then trained as by `accel-run train` in a separate process. Memory is
the peak of torch's allocator, without the context; the time is that of an update without evaluation and saving.
Prints a table of predicted / measured and the ratios. Needs a GPU with a hardware profile, for the times.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runner.config.request import merge_overrides

GPT = ("task=gpt", "task.size=124m", "precision=bf16", "global_batch_size=16", "micro_batch_size=16")
ROWS: dict[str, tuple[str, ...]] = {
    "gpt 124m": GPT,
    "gpt 124m fp32": merge_overrides(GPT, ["precision=fp32"]),
    "gpt 124m fp16": merge_overrides(GPT, ["precision=fp16"]),
    "gpt 124m accumulation": merge_overrides(GPT, ["global_batch_size=32", "micro_batch_size=8"]),
    "gpt 124m checkpoint": merge_overrides(GPT, ["memory=checkpoint"]),
    "gpt 124m selective": merge_overrides(GPT, ["memory=selective"]),
    "gpt 124m compiled": merge_overrides(GPT, ["compile=default"]),
    "gpt 124m averaging": merge_overrides(GPT, ["averaging=ema"]),
    "gpt tiny": ("task=gpt",),
    "nmt": ("task=nmt", "task.size=full", "task.data=random", "task.packed=false", "global_batch_size=256"),
    "nmt bf16": ("task=nmt", "task.size=full", "task.data=random", "global_batch_size=256", "precision=bf16"),
    "cape": ("task=cape", "task.size=full", "global_batch_size=16"),
    "cape bf16": ("task=cape", "task.size=full", "global_batch_size=16", "precision=bf16"),
    "tractodiff": ("task=tractodiff", "task.size=full"),
    "tractodiff unet": ("task=tractodiff", "task.size=full", "task.denoiser=unet"),
    "dynamo": ("task=dynamo", "task.size=full", "phases=[pretrain]"),
    "hyperspectral": ("task=hyperspectral", "task.size=full", "task.data=synthetic", "task.num_cubes=40"),
}
COMMON = ("device=cuda:0", "checkpoint=off", "evaluate.every=0", "evaluate.samples=16", "log_every=5")


def settings_of(name: str, updates: int) -> tuple[str, ...]:
    """Return the overrides of a row."""
    return merge_overrides(ROWS[name], (f"updates={updates}", *COMMON))


def predict(name: str, updates: int) -> tuple[float, float, float | None] | str:
    """Return the predicted allocated and reserved bytes and the seconds of an update, or the reason for none."""
    from runner.config.request import Request
    from runner.plan.inventory import take_inventory
    from runner.tools.doctor.contact_checks import predict_run

    try:
        expected = predict_run(Request(settings_of(name, updates)), take_inventory())
    except Exception as error:  # one row must not end the others
        return f"{type(error).__name__}: {error}"
    if isinstance(expected, str):
        return expected
    return expected.allocated, expected.reserved, expected.seconds.seconds if expected.seconds else None


def train(name: str, updates: int) -> tuple[float | None, float | None, float | None] | str:
    """Return the measured allocated and reserved GiB and the milliseconds of an update, or the error."""
    from runner.durable.record_files import read_record

    with tempfile.TemporaryDirectory() as root:
        line = [sys.executable, "-m", "runner", "train", *settings_of(name, updates), f"output_root={root}", "run=row"]
        done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            return f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
        evidence = read_record(Path(root) / "row").evidence
    assert evidence is not None, "a successful run records its evidence"
    return evidence.device_peak_gib, evidence.device_peak_reserved_gib, evidence.step_time_ms


def main() -> int:
    """Print the table; exit 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--updates", type=int, default=30)
    arguments = parser.parse_args()
    names = [name for name in ROWS if not arguments.words or any(word in name for word in arguments.words)]
    # The workers of multiprocessing.Pool are daemons, which may not start the process that queries the GPUs.
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        predicted = dict(zip(names, pool.map(partial(predict, updates=arguments.updates), names), strict=True))
    is_complete = True
    for name in names:
        before, after = predicted[name], train(name, arguments.updates)
        if isinstance(before, str) or isinstance(after, str):
            is_complete = False
            print(f"{name}: predicted {before}, measured {after}", flush=True)
            continue
        columns = []
        for label, expected, measured, unit in (
            ("allocated", before[0] / 2**30, after[0], "GiB"),
            ("reserved", before[1] / 2**30, after[1], "GiB"),
            ("update", before[2] and 1e3 * before[2], after[2], "ms"),
        ):
            ratio = f" = {expected / measured:.2f}" if expected and measured else ""
            columns.append(f"{label} {expected:.3f} / {measured:.3f} {unit}{ratio}" if expected and measured else label)
        print(f"{name:22} {';  '.join(columns)}", flush=True)
    return int(not is_complete)


if __name__ == "__main__":
    sys.exit(main())
