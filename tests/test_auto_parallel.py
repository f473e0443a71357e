"""Parallelism from Python: a split model computes the same results as the unsplit one, and each choice states its
reason.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import runner
from runner.auto_parallel import DeviceStage, ParallelChoice, PipelineParallel, auto_parallelize
from runner.base.errors import ConfigError, TaskFault
from runner.distributed.world import World
from tests.distributed.ranks import run_ranks
from tests.rounding import ADAPTIVE, PROMISED, assert_close

GIB = 2**30


def ten_layers(dtype: torch.dtype = torch.float64, num_layers: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers))).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


# ---------------------------------------------------------------- a pipeline in one process


@settings(max_examples=40)
@given(
    num_layers=st.integers(1, 8),
    num_stages=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    rest=st.integers(0, 5),
)
def test_split_and_unsplit_models_are_equal(num_layers: int, num_stages: int, num_microbatches: int, rest: int) -> None:
    if num_layers < num_stages:
        return
    terms = 8 * (num_layers + num_microbatches + rest)  # behind a gradient: inputs of each layer, and samples
    for dtype in (torch.float64, torch.float32):
        whole = ten_layers(dtype, num_layers)
        piped = PipelineParallel(copy.deepcopy(whole), num_microbatches, ["cpu"] * num_stages)
        x = torch.randn(num_microbatches + rest, 8, dtype=dtype)
        one, other = whole(x), piped(x)
        assert_close(other, one, terms)
        one.square().sum().backward()
        other.square().sum().backward()
        expected, result = gradients(whole), gradients(piped.model)
        assert result.keys() == expected.keys()
        assert len(result) == 2 * num_layers
        for name, grad in expected.items():
            assert_close(result[name], grad, terms)


def test_optimizer_updates_a_split_model_equally() -> None:
    whole = ten_layers()
    piped = PipelineParallel(copy.deepcopy(whole), 3, ["cpu", "cpu"])
    x = torch.randn(7, 8, dtype=torch.float64)
    for model in (whole, piped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(piped.model.state_dict()[name], value, rtol=ADAPTIVE, atol=PROMISED[torch.float64])


def test_layers_are_split_by_memory() -> None:
    piped = PipelineParallel(ten_layers(), 4, ["cpu", "cpu"], [11 * GIB, 8 * GIB])
    assert str(piped.split) == "6 : 4"
    lines = piped.table().splitlines()
    assert len(lines) == 1 + 10 + 2
    assert lines[7].split()[:3] == ["=", "6", "layers"]
    assert all("MiB" in line for line in lines[1:])


class Parts(NamedTuple):
    """An output with several fields."""

    logits: Tensor
    others: list[dict[str, Tensor]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, *, scale: float = 1.0) -> Parts:
        first, _, last = self.layers()
        first.training = self.training
        return last(self.middle(first(tokens, scale=scale)))

    def layers(self) -> list[nn.Module]:
        return [Start(self.embedding), self.middle, End(self.embedding)]


class Start(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.dropout(self.embedding(tokens) * scale, 0.5, self.training)


class End(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Parts:
        return Parts(F.linear(x, self.embedding.weight), [{"mean": x.mean(-1)}])


def test_layers_may_share_weights_and_return_structures() -> None:
    torch.manual_seed(0)
    model = Tied().double().eval()
    tokens = torch.randint(0, 5, (6, 3))
    expected = model(tokens, scale=2.0)
    piped = PipelineParallel(model, 4, ["cpu"] * 3, layers=model.layers()).eval()  # also disables the dropout in layers
    result = piped(tokens, scale=2.0)
    assert type(result) is Parts
    torch.testing.assert_close(result.logits, expected.logits)
    torch.testing.assert_close(result.others[0]["mean"], expected.others[0]["mean"])
    assert not torch.equal(piped.train()(tokens).logits, expected.logits)


def test_train_and_eval_reach_all_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers = [model[0], nn.Sequential(nn.Tanh(), nn.Dropout(0.5)), model[1]]
    piped = PipelineParallel(model, 2, ["cpu"] * 2, layers=layers).eval()
    x = torch.ones(4, 4)
    torch.testing.assert_close(piped(x), model[1](model[0](x).tanh()))
    assert not torch.equal(piped.train()(x), piped.eval()(x))


def test_a_stage_copies_shared_weights_to_its_device() -> None:
    """The `meta` device computes only shapes, and an operation that also has a CPU tensor would fail."""
    model = Tied()
    stage = DeviceStage([End(model.embedding)], torch.device("meta"))
    stage.move(placed={model.embedding.weight})
    result = stage((torch.zeros(4, 3, 8),), {})
    assert result.logits.shape == (4, 3, 5)
    assert result.logits.is_meta
    assert not model.embedding.weight.is_meta


class Summed(nn.Module):
    """A last layer that returns the result of a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)

    @classmethod
    def piped(cls, function: Any) -> PipelineParallel:
        return PipelineParallel(nn.Sequential(nn.Linear(8, 8), cls(function)), 2, ["cpu"] * 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PipelineParallel(ten_layers(), 8, ["cpu"])(torch.zeros(5, 8)), "(8) samples, but got 5"),
        (lambda: PipelineParallel(ten_layers(), 1, ["cpu"])(3.0), "but got 0"),
        (lambda: PipelineParallel(ten_layers(), 2, ["cpu"])(torch.zeros(4, 8), torch.zeros(2)), "but got 4, 2"),
        (lambda: PipelineParallel(ten_layers(), 0, ["cpu"]), "must be at least 1, but is 0"),
        (lambda: PipelineParallel(ten_layers(), 2, []), "at least one device"),
        (lambda: PipelineParallel(ten_layers(num_layers=2), 2, ["cpu"] * 3), "layers as stages (3)"),
        (lambda: PipelineParallel(ten_layers(), 2, ["cpu"] * 2, [10, 10]), "needs"),
        (lambda: PipelineParallel(ten_layers(), 2, ["cpu"] * 2, [10]), "one size for each of the 2 devices"),
        (lambda: PipelineParallel(ten_layers(), 2, ["cpu"] * 2, split=[5, 6]), "add up to the model's 10"),
        (lambda: PipelineParallel(Tied(), 2, ["cpu"] * 2), "layers of a Tied are unknown"),
        (
            lambda: PipelineParallel(ten_layers(), 2, ["cpu"] * 2, balance="time"),
            "example: is required for balance",
        ),
        (
            lambda: Summed.piped(lambda x: x.sum())(torch.zeros(4, 8)),
            "the output must have the samples along its first",
        ),
        (lambda: Summed.piped(lambda x: (x, {"loss": x.sum()}))(torch.zeros(4, 8)), "the output must have"),
        (lambda: Summed.piped(lambda x: Parts(x.sum(), []))(torch.zeros(4, 8)), "the output must have"),
    ],
)
def test_invalid_splits_are_reported(make: Any, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert text in str(raised.value)
    assert raised.value.exit_code == 78


def test_an_example_balances_layers_by_time() -> None:
    example = (torch.randn(4, 8, dtype=torch.float64),)
    assert len(PipelineParallel(ten_layers(), 2, ["cpu"] * 2, balance="time", example=example).split.sizes) == 2
    assert str(PipelineParallel(ten_layers(), 2, ["cpu"] * 2, balance="time", split=[3, 7]).split) == "3 : 7"


def test_layers_must_contain_all_parameters() -> None:
    with pytest.raises(TaskFault, match="must contain exactly the parameters of the model, but lacks 9"):
        PipelineParallel(model := ten_layers(), 2, ["cpu"] * 2, layers=list(model)[:9])


# ---------------------------------------------------------------- automatic choice


def chosen(*given: Any, **options: Any) -> tuple[ParallelChoice, list[str]]:
    messages: list[str] = []
    return auto_parallelize(*given, say=messages.append, **options), messages


def test_a_model_that_fits_is_not_split() -> None:
    made, messages = chosen(model := ten_layers(), ["cpu"], capacities=[GIB])
    assert made.strategy == "single"
    assert made.model is model
    assert messages == [f"single: {made.reason}"]
    assert re.findall(r"[\d.]+ MiB", made.reason) == ["0.011 MiB", "921.6 MiB"]


def test_one_process_with_equal_devices_does_not_split() -> None:
    made, _ = chosen(ten_layers(), ["cpu", "cpu"], capacities=[GIB, GIB])
    assert made.strategy == "single"
    assert "2 processes" in made.reason


@pytest.mark.parametrize(
    ("capacities", "why", "split"),
    [
        ([9000, 8000], "it does not fit on a single device", "5 : 5"),
        ([11 * GIB, 8 * GIB], "the devices are unequal", "6 : 4"),
    ],
)
def test_small_or_unequal_devices_split_a_model(capacities: list[int], why: str, split: str) -> None:
    whole = ten_layers()
    x = torch.randn(8, 8, dtype=torch.float64)
    expected = whole(x)
    made, messages = chosen(whole, ["cpu", "cpu"], capacities=capacities)
    assert made.strategy == "pipeline"
    assert why in made.reason
    assert f"layers are split {split}" in made.reason
    assert "= 5 layers" in messages[0] or "= 6 layers" in messages[0]
    torch.testing.assert_close(made.model(x), expected)


def test_an_example_adds_activations_to_the_memory() -> None:
    """The input and 10 outputs of tanh are saved, 1000 x 8 x 8 bytes each; 720 parameters need 16 bytes each."""
    example = (torch.randn(1000, 8, dtype=torch.float64),)
    assert chosen(ten_layers(), ["cpu"], capacities=[GIB], example=example)[0].strategy == "single"
    text = f"needs {(11 * 64000 + 720 * 16) / 2**20:.3f} MiB, but cpu has 0.450 MiB available"
    with pytest.raises(ConfigError, match=re.escape(text)):
        chosen(ten_layers(), ["cpu"], capacities=[2**19], example=example)


def test_a_model_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"needs 0\.011 MiB, but cpu has 0\.001 MiB available"):
        chosen(ten_layers(), ["cpu"], capacities=[1000])
    with pytest.raises(ConfigError, match="layers of a Tied are unknown"):
        chosen(Tied(), ["cpu", "cpu"], capacities=[100, 100])


