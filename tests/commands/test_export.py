"""An exported model gives the same outputs as the original, for any batch size and without the runner."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from runner.cli import main
from runner.durable import files
from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
from tests.commands_here import run_here
from tests.durable.parts import parts_of
from tests.faults.crash_states import states
from tests.faults.recording import Recording
from tests.rounding import allowed, distance

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from runner import Task

SETTINGS = {"updates": 3}

def build(*, batch_bound: bool = False, example: bool = True, kind: str = "plain"):
    task = Mine(batch_bound)
    task.model.kind = kind
    if not example:
        del Mine.example
    return task

class Model(nn.Module):
    def __init__(self, batch_bound):
        super().__init__()
        self.layer, self.batch_bound = nn.Linear(4, 2), batch_bound
    def forward(self, x):
        if self.kind == "masked":
            return torch.where(torch.tensor([True, False]), self.layer(x), float("-inf")), self.layer(x) > 0
        if self.kind == "noise":
            return torch.where(torch.tensor([True, False]), torch.randn_like(self.layer(x)), float("-inf"))
        return self.layer(x) if not self.batch_bound else self.layer(x) * torch.tensor([[1.0], [2.0]])

class Mine(Task):
    def __init__(self, batch_bound):
        self.model = Model(batch_bound)
    def dataset(self, split):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    def loss(self, model, batch):
        return F.cross_entropy(self.model.layer(batch[0]), batch[1], reduction="sum"), len(batch[1])
    def example(self):
        return (torch.ones(2, 4),)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TASK)
    done = run_here(["train", "--task", "mine.py", "run=first", "device=cpu", "monitor=off"], tmp_path)
    assert done.code == 0, done.err
    return tmp_path


@pytest.mark.slow
def test_each_exported_format_gives_the_outputs_of_the_model(folder: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    done = run_here(["export", "first"], folder)
    assert done.code == 0, done.err
    run = folder / "outputs" / "first"
    parity = json.loads((run / "export" / "parity.json").read_text())
    assert all(
        parity[name]["largest_difference"] <= allowed(torch.float32, 5) for name in ("safetensors", "program", "onnx")
    )
    weights = load(checkpoint_path(run / "checkpoints", 3)).tensors("model")
    for name, value in load_file(run / "export" / "model.safetensors").items():
        assert torch.equal(value, weights[name])
    x = torch.randn(5, 4)
    wanted = x @ weights["layer.weight"].T + weights["layer.bias"]
    program = torch.export.load(str(run / "export" / "model.pt2")).module()
    assert distance(wanted.tolist(), program(x).tolist()) <= allowed(torch.float32, 5)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(run / "export" / "model.onnx"), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert distance(wanted.tolist(), result.tolist()) <= allowed(torch.float32, 5)


def test_a_sharded_checkpoint_is_exported_to_a_loadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has a weight with two names, which is stored once, a scalar buffer, and averaged weights."""
    more = "self.again = self.layer; self.register_buffer('count', torch.tensor(3.0))"
    text = TASK.replace("nn.Linear(4, 2), batch_bound", f"nn.Linear(4, 2), batch_bound; {more}")
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    averaging = ("averaging=ema", "averaging.decay=0.5")
    assert main(["train", "--task", "mine.py", "run=first", "device=cpu", "monitor=off", *averaging]) == 0
    path = checkpoint_path(tmp_path / "outputs/first/checkpoints", 3)
    loaded = load(path)
    computed = ("format_version", "update", "files", "sha256")
    facts = {key: value for key, value in loaded.manifest.items() if key not in computed}
    tensors = {stem: loaded.tensors(stem) for stem in loaded.stems}
    first, *others = parts_of(Snapshot(3, tensors, dict(loaded.state), facts))
    shutil.rmtree(path)
    for other in others:
        save_part(path.parent, other)
    save(path.parent, first)
    recording = Recording(tmp_path / "outputs/first")
    with files.use_system(recording):
        assert main(["export", "first", "format=safetensors"]) == 0
    model = nn.Module()
    model.layer = model.again = nn.Linear(4, 2)
    model.register_buffer("count", torch.zeros(()))
    load_model(model, tmp_path / "outputs/first/export/model.safetensors")
    for name, tensor in model.state_dict().items():
        averaged = tensors["averaging"].get(name.replace("again", "layer"))
        assert torch.equal(tensor, tensors["model"][name] if averaged is None else averaged), name
    assert not torch.equal(model.layer.weight, tensors["model"]["layer.weight"])
    parity = json.loads((tmp_path / "outputs/first/export/parity.json").read_text())
    assert (parity["checkpoint_update"], parity["safetensors"]["file"]) == (3, "model.safetensors")
    assert parity["safetensors"]["largest_difference"] == 0.0, "the outputs must be compared bit by bit"
    for state in states(recording.start, recording.operations, 60, "names"):  # as a crash leaves it
        assert "export/parity.json" not in state.tree or "export/model.safetensors" in state.tree, state

    def write_damaged(path: Path, data: Iterable[bytes | memoryview]) -> None:
        content = b"".join(map(bytes, data))
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    before = {file.name: file.read_bytes() for file in (tmp_path / "outputs/first/export").iterdir()}
    monkeypatch.setattr(files, "write_stream", write_damaged)
    assert main(["export", "first", "format=safetensors"]) == 65
    assert {file.name: file.read_bytes() for file in (tmp_path / "outputs/first/export").iterdir()} == before


@pytest.mark.slow
def test_outputs_that_are_not_finite_are_compared(folder: Path) -> None:
    masked = run_here(["export", "first", "format=safetensors,program", "task.kind=masked"], folder)
    assert masked.code == 0, masked.err + masked.out
    noise = run_here(["export", "first", "format=safetensors", "task.kind=noise"], folder)
    assert noise.code == 70
    assert "DIFFERENT" in noise.out


@pytest.mark.slow
def test_failed_exports_are_reported(folder: Path) -> None:
    wrong = run_here(["export", "first", "format=onx"], folder)
    assert (wrong.code, " onnx?" in wrong.err) == (78, True)
    without = run_here(["export", "first", "format=program", "task.example=false"], folder)
    assert without.code == 78
    assert "example()" in without.err
    bound = run_here(["export", "first", "format=program", "task.batch_bound=true"], folder)
    assert bound.code == 78
    assert "format=program: " in bound.err
    nothing = run_here(["export", "other"], folder)
    assert nothing.code == 66
    assert "Traceback" not in wrong.err + without.err + bound.err + nothing.err
