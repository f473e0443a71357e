"""Phases of a run: evaluation intervals, freed memory, stops and failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.base.errors import DataError, Exit
from runner.config.request import Request
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.opening import open_new_run
from runner.engine.training import run_phases
from tests.forkserver import ForkServer
from tests.opened import opened

TASK = Path(__file__).parents[1] / "laws" / "task_of_buffers.py"


@pytest.mark.parametrize(("updates", "every"), [(1, 1), (9, 1), (10, 1), (25, 2), (400, 40)])
def test_auto_evaluates_about_ten_times_and_at_most_once_per_update(updates: int, every: int, tmp_path: Path) -> None:
    with opened(tmp_path, f"updates={updates}", "evaluate.every=auto") as phase:
        assert phase.hook(Evaluation).every == every


def test_finished_phases_and_consumed_batches_are_freed(server: ForkServer, tmp_path: Path) -> None:
    """Tensors that are not freed would occupy GPU memory until the end of the run."""
    task = Path(__file__).with_name("task_that_counts_tensors.py")
    result = server.run(f"train --task {task} run=r device=cpu monitor=off dataloader.num_workers=0", tmp_path)
    assert result.code == 0, result.out + result.err
    rows = [json.loads(line) for line in (tmp_path / "outputs/r/metrics.jsonl").read_text().splitlines()]
    evaluated = {row["phase"]: row for row in rows if "val/consumed_batches" in row}
    assert evaluated.keys() == {"statistics", "first", "second"}
    for row in evaluated.values():
        assert row["val/finished_phases"] == row["val/consumed_batches"] == 0, row
    first, second = (evaluated[phase]["val/of_weight_shape"] for phase in ("first", "second"))
    assert second == first >= 3, "only the average and both AdamW moments of the current phase may be in memory"


def test_a_stopped_run_records_the_signal_and_the_update(server: ForkServer, tmp_path: Path) -> None:
    fault = {"at": "update", "number": 3, "by": "SIGTERM"}
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
    args = f"train --task {TASK} run=mine device=cpu monitor=off dataloader.num_workers=0"
    assert server.run(args, tmp_path, env).code == Exit.PREEMPTED
    rows = [json.loads(line) for line in (tmp_path / "outputs/mine/events.jsonl").read_text().splitlines()]
    assert [(row["stopped_by"], row["update"]) for row in rows if row["kind"] == "end"] == [("SIGTERM", 4)]


BAD = """
import torch
from runner import Task

def build():
    return Bad()

class Samples:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index in (2, 5):
            raise ValueError("broken file")
        return torch.tensor([float(index)])

class Bad(Task):
    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
    def dataset(self, split):
        return Samples() if split == "train" else [torch.zeros(1)]
    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""


@pytest.mark.parametrize("choice", ["sharpness=none", "sharpness=sam"])
def test_bad_samples_are_skipped_with_micro_batches_of_one_sample(choice: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(BAD)
    settings = ("epochs=1", "global_batch_size=4", "micro_batch_size=1", "dataloader.bad_samples=skip", choice,
                "dataloader.num_workers=0", "device=cpu", "run=small", "monitor=off", "checkpoint=off",
                f"output_root={tmp_path}", "backend.threads=1")  # fmt: skip
    with open_new_run(Request(settings, tmp_path / "task.py")) as run:
        run_phases(run, None)
    rows = [json.loads(line) for line in (tmp_path / "small" / "events.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in rows if row["kind"] == "bad sample") == [2, 5]


RAISING = """
import torch
from runner import Task
from runner.base.errors import DataError

def build():
    return Raising()

class Raising(Task):
    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.zeros(16, 1))
    def loss(self, model, batch):
        raise DataError("a table is missing")
"""


TIED = """
import torch
from runner import Task

PHASES = {"all": {}, "head": {"trains": ["head"], "optimizer.lr_scales": {"head": 0.5}}}

def build():
    return Tied()

class Tied(Task):
    def __init__(self):
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("body", "head")})
        self.model["head"].weight = self.model["body"].weight
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 2))
    def loss(self, model, batch):
        return model["head"](batch[0]).square().sum(), len(batch[0])
"""


def test_later_phases_can_name_a_tied_weight_by_its_second_name(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TIED)
    settings = ("updates=1", "device=cpu", "run=small", "monitor=off", "checkpoint=off", "dataloader.num_workers=0",
                f"output_root={tmp_path}", "backend.threads=1")  # fmt: skip
    with open_new_run(Request(settings, tmp_path / "task.py")) as run:
        run_phases(run, None)
        assert {name: record.finished for name, record in run.progress.records.items()} == {"all": True, "head": True}


def test_a_known_error_is_raised_unchanged_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(RAISING)
    settings = ("updates=2", "global_batch_size=8", "device=cpu", "run=small", "monitor=off", "checkpoint=off",
                f"output_root={tmp_path}", "backend.threads=1")  # fmt: skip
    with open_new_run(Request(settings, tmp_path / "task.py")) as run, pytest.raises(DataError) as caught:
        run_phases(run, None)
    assert caught.value.problems[0].what == "a table is missing"
    assert caught.value.__cause__ is None
    assert caught.value.place["update"] == 0, "completed updates"
