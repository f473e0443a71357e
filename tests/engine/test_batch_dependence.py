"""Reports name exactly the modules and functions that make an update depend on how its batch is divided."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from runner.engine.checks.batch_dependence import describe_dependence
from runner.engine.contract.batch_dependent_calls import BatchDependentCalls
from runner.workload.division import Batch
from tests.forkserver import ForkServer

WHOLE, ACCUMULATED = Batch(32, 32, (32,)), Batch(32, 8, (32,))
UNEQUAL, BOTH = Batch(32, 19, (19, 13)), Batch(32, 8, (19, 13))


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


NORMS = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
DROPOUTS = nn.ModuleDict({
    "feature": nn.Dropout2d(0.2), "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
    "recurrent": nn.LSTM(4, 4, num_layers=2, dropout=0.1),
})  # fmt: skip
INDEPENDENT = nn.ModuleDict({
    "norm": nn.LayerNorm(4), "zero": nn.Dropout(0.0), "frozen": Frozen(4), "attention": nn.MultiheadAttention(4, 2),
    "recurrent": nn.LSTM(4, 4, dropout=0.0), "groups": nn.GroupNorm(2, 4),
})  # fmt: skip


def test_each_module_that_depends_on_the_batch_division_is_named(snapshot: SnapshotAssertion) -> None:
    model = nn.ModuleDict({"norms": NORMS, "dropouts": DROPOUTS, "others": INDEPENDENT})
    notes = {
        f"{batch}{', synchronized' if is_sync_norm else ''}": describe_dependence(
            model, batch, is_sync_norm=is_sync_norm
        )
        for batch in (ACCUMULATED, UNEQUAL, BOTH)
        for is_sync_norm in (False, True)
    }
    assert notes == snapshot


@pytest.mark.parametrize(
    ("model", "batch", "is_sync_norm"),
    [(NORMS, WHOLE, False), (DROPOUTS, WHOLE, False), (NORMS, UNEQUAL, True), (INDEPENDENT, BOTH, False)],
    ids=["one batch norm", "one dropout", "synchronized", "independent"],
)
def test_no_note_is_printed_if_the_batch_division_has_no_effect(
    model: nn.Module, batch: Batch, is_sync_norm: bool
) -> None:
    assert not describe_dependence(model, batch, is_sync_norm=is_sync_norm)


def test_modes_are_not_changed_for_an_undivided_batch() -> None:
    class Merging(nn.Dropout):
        def train(self, mode: bool = True) -> Merging:
            raise AssertionError("merges weights")

    assert not describe_dependence(Merging(0.5), WHOLE, is_sync_norm=False)


def test_modules_keep_their_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    describe_dependence(model, BOTH, is_sync_norm=False)
    assert not any(module.training for module in model.modules())


TASK = """
import torch
from torch import nn
from runner import Task
SETTINGS = {"updates": 1, "global_batch_size": 8}
def build() -> Task: return Dropping()
class Dropping(Task):
    def __init__(self): self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout1d(0.5))
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(8, 4))
    def loss(self, model, batch): return model(batch[0]).square().sum(), len(batch[0])
"""


@pytest.mark.parametrize(("size", "is_noted"), [(4, True), (8, False)])
def test_the_start_report_notes_batch_dependent_modules(
    size: int, is_noted: bool, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "dropping.py").write_text(TASK)
    result = server.run(f"train --task dropping.py device=cpu monitor=off micro_batch_size={size}", tmp_path)
    assert result.code == 0, result.err
    assert ("Dropout1d" in result.out + result.err) == is_noted


FUNCTIONS = (
    TASK.replace("nn.Dropout1d(0.5)", "Own()")
    .replace(
        "class Dropping",
        """
class Own(nn.Module):
    def forward(self, x):
        x = nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=self.training)
        x = x + runner.per_sample_noise(x).normal(4)
        scores = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return nn.functional.dropout(nn.functional.dropout(scores, 0.0), 0.5, self.training)
class Dropping""",
    )
    .replace("import torch\n", "import runner, torch\n")
)


@pytest.mark.parametrize("kind", [FUNCTIONS, TASK])
@pytest.mark.parametrize("size", [4, 8])
def test_the_first_update_reports_batch_dependent_functions(
    kind: str, size: int, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "dropping.py").write_text(kind)
    result = server.run(f"train --task dropping.py device=cpu monitor=off micro_batch_size={size}", tmp_path)
    assert result.code == 0, result.err
    lines = kind.splitlines()
    places = {f"dropping.py:{number}" for number in range(1, len(lines) + 1)}
    named = {place for place in places if re.search(rf"{place}\b", result.out + result.err)}
    depends = {f"dropping.py:{number}" for number, line in enumerate(lines, 1) if "self.training)" in line}
    assert named == (depends if size == 4 else set())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: nn.functional.dropout2d(x[..., None], 0.5), {"random numbers"}),
        (lambda x: nn.functional.alpha_dropout(x, 0.5, training=True), {"random numbers"}),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), {"random numbers"}),
        (lambda x: x.new_empty(4, 1, 1).bernoulli_(0.5) * x, {"random numbers"}),  # like timm's DropPath
        (lambda x: x[torch.randperm(4)], {"random numbers"}),
        (lambda x: nn.functional.batch_norm(x, None, None, training=True), {"batch norm"}),
        (lambda x: nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4)), set()),
        (nn.functional.instance_norm, set()),
        (nn.functional.rrelu, set()),
        (lambda x: nn.functional.rrelu(x, training=True), {"random numbers"}),
        (lambda x: nn.functional.group_norm(x, 2), set()),
        (lambda x: nn.functional.dropout(x, 0.5, training=False), set()),
        (lambda x: nn.functional.dropout(x, 0.0), set()),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), set()),
        (lambda x: x + torch.rand(x.shape, generator=torch.Generator()), set()),
        (NORMS[0], set()), (nn.Dropout(0.5), set()), (nn.Dropout1d(0.5), set()),
        (lambda x: DROPOUTS["attention"](x, x, x), set()), (DROPOUTS["recurrent"], set()),
    ],
)  # fmt: skip
def test_calls_of_batch_dependent_functions_are_recorded(
    call: Callable[[torch.Tensor], object], expected: set[str]
) -> None:
    calls = BatchDependentCalls()
    with calls:
        call(torch.ones(4, 4, 4, requires_grad=True))
    assert {*calls.found.values()} == expected
    assert all(place.startswith(Path(__file__).name) for place in calls.found)
