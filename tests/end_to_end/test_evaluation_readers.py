"""Evaluations read their samples with the data loader of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import Exit
from tests.forkserver import ForkServer

TASK = Path(__file__).with_name("task_of_readers.py")
TRAIN = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "backend.threads=1"]
# arguments -> number of workers that read an evaluation of four batches, in training and in `accel-run evaluate`
WORKERS = {
    "dataloader.num_workers=0": (0, 0),
    "dataloader.num_workers=1": (1, 1),
    "dataloader.num_workers=3": (3, 3),
    "dataloader.num_workers=9": (4, 4),
    "dataloader.num_workers=2 dataloader.cache=memory": (0, 2),  # training reads its cache in the main process
    "dataloader=thread": (1, 1),
    "dataloader=thread dataloader.cache=memory": (0, 1),
}


def readers(folder: Path) -> tuple[set[int], int]:
    """Return the PIDs of the processes that read validation samples and of the main process, and clear the records."""
    found = [path for path in folder.glob("val-*") if path.unlink() is None]
    (main,) = {int(path.name.split("-")[2]) for path in found}
    return {int(path.name.split("-")[1]) for path in found}, main


def trained(server: ForkServer, folder: Path, *args: str) -> list[dict[str, Any]]:
    """Return the metrics of the evaluations of a run."""
    result = server.run([*TRAIN, *args], folder)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (folder / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name.startswith("val/")} for row in rows if "val/loss" in row]


@pytest.fixture(scope="module")
def inline(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of a run without workers."""
    return trained(server, tmp_path_factory.mktemp("inline"), "dataloader.num_workers=0")


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("args", WORKERS)
def test_evaluations_use_the_configured_workers(
    args: str, inline: list[dict[str, Any]], server: ForkServer, tmp_path: Path
) -> None:
    training, alone = WORKERS[args]
    metrics = trained(server, tmp_path, *args.split())
    assert metrics == inline
    assert [row["val/left"] for row in metrics] == [0.0, 0.0], "workers must exit after their evaluation"
    pids, main = readers(tmp_path)
    assert (main in pids) == (training == 0)
    # Each of the two evaluations starts its own workers. Another process may have read samples before training.
    assert len(pids - {main}) - 2 * training in (0, 1)
    record = server.run("evaluate mine checkpoint=last --json", tmp_path)
    assert record.code == 0, record.err
    assert json.loads(record.out)["metrics"] == inline[-1]
    pids, main = readers(tmp_path)
    assert (main in pids) == (alone == 0)
    assert len(pids - {main}) == alone


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["fails", "dies"])
def test_a_failed_evaluation_worker_is_reported(kind: str, server: ForkServer, tmp_path: Path) -> None:
    args = ("dataloader.num_workers=2", f"task.{kind}=17", "evaluate.every=2")
    code = Exit.BAD_DATA if kind == "fails" else Exit.DATA_WORKER
    assert server.run([*TRAIN, *args], tmp_path).code == code
    error = json.loads((tmp_path / "outputs/mine/error.json").read_text())
    assert error["place"]["update"] == 2
    assert kind == "dies" or error["place"]["samples"] == [17]
    trained(server, tmp_path, "dataloader.num_workers=2", "run=good")
    assert server.run(["evaluate", "good", *args[:2]], tmp_path).code == code
