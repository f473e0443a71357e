"""Data loaders, precisions, optimizers, gradient sums and techniques of a task file train correctly."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.base.errors import Exit
from runner.cli import main
from runner.commands.complete import candidates
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.checkpoint import load, newest_valid
from runner.engine.parts.assemble import assemble
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from tests.forkserver import ForkServer

TASK = Path(__file__).with_name("task_of_tables.py")
COMMON = f"--task {TASK} device=cpu monitor=off run=mine"
TWO = "parallelism.world_size=2 parallelism.shares=[9,7] micro_batch_size=4"


def run(server: ForkServer, folder: Path, args: str, fault: dict[str, Any] | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault or {})}
    return server.run(f"train {COMMON} {args}", folder, env)


def weights(folder: Path) -> dict[str, Tensor]:
    path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert path is not None
    return dict(load(path).tensors("model"))


def trained(server: ForkServer, folder: Path, args: str) -> dict[str, Tensor]:
    result = run(server, folder, args)
    assert result.code == 0, result.err
    return weights(folder)


def error_message(server: ForkServer, folder: Path, args: str) -> str:
    """Return the single error message of a run that ends with a task error."""
    result = run(server, folder, args)
    assert result.code == Exit.SOFTWARE
    assert result.err.count("accel-run:") == 1
    return str(result.err)


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("loader", ["plain", "workers", "threads"])
@pytest.mark.parametrize("ranks", ["", f"parallelism=ddp {TWO}"], ids=["one", "two"])
def test_custom_loaders_train_bitwise_equally(server: ForkServer, tmp_path: Path, loader: str, ranks: str) -> None:
    """Training includes dropout, an incomplete update per epoch, evaluations, and a resume after a kill."""
    draws = f"task.dropout=0.5 task.draws={'false' if loader == 'threads' else 'true'}"
    wanted = trained(server, tmp_path / "shipped", f"{ranks} {draws} dataloader.num_workers=0")
    folder = tmp_path / "custom"
    args = f"{ranks} {draws} dataloader={loader}"
    assert run(server, folder, args, {"at": "update", "number": 6, "by": "SIGKILL"}).code == -9
    assert are_equal(trained(server, folder, args), wanted)


def test_drop_last_works_with_every_loader(server: ForkServer, tmp_path: Path) -> None:
    shipped = trained(server, tmp_path / "shipped", "dataloader.drop_last=true dataloader.num_workers=0")
    custom = trained(server, tmp_path / "custom", "dataloader=plain dataloader.drop_last=true")
    assert are_equal(custom, shipped)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("loader", ["swapped", "short", "bare", "in_threads", "fails", "nothing"])
def test_incorrect_loaders_end_the_run(server: ForkServer, tmp_path: Path, loader: str) -> None:
    message = error_message(server, tmp_path / "run", f"dataloader={loader}")
    assert loader in message or "thread" in message
    assert not newest_valid(tmp_path / "run" / "outputs" / "mine" / "checkpoints")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("custom", "base"), [("same32", "fp32"), ("same16", "fp16"), ("returned", "fp32")])
def test_a_trivial_extension_trains_bitwise_equally(server: ForkServer, tmp_path: Path, custom: str, base: str) -> None:
    key = "precision.init_scale=1024" if base == "fp16" else ""
    one, other = (
        trained(server, tmp_path / name, f"precision={name} {key} dataloader.num_workers=0") for name in (custom, base)
    )
    assert are_equal(one, other)


def test_a_custom_precision_resumes_exactly(server: ForkServer, tmp_path: Path) -> None:
    args = "precision=rounded precision.bits=4 dataloader.num_workers=0"
    whole = trained(server, tmp_path / "whole", args)
    assert [name for name in whole if "parametrizations" in name]
    assert run(server, tmp_path / "killed", args, {"at": "update", "number": 6, "by": "SIGKILL"}).code == -9
    assert are_equal(trained(server, tmp_path / "killed", args), whole)
    result = run(server, tmp_path / "killed", "precision=bf16 updates=9")
    assert result.code == Exit.INCOMPATIBLE_RESUME


def test_forward_passes_run_in_the_precision_context(server: ForkServer, tmp_path: Path) -> None:
    one, other = (
        trained(server, tmp_path / name, f"precision={name} dataloader.num_workers=0") for name in ("noted", "same32")
    )
    assert not are_equal(one, other)
    losses = [
        json.loads((tmp_path / name / "outputs" / "mine" / "run.json").read_text())["metrics"]["val/loss"]
        for name in ("noted", "same32")
    ]
    assert losses[0] != losses[1]


def test_weights_of_another_precision_can_be_renamed(server: ForkServer, tmp_path: Path) -> None:
    """The function of a precision changes parameter names before weights are loaded."""
    plain = trained(server, tmp_path / "run", "precision=fp32 updates=1 dataloader.num_workers=0")
    args = "run=other weights=mine precision=rounded precision.bits=20 updates=1 optimizer.lr=1e-30"
    error_message = run(server, tmp_path / "run", args)
    assert error_message.code == Exit.INCOMPATIBLE_RESUME
    assert "precision" in error_message.err.partition("task options")[2]
    weighted = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
    names = {f"{layer}.weight": f"{layer}.parametrizations.weight.original" for layer in weighted}
    renamed = ",".join(f"{old}:{new}" for old, new in names.items())
    result = run(server, tmp_path / "run", f"{args} weights.rename={{{renamed}}}")
    assert result.code == 0, result.err
    path = newest_valid(tmp_path / "run" / "outputs" / "other" / "checkpoints")
    assert path is not None
    loaded = dict(load(path).tensors("model"))
    assert all(loaded[names.get(name, name)].equal(tensor) for name, tensor in plain.items())


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("name", ["wrong", "no_context", "unstored", "another", "takes_batch"])
def test_invalid_custom_precisions_are_rejected(server: ForkServer, tmp_path: Path, name: str) -> None:
    message = error_message(server, tmp_path / "run", f"precision={name} dataloader.num_workers=0")
    assert TASK.name in message
    assert "Traceback" not in message


def test_recomputation_rejects_precisions_with_a_context(server: ForkServer, tmp_path: Path) -> None:
    """The recomputation in the backward pass would not enter the context, so gradients would be wrong."""
    result = run(server, tmp_path / "run", "precision=noted memory=checkpoint")
    assert result.code == Exit.CONFIG
    assert "memory=none" in result.err


def test_replaced_modules_are_recomputed() -> None:
    configuration = compose(Request(("device=cpu", "precision=replaced", "memory=checkpoint"), TASK))
    plan = make_plan(configuration, Inventory((), Cpu("a processor", 2, 4, 8 << 30)))
    with ExitStack() as stack:
        parts = assemble(plan, stack)
        layers = [module for module in parts.bare.children() if isinstance(module, torch.nn.Linear)]
        assert layers
        assert all("forward" in vars(layer) for layer in layers)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", ["", f"parallelism=ddp {TWO}"], ids=["one", "two"])
def test_optimizer_state_without_parameter_is_restored(server: ForkServer, tmp_path: Path, args: str) -> None:
    args = f"{args} dataloader.num_workers=0 optimizer=shared_state"
    wanted = trained(server, tmp_path / "uninterrupted", args)
    killed = run(server, tmp_path / "resumed", args, {"at": "update", "number": 6, "by": "SIGKILL", "wait": 4})
    assert killed.code == -9
    assert are_equal(trained(server, tmp_path / "resumed", args), wanted)


def test_an_exact_custom_all_reduce_equals_ddp(server: ForkServer, tmp_path: Path) -> None:
    wanted = trained(server, tmp_path / "ddp", f"parallelism=ddp {TWO} dataloader.num_workers=0")
    args = f"parallelism=exact {TWO} dataloader.num_workers=0"
    killed = run(server, tmp_path / "exact", args, {"at": "update", "number": 6, "by": "SIGKILL"})
    assert killed.code == -9
    assert are_equal(trained(server, tmp_path / "exact", args), wanted)


def test_a_compressed_all_reduce_is_close_to_an_exact_one(server: ForkServer, tmp_path: Path) -> None:
    options = "dataloader.num_workers=0 optimizer=sgd optimizer.lr=0.1"
    one = trained(server, tmp_path / "compressed", f"parallelism=compressed {TWO} {options}")
    other = trained(server, tmp_path / "exact", options)
    start = trained(server, tmp_path / "start", f"{options} updates=1 optimizer.lr=1e-30")
    assert not are_equal(one, other)
    for name in one:
        change = (other[name] - start[name]).abs().max()
        # each of 7 sums is rounded to 8 bits after each of its 2 terms
        assert (one[name] - other[name]).abs().max() <= 4 * 7 * torch.finfo(torch.bfloat16).eps * change


@pytest.mark.parametrize("name", ["mean", "unequal"])
def test_incorrect_custom_all_reduces_end_the_run(server: ForkServer, tmp_path: Path, name: str) -> None:
    result = run(server, tmp_path / "run", f"parallelism={name} {TWO} dataloader.num_workers=0")
    assert result.code == Exit.SOFTWARE
    assert result.err.count("PARALLELISMS") == 1
    assert not newest_valid(tmp_path / "run" / "outputs" / "mine" / "checkpoints")


TASK_WITH_SHARDS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from runner import Prediction, Task

SETTINGS = {"updates": 1}


def own_sum(gradients):
    \"\"\"The exact sum.\"\"\"
    dist.all_reduce(gradients)


PARALLELISMS = {"mine": ("ddp", own_sum)}


def build():
    return Line()


class Line(Task):
    def __init__(self):
        self.model = nn.Linear(1, 1)

    def dataset(self, split):
        return TensorDataset(torch.linspace(-1, 1, 64).view(-1, 1))

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

    def predict(self, model, generator, *, shard: int = 0, num_shards: int = 1):
        yield Prediction({f"{shard}-of-{num_shards}.txt": ""})
"""


