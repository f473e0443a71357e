"""An exported model is compared with the original for every output, and a format that fails leaves no file."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, MissingPackage
from runner.cli import main
from runner.config.request import Request
from runner.durable import files
from runner.durable.checkpoint import checkpoint_path, load
from runner.trained import export_model
from runner.trained.export_model import TOLERANCE, ExportFormat, export
from tests.faults.recording import Quick

TASK = """
import torch
from torch import nn
from runner import Task

SETTINGS = {"updates": 3}

def build(*, has_example: bool = True, kind: str = "tensors"):
    if not has_example:
        del Mine.example
    return Mine(kind)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x, scale, negate=False, offset=None):
        x = x["parts"][0] if isinstance(x, dict) else x
        y = self.layer(x) * (-scale if negate else scale)
        masked = torch.where(torch.tensor([True, False]), y, float("-inf"))
        return {"y": y, "masked": masked}, y > 0, torch.full_like(y, float("nan"))

class Mine(Task):
    def __init__(self, kind):
        self.model, self.kind = Model(), kind
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    def loss(self, model, batch):
        return self.model.layer(batch[0]).square().sum(), len(batch[0])
    def example(self):
        x, scale = torch.ones(2, 4), torch.tensor(3.0)
        return {
            "tensors": (x, scale),
            "list": [x, scale],
            "nested": ({"parts": [x, None], "unused": x}, scale, True, None),
            "one row": (x, torch.full((1, 2), 3.0), False),
        }[self.kind]
"""
Outputs = tuple[Tensor, ...]
Y, MASKED, FLAGS, NANS = range(4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "task_of_exports.py").write_text(TASK)
    args = ["device=cpu", "monitor=off", "backend.threads=1", f"output_root={folder / 'outputs'}"]
    with files.use_system(Quick()):
        assert main(["train", "--task", str(folder / "task_of_exports.py"), "run=first", *args]) == 0
    return folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the folder of the fixture `trained`, delete earlier exports, and return the folder of the run."""
    monkeypatch.chdir(trained)
    shutil.rmtree(trained / "outputs" / "first" / "export", ignore_errors=True)
    return trained / "outputs" / "first"


def run_export(*formats: str, options: tuple[str, ...] = ()) -> Exit:
    with files.use_system(Quick()):
        return export(Request(("run=first", *options)), formats)


def make_changing_format(change: Callable[[list[Tensor]], Any]) -> ExportFormat:
    """Return a format whose models return changed outputs."""

    def write(model: nn.Module, _: Outputs, file: Path) -> Callable[[Outputs], Outputs]:
        file.write_bytes(b"a model")

        def run(args: Outputs) -> Outputs:
            named, flags, nans = model(*args)
            assert args[1].dim() == 0, "the scale has no batch dimension"
            outputs = [named["y"], named["masked"], flags, nans]
            return tuple(change(outputs) or outputs)

        return run

    return ExportFormat("own", write)


def replace_output(index: int, new: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], None]:
    def change(outputs: list[Tensor]) -> None:
        outputs[index] = new(outputs[index])

    return change


