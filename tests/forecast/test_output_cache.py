"""Operations with cached outputs are traced like computed ones."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.forecast.fake_mode import AllocationRecorder, FakeRun

Operations = Callable[[nn.ParameterList, Tensor], object]


def _attention(weights: nn.ParameterList, x: Tensor) -> object:
    heads = F.linear(x, weights[0]).unflatten(1, (2, 4)).expand(3, -1, -1, -1).transpose(1, 2)
    return (
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(3, -1).chunk(2, 1)
    )


def _numbers_that_are_equal(weights: nn.ParameterList, x: Tensor) -> object:
    whole = torch.ones(3, dtype=torch.int64) * weights[1].long()[:3]
    return whole * 1, whole * 1.0, whole * True, whole.to(torch.bool) * 1


def _in_place(weights: nn.ParameterList, x: Tensor) -> object:
    made = F.linear(x, weights[0])
    made[:, 1:3].mul_(2).add_(1)
    x.add_(made[:, :8])  # a tensor that an operation writes to loses its known values
    return made.relu_(), x, x.view(-1)[3:]


def _norms(weights: nn.ParameterList, x: Tensor) -> object:
    made = F.layer_norm(F.linear(x, weights[0]), (8,))
    return torch.var_mean(made, 1), made.split(3, 1), made.unbind(1), F.dropout(made, 0.5)


def _masks(weights: nn.ParameterList, x: Tensor) -> object:
    made = F.linear(x, weights[0])
    return made[x > 0], made.masked_fill(x > 0, 0.0), torch.where(x > 0, made, x), made[:, [0, 2]]


def _half(weights: nn.ParameterList, x: Tensor) -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, weights[0]), F.linear(x, weights[0]).float().exp()


def _complex(weights: nn.ParameterList, x: Tensor) -> object:
    made = torch.fft.rfft(F.linear(x, weights[0]))
    return made.conj().imag, made.abs()


def _update(weights: nn.ParameterList, x: Tensor) -> object:
    optimizer = torch.optim.AdamW(weights, foreach=True)
    for _ in range(2):
        (F.linear(x, weights[0]).square().sum() + weights[1].square().sum()).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def _fused_update(weights: nn.ParameterList, x: Tensor) -> object:
    """The values of step counters are known, and the learning rate, a Python float, changes."""
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    for lr in (0.1, 0.05, 0.01):
        optimizer.param_groups[0]["lr"] = lr
        (F.linear(x, weights[0]).square().sum() + weights[1].square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "step")]


def _devices(weights: nn.ParameterList, x: Tensor) -> object:
    """Layers of other pipeline stages are on the meta device and need no memory."""
    made = F.linear(x, weights[0])
    elsewhere = made.to("meta")
    return made.detach() * 2, made.t(), elsewhere.detach() * 2, elsewhere.t()


def _given_outputs(weights: nn.ParameterList, x: Tensor) -> object:
    """The output tensor is empty, so the operation resizes it."""
    made = F.linear(x, weights[0]).detach()
    return [torch.add(made, made, out=made.new_empty(0)) for _ in range(3)]


def _default_dtypes(weights: nn.ParameterList, x: Tensor) -> object:
    whole, before = F.linear(x, weights[0]).long(), torch.get_default_dtype()
    answers = [whole / 2]
    torch.set_default_dtype(torch.float64)
    try:
        return [*answers, whole / 2]
    finally:
        torch.set_default_dtype(before)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def traced(operations: Operations, cached: bool) -> object:
    """Return the metadata and shared storages of the results of three passes, and the recorded values."""
    recorder, result = AllocationRecorder(), []
    run = FakeRun(recorder, cached=cached)
    with run:
        with run.fake_parameters():
            weights = nn.ParameterList([nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))])
        for number in range(3):
            recorder.stage = f"pass {number}"
            answers = _tensors(operations(weights, torch.linspace(-1, 1, 32).view(4, 8)))
            places = {id(answer.untyped_storage()): None for answer in answers}
            result.append(
                [
                    (
                        run.is_fake(one),
                        one.dtype,
                        one.device,
                        one.shape,
                        one.stride(),
                        one.storage_offset(),
                        one.requires_grad,
                        one.untyped_storage().nbytes(),
                        [*places].index(id(one.untyped_storage())),
                    )
                    for one in answers
                ]
            )
            del answers
    allocated = [event for event in recorder.events if event[1]]
    return result, recorder.work, allocated, sorted(recorder.events)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "operations",
    [
        _attention,
        _numbers_that_are_equal,
        _in_place,
        _norms,
        _masks,
        _half,
        _complex,
        _update,
        _fused_update,
        _devices,
        _given_outputs,
        _default_dtypes,
    ],
    ids=lambda one: one.__name__.strip("_"),
)
def test_cached_operations_are_traced_like_computed_ones(operations: Operations) -> None:
    assert traced(operations, cached=True) == traced(operations, cached=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_decomposed_operations_are_traced_like_computed_ones(dtype: torch.dtype, affine: bool) -> None:
    """Grid samples, and gradients of a group norm with float32 weights, which autocast passes."""

    def compute() -> list[Tensor]:
        norm = nn.GroupNorm(2, 4, affine=affine)
        x = nn.Conv2d(3, 4, 3)(torch.ones(2, 3, 8, 8)).to(dtype)
        made = torch.ops.aten.native_group_norm(x, norm.weight, norm.bias, 2, 4, 36, 2, 1e-5)
        mask = [True, affine, affine]
        grads = torch.ops.aten.native_group_norm_backward(made[0], x, *made[1:], norm.weight, 2, 4, 36, 2, mask)
        places = torch.zeros(2, 5, 1, 2, dtype=dtype)
        return [grad for grad in grads if grad is not None] + [F.grid_sample(x, places, align_corners=False)]

    run = FakeRun(AllocationRecorder())
    with torch.no_grad():
        with run, run.fake_parameters():
            fakes = compute()
        assert all(map(run.is_fake, fakes))
        expected = [(one.shape, one.stride(), one.dtype) for one in compute()]
    assert [(one.shape, one.stride(), one.dtype) for one in fakes] == expected


def test_device_queries_are_not_counted_as_operations() -> None:
    """The autograd engine queries the device of every gradient, which reads no memory."""
    recorder = AllocationRecorder()
    run = FakeRun(recorder)
    with run:
        with run.fake_parameters():
            layer = nn.Linear(64, 64)
        recorder.work.clear()
        assert layer.weight.device == torch.device("cpu")
    assert not recorder.work


def test_only_modified_tensors_lose_their_known_values() -> None:
    run = FakeRun(AllocationRecorder())
    with run:
        with run.fake_parameters():
            weights = nn.ParameterList([nn.Parameter(torch.ones(4, 8))])
        written, read, both = torch.zeros(4, 8), torch.ones(4, 8), torch.ones(4, 8)
        with torch.no_grad():
            written.addcmul_(weights[0], read).addcmul_(weights[0], both)
        assert [run.is_fake(tensor) for tensor in (written, read, both)] == [True, False, False]


@pytest.mark.parametrize("cached", [True, False])
def test_bytes_of_products_are_counted_separately(cached: bool) -> None:
    recorder = AllocationRecorder()
    run = FakeRun(recorder, cached=cached)
    with run:
        with run.fake_parameters():
            weights = nn.ParameterList([nn.Parameter(torch.ones(8, 8))])
        recorder.work.clear()
        for _ in range(2):
            (torch.ones(4, 8) @ weights[0]).relu()
    work = recorder.work[recorder.stage]
    read_and_written = 4 * (4 * 8 + 8 * 8 + 4 * 8)
    assert work.product_bytes == 2 * read_and_written
    assert work.flops == 2 * 2 * 4 * 8 * 8
    assert work.moved_bytes - work.product_bytes >= 2 * 4 * (4 * 8 + 4 * 8), "relu reads and writes, ones writes"


def test_each_operation_is_cached_once() -> None:
    """Adding them to the cache of torch, which all fake modes share, would take as long as the operations."""
    before = FakeTensorMode.cache_info()
    traced(_norms, cached=True)
    assert FakeTensorMode.cache_info() == before


def test_parts_of_decomposed_operations_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward passes of a group norm that need different gradients consist of the same operations."""
    computed: list[object] = []
    dispatch = FakeTensorMode.dispatch

    def count(mode: FakeTensorMode, func: object, *args: object) -> object:
        computed.append(func)
        return dispatch(mode, func, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTensorMode, "dispatch", count)
    run = FakeRun(AllocationRecorder())
    with torch.no_grad(), run:
        with run.fake_parameters():
            (x,) = nn.ParameterList([nn.Parameter(torch.ones(2, 4, 6, 6))])
        made = torch.ops.aten.native_group_norm(x, None, None, 2, 4, 36, 2, 1e-5)
        counts = []
        for mask in ([True, True, True], [True, True, False]):
            computed.clear()
            torch.ops.aten.native_group_norm_backward(made[0], x, *made[1:], None, 2, 4, 36, 2, mask)
            counts.append(len(computed))
    assert 0 < 2 * counts[1] < counts[0]
