"""A run ends at the first update with non-finite values, names the module, and saves no non-finite weights.

By default, a seed selects some of the places where a value can become non-finite; `scripts/test.sh --all` tests all.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.axes.precision import NotFinite, Precision, fp32
from runner.base.errors import NumericError
from runner.distributed.world import World
from runner.durable.checkpoint import newest_valid, verify
from runner.engine.update.non_finite import check_finite, is_finite, record_calls
from tests.faults.tallies import Tally
from tests.forkserver import CompletedCommand, ForkServer

TASK = Path(__file__).parent / "task_of_numbers.py"
BASE = ["train", "--task", str(TASK), "device=cpu", "monitor=off", "run=mine"]
CPU = World(torch.device("cpu"))


@dataclass(frozen=True)
class Fault:
    """Overrides of the task, and the expected outcome; saved: update of the newest checkpoint, 0: none, -1: any."""

    words: str
    cause: str
    code: int = 82
    saved: int = 10


FORWARD = "at update 12: first in the output of middle (Middle), whose inputs are finite; samples "
BACKWARD = "the gradients are not finite at update 12: first in the backward pass of middle (Middle)"
FAULTS = {
    "the loss": Fault("task.fault=loss", "at update 12: the outputs of all modules are finite, but the loss is not ("),
    "a module": Fault("task.fault=module", "the loss is not finite " + FORWARD),
    "a module in bf16": Fault("task.fault=module precision=bf16", FORWARD),
    "a module, with workers": Fault("task.fault=module dataloader.num_workers=1", FORWARD),
    "a module, with a thread": Fault("task.fault=module dataloader=thread", FORWARD),
    "a module, micro-batches": Fault("task.fault=module micro_batch_size=1", FORWARD),
    "a module, few metric rows": Fault("task.fault=module log_every=1000", FORWARD),
    "a module in the first update": Fault(
        "task.fault=module task.at=1", "at update 1: first in the output of middle", saved=0
    ),
    "the backward pass": Fault("task.fault=backward", BACKWARD),
    "the backward pass, checkpointed": Fault("task.fault=backward memory=checkpoint", "the gradients are not finite"),
    "the gradient of the loss": Fault("task.fault=gradient", "the gradients are not finite at update 12: "),
    "gradients without clipping": Fault("task.fault=backward max_grad_norm=null", BACKWARD),
    "gradients without clipping, in the last update": Fault(
        "task.fault=backward max_grad_norm=null updates=12", BACKWARD
    ),
    "samples": Fault("task.fault=samples task.at=1", "samples that are not finite: ", saved=-1),
    "augmentation": Fault("task.fault=augmentation updates=500", "samples that are not finite: 32", saved=-1),
    "augmentation, in a worker": Fault(
        "task.fault=augmentation updates=500 dataloader.num_workers=1", "samples that are not finite: 32", saved=-1
    ),
    "a large learning rate": Fault(
        "optimizer=sgd optimizer.lr=1e38 scheduler=constant", "not finite at update ", saved=-1
    ),
    "a fault that does not recur": Fault("task.fault=once", "at update 12: the update was finite when it was repeated"),
    "no items": Fault("task.fault=nothing", "loss() returned a count of 0 for all micro-batches (update 12)", code=70),
    "an unused parameter": Fault("task.ghost=true", "not finite, and therefore not saved: ghost", saved=0),
    "half precision": Fault(
        "task.fault=half precision=fp16 precision.max_skips=4 precision.growth_interval=1000",
        "4 consecutive updates were skipped because float16 overflowed",
        saved=0,
    ),
}


def run(server: ForkServer, folder: Path, args: str = "", **env: str) -> CompletedCommand:
    return server.run([*BASE, *args.split()], folder, env)


def check_outcome(result: CompletedCommand, run_dir: Path, fault: Fault) -> dict[str, Any]:
    """Check the exit code, the message and error.json, and that there is no traceback and no non-finite checkpoint."""
    assert result.code == fault.code, result.err
    assert fault.cause in result.err
    assert "Traceback" not in result.err
    error: dict[str, Any] = json.loads((run_dir / "error.json").read_text())
    assert fault.cause in error["cause"]
    assert error["fix"]
    assert error["exit_code"] == fault.code
    for folder in (run_dir / "checkpoints").glob("update-*"):
        assert verify(folder) == []
        for stem in ("model", "optimizer"):
            tensors = load_file(folder / f"{stem}.safetensors")
            assert all(is_finite(tensor) for tensor in tensors.values()), f"{folder.name} {stem} is not finite"
    newest = newest_valid(run_dir / "checkpoints")
    if fault.saved >= 0:
        assert (int(newest.name.split("-")[1]) if newest else 0) == fault.saved
    assert error["last_checkpoint"] == (newest.name if newest else None)
    return error


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_at_the_first_update_with_non_finite_values(
    name: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    check_outcome(run(server, tmp_path, FAULTS[name].words), tmp_path / "outputs" / "mine", FAULTS[name])
    tally.tried += 1


# ---------------------------------------------------------------- values that are not finite by design

BY_DESIGN = {
    "missing labels": "first in the output of blow (Blow), whose inputs are finite; samples ",
    "mask in the batch": "first in the output of blow (Blow), whose inputs are finite; samples ",
    "logits": "first in the output of blow (Blow), whose inputs are finite; samples ",
    "rows of a mask": "first in the output of attention (MultiheadAttention), whose inputs have no NaN; samples ",
    "a dataclass": "first in the output of answering (Answering), whose inputs are finite; samples ",
    "a large norm": "the gradients are not finite at update 7: every gradient is finite, but their norm overflows",
    "gradients": "the gradients are not finite at update 7: the forward pass is finite, the gradient of the loss",
}


WITH_BAD_SAMPLES = ("missing labels", "mask in the batch")


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", BY_DESIGN)
def test_the_report_does_not_blame_intentional_infinities(
    mode: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    args = [*BASE, f"task.mode={mode!r}"]
    args[2] = str(TASK.with_name("task_of_masks.py"))
    fault = Fault("", BY_DESIGN[mode], saved=5)
    error = check_outcome(server.run(args, tmp_path), tmp_path / "outputs" / "mine", fault)
    assert error["place"]["update"] == 7
    assert error["place"]["samples"]
    assert ("samples that" in error["cause"]) == (mode in WITH_BAD_SAMPLES)
    tally.tried += 1


LATE = """
from runner.axes.precision import Precision
original = Precision.__init__
def late(self, *given, **named):
    original(self, *given, **named)
    self.checks_immediately = False
