"""Task files written for early versions train unmodified, with the same losses as in those versions.

`first_tasks` contains them as they were on 2026-11-24 (f2da3733), before task files could define options, objectives,
streams or merged metrics; `template.py` is what `accel-run new` wrote on 2026-11-21 (8c2b76b4). `losses.json` contains
the losses that these two commits measured in two updates per phase, on the CPU with torch 2.13.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

FIRST_TASKS = Path(__file__).with_name("first_tasks")
MEASURED = json.loads((FIRST_TASKS / "losses.json").read_text())
SETTINGS = "updates=2 log_every=1 device=cpu monitor=off dataloader.num_workers=0 run=mine"
PREDICTS = {"template", "draws"}


def test_early_task_files_have_reference_losses() -> None:
    assert {path.stem for path in FIRST_TASKS.glob("*.py")} == MEASURED.keys()


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", MEASURED)
def test_losses_of_early_task_files_are_unchanged(name: str, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes((FIRST_TASKS / f"{name}.py").read_bytes())
    result = server.run(f"train --task ./mine.py {SETTINGS}", tmp_path)
    assert result.code == 0, result.err
    folder = tmp_path / "outputs" / "mine"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert distance(losses, MEASURED[name]["train"]) <= PROMISED[torch.float32]
    metrics = json.loads((folder / "run.json").read_text())["metrics"]
    assert distance(metrics, MEASURED[name]["val"]) <= PROMISED[torch.float32]
    if name in PREDICTS:
        predicted = server.run("inference run=mine --task ./mine.py device=cpu", tmp_path)
        assert predicted.code == 0, predicted.err
