"""A LightningModule trains as in a plain loop that uses its steps, optimizer and schedule."""

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
def train_by_hand() -> dict[str, Tensor]:
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
def test_training_matches_a_plain_loop(args: str, server: ForkServer, tmp_path: Path) -> None:
    assert_equal(trained(server, tmp_path, args), train_by_hand())


def test_a_resumed_run_is_bitwise_equal(server: ForkServer, tmp_path: Path) -> None:
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


def test_a_real_lightning_module_trains_identically(server: ForkServer, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the package lightning is not installed")
    text = EXAMPLE.read_text(encoding="utf-8").replace("(nn.Module)", "(L.LightningModule)")
    text = text.replace("import torch\n", "import lightning as L\nimport torch\n", 1)
    assert_equal(trained(server, tmp_path, text=text), train_by_hand())


@pytest.mark.parametrize(
    ("train_collate", "val_collate", "own", "means"),
    [
        ("None", "doubled", "", (1, 2)),
        ("doubled", "None", "", (2, 1)),
        ("doubled", "doubled", "", (2, 2)),
        ("None", "doubled", "task.collate = tripled", (3, 3)),
    ],
)
def test_splits_use_the_collate_function_of_their_loader(
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


METRICS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score, BinaryPrecision

from runner.adapters.lightning import LightningTask


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.auroc, self.accuracy, self.never = BinaryAUROC(), BinaryAccuracy(), BinaryAUROC()
        self.others = MetricCollection({"f1": BinaryF1Score(), "precision": BinaryPrecision()}, prefix="val_")

    def training_step(self, batch, batch_index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_index):
        scores, labels = batch[:, 0], batch[:, 1].int()
        self.auroc.update(scores, labels)
        of_batch = self.accuracy(scores, labels)
        CALL(scores, labels)
        self.log("val_auroc", self.auroc, on_epoch=True)
        self.log_dict({"val_accuracy": self.accuracy, "val_mean": of_batch, "val_never": self.never})
        self.log_dict(self.others)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(list(torch.ones(8, 2)), batch_size=4)

    def val_dataloader(self):
        return DataLoader(SAMPLES, batch_size=4)


generator = torch.Generator().manual_seed(3)
LABELS = torch.randint(0, 2, (23,), generator=generator)
SCORES = (torch.rand(23, generator=generator) + 0.3 * LABELS).clamp(max=1)
SAMPLES = list(torch.stack([SCORES, LABELS.float()], 1))


def build():
    return LightningTask(Module())
"""


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", [f"{TWO} parallelism.shares=[5,3]", "", "micro_batch_size=4"])
@pytest.mark.parametrize("call", ["self.others", "self.others.update"])
def test_logged_metrics_are_computed_over_all_samples(call: str, args: str, server: ForkServer, tmp_path: Path) -> None:
    """This includes ranks with unequal shares and micro-batches, where the mean over batches would differ."""
    classification = pytest.importorskip("torchmetrics.classification", reason="torchmetrics is not installed")
    trained(server, tmp_path, f"global_batch_size=8 updates=2 {args}", METRICS.replace("CALL", call))
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 2, (23,), generator=generator)
    scores = (torch.rand(23, generator=generator) + 0.3 * labels).clamp(max=1)
    found = json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())["metrics"]
    kinds = {
        "auroc": "BinaryAUROC",
        "accuracy": "BinaryAccuracy",
        "f1": "BinaryF1Score",
        "precision": "BinaryPrecision",
    }
    expected = {f"val/{name}": float(getattr(classification, kind)()(scores, labels)) for name, kind in kinds.items()}
    assert {name: found[name] for name in expected} == expected
    assert "val/mean" in found
    assert found["val/never"] is None, "NaN"


def test_predict_step_writes_a_table(server: ForkServer, tmp_path: Path) -> None:
    trained(server, tmp_path, "epochs=1")
    folder = tmp_path / "outputs/mine/predictions"
    result = server.run("inference mine inference.samples=16", tmp_path)
    assert result.code == 0, result.err
    rows = (folder / "val.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "index,label"
    assert len(rows) == 17
    assert {row.split(",")[1] for row in rows[1:]} <= {"0", "1"}
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["model"]["samples_per_call"] == 16


@pytest.mark.slow
def test_a_module_without_predict_step_predicts_nothing(server: ForkServer, tmp_path: Path) -> None:
    trained(server, tmp_path, "epochs=1", EXAMPLE.read_text(encoding="utf-8").replace("predict_step", "_step"))
    assert server.run("inference mine", tmp_path).code != 0
