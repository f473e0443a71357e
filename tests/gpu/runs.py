"""Run the small task on GPUs, and read its results."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.base.loaded_torch import is_stand_in
from runner.durable.checkpoint import load_newest
from tests.forkserver import CompletedCommand, ForkServer
from tests.rounding import allowed
from tests.stand_ins.cuda.devices import VARIABLE

DESCRIBE = "from tests.stand_ins.cuda.install import describe; describe()\n"  # because CUDA_VISIBLE_DEVICES may differ
PIPES = "SERVER_FOR_GPUS"  # environment variable with the pipes of a fork server on the stand-in
TASK = Path(__file__).with_name("task_for_gpus.py")
UPDATES, SAMPLES = 6, 16
OF_OUTPUT = 6 + 16 + 16  # additions per output of the task's model, which are the inputs of its three layers
TERMS = SAMPLES * OF_OUTPUT  # additions per loss
SAME_CURVE = allowed(torch.float32, TERMS, growth=UPDATES)  # each update adds in a different order
# Kernels of another device or compiler compute tanh, exp and log with an error of at most 2 ulp, and additions with 1/2
# ulp. The same bound holds for batch norm, which also rounds a difference, a square, a root and a quotient.
OTHER_KERNELS = allowed(torch.float32, TERMS, growth=4 * UPDATES)
HALF_PRECISION = allowed(torch.bfloat16, 1, growth=UPDATES)  # each update rounds its samples in a different order
COMMON = (
    *(f"updates={UPDATES}", f"global_batch_size={SAMPLES}", "log_every=1", "monitor=off", "evaluate.samples=16"),
    *("optimizer.lr=0.01", "max_grad_norm=1"),
    *("micro_batch_size=8", "dataloader.num_workers=0"),  # set explicitly, so that tracing is skipped
    "evaluate.every=2",  # by default, a run evaluates after each update, which would take a third of the time
)


class GpuServer(ForkServer):
    """A fork server whose commands see the GPUs of this process, either real or simulated by the stand-in."""

    def start(self, args: list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = "") -> int:
        if is_stand_in():
            env, before = {VARIABLE: os.environ[VARIABLE], **(env or {})}, DESCRIBE + before
        return super().start(args, folder, env, before)


@dataclass(frozen=True)
class Runs:
    """Run accel-run in one folder.

    known  arguments -> folder of a reference run; "folder" -> parent of these folders
    """

    server: GpuServer
    folder: Path
    known: dict[str, Path]

    def start(self, args: str | list[str], env: Mapping[str, str] | None = None) -> None:
        """Start a command; `self.server.wait()` returns its result."""
        self.server.start(args.split() if isinstance(args, str) else args, self.folder, env)

    def end(self, args: str | list[str], env: Mapping[str, str] | None = None) -> CompletedCommand:
        """Run a command and return its result, with any exit code."""
        self.start(args, env)
        return self.server.wait()

    def train(self, run: str, args: str, *, code: int = 0, env: Mapping[str, str] | None = None) -> Path:
        """Train the small task; return the folder of the run."""
        given = args.split()
        keys = {word.partition("=")[0] for word in given}
        common = [word for word in COMMON if word.partition("=")[0] not in keys]
        result = self.end(["train", "--task", str(TASK), f"run={run}", *common, *given], env)
        assert result.code == code, result.out + result.err
        return self.folder / "outputs" / run

    def straight(self, args: str) -> Path:
        """Train a reference run, which is cached for all tests, and return its folder."""
        if args not in self.known:
            kept = self.known["folder"] / str(len(self.known))
            kept.mkdir()
            self.known[args] = dataclasses.replace(self, folder=kept).train("straight", args)
        return self.known[args]

    def copy_of_straight(self, args: str) -> Path:
        """Return the folder of a copy of a reference run, `straight`, which commands of this test may change."""
        return Path(shutil.copytree(self.straight(args), self.folder / "outputs" / "straight"))

    def stopped(self, args: str) -> Path:
        """Return the folder of a copy of a cached run, `stopped`, which SIGTERM ended at update 3."""
        key = f"{args} stopped"
        if key not in self.known:
            kept = self.known["folder"] / str(len(self.known))
            kept.mkdir()
            made = dataclasses.replace(self, folder=kept)
            self.known[key] = made.train("stopped", args, code=75, env={"STOP_AT": "3"})
        return Path(shutil.copytree(self.known[key], self.folder / "outputs" / "stopped"))

    def curve(self, run: str, args: str) -> dict[int, float]:
        """Train, and return the loss of each update."""
        return losses(self.train(run, args))


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["update"]: row["train/loss"] for row in rows if "train/loss" in row}


def plan_of(folder: Path) -> Any:
    return json.loads((folder / "plan.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the newest checkpoint: weights, optimizer state and generator states."""
    checkpoint = load_newest(folder / "checkpoints")
    assert checkpoint is not None
    return {f"{stem}/{name}": tensor for stem in checkpoint.stems for name, tensor in checkpoint.tensors(stem).items()}
