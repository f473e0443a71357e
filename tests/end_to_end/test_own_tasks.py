"""Each example of docs/own-task.md trains unmodified if its package is installed."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.option_table import load_file
from tests.forkserver import ForkServer
from tests.rounding import PROMISED

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = {
    "own_torchvision.py": "torchvision",
    "own_timm.py": "timm",
    "own_transformers.py": "transformers",
    "own_lightning.py": "torch",
    "own_script.py": "torch",
    "own_clip.py": "torch",
    "own_gan.py": "torch",
}
FIRST = "def configure_optimizers(self)"
ON_CPU = ["device=cpu", "monitor=off", "run=mine"]


def of_run(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "outputs" / "mine" / "run.json").read_text()))


def test_every_example_is_tested_and_listed() -> None:
    assert {path.name for path in (DOCS / "examples").glob("own_*.py")} == set(EXAMPLES)
    page = (DOCS / "own-task.md").read_text(encoding="utf-8")
    assert all(f"(examples/{name})" in page for name in EXAMPLES)


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_two_updates(name: str, server: ForkServer, tmp_path: Path) -> None:
    needs = [
        package for package in {EXAMPLES[name], "torchvision" if "timm" in name else "torch"} if not find_spec(package)
    ]
    if needs:
        pytest.skip(f"{', '.join(needs)} is not installed")
    (tmp_path / name).write_text((DOCS / "examples" / name).read_text(encoding="utf-8"))
    result = server.run(["train", "--task", f"./{name}", "updates=2", *ON_CPU], tmp_path)
    assert result.code == 0, result.err
    assert all(value > 0 for value in of_run(tmp_path)["metrics"].values())


def changed(folder: Path, old: str, new: str) -> Path:
    """Write the LightningModule example with one change; return its path."""
    text = (DOCS / "examples" / "own_lightning.py").read_text(encoding="utf-8")
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new, 1))
    return folder / "mine.py"


@pytest.mark.slow
def test_mean_losses_accumulate_exactly(server: ForkServer, tmp_path: Path) -> None:
    losses = []
    for number, micro in enumerate(("32", "8")):
        folder = tmp_path / str(number)
        folder.mkdir()
        task = changed(folder, "hidden=32", "hidden=16")
        result = server.run(["train", "--task", str(task), "updates=3", f"micro_batch_size={micro}", *ON_CPU], folder)
        assert result.code == 0, result.err
        losses.append(of_run(folder)["metrics"]["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=PROMISED[torch.float32])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (FIRST, f"def on_train_batch_end(self): ...\n\n    {FIRST}", "on_train_batch_end"),
        (FIRST, f"automatic_optimization = False\n    {FIRST}", "automatic_optimization is False"),
        ("return [optimizer], [", "return [optimizer, optimizer], [", "OBJECTIVES"),
        ("StepLR(optimizer, step_size=2, gamma=0.5)", "ReduceLROnPlateau(optimizer)", "plateau"),
        ("def training_step", "def train_step", "training_step"),
        ("(self(x).argmax(1) == y).float().mean()", "nn.Identity()", "metrics and evaluate"),
        ("lr=0.01", "lr=0.01 * self.trainer.unknown", "unknown"),
    ],
)  # fmt: skip
def test_modules_that_need_a_trainer_are_rejected(
    old: str, new: str, messages: str, server: ForkServer, tmp_path: Path
) -> None:
    result = server.run(["train", "--task", str(changed(tmp_path, old, new)), *ON_CPU], tmp_path)
    assert result.code == 70
    assert messages in result.err


def test_create_plan_train_resume_and_predict(server: ForkServer, tmp_path: Path) -> None:
    own = ["--task", "./my_task.py", *ON_CPU]
    commands = [
        ["new", "my_task.py"],
        ["plan", *own[:-1]],
        ["train", *own, "updates=20"],
        ["resume", "mine", "updates=30", "resume_allow=[updates]", "parallelism=ddp", "parallelism.world_size=2"],
        ["inference", "mine", "device=cpu"],
    ]
    for args in commands:
        result = server.run(args, tmp_path)
        assert result.code == 0, (args, result.err)
    record = of_run(tmp_path)
    assert (record["state"], record["overrides"].count("parallelism=ddp")) == ("done", 1)
    assert len(json.loads((tmp_path / "outputs" / "mine" / "plan.json").read_text())["ranks"]) == 2
    assert (
        json.loads((tmp_path / "outputs" / "mine" / "predictions" / "summary.json").read_text())["checkpoint_update"]
        == 30
    )


def test_task_files_are_always_recompiled(tmp_path: Path) -> None:
    """Cached bytecode is identified by modification time in seconds and file size, which an edit need not change."""
    file = tmp_path / "compiled_twice.py"
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (10**9, 10**9))
        assert value == load_file(file).VALUE
        del sys.modules["compiled_twice"]
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "__pycache__").exists()


DIVIDED = """
import os
import torch
from runner import Task

class Divided(Task):
    def __init__(self):
        self.model = torch.nn.Linear(1, 1)

    def dataset(self, split):
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return torch.arange(64.0).view(-1, 1)[rank::ranks]

    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)

def build():
    return Divided()
"""


def test_self_dividing_datasets_stay_complete(server: ForkServer, tmp_path: Path) -> None:
    task = tmp_path / "divided.py"
    task.write_text(DIVIDED)
    ranks = ["parallelism=ddp", "parallelism.world_size=2", "global_batch_size=8", "updates=2"]
    result = server.run(["train", "--task", str(task), *ranks, *ON_CPU], tmp_path)
    assert result.code == 0, result.err
    assert of_run(tmp_path)["evidence"]["num_samples"] == 64