@pytest.mark.slow
def test_each_process_trains_a_copy() -> None:
    def replicate(world: World) -> list[Any]:
        made, messages = chosen(ten_layers(), ["cpu"], capacities=[GIB])
        torch.manual_seed(world.rank)
        x = torch.randn(4, 8, dtype=torch.float64)
        made.model(x).square().sum().backward()
        grad = next(iter(gradients(made.model).values()))
        return [made.strategy, messages[0], grad.tolist()]

    (strategy, reason, one), (_, _, other) = run_ranks(replicate, 2)
    assert strategy == "replicated"
    assert "2 processes; " in reason
    assert one == other


class Placed(nn.Sequential):
    """A model that only records its device."""

    place: Any = None

    def to(self, place: Any) -> Placed:  # type: ignore[override]
        self.place = place
        return self


@pytest.mark.parametrize(
    ("bound", "current", "local_rank", "num_gpus", "expected"),
    [
        (None, 0, 3, 4, "cuda:3"),  # no device set: use torchrun's local rank
        (None, 2, 1, 4, "cuda:2"),  # torch.cuda.set_device
        (0, 2, 1, 4, "cuda:0"),  # init_process_group(device_id=...)
        (None, 0, 3, 1, "cuda:0"),  # each process sees only its own GPU
        (None, 0, None, 4, "cuda:0"),
        (None, 0, 3, 0, "cpu"),
    ],
)
def test_each_process_uses_its_own_gpu(
    bound: int | None,
    current: int,
    local_rank: int | None,
    num_gpus: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(bound_device_id=None if bound is None else torch.device("cuda", bound))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(type(dist.group), "WORLD", group)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda model: model)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    model = Placed(nn.Linear(8, 8))
    made, messages = chosen(model)
    assert made.strategy == "replicated"
    assert str(model.place) == expected
    assert f"{expected} has " in messages[0]
    chosen(model, ["cuda:1"])
    assert str(model.place) == "cuda:1", "a named module is used"


def test_one_process_uses_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    made, _ = chosen(model := Placed(nn.Linear(8, 8)))
    assert made.strategy == "single"
    assert str(model.place) == "cuda:0"
    assert "2 processes" in made.reason


def test_importing_the_functions_does_not_import_torch() -> None:
    assert runner.auto_parallelize is auto_parallelize
    assert runner.PipelineParallel is PipelineParallel
    check = "import sys, runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def test_model_size_mb_is_rejected() -> None:
    """The error names the replacement of this former argument."""
    with pytest.raises(ConfigError, match="model_size_mb"):
        auto_parallelize(ten_layers(), ["cpu"], model_size_mb=5000)
