"""Precision determines compute dtypes, scales the loss within limits, and restores the switches of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from runner.axes.precision import PRECISIONS, NotFinite, Precision, ScaledHalf, bf16, fp16, fp32, tf32
from runner.base.errors import ConfigError, Exit, NumericError, TaskFault
from runner.distributed.world import World

CPU = World(torch.device("cpu"))


class Net(nn.Module):
    """A model that records the dtypes that each part receives and returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        for name in ("body", "head"):
            part = self.get_submodule(name)
            part.register_forward_hook(lambda _, given, out, name=name: self.record(name, given[0], out))

    def record(self, name: str, given: Tensor, out: Tensor) -> None:
        self.seen[name] = (given.dtype, out.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def dtypes(precision: Precision, model: Net) -> tuple[torch.dtype, torch.dtype]:
    """Return the output dtypes of the body and the head."""
    with precision.forward():
        model(torch.ones(3, 4))
    return model.seen["body"][1], model.seen["head"][1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_forward_pass_uses_the_dtype_of_the_option(name: str, dtype: torch.dtype) -> None:
    model = Net()
    precision = PRECISIONS[name](CPU, model)
    for _ in range(2):  # the context can be entered again
        assert dtypes(precision, model) == (dtype, dtype)
    assert precision.dtype == dtype
    assert model(torch.ones(3, 4)).dtype == torch.float32, "autocast must be disabled outside of the context"
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.parametrize(("make", "half"), [(bf16, torch.bfloat16), (fp16, torch.float16)])
def test_a_module_kept_in_float32_computes_in_float32(make: Any, half: torch.dtype) -> None:
    model = Net()
    precision = make(CPU, model, keep_fp32=["head"])
    assert dtypes(precision, model) == (half, torch.float32)
    with precision.forward(), torch.no_grad():
        middle = model.body(torch.ones(3, 4))
        assert middle.dtype == half
    exact = torch.nn.functional.linear(middle.float(), model.head.weight, model.head.bias)
    with precision.forward():
        assert torch.equal(model.head(middle), exact), "the result must be bitwise equal to the product in float32"
    out = model(torch.ones(3, 4))
    precision.backward(out.sum())
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in model.parameters())


class Two(NamedTuple):
    first: Tensor
    second: Tensor


def test_only_half_precision_tensors_are_cast_to_float32() -> None:
    """Tensors may be nested; integers are not cast."""
    seen: list[torch.dtype] = []

    class Part(nn.Module):
        def forward(self, two: Two, *, more: dict[str, Tensor], flag: bool) -> Tensor:
            seen.extend(tensor.dtype for tensor in (*two, *more.values()))
            assert flag
            return two.first

    model = nn.ModuleDict({"part": Part()})
    bf16(CPU, model, keep_fp32=["part"])
    half = torch.ones(1, dtype=torch.bfloat16)
    model["part"](Two(half, torch.ones(1, dtype=torch.int64)), more={"a": half}, flag=True)
    assert seen == [torch.float32, torch.int64, torch.float32]


@pytest.mark.parametrize("make", [bf16, fp16])
def test_all_unknown_modules_are_reported(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(CPU, Net(), keep_fp32=["heat", "body", "xyzzy"])
    near, far = caught.value.problems
    assert (near.where, far.where, far.fix) == ("precision.keep_fp32", "precision.keep_fp32", "")
    assert ("heat" in near.what, "head" in near.fix, "xyzzy" in far.what) == (True, True, True)


# ---------------------------------------------------------------- float32


def test_float32_methods_are_equal_to_plain_torch_calls() -> None:
    model, by_hand = Net(), Net()
    precision = fp32(CPU, model)
    for each in (model, by_hand):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        loss = each(torch.ones(3, 4)).square().sum()
        if each is model:
            precision.backward(loss)
            precision.unscale(optimizer)
            precision.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert (precision.num_skipped(), precision.values(), precision.state()) == (0, {}, {})
    precision.load({"scaler": {"scale": 2.0}, "skipped": 3})
    assert (precision.num_skipped(), precision.state()) == (0, {}), "the state of another precision must be ignored"


@pytest.mark.parametrize("make", [fp32, fp16])
def test_a_loss_factor_equals_multiplying_the_loss(make: Any) -> None:
    model = Net()
    precision, wide = make(CPU, model), torch.float64
    for dtype, factor in ((wide, 1 / 3), (wide, 1 / 7), (torch.float32, 1 / 7), (torch.float32, 1 / 7)):
        gradients = []
        for has_product in (False, True):
            model.to(dtype).zero_grad()
            loss = model(torch.ones(3, 4, dtype=dtype)).square().sum()
            precision.backward(*((loss * factor,) if has_product else (loss, factor)))
            gradients.append([weight.grad for weight in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True)), (dtype, factor)


# ---------------------------------------------------------------- float16 with loss scaling


def fp16_case(**options: Any) -> tuple[ScaledHalf, nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    precision = fp16(CPU, model, **options)
    assert isinstance(precision, ScaledHalf)
    return precision, model, torch.optim.SGD(model.parameters(), lr=0.01)


def update(precision: Precision, model: nn.Linear, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> Tensor:
    """Run one update and return the unscaled gradient."""
    with precision.forward():
        loss = model(torch.ones(3, 4)).float().square().sum()
    precision.backward(loss * factor)
    precision.unscale(optimizer)
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    precision.step(optimizer)
    optimizer.zero_grad()
    return gradient


def test_unscaled_gradients_do_not_depend_on_the_scale() -> None:
    gradients = [update(*fp16_case(init_scale=scale)) for scale in (1.0, 1024.0)]
    assert torch.equal(*gradients), "a power of two must not change a bit of a float32 gradient"


def test_the_scale_shrinks_on_overflow_and_grows_again() -> None:
    """An overflow also skips the update."""
    precision, model, optimizer = fp16_case(
        init_scale=1024.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25
    )
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
        before = model.weight.detach().clone()
        update(precision, model, optimizer, factor)
        assert torch.equal(before, model.weight) == (factor != 1.0)
        scales.append(precision.values()["precision/loss_scale"])
    assert scales == [1024.0, 256.0, 256.0, 1024.0, 1024.0]
    assert precision.num_skipped() == 1
    assert precision.values()["precision/skipped_updates"] == 1.0


def test_the_loss_scaler_resumes_from_its_state() -> None:
    factors = [1.0, float("inf"), 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0]
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}
    uninterrupted, stopped = fp16_case(**options), fp16_case(**options)
    for number, factor in enumerate(factors):
        update(*uninterrupted, factor)
        if number == 4:
            saved = stopped[0].state()
            assert saved["skipped"] == 1
            again = fp16(CPU, stopped[1], **options)
            again.load(json.loads(json.dumps(saved)))
            stopped = (again, *stopped[1:])  # type: ignore[assignment]
        update(*stopped, factor)
        assert stopped[0].state() == uninterrupted[0].state()
    assert torch.equal(stopped[1].weight, uninterrupted[1].weight)
    assert uninterrupted[0].num_skipped() == 2


def test_loading_a_state_replaces_a_scale_already_read() -> None:
    precision, model, optimizer = fp16_case(init_scale=1024.0)
    saved = precision.state()
    update(precision, model, optimizer, float("inf"))
    assert precision.values()["precision/loss_scale"] == 512.0
    precision.load(saved)
    assert precision.values() == {"precision/loss_scale": 1024.0, "precision/skipped_updates": 0.0}


def test_skipped_updates_are_counted_across_a_resume() -> None:
    precision, model, optimizer = fp16_case(max_skips=3)
    for _ in range(2):
        update(precision, model, optimizer, float("inf"))
    again = fp16(CPU, model, max_skips=3)
    again.load(json.loads(json.dumps(precision.state())))
    update(again, model, optimizer, float("inf"))
    with pytest.raises(NotFinite):
        again.num_skipped()


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_resumed_run_counts_the_skipped_updates_of_forks_once(is_finished: bool) -> None:
    """After a resume, forks of a finished phase do not exist; forks of an unfinished phase restore their counts."""
    precision, model, optimizer = fp16_case(max_skips=9)
    forked = precision.fork(model)
    for each, num_skipped in ((precision, 1), (forked, 2)):
        for _ in range(num_skipped):
            update(each, model, optimizer, float("inf"))
    own, of_fork = json.loads(json.dumps([precision.state(), forked.state()]))
    again = fp16(CPU, model, max_skips=9)
    if not is_finished:
        again.fork(model).load(of_fork)
    again.load(own)
    assert again.total_skipped() == precision.total_skipped() == 3
    assert again.state() == precision.state()
    update(again.fork(model), model, optimizer, float("inf"))
    assert again.total_skipped() == 4
    assert again.num_skipped() == 1


def test_the_state_of_another_precision_does_not_change_the_scaler() -> None:
    precision, *_ = fp16_case(init_scale=8.0)
    before = precision.state()
    precision.load({})
    assert precision.state() == before


def test_a_run_ends_when_the_loss_scale_collapses() -> None:
    precision, model, optimizer = fp16_case(init_scale=4.0, min_scale=1.0)
    for scale in (2.0, 1.0):
        update(precision, model, optimizer, float("inf"))
        assert precision.values()["precision/loss_scale"] == scale
    update(precision, model, optimizer, float("inf"))
    with pytest.raises(NumericError, match=r"the loss scale fell to 0\.5, below min_scale 1") as caught:
        precision.values()
    assert caught.value.exit_code == Exit.NUMERIC == 82


# ---------------------------------------------------------------- torch's switches


def switches() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.fixture
def untouched() -> Iterator[None]:
    before = switches()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("precision", "inside"),
    [
        (lambda: fp32(CPU, Net()), ("highest", False)),
        (lambda: tf32(CPU, Net()), ("high", True)),
        (lambda: tf32(CPU, Net(), level="medium"), ("medium", True)),
        (lambda: bf16(CPU, Net()), ("highest", False)),
        (lambda: fp16(CPU, Net()), ("highest", False)),
    ],
)
@pytest.mark.parametrize("before", [("highest", True), ("medium", False)])
@pytest.mark.usefixtures("untouched")
def test_switches_are_set_for_the_run_and_restored(
    precision: Any, inside: tuple[str, bool], before: tuple[str, bool]
) -> None:
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    made_here = precision()
    assert switches() == before, "constructing a precision must have no side effects"
    with made_here.flags:
        assert switches() == inside
    assert switches() == before
    with pytest.raises(ValueError, match="stop"), precision().flags:
        raise ValueError("stop")
    assert switches() == before


def test_setting_newer_float32_switches_in_a_task_is_explained() -> None:
    matmul: Any = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(TaskFault, match="float32 switches must not be changed"), fp32(CPU, Net()).flags:
            pass
    finally:
        matmul.fp32_precision = before
