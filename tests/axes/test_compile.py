"""Compilation changes neither names nor results, and missing requirements are reported before the first update."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.axes import compile as axis
from runner.axes.compile import COMPILES, default, max_autotune, reduce_overhead, regional
from runner.base import compilers
from runner.base.errors import ConfigError
from tests.forkserver import ROOT, ForkServer

CPU = torch.device("cpu")


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def gradients(model: nn.Module) -> list[Tensor]:
    model(torch.ones(2, 4)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Record the modules that would be compiled, with their options."""
    result: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: result.append((self, options)))
    return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("option", ["default", "regional"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo inspects non-leaf inputs
def test_compiling_changes_neither_names_nor_results(option: str) -> None:
    plain, model = stack(), stack()
    COMPILES[option](model, list(model), CPU, backend="aot_eager")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(model) is nn.Sequential
    result, wanted = gradients(model), gradients(plain)
    assert all(map(torch.equal, result, wanted))
    assert len(result) == 6


def backward_passes(loss: Tensor) -> int:
    """Return the number of compiled graphs in the backward pass of `loss`."""
    seen, result = set(), [loss.grad_fn]
    while result:
        node = result.pop()
        if node is not None and node not in seen:
            seen.add(node)
            result += [before for before, _ in node.next_functions]
    return sum(type(node).__name__ == "CompiledFunctionBackward" for node in seen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo inspects non-leaf inputs
def test_a_split_graph_returns_gradients_part_by_part() -> None:
    """Each layer has 80 bytes of parameters. An unsplit graph returns all gradients at the end of its backward pass."""
    plain, one, parts = stack(), stack(), stack()
    default(one, [], CPU, backend="aot_eager", split_mib=0)
    default(parts, [], CPU, backend="aot_eager", split_mib=80 / (1 << 20))
    assert backward_passes(one(torch.ones(2, 4)).sum()) == 1
    assert backward_passes(parts(torch.ones(2, 4)).sum()) == 3
    assert all(map(torch.equal, gradients(parts), gradients(plain)))


class Own(nn.Module):
    """A model class as a user would define it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("option", ["default", "regional"])
@pytest.mark.parametrize("make", [Own, stack, lambda: nn.Linear(4, 4)], ids=["own", "sequential", "linear"])
def test_calling_the_model_runs_compiled_code(option: str, make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = make()
    COMPILES[option](model, [model], CPU, backend="eager")
    model(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == 1
    assert not axis.nothing_was_compiled()


TASK = """
import torch
from torch import nn
from runner import Task

def build() -> Task:
    return Mine()

class Mine(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 1))

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 4))

    def loss(self, model, batch):
        return {call}(batch[0]).sum(), len(batch[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("call", "num_warnings"), [("model", 0), ("model[0]", 1)])
def test_a_warning_reports_missing_compilation(
    server: ForkServer, tmp_path: Path, call: str, num_warnings: int
) -> None:
    """Nothing is compiled if the task does not call its model."""
    (tmp_path / "task.py").write_text(TASK.replace("{call}", call))
    args = "train --task task.py device=cpu monitor=off updates=2 global_batch_size=4 run=mine"
    result = server.run(f"{args} compile=default compile.backend=eager dataloader.num_workers=0", tmp_path)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (tmp_path / "outputs" / "mine" / "events.jsonl").read_text().splitlines()]
    warned = [row for row in rows if row["kind"] == "warning" and row["text"].startswith("compile=default:")]
    assert len(warned) == num_warnings


def test_off_compiles_nothing(calls: list[Any]) -> None:
    COMPILES["off"](stack(), [nn.Linear(2, 2)], CPU)
    assert calls == []


def test_regional_compiles_each_block_once_and_not_the_model(calls: list[Any]) -> None:
    model = stack()
    regional(model, [model[0], model[1], model[0]], CPU, backend="eager", dynamic=True, fullgraph=True)
    options = {"backend": "eager", "dynamic": True, "fullgraph": True}
    assert calls == [(model[0], options), (model[1], options)]


def test_regional_compilation_without_blocks_compiles_the_model(calls: list[Any]) -> None:
    """A message reports this."""
    model = stack()
    with pytest.warns(UserWarning, match="defines no blocks"):
        regional(model, [], CPU, backend="eager")
    assert [module for module, _ in calls] == [model]