Precision.__init__ = late
"""
LATE_KERNELS = {
    "fused": "at update 12: first in the output of middle (Middle), whose inputs are finite",
    "foreach": "at update 12: the update had changed body.0.weight, ",
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kernel", LATE_KERNELS)
def test_the_report_mentions_updates_applied_before_their_check(
    kernel: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    args = [*BASE, "task.fault=module", f"optimizer.kernel={kernel}"]
    error = check_outcome(
        server.run(args, tmp_path, {}, LATE), tmp_path / "outputs/mine", Fault("", LATE_KERNELS[kernel])
    )
    assert error["place"]["update"] == 12
    assert ("optimizer.kernel=fused" in error["fix"]) == (kernel == "foreach")
    tally.tried += 1


# ---------------------------------------------------------------- statistics of batch normalization


def test_a_skipped_update_does_not_change_batch_norm_statistics(
    server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    args = [*BASE, "precision=fp16", "log_every=1"]
    args[2] = str(TASK.with_name("task_of_norms.py"))
    result = server.run(args, tmp_path)
    assert result.code == 0, result.err
    run_dir = tmp_path / "outputs" / "mine"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("precision/skipped_updates", 0) for row in rows) >= 1, "the fault must occur"
    newest = newest_valid(run_dir / "checkpoints")
    assert newest is not None
    assert all(is_finite(tensor) for tensor in load_file(newest / "model.safetensors").values())
    tally.tried += 1


def test_non_finite_batch_norm_statistics_are_not_saved(server: ForkServer, tmp_path: Path, tally: Tally) -> None:
    args = [*BASE, "task.large=0", "task.breaks_at=12"]
    args[2] = str(TASK.with_name("task_of_norms.py"))
    cause = "not finite, and therefore not saved: 1.running_var"
    check_outcome(server.run(args, tmp_path), tmp_path / "outputs" / "mine", Fault("", cause))
    tally.tried += 1


# ---------------------------------------------------------------- resuming, and ranks


@pytest.mark.slow
def test_the_same_command_succeeds_once_the_fault_is_fixed(server: ForkServer, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert run(server, whole, "task.fault=module", FIXED="1").code == 0
    run(server, broken, "task.fault=module")
    messages = json.loads((broken / "outputs" / "mine" / "error.json").read_text())
    assert (messages["last_checkpoint"], messages["updates_repeated"]) == ("update-0000000010", 1)
    again = run(server, broken, "task.fault=module", FIXED="1")
    assert again.code == 0, again.err
    assert "resumes after update 10" in again.out
    states = [folder / "outputs" / "mine" / "checkpoints" / "update-0000000030" for folder in (whole, broken)]
    for stem in ("model", "optimizer"):
        first, second = (load_file(state / f"{stem}.safetensors") for state in states)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (broken / "outputs" / "mine" / "error.json").exists(), "error.json must be removed"


WITH_RANKS = [("module", "on rank 0, first in the output of middle ("), ("samples", "samples that are not finite: ")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("fault", "cause"), WITH_RANKS)
def test_all_ranks_stop_and_the_failing_rank_is_reported(
    strategy: str, fault: str, cause: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    args = f"task.fault={fault} parallelism={strategy} parallelism.world_size=2 parallelism.timeout_s=60"
    result = run(server, tmp_path, args)
    error = check_outcome(result, tmp_path / "outputs" / "mine", Fault(args, cause, saved=-1))
    assert re.search(r"update \d+: on rank [01]", error["cause"]), error["cause"]
    tally.tried += 1


STAGES = {
    "samples": "on rank 0, samples that are not finite: ",
    "module": "at update 12: on rank 0, all samples are finite; the modules of a pipeline are not searched",
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", STAGES)
def test_the_search_in_a_pipeline_covers_samples_but_not_modules(
    fault: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    args = f"task.fault={fault} parallelism=pipeline parallelism.world_size=2 parallelism.timeout_s=60"
    check_outcome(run(server, tmp_path, args), tmp_path / "outputs" / "mine", Fault(args, STAGES[fault], saved=-1))
    tally.tried += 1


# ---------------------------------------------------------------- values of an asynchronous device


class Late(Precision):
    """float32 with deferred checks, as on a GPU, but on the CPU."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.checks_immediately = False


