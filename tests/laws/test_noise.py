"""Draws for a sample do not depend on micro-batches, ranks, strategies, retries, stops or recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import CompletedCommand, ForkServer
from tests.rounding import ADAPTIVE

TASK = Path(__file__).with_name("task_of_noise.py")
RANKS = "parallelism.world_size=2"
WAYS = {
    "micro-batches of 8": ["micro_batch_size=8"],
    "micro-batches of 2": ["micro_batch_size=2"],
    "workers": ["micro_batch_size=8", "dataloader.num_workers=2"],
    "recomputed": ["micro_batch_size=8", "memory=checkpoint"],
    "two ranks": ["parallelism=ddp", RANKS],
    "unequal shares": ["parallelism=ddp", RANKS, "parallelism.shares=[9,7]", "micro_batch_size=4"],
    "sharded": ["parallelism=fsdp", RANKS, "parallelism.shares=[9,7]", "micro_batch_size=4"],
    "sharded and recomputed": ["parallelism=fsdp", RANKS, "memory=checkpoint"],
    "pipeline": ["parallelism=pipeline", RANKS, "micro_batch_size=4"],
    "pipeline, recomputed": ["parallelism=pipeline", RANKS, "micro_batch_size=2", "memory=checkpoint"],
    "out of memory": ["task.full_above=4"],
    "out of memory on ranks": ["task.full_above=4", "parallelism=ddp", RANKS],
}


class Runs:
    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.folder = server, folder

    def run(self, name: str, *args: str) -> CompletedCommand:
        (self.folder / name).mkdir(exist_ok=True)
        always = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "precision=fp32"]
        return self.server.run([*always, *args], self.folder / name)

    def done(self, name: str, *args: str) -> Runs:
        result = self.run(name, *args)
        assert result.code == 0, result.err
        return self

    def weights(self, name: str) -> torch.Tensor:
        path = newest_valid(self.folder / name / "outputs" / "mine" / "checkpoints")
        assert path is not None
        there = load(path)
        assert there.update == 6
        tensors = there.tensors("model")
        return torch.cat([tensors[key].flatten() for key in sorted(tensors)])

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return losses and metrics by update. Rows of repeated updates replace earlier rows."""
        result: dict[int, dict[str, Any]] = {}
        for line in (self.folder / name / "outputs" / "mine" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            mine = {key: value for key, value in row.items() if key in ("train/loss", "val/loss", "val/flips")}
            result.setdefault(row["update"], {}).update(mine)
        return [result[update] for update in sorted(result) if result[update]]


@pytest.fixture(scope="module")
def runs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, tmp_path_factory.mktemp("runs")).done("whole", "micro_batch_size=16")


def check_same(runs: Runs, name: str) -> None:
    """Compare results of AdamW on float64 sums in different orders."""
    whole, mine = runs.weights("whole"), runs.weights(name)
    assert float((whole - mine).abs().max()) <= ADAPTIVE * float(whole.abs().max())
    rows = runs.rows("whole")
    assert len(rows) == 6
    assert sum("val/flips" in row for row in rows) == 2
    for one, other in zip(rows, runs.rows(name), strict=True):
        assert other == pytest.approx(one, rel=ADAPTIVE)


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_mechanics_do_not_change_random_draws(way: str, runs: Runs) -> None:
    name = way.replace(" ", "-").replace(",", "")
    check_same(runs.done(name, *WAYS[way]), name)
    if way.startswith("out of memory"):
        assert json.loads((runs.folder / name / "outputs" / "mine" / "passes.json").read_text())["smaller"]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize(
    "more", [["micro_batch_size=8"], ["parallelism=ddp", RANKS, "parallelism.shares=[9,7]"]], ids=str
)
def test_stops_do_not_change_random_draws(end: str, more: list[str], runs: Runs) -> None:
    name = f"{end}-{len(more)}"
    args = [f"task.end={end}", "checkpoint.every=2", *more]
    result = runs.run(name, *args)
    assert (runs.folder / name / f"ended-{end}").exists()
    if result.code != 0 or "parallelism=ddp" not in more:  # the remaining ranks may already have resumed
        assert result.code in {"SIGTERM": (75,), "SIGKILL": (-9, 137)}[end], result.err
        runs.done(name, *args)
    check_same(runs, name)


def test_another_seed_gives_different_random_numbers(runs: Runs) -> None:
    """Otherwise, the comparisons above would be meaningless."""
    runs.done("seed", "seed=1")
    assert runs.rows("seed")[1]["train/loss"] != pytest.approx(runs.rows("whole")[1]["train/loss"], rel=1e-3)
