"""Ranks on GPUs: the same curve over NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
GPT = (
    "train task=gpt task.size=tiny updates=20 global_batch_size=32 optimizer.lr=0.0003 log_every=1 precision=fp32"
    " evaluate.every=0 evaluate.samples=32"
)


def curve(folder: Path, run: str, words: str) -> dict[int, float]:
    line = [sys.executable, "-m", "runner", *f"{GPT} run={run} {words}".split()]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (folder / "outputs" / run / "metrics.jsonl").read_text().splitlines()]
    return {row["update"]: row["train/loss"] for row in rows if "train/loss" in row}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "words",
    [
        "parallelism=ddp", "parallelism=ddp parallelism.shares=[19,13]", "parallelism=ddp parallelism.shares=speed",
        "parallelism=fsdp", "parallelism=pipeline", "parallelism=auto",
    ],
)  # fmt: skip
def test_two_gpus_make_the_curve_of_one(words: str, tmp_path: Path) -> None:
    one = curve(tmp_path, "one", "device=cuda:0")
    assert curve(tmp_path, "two", words) == pytest.approx(one, rel=1e-5)


def test_one_gpu_is_a_world_of_size_one_of_every_strategy(tmp_path: Path) -> None:
    one = curve(tmp_path, "one", "device=cuda:0")
    for number, strategy in enumerate(("ddp", "fsdp", "pipeline", "auto")):
        words = f"parallelism={strategy}" + (" parallelism.world_size=1" if strategy != "auto" else "")
        assert curve(tmp_path, f"same{number}", words) == pytest.approx(one, rel=1e-6)