def run_updates(precision: Precision, losses: list[float], fused: bool = True) -> list[Tensor]:
    """Return the weight after each update; the gradient equals the loss."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    weights = []
    for loss in losses:
        weight.grad = torch.full((3,), loss)
        precision.step(optimizer, torch.tensor(loss), torch.tensor(loss))
        weights.append(weight.detach().clone())
    return weights


def test_device_values_are_checked_one_update_later() -> None:
    """A fused optimizer skips the non-finite update itself."""
    precision, nan = Late(), float("nan")
    first, second = run_updates(precision, [1.0, nan])
    assert torch.equal(first, second), "weights stay finite"
    with pytest.raises(NotFinite, match="the loss is not finite") as caught:
        precision.num_skipped()
    assert caught.value.late
    precision.state()  # reported once


@pytest.mark.parametrize("ask", [Precision.num_skipped, Precision.state], ids=["the next update", "a checkpoint"])
def test_no_checkpoint_is_written_before_values_are_checked(ask: Any) -> None:
    precision = Late()
    run_updates(precision, [1.0, float("inf")], fused=False)
    with pytest.raises(NotFinite):
        ask(precision)


def test_a_skipped_update_does_not_change_the_optimizer() -> None:
    nan = float("nan")
    precision = Late()
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.full((3,), nan)
    precision.step(optimizer, torch.tensor(nan), torch.tensor(nan))
    assert float(optimizer.state[weight]["step"]) == 0
    assert is_finite(list(optimizer.state[weight].values()))


def test_the_injected_faults_make_weights_nan_without_the_check() -> None:
    """Without a check, training would continue with NaN weights."""

    class Blind(Precision):
        def step(self, optimizer: torch.optim.Optimizer, loss: Any = None, grad_norm: Any = None) -> None:
            optimizer.step()

    assert not is_finite(run_updates(Blind(CPU), [1.0, float("nan")])[-1])
    with pytest.raises(NotFinite):
        run_updates(fp32(CPU, nn.Linear(1, 1)), [1.0, float("nan")])


# ---------------------------------------------------------------- the search


class Siamese(nn.Module):
    """Calls one module twice, the second time with an infinite input."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(2, 2), nn.ReLU(inplace=True)
        with torch.no_grad():  # infinite inputs give NaN, whatever the activation
            self.shared.weight.copy_(torch.tensor([[1.0, -1.0], [2.0, -1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(x)) + self.last(self.shared(x * torch.tensor(float("inf"))))  # type: ignore[no-any-return]


def test_a_module_with_non_finite_input_is_not_blamed() -> None:
    model = Siamese()
    with record_calls(model) as calls:
        calls.begin()
        model(torch.ones(1, 2))
    assert str(calls.find_origin()).endswith("(Siamese)")
    calls.begin()
    model(torch.ones(1, 2))
    assert not calls.completed, "the hooks must have been removed"


class Root(nn.Module):
    """A square root at 0: its value is finite, its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), Root()), nn.Tanh()), "1.1"),
        (Root(), "the model itself"),
    ],
)
def test_the_innermost_module_with_a_non_finite_backward_pass_is_reported(model: nn.Module, name: str) -> None:
    with record_calls(model) as calls:
        calls.begin()
        loss = model(torch.ones(1, 2, requires_grad=True)).sum()
        calls.end()
        loss.backward()
    assert str(calls.find_backward_origin()) == f"{name} (Root)"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_single_non_finite_value_is_found(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(70_000, dtype=dtype)  # in float16, the sum overflows
    assert is_finite({"a": (tensor, 3, torch.ones(2, dtype=torch.int64))})
    tensor[69_000] = bad
    assert not is_finite([tensor])


def test_non_finite_tensors_are_reported_by_name() -> None:
    named = [("a", torch.ones(2)), ("b", torch.tensor(float("nan"))), ("c", torch.tensor(float("inf")))]
    with pytest.raises(NumericError, match="not saved: b, c"):
        check_finite(named, "update 3")
    check_finite(named[:1], "update 3")