def test_options_set_the_mode_of_torch_compile(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    model, cuda = stack(), torch.device("cuda")
    begin = [
        reduce_overhead(model, [], cuda),
        max_autotune(model, [], cuda),
        max_autotune(model, [], cuda, cuda_graphs=False),
    ]
    assert begin == [torch.compiler.cudagraph_mark_step_begin] * 2 + [None]
    modes = [options["mode"] for _, options in calls]
    assert modes == ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    assert set(modes) <= set(torch._inductor.list_mode_options())


def test_cuda_graphs_without_cuda_are_reported_as_unused(calls: list[Any]) -> None:
    with pytest.warns(UserWarning, match="same as compile=default on cpu"):
        assert reduce_overhead(stack(), [], CPU) is None
    assert len(calls) == 1


class FixedGradientBuffer(torch.autograd.Function):
    """A matrix product that always writes the gradient of its weight to the same memory."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.memory = memory
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        ctx.memory.copy_(inputs.T @ gradient)
        return None, ctx.memory.detach(), None  # a new tensor with the same storage, which becomes `weight.grad`


class Replayed(nn.Module):
    """A layer that overwrites its gradients in each call, as the replay of a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(1))
        self.memory = torch.zeros(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.memory.fill_(torch.nan)
        return FixedGradientBuffer.apply(inputs, self.weight, self.memory)  # type: ignore[no-any-return]


@pytest.mark.parametrize("option", ["reduce-overhead", "max-autotune"])
def test_gradients_accumulate_despite_cuda_graph_replays(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = Replayed()
    COMPILES[option](model, [], torch.device("cuda"))
    batches = torch.arange(24.0).view(3, 2, 4)
    for _ in range(2):  # two updates
        for batch in batches:
            model(batch).sum().backward()
        expected = batches.sum((0, 1)).unsqueeze(1).expand(4, 2)
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, expected)
        assert model.unused.grad is None, "an unused parameter must have no gradient"
        model.weight.grad = None


def test_fullgraph_rejects_a_model_with_graph_breaks() -> None:
    class Broken(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return -inputs

    model = Broken()
    default(model, [], CPU, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.ones(2))


def test_a_missing_cpp_compiler_is_reported_early(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for option in set(COMPILES) - {"off"}:
        with pytest.raises(ConfigError, match="no-such-compiler"):
            COMPILES[option](stack(), [], CPU)
    default(stack(), [], CPU, backend="eager")
    assert len(calls) == 1


def test_missing_triton_and_old_gpus_are_reported_early(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """Each rank checks its own machine, because the plan is made on the machine of rank 0."""
    cuda = torch.device("cuda")
    for capability, triton, named in (((6, 1), object(), "6.1"), ((7, 5), None, "Triton")):
        monkeypatch.setattr(compilers, "find_spec", lambda name, found=triton: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for option in set(COMPILES) - {"off"}:
            with pytest.raises(ConfigError, match=named):
                COMPILES[option](stack(), [], cuda)
        default(stack(), [], cuda, backend="eager")
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # from Inductor's own imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long  # any first compilation by Inductor takes 15 s of CPU time (detection of vector instructions, g++)
def test_inductor_gives_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, plain = nn.Tanh(), nn.Tanh()
    default(model, [], CPU)
    # the vectorized tanh differs in the last bits
    torch.testing.assert_close(model(torch.arange(4.0)), plain(torch.arange(4.0)))


@pytest.mark.slow
def test_runs_without_compilation_do_not_import_the_compiler(tmp_path: Path) -> None:
    """Importing Dynamo takes two seconds, as long as importing torch and accel-run together."""
    (tmp_path / "task.py").write_text(TASK.replace("{call}", "model"))
    args = "train --task task.py device=cpu monitor=off updates=2 global_batch_size=4 dataloader.num_workers=0"
    names = sorted(path.stem for path in Path(axis.__file__).parent.glob("*.py") if path.stem != "__init__")
    code = (
        "import importlib, sys\n"
        "from runner.cli import main\n"
        f"assert main({args.split()}) == 0\n"
        f"for name in {names}: importlib.import_module(f'runner.axes.{{name}}')\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0
