"""Ranks that somebody else has started must agree before they begin."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Exit
from runner.launch.start import _must_agree

SAME = {"accel-run": "0.1.0", "torch": "2.13.0", "task": "gpt"}


def test_ranks_with_the_same_software_agree() -> None:
    _must_agree([SAME, dict(SAME), dict(SAME)])


def test_unequal_software_is_named_by_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        _must_agree([SAME, {**SAME, "torch": "2.11.0"}, {**SAME, "task": "cape"}])
    assert caught.value.exit_code == Exit.CONFIG
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("torch", "must be the same on every rank, but is 2.13.0 on rank 0 and 2.11.0 on rank 1"),
        ("task", "must be the same on every rank, but is gpt on rank 0 and cape on rank 2"),
    ]


TASK = """
import torch, torch.nn.functional as F
from torch import nn
from runner import Task
class Small(Task):
    def __init__(self): self.model = nn.Sequential(nn.Linear(2, 4), nn.ACTIVATION(), nn.Linear(4, 2))
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
def build() -> Task: return Small()
"""


def two_nodes(folder: Path, *words: Sequence[str]) -> list[tuple[int, str]]:
    """Run a process as each of two machines would, with words of its own; return exit codes and errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in (0, 1):
        (folder / f"n{rank}").mkdir(exist_ok=True)
        environment = {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "RANK": str(rank),
            "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        line = [sys.executable, "-m", "runner", "train", "parallelism=ddp", "updates=2", "run=r", "device=cpu"]
        processes.append(
            subprocess.Popen(
                [*line, "monitor=off", *words[rank]],
                cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    return [(process.wait(60), process.communicate()[1]) for process in reversed(processes)][::-1]


def test_machines_whose_task_files_differ_end_with_78(tmp_path: Path) -> None:
    for rank, activation in enumerate(("Tanh", "ReLU")):
        (tmp_path / f"n{rank}").mkdir()
        (tmp_path / f"n{rank}" / "task.py").write_text(TASK.replace("ACTIVATION", activation))
    ended = two_nodes(tmp_path, ["--task", "n0/task.py"], ["--task", "n1/task.py"])
    assert [code for code, _ in ended] == [Exit.CONFIG, Exit.CONFIG]
    assert "the task's file: must be the same on every rank" in ended[0][1]
    assert ended[1][1] == "", "what all know is said once"


def test_what_only_another_machine_finds_is_said_there(tmp_path: Path) -> None:
    """The first of each machine speaks before the ranks have met; rank 0 cannot know what is wrong elsewhere."""
    (tmp_path / "task.py").write_text(TASK.replace("ACTIVATION", "Tanh"))
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
    }  # fmt: skip
    words = ["train", "--task", "task.py", "parallelism=ddp", "optimizer.lrr=1"]
    second = subprocess.run(
        [sys.executable, "-m", "runner", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert second.returncode == Exit.CONFIG
    assert "optimizer.lrr=1: unknown key" in second.stderr
