"""Measure the time of a training update in accel-run and in other trainers, with the same mathematics.

hand        a plain PyTorch loop with DataLoader; on a GPU, non-blocking copies from pinned memory
accel-run   `accel-run train`, with its progress output, monitor, watchdog and checks
lightning   Trainer of PyTorch Lightning
trainer     Trainer of transformers
accelerate  the plain loop, with its parts prepared by Accelerate

Workloads: mlp (64-64-10, batch 32), cnn (4 convolutions with batch norm, batch 32), gpt-tiny and gpt-124m (the models
of the task gpt, batches of 16 windows of random tokens).

The same for all: weights, samples and their order, batch size, the expressions of the loss, AdamW with weight decay for
all parameters, gradient clipping to 1.0, a linear schedule stepped after each update, the mean loss or the current loss
written to a file every 10 updates, TF32 off with fp32. The optimizer is torch.optim.AdamW(fused=True) for all but
accel-run, whose class calls the same kernel. The data is read once, in order, without the end of an epoch. On a CPU,
all use --threads threads.

Off for all: evaluation, checkpoints, trackers, and the progress bars of Lightning and transformers, which are on by
default: --bars leaves them on. Otherwise, each trainer has its own defaults. These matter: transformers tests
each loss for NaN, which waits for the GPU; Accelerate, also inside transformers, waits for each copy to the GPU;
accel-run chooses the number of its data loader workers. With bf16, the LightningModule clips the gradients in a hook,
because Lightning refuses to clip those of a fused optimizer.

Each measurement is a process with U updates. The clock starts before the forward pass of update U/3 + 1 and stops after
update U; both are found by a forward hook of the network, which waits for the GPU. The CPU time is that of the process
and all its threads, without data loader workers. The memory is the peak of torch's allocator on a GPU, otherwise the
maximum resident set, which includes imported packages. Processes take turns, in a different order in each round. A
ratio is the median over rounds of the ratio to `hand` within a round, with the range of the rounds in brackets.

After update U, the loss of the first batch is computed in float32. Exits with 1 if it differs from that of `hand` by
more than rounding explains, if a log lacks rows, or if a trainer fails.

Not compared: start-up, evaluation, checkpoints, several GPUs, gradient accumulation, torch.compile.

    python scripts/measure/trainers.py
    python scripts/measure/trainers.py --device cuda --precision bf16 --workloads gpt-124m --rounds 3
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from trainer_loops import LOG_EVERY, TRAINERS, WORKLOADS, Job, find_package, run_job


def measure(trainer: str, workload: str, updates: int, arguments: Namespace) -> dict[str, Any]:
    """Return the result of a process; without `wall`, but with `error`, if it failed."""
    words = ["--child", trainer, "--workloads", workload, "--updates", str(updates), "--device", arguments.device]
    words += ["--precision", arguments.precision, *(["--bars"] if arguments.bars else [])]
    environment = {"OMP_NUM_THREADS": str(arguments.threads)} if arguments.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+") as output:
        subprocess.run([sys.executable, str(Path(__file__).resolve()), *words], stdin=subprocess.DEVNULL, cwd=folder,
                       stdout=output, stderr=output, env={**os.environ, **environment}, check=False)  # fmt: skip
        output.seek(0)
        path, tail = Path(folder) / "result.json", output.read()[-2000:]
        result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"error": tail}
    if result.get("rows", updates) < (updates - 100) // LOG_EVERY:  # Lightning writes every 100 updates
        return {"error": f"the log has only {result['rows']} rows"}
    return result


def print_row(workload: str, name: str, mine: list[dict[str, Any]], hand: list[dict[str, Any]], bound: float) -> bool:
    """Print the figures of a trainer; return whether its loss is that of `hand`."""
    columns = []
    for clock in ("wall", "cpu"):
        ratios = sorted(own[clock] / other[clock] for own, other in zip(mine, hand, strict=True))
        median = statistics.median(own[clock] for own in mine)
        columns.append(f"{clock} {median:8.3f} ms, {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
    peak = statistics.median(own["peak"] for own in mine)
    deviation = max(abs(own["loss"] / other["loss"] - 1) for own, other in zip(mine, hand, strict=True))
    verdict = "" if deviation <= bound else ", more than rounding explains"
    columns += [f"peak {peak:.0f} MiB", f"loss {mine[0]['loss']:.6f} ({deviation:.0e} from hand{verdict})"]
    print(f"{workload:<8} {name:<10} {';  '.join(columns)}", flush=True)
    return deviation <= bound


def main() -> int:
    """Print the tables; exit 1 if a trainer failed or has a different loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=["mlp", "cnn", "gpt-tiny"])
    parser.add_argument("--trainers", nargs="+", choices=[*TRAINERS], default=[*TRAINERS], help="hand is added")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, help="default: depends on the workload")
    parser.add_argument("--threads", type=int, default=1, help="of all trainers on a CPU")
    parser.add_argument("--bars", action="store_true", help="leave the progress bars on")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if arguments.child:
        name, precision = arguments.workloads[0], arguments.precision
        job = Job(name, arguments.updates, device=arguments.device, precision=precision, has_bars=arguments.bars)
        run_job(arguments.child, job)
        return 1  # not reached if `total` updates were run
    names = [name for name in TRAINERS if name == "hand" or (name in arguments.trainers and find_package(name))]
    for name in sorted({*arguments.trainers} - {*names}):
        print(f"{name} is skipped: {' or '.join(TRAINERS[name][0])} is not installed")
    print(", ".join(f"{each} {importlib.metadata.version(each)}" for each in dict.fromkeys(map(find_package, names))))
    # Rounding errors grow during training: compare half of the digits of the number format.
    bound = torch.finfo(torch.bfloat16 if arguments.precision == "bf16" else torch.float32).eps ** 0.5
    is_ok = True
    for workload in arguments.workloads:
        updates = arguments.updates or WORKLOADS[workload].updates
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name in results:
                    results[name].append(measure(name, workload, updates, arguments))
                    if "error" in results[name][-1]:
                        print(f"{workload:<8} {name} failed: {results.pop(name)[-1]['error']}", flush=True)
                        is_ok = False
                    else:  # immediately, in case the script is interrupted
                        print(f"{workload:<8} {name:<10} round {number + 1}: {results[name][-1]}", flush=True)
        if "hand" in results:
            hand = results["hand"]
            print(f"{hand[0]['where']}, {arguments.precision}, {arguments.rounds} rounds of {updates} updates")
            is_ok &= min([print_row(workload, name, mine, hand, bound) for name, mine in results.items()])
    return int(not is_ok)


if __name__ == "__main__":
    sys.exit(main())
