"""A StreamingDataset of MosaicML gives the same training on several ranks as in one process, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed", exc_type=ImportError)

TASK = """
import streaming
from torch import nn

from runner import Task

SETTINGS = {
    "updates": 7, "global_batch_size": 16, "optimizer": "sgd", "optimizer.lr": 0.1, "checkpoint.every": 2,
    "evaluate.every": 3,
}


def build(context):
    return Mine(context.data_path)


class Mine(Task):
    def __init__(self, folder):
        self.model = nn.Linear(1, 1)
        self.folder = folder

    def dataset(self, split):
        return streaming.StreamingDataset(local=str(self.folder), split=split, batch_size=1)

    def loss(self, model, batch):
        x = batch["number"].float().view(-1, 1) / 72
        return (model(x) - 2 * x).square().sum(), len(x)

    def begin_update(self, progress):
        from tests.faults.ending import reached

        reached("update", progress.update + 1)
"""
TWO = "parallelism=ddp parallelism.world_size=2 parallelism.shares=[9,7] micro_batch_size=4"


def train(
    server: ForkServer, folder: Path, args: str, fault: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], float]:
    folder.mkdir(exist_ok=True)
    if not (folder / "mine_mds.py").exists():
        (folder / "mine_mds.py").write_text(TASK)
        for split, count in (("train", 72), ("val", 24)):
            with streaming.MDSWriter(
                out=str(folder / "data" / split), columns={"number": "int"}, size_limit=200
            ) as writer:
                for number in range(count):
                    writer.write({"number": number})
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault or {})}
    command = "train --task mine_mds.py data.path=data device=cpu monitor=off run=mine"
    result = server.run(f"{command} {args}", folder, env)
    if fault:
        assert result.code == -9, result.err
        return {}, 0.0
    assert result.code == 0, result.err
    path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert path is not None
    metrics = json.loads((folder / "outputs" / "mine" / "run.json").read_text())["metrics"]
    return dict(load(path).tensors("model")), metrics["val/loss"]


@pytest.mark.slow
def test_ranks_and_resumes_do_not_change_training(server: ForkServer, tmp_path: Path) -> None:
    """len() of the dataset counts the samples of one rank. A run that relies on it would omit half of them."""
    whole, loss = train(server, tmp_path / "one", "dataloader.num_workers=0")
    ranks, loss_of_ranks = train(server, tmp_path / "two", f"{TWO} dataloader.num_workers=1")
    one, other = ({name: tensors[name].tolist() for name in whole} for tensors in (whole, ranks))
    assert distance(one, other) <= PROMISED[torch.float32]
    assert loss_of_ranks == pytest.approx(loss, rel=PROMISED[torch.float32])
    train(
        server, tmp_path / "killed", f"{TWO} dataloader.num_workers=1", {"at": "update", "number": 6, "by": "SIGKILL"}
    )
    resumed, _ = train(server, tmp_path / "killed", f"{TWO} dataloader.num_workers=1")
    assert all(resumed[name].equal(ranks[name]) for name in ranks)