CHANGES: dict[str, tuple[Callable[[list[Tensor]], Any], float]] = {
    "none": (lambda _: None, 0.0),
    "rounding": (replace_output(Y, lambda y: y + 2e-5 * y.abs().max()), 2e-5),
    "a small difference": (replace_output(Y, lambda y: y + 4 * TOLERANCE * y.abs().max()), 4 * TOLERANCE),
    "finite values beside infinities": (replace_output(MASKED, lambda y: y - 0.5 * y[y.isfinite()].abs().max()), 0.5),
    "another shape": (replace_output(Y, lambda y: y[:, :1]), math.inf),
    "another type": (replace_output(FLAGS, lambda flags: flags.float()), math.inf),
    "another flag": (replace_output(FLAGS, lambda flags: ~flags), math.inf),
    "no infinity": (replace_output(MASKED, lambda y: y.nan_to_num(neginf=0.0)), math.inf),
    "another infinity": (replace_output(MASKED, lambda y: torch.where(y.isfinite(), y, math.inf)), math.inf),
    "infinity becomes NaN": (replace_output(MASKED, lambda y: torch.where(y.isfinite(), y, math.nan)), math.inf),
    "NaN becomes 0": (replace_output(NANS, torch.nan_to_num), math.inf),
    "the batch size of the example": (replace_output(Y, lambda y: y if len(y) > 1 else y + 1e3), math.nan),
    "the batch size of one sample": (replace_output(Y, lambda y: y if len(y) == 1 else y + 1e3), math.nan),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_exported_model_is_compared_in_every_output(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = CHANGES[name]
    monkeypatch.setattr(export_model, "FORMATS", {"own": make_changing_format(change)})
    if expected <= TOLERANCE:
        assert run_export() == Exit.DONE
    else:
        with pytest.raises(AccelRunError) as caught:
            run_export("own")
        assert type(caught.value) is AccelRunError
        assert "own" in caught.value.problems[0].what
    assert ("DIFFERENT" in capsys.readouterr().out) == (not expected <= TOLERANCE)
    parity = json.loads((run / "export" / "parity.json").read_text())
    assert (parity["checkpoint_update"], parity["tolerance"]) == (3, TOLERANCE)
    assert (parity["own"]["file"], parity["own"]["bytes"]) == ("model.own", len(b"a model"))
    assert parity["own"]["batch_sizes"] == [2, 1]
    difference = parity["own"]["largest_difference"]
    # y and 2e-5 max(y) are rounded to float32
    assert difference > 1 if math.isnan(expected) else difference == pytest.approx(expected, rel=0.02)


def test_a_different_number_of_outputs_fails_the_export(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_model, "FORMATS", {"own": make_changing_format(lambda outputs: outputs[:-1])})
    with pytest.raises(ConfigError) as caught:
        run_export("own")
    assert caught.value.problems[0].where == "format=own"
    assert not any((run / "export").iterdir())


def make_failing_format(error: Exception) -> ExportFormat:
    def write(_: nn.Module, __: Outputs, file: Path) -> Any:
        file.write_bytes(b"half")
        raise error

    return ExportFormat("bad", write)


@pytest.mark.parametrize(
    "error", [MissingPackage("is not installed"), ValueError("no graph\nof this model"), AssertionError()]
)
def test_other_formats_are_written_if_one_fails(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        export_model, "FORMATS", {"bad": make_failing_format(error), "own": make_changing_format(lambda _: None)}
    )
    assert run_export("bad", "own") == Exit.DONE
    assert sorted(path.name for path in (run / "export").iterdir()) == ["model.own", "parity.json"]
    assert json.loads((run / "export" / "parity.json").read_text()).keys() == {"checkpoint_update", "tolerance", "own"}
    output = capsys.readouterr()
    reason = {MissingPackage: "is not installed", ValueError: "no graph"}.get(type(error), "AssertionError")
    assert reason in output.out + output.err
    assert "of this model" not in output.out + output.err
    with pytest.raises(ConfigError) as caught:
        run_export("bad")
    assert reason in str(caught.value)
    assert not any(path.name.startswith(".tmp") for path in run.iterdir())


def test_an_internal_error_ends_the_export(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = DataError("is damaged")
    monkeypatch.setattr(
        export_model, "FORMATS", {"bad": make_failing_format(error), "own": make_changing_format(lambda _: None)}
    )
    with pytest.raises(DataError) as caught:
        run_export("bad", "own")
    assert caught.value is error


def test_exporting_weights_needs_no_example_input(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_export("safetensors", options=("task.has_example=false",)) == Exit.DONE
    weights = load(checkpoint_path(run / "checkpoints", 3)).tensors("model")
    stored = load_file(run / "export" / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    parity = json.loads((run / "export" / "parity.json").read_text())["safetensors"]
    assert (parity["batch_sizes"], parity["largest_difference"]) == ([], 0.0)
    capsys.readouterr()
    assert run_export(options=("task.has_example=false",)) == Exit.DONE
    output = capsys.readouterr()
    assert "format=program" in output.out + output.err
    assert sorted(path.name for path in (run / "export").iterdir()) == ["model.safetensors", "parity.json"]


def test_unknown_formats_and_missing_example_inputs_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_export("safetensors", "onx", "zzz")
    assert len(caught.value.problems) == 2
    assert "onnx?" in caught.value.problems[0].fix
    with pytest.raises(ConfigError) as caught:
        run_export("program", options=("task.has_example=false",))
    assert "example()" in caught.value.problems[0].what
    assert not list((run / "export").glob("*"))


def test_exported_weights_and_program_give_the_outputs_of_the_model(run: Path) -> None:
    assert run_export("safetensors", "program") == Exit.DONE
    weights = load(checkpoint_path(run / "checkpoints", 3)).tensors("model")
    stored = load_file(run / "export" / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    program = torch.export.load(str(run / "export" / "model.pt2")).module()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    named, flags, _ = program(x, torch.tensor(2.0))
    wanted = nn.functional.linear(x, weights["layer.weight"], weights["layer.bias"]) * 2
    torch.testing.assert_close(named["y"], wanted)
    assert torch.equal(flags, named["y"] > 0)
    parity = json.loads((run / "export" / "parity.json").read_text())
    assert parity["safetensors"]["largest_difference"] == 0.0
    assert parity["program"]["largest_difference"] <= TOLERANCE


@pytest.mark.parametrize("kind", ["list", "nested", "one row"])
def test_non_batch_arguments_are_constants_of_an_exported_program(kind: str, run: Path) -> None:
    assert run_export("program", options=(f"task.kind={kind}",)) == Exit.DONE
    program = torch.export.load(str(run / "export" / "model.pt2")).module()
    x, scale = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor(3.0)
    args = {
        "list": (x, scale),
        "nested": ({"parts": [x, None], "unused": x}, scale, True, None),
        "one row": (x, scale.expand(1, 2), False),
    }
    weights = load(checkpoint_path(run / "checkpoints", 3)).tensors("model")
    wanted = nn.functional.linear(x, weights["layer.weight"], weights["layer.bias"]) * 3
    torch.testing.assert_close(program(*args[kind])[0]["y"], -wanted if kind == "nested" else wanted)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("tensors", ["x (batch, 4)", "scale ()"]),
        ("nested", ["x['parts'][0] (batch, 4)", "x['unused'] (batch, 4)", "scale ()"]),
        ("one row", ["x (batch, 4)", "scale (1, 2)"]),
    ],
)
def test_the_dynamic_and_fixed_dimensions_of_a_program_are_printed(
    kind: str, shapes: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export("safetensors", options=(f"task.kind={kind}",))
    assert shapes[0] not in capsys.readouterr().out
    run_export("program", options=(f"task.kind={kind}",))
    assert ", ".join(shapes) in capsys.readouterr().out


def test_an_onnx_graph_is_one_file_and_verified_with_its_runtime(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins replace the optional packages."""
    required: list[tuple[str, str]] = []
    programs: list[Any] = []

    class Session:
        def __init__(self, file: str, *, providers: list[str]) -> None:
            assert Path(file).read_bytes() == b"a graph"
            assert providers == ["CPUExecutionProvider"]

        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="x"), SimpleNamespace(name="scale")]

        def run(self, outputs: None, feeds: dict[str, Any]) -> list[Any]:
            named, flags, nans = programs[0].module()(*(torch.from_numpy(feeds[name]) for name in ("x", "scale")))
            return [tensor.numpy() for tensor in (named["y"] + 10.0, named["masked"], flags, nans)]

    def require(package: str, extra: str) -> Any:
        required.append((package, extra))
        return SimpleNamespace(InferenceSession=Session)

    def export_graph(program: torch.export.ExportedProgram, inputs: Outputs, **options: bool) -> Any:
        assert options == {"dynamo": True, "verbose": False, "external_data": False}
        assert inputs[0].shape == (2, 4)
        programs.append(program)
        return SimpleNamespace(save=lambda file: Path(file).write_bytes(b"a graph"))

    monkeypatch.setattr(export_model, "require", require)
    monkeypatch.setattr(torch.onnx, "export", export_graph)
    with pytest.raises(AccelRunError) as caught:
        run_export("onnx")
    assert "onnx" in caught.value.problems[0].what
    assert {extra for _, extra in required} == {"onnx"}
    assert (run / "export" / "model.onnx").read_bytes() == b"a graph"
