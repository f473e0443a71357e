"""A LightningModule trains as in a plain loop over its own steps, optimizer and schedule."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runner.adapters.lightning import configure
from runner.base.order import permutation
from runner.tensors.global_rng import seed_everything
from tests.end_to_end.examples import EXAMPLES, ON_CPU, module_of, train
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

EXAMPLE = EXAMPLES / "own_lightning.py"
SEED, SIZE, EPOCHS = 3, 32, 5
WORDS = f"seed={SEED} max_grad_norm=null {ON_CPU}"


@cache
def by_hand() -> dict[str, Tensor]:
    """Train as Lightning does: one optimizer step per batch, one scheduler step per epoch."""
    seed_everything(SEED)
    model = module_of("own_lightning").LitModel()
    model.log = lambda *given: None
    optimizer, config = configure(model)
    assert config is not None
    data = model.train_dataloader().dataset
    for epoch in range(EPOCHS):
        order = permutation(SEED, epoch, len(data)).tolist()
        for start in range(0, len(data), SIZE):
            loss = model.training_step(data[order[start : start + SIZE]], start // SIZE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        config["scheduler"].step()
    return {f"module.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def trained(server: ForkServer, folder: Path, args: str = "", text: str = "") -> dict[str, Tensor]:
    from runner.durable.checkpoint import load, newest_valid

    (folder / "lit_task.py").write_text(text or EXAMPLE.read_text(encoding="utf-8"))
    result = server.run(f"train --task lit_task.py {WORDS} {args}", folder)
    assert result.code == 0, result.err
    path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert path is not None
    return load(path).tensors("model")


def assert_equal(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert distance(tensor.tolist(), result[name].tolist()) <= PROMISED[torch.float32] * EPOCHS * 16, name


TWO = "parallelism=ddp parallelism.world_size=2"


@pytest.mark.slow
@pytest.mark.parametrize("args", ["", "micro_batch_size=8", f"{TWO} parallelism.shares=[19,13]"])
def test_a_module_trains_as_in_a_plain_loop(args: str, server: ForkServer, tmp_path: Path) -> None:
    assert_equal(trained(server, tmp_path, args), by_hand())


def test_a_resumed_run_is_the_same_bit_for_bit(server: ForkServer, tmp_path: Path) -> None:
    faults = ({"at": "update", "number": 40, "by": "raise"}, None)
    (tmp_path / "cut").mkdir()
    whole = trained(server, tmp_path)
    args = WORDS.replace(ON_CPU, "checkpoint.every=15")
    cut, _ = train(server, tmp_path / "cut", "own_lightning", args, faults, point=POINT)
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, cut[name])] == []


POINT = """

class Failing(LightningTask):
    def begin_update(self, progress):
        from tests.faults.ending import reached

        super().begin_update(progress)
        reached('update', progress.update + 1)


def build(*, hidden: int = 32) -> Task:
    return Failing(LitModel(hidden))
"""


def test_a_module_of_lightning_itself_trains_identically(server: ForkServer, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the package lightning is not installed")
    text = EXAMPLE.read_text(encoding="utf-8").replace("(nn.Module)", "(L.LightningModule)")
    text = text.replace("import torch\n", "import lightning as L\nimport torch\n", 1)
    assert_equal(trained(server, tmp_path, text=text), by_hand())


@pytest.mark.parametrize(
    ("train_collate", "val_collate", "own", "means"),
    [
        ("None", "doubled", "", (1, 2)),
        ("doubled", "None", "", (2, 1)),
        ("doubled", "doubled", "", (2, 2)),
        ("None", "doubled", "task.collate = tripled", (3, 3)),
    ],
)
def test_each_split_has_the_collate_function_of_its_loader(
    train_collate: str, val_collate: str, own: str, means: tuple[int, int], server: ForkServer, tmp_path: Path
) -> None:
    text = COLLATED.replace("TRAIN", train_collate).replace("VAL", val_collate).replace("OWN", own or "pass")
    (tmp_path / "lit_task.py").write_text(text)
    result = server.run(f"train --task lit_task.py updates=1 log_every=1 global_batch_size=4 {ON_CPU}", tmp_path)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (tmp_path / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    found = {name: value for row in rows for name, value in row.items()}
    assert (found["train/mean"], found["val/mean"]) == means


COLLATED = """
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner.adapters.lightning import LightningTask


def doubled(samples):
    return 2 * torch.stack(samples)


def tripled(samples):
    return 3 * torch.stack(samples)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_index):
        self.log("train_mean", batch.mean())
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_index):
        self.log("val_mean", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(list(torch.ones(8, 2)), batch_size=4, collate_fn=TRAIN)

    def val_dataloader(self):
        return DataLoader(list(torch.ones(8, 2)), batch_size=4, collate_fn=VAL)


def build():
    task = LightningTask(Module())
    OWN
    return task
"""