def test_ranks_with_a_custom_all_reduce_divide_predictions(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(TASK_WITH_SHARDS)
    train = "train --task line.py device=cpu monitor=off run=mine parallelism=mine parallelism.world_size=2"
    for args in (train, "inference mine"):
        result = server.run(args, tmp_path)
        assert result.code == 0, result.err
    files = sorted(path.name for path in (tmp_path / "outputs" / "mine" / "predictions").rglob("*-of-*"))
    assert files == ["0-of-2.txt", "1-of-2.txt"]


def test_a_custom_all_reduce_must_not_return_a_result(server: ForkServer, tmp_path: Path) -> None:
    result = run(server, tmp_path / "run", f"parallelism=returns {TWO} dataloader.num_workers=0")
    assert result.code == Exit.SOFTWARE
    assert result.err.count("parallelism=returns") == result.err.count("wait()") == 1
    assert TASK.name in result.err


def test_commands_know_custom_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def ran(args: str) -> tuple[int, str, str]:
        return main(args.split()), *capsys.readouterr()

    chosen = f"dataloader=threads precision=rounded parallelism=compressed {TWO}"
    code, out, err = ran(f"plan --task {TASK} device=cpu {chosen} dataloader.ahead=5")
    assert code == 0, err
    for line in ("dataloader=threads", "precision=rounded", "parallelism=compressed"):
        assert f"{line} is from {TASK}" in out + err
    assert "training data only" in out + err
    _, out, _ = ran(f"explain precision.bits --task {TASK} device=cpu {chosen}")
    assert f"({TASK})" in out
    code, _, err = ran(f"plan --task {TASK} device=cpu dataloader=thrads")
    assert code == Exit.CONFIG
    assert "threads" in err
    before = ["train", "--task", str(TASK)]
    assert "parallelism=compressed" in candidates([*before, "parallelism=c"])
    assert "precision.bits=" in candidates([*before, "precision=rounded", "precision.b"])
    assert "small" in candidates(["benchmark", "--task", str(TASK), "s"])
    _, help_text, _ = ran(f"train --help --task {TASK}")
    assert [line for line in help_text.splitlines() if "benchmark small" in line and "micro_batch_size=4" in line]


@pytest.mark.slow
def test_a_custom_technique_is_measured(server: ForkServer, tmp_path: Path) -> None:
    args = f"benchmark small --task {TASK} device=cpu monitor=off steps=2 rounds=1 budget_s=60"
    result = server.run(args, tmp_path, {})
    assert result.code == 0, result.err
    assert "small" in result.out
    unknown = server.run(f"benchmark smal --task {TASK} device=cpu", tmp_path, {})
    assert unknown.code == Exit.CONFIG
    assert "small" in unknown.err
