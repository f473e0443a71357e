"""Measure the cost of saving: how long training is blocked, how fast the checkpoint is on disk, and the slowdown.

The state is a model of 100 M parameters in 120 tensors, with AdamW: 1.2 GB. The measurements are interleaved in one
process.

held    how long a save blocks training: the complete call of the save hook
clone   a copy of the state as a user would write it: `clone` of each tensor into new memory
warm    a copy of the state into memory that has been written before: the fastest possible copy
write   time until the checkpoint is on disk under its name, including the folder, hashes and syncs
dd      dd if=/dev/zero bs=1M conv=fsync, with the same number of bytes on the same disk

Then, blocks of updates with and without a save give the total cost of a save, and its share of the time at the interval
that checkpoint.every=auto chooses. Run: python scripts/measure/save.py --folder A_FOLDER_ON_THE_DISK
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import torch

TASK = """
import torch
from torch import nn
from runner import Task

def build() -> Task:
    return Wide()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.full((912,), float(index % 7))

class Wide(Task):
    def __init__(self):
        self.model = nn.Sequential(*(nn.Linear(912, 912, bias=False) for _ in range(120)))
    def dataset(self, split):
        if split != "train":
            raise NotImplementedError
        return Rows()
    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""


def opened(folder: Path, stack: ExitStack) -> Any:
    """Return the phase of this model in accel-run, opened as the command line does."""
    from runner.config.request import Request
    from runner.engine.opening import open_phase

    (folder / "wide.py").write_text(TASK)
    settings = (
        "updates=100000", "global_batch_size=8", f"backend.threads={torch.get_num_threads()}", "device=cpu", "run=wide",
        f"output_root={folder}", "monitor=off", "optimizer.lr=1e-6", "scheduler.warmup=0", "checkpoint=off",
    )  # fmt: skip
    return stack.enter_context(open_phase(Request(settings, folder / "wide.py")))


def saving_of(phase: Any) -> Any:
    """Return the hook that saves the phase."""
    from runner.engine.hooks.checkpointing import Checkpointing

    return phase.hook(Checkpointing)


def state_of(phase: Any) -> list[torch.Tensor]:
    """Return the tensors that a save copies."""
    from runner.tensors.optimizer_state import export_state

    return [*phase.run.parts.bare.state_dict().values(), *export_state(phase.work.training.optimizer)[0].values()]


def timed(act: Any) -> float:
    """Return the seconds of a call; freeing its result is not timed, but happens before this function returns."""
    began = time.perf_counter()
    kept = act()
    spent = time.perf_counter() - began
    del kept
    return spent


def seconds_of_dd(folder: Path, nbytes: int) -> float:
    """Return the seconds that dd takes to write this number of bytes."""
    target = folder / "dd.bin"
    words = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={nbytes >> 20}", "conv=fsync"]
    spent = timed(lambda: subprocess.run(words, check=True, stderr=subprocess.DEVNULL))
    target.unlink()
    settle()
    return spent


def settle() -> None:
    """Wait until earlier writes and removals no longer disturb the next measurement."""
    os.sync()
    time.sleep(0.5)


def line(name: str, values: Sequence[float], unit: str = "s") -> str:
    """Return the median and the range of some figures."""
    return f"{name:<28} {statistics.median(values):8.3f} {unit:<4} ({min(values):.3f} to {max(values):.3f})"


def rounds_of(phase: Any, updates: Any, folder: Path, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of the state, and name -> seconds of each round."""
    next(updates)
    state, saving = state_of(phase), saving_of(phase)
    nbytes = sum(tensor.nbytes for tensor in state)
    warm = [torch.empty_like(tensor) for tensor in state]
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    def measured(name: str, act: Any) -> None:
        next(updates)
        settle()
        note(name, timed(act))

    def saved(name: str) -> None:
        measured(name, saving.save)
        saving.saver.writer.wait()
        note("write", saving.saver.writer.last.write_s)
        settle()

    def copy_state() -> None:
        for target, tensor in zip(warm, state, strict=True):
            target.copy_(tensor)

    note("first clone", timed(lambda: [tensor.clone() for tensor in state]))
    for _ in range(20):  # warm-up updates, because a run does not save at its start either
        next(updates)
    saved("first held")
    copy_state()
    for round_ in range(rounds):
        acts = [
            lambda: measured("clone", lambda: [tensor.clone() for tensor in state]),
            lambda: measured("warm", copy_state),
            lambda: saved("held"),
            lambda: note("dd", seconds_of_dd(folder, nbytes)),
        ]
        for act in acts[round_ % 4 :] + acts[: round_ % 4]:
            act()
    found["write"] = found["write"][1:]  # without the first save, which belongs to no round
    return nbytes, found


def slowed(phase: Any, updates: Any, rounds: int, write_s: float) -> dict[str, list[float]]:
    """Return the total cost of a save: the time of a block of updates with a save, minus that without, interleaved."""
    block, saving = 4, saving_of(phase)
    while True:  # until a block is long enough to contain the write
        began = time.perf_counter()
        for _ in range(block):
            next(updates)
        if time.perf_counter() - began > 2 * write_s:
            break
        block *= 2
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(rounds):
        for with_save in (True, False) if round_ % 2 else (False, True):
            saving.saver.writer.wait()
            settle()
            began = time.perf_counter()
            if with_save:
                saving.save()
            for _ in range(block):
                next(updates)
            seconds[with_save].append(time.perf_counter() - began)
    return {
        "update": [spent / block for spent in seconds[False]],
        "cost": [there - without for there, without in zip(seconds[True], seconds[False], strict=True)],
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=None, help="on the disk to be measured; default: the temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from runner.engine.checkpoints.save_policy import MAX_OVERHEAD, MIN_INTERVAL_S

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        quiet = stack.enter_context(Path(os.devnull).open("w"))
        with redirect_stdout(quiet):
            phase = opened(folder, stack)
            updates = phase.updates()
            nbytes, found = rounds_of(phase, updates, folder, arguments.rounds)
        show_saves(nbytes, found, arguments.threads, arguments.rounds)
        middle = statistics.median(found["write"])
        with redirect_stdout(quiet):
            costs = slowed(phase, updates, arguments.rounds, middle)
        for name, values in costs.items():
            print(line(name, values))
        cost = statistics.median(costs["cost"])
        every = max(MIN_INTERVAL_S, cost / MAX_OVERHEAD)
        print(f"a save costs {cost:.2f} s: every {every:.0f} s that is {cost / every:.2%} of the time")
        print(f"the run's own figures of its last save: {saving_of(phase).saver.save_cost.last}")
    return 0


def show_saves(nbytes: int, found: dict[str, list[float]], threads: int, rounds: int) -> None:
    """Print the times of single saves, and their ratios to those of the other operations."""
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {platform.machine()}, {threads} of {cores} cores,", end=" ")
    print(f"{nbytes / 1e6:,.0f} MB of state, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, values in found.items():
        print(line(name, values))
    pairs = {"held / clone": ("held", "clone"), "held / warm": ("held", "warm"), "speed of write / dd": ("dd", "write")}
    for name, (above, below) in pairs.items():
        print(line(name, [a / b for a, b in zip(found[above], found[below], strict=True)], ""))
    middle = {name: statistics.median(values) for name, values in found.items()}
    print(f"of medians: held / clone {middle['held'] / middle['clone']:.2f}, held / warm", end=" ")
    print(f"{middle['held'] / middle['warm']:.2f}, first held / first clone", end=" ")
    print(
        f"{middle['first held'] / middle['first clone']:.2f}, write / dd {middle['dd'] / middle['write']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
