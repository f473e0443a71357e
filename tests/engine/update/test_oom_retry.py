"""State that an interrupted update changed is restored or reported; other updates are not affected."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runner.axes.precision import NotFinite, Precision, fp16
from runner.base.accelerator import Accelerator
from runner.base.errors import DataError
from runner.base.oom_errors import OomCause, find_oom_cause
from runner.base.text import RemoteError, describe_exception
from runner.distributed.parallel import Discarded
from runner.distributed.world import World
from runner.engine.update import oom_retry
from runner.engine.update.loop import StepInfo
from runner.engine.update.oom_retry import OomRetry, UpdateSnapshot

CPU = torch.device("cpu")


class Model(nn.Module):
    """A weight, a batch norm, a buffer that does not change by itself, and buffers that a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(200.0))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("constant", torch.arange(4.0))


def snapshot_at(
    change: Callable[[Model], object], *, update: int, since: int = 0, model: Model | None = None
) -> UpdateSnapshot:
    """Return the snapshot of update `update` (from 0); `change` is applied in each update from `since` on."""
    model = model or Model()
    result = UpdateSnapshot(model, CPU)
    for number in range(update + 1):
        result.begin()
        if number >= since:
            change(model)
        if number < update:
            result.check_weights()
            with torch.no_grad():
                model.weight -= 0.5  # the step of the optimizer
            result.finish()
    return result


def replace(model: Model) -> None:
    model.constant = model.constant + 1


def grow(model: Model) -> None:
    model.constant = torch.zeros(len(model.constant) + 1)


def add_one(model: Model) -> None:
    if not hasattr(model, "late"):
        model.register_buffer("late", torch.zeros(2))
    model.late.add_(1)


def drop(model: Model) -> None:
    model.constant = None


def write_data(model: Model) -> None:
    model.weight.data.mul_(0.9)


def assign_data(model: Model) -> None:
    model.weight.data = model.weight.data * 0.9


CHANGES: dict[str, Callable[[Model], object]] = {
    "nothing": lambda _: None,
    "statistics that torch does not count": lambda model: model.norm(torch.randn(4, 3)),
    "a buffer in place": lambda model: model.constant.add_(1),
    "a buffer that is replaced": replace,
    "a buffer with NaN": lambda model: model.constant.fill_(float("nan")),
    "generators": lambda _: (torch.rand(1), np.random.random(), random.random()),
}


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.state_dict().items()}


def numpy_generator_state() -> dict[str, Any]:
    """Return the key of numpy's generator and the position in it, which is all that most draws change."""
    state = np.random.get_state(legacy=False)["state"]
    return {"key": state["key"].tolist(), "pos": state["pos"]}


@pytest.mark.parametrize("update", [0, 1, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_state_changed_by_forward_passes_is_restored(name: str, update: int) -> None:
    model = Model()
    result = snapshot_at(CHANGES[name], update=update, model=model)
    result.restore()  # the change of this update
    before, drawn = bits(model), (torch.get_rng_state(), numpy_generator_state(), random.getstate())
    result.begin()
    CHANGES[name](model)
    assert result.restore() == ""
    assert bits(model) == before
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (numpy_generator_state(), random.getstate()) == drawn[1:]


class Device(Accelerator):
    """A device with a generator."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.generator = torch.Generator()

    def generator_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)


@pytest.mark.parametrize("update", [0, 2])
def test_the_generator_of_the_device_is_restored(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(oom_retry, "get_accelerator", lambda _: device)
    found = snapshot_at(lambda _: torch.rand(1, generator=device.generator), update=update)
    assert found.restore() == ""
    before = device.generator.get_state()
    torch.rand(1, generator=device.generator)
    assert found.restore() == ""
    assert torch.equal(device.generator.get_state(), before)


@pytest.mark.parametrize(
    ("change", "update", "since", "message"),
    [
        (lambda model: model.constant.add_(1), 2, 2, "a parameter, or a buffer that the first update did not change"),
        (replace, 2, 2, "a buffer, which the first update did not replace"),
        (grow, 2, 0, "a buffer that was resized or removed"),
        (add_one, 0, 0, "a buffer that did not exist"),
        (add_one, 2, 2, "a buffer that did not exist"),
        (lambda model: nn.init.zeros_(model.weight), 2, 0, "a parameter, or a buffer that the first update did not"),
        (write_data, 0, 0, "a parameter, which the forward"),
        (write_data, 2, 0, "a parameter, which the forward"),
        (assign_data, 2, 0, "a parameter, which the forward"),
        (lambda _: np.random.random(), 2, 2, "numpy's random generator"),
        (lambda _: random.random(), 2, 2, "Python's random generator"),
    ],
)  # fmt: skip
def test_state_that_cannot_be_restored_is_reported(
    change: Callable[[Model], object], update: int, since: int, message: str
) -> None:
    """This includes weights that a momentum encoder updates through `.data`, which torch does not count as changes."""
    assert snapshot_at(change, update=update, since=since).restore().startswith(message)


@pytest.mark.parametrize("change", [replace, grow, add_one, drop, write_data, lambda _: None])
@pytest.mark.parametrize("since", [0, 1, 2])
def test_an_update_without_oom_is_unaffected(change: Callable[[Model], object], since: int) -> None:
    snapshot_at(change, update=4, since=since)


@pytest.fixture
def odd() -> Model:
    """A model with buffers that are difficult to copy."""
    model = Model()
    with torch.inference_mode():
        model.register_buffer("of_inference", torch.ones(3))
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    model.register_buffer("rows", torch.eye(4).to_sparse_csr())
    model.register_buffer("expanded", torch.zeros(1).expand(5))
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))
    model.register_buffer("absent", None)
    return model


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("update", [0, 2])
def test_buffers_of_any_kind_are_restored(odd: Model, update: int) -> None:
    result = snapshot_at(lambda model: model.norm(torch.randn(4, 3)), update=update, model=odd)
    assert result.restore() == ""


def test_earlier_non_finite_values_are_found_after_a_discarded_update() -> None:
    """On a GPU, the values of an update are checked during the next update."""
    precision = Precision(World(CPU))
    precision.checks_immediately = False
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    precision.step(optimizer, torch.tensor(float("nan")), torch.tensor(1.0))
    precision.discard()  # out of memory in the next update
    with pytest.raises(NotFinite):
        precision.step(optimizer, torch.tensor(1.0), torch.tensor(1.0))


def test_the_values_of_a_failed_step_are_discarded() -> None:
    precision = Precision(World(CPU))
    precision.checks_immediately = False
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.step = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        precision.step(optimizer, torch.tensor(float("nan")), torch.tensor(1.0))
    precision.discard()
    assert precision.num_skipped() == 0


# ---------------------------------------------------------------- the retry of an update


class Policy:
    """Records the reductions that the retry requests."""

    def __init__(self) -> None:
        self.reduced: list[tuple[OomCause | None, str]] = []

    def record_usage(self, shortage: OomCause, error: Exception) -> None:
        pass

    def reduce(self, shortage: OomCause | None, obstacle: str) -> None:
        self.reduced.append((shortage, obstacle))

    def report_step_retry(self, shortage: OomCause) -> None:
        pass


STEP = StepInfo(1, None, 0, None, None, ())
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def retry_of(model: nn.Module, precision: Precision, policy: Policy, optimizer: torch.optim.Optimizer) -> OomRetry:
    return OomRetry(model, [*model.parameters()], optimizer, precision, CPU, policy, has_one_rank=True)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(OUT_OF_MEMORY), Discarded()], ids=["this rank", "another"])
def test_each_attempt_starts_from_the_same_state(error: Exception) -> None:
    """No gradients are left, and generators repeat their draws, whichever rank ran out of memory."""
    model, policy, drawn = Model(), Policy(), []
    retry = retry_of(model, Precision(World(CPU)), policy, torch.optim.SGD(model.parameters(), lr=0.1))

    def update() -> StepInfo:
        assert all(parameter.grad is None for parameter in model.parameters())
        drawn.append(torch.rand(1).item())
        (model.weight.sum() * drawn[-1]).backward()
        if len(drawn) < 3:
            raise error
        return STEP

    assert retry.run(update) is STEP
    assert drawn == [drawn[0]] * 3
    causes = [None if shortage is None else shortage.requested_bytes for shortage, _ in policy.reduced]
    assert causes == [None if isinstance(error, Discarded) else 2 << 30] * 2
    assert {obstacle for _, obstacle in policy.reduced} == {""}


def test_gradients_are_unscaled_again_after_a_step_fails_twice() -> None:
    model, policy = nn.Linear(2, 1), Policy()
    optimizer, failures = torch.optim.SGD(model.parameters(), lr=0.1), 2
    precision, apply = fp16(World(CPU), model), optimizer.step
    retry = retry_of(model, precision, policy, optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return apply(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]

    def update() -> StepInfo:
        precision.scale_loss(model(torch.ones(1, 2)).sum()).backward()
        precision.unscale(optimizer)
        retry.apply(lambda: precision.step(optimizer))
        return STEP

    before = model.weight.detach().clone()
    assert retry.run(update) is STEP
    assert len(policy.reduced) == 1
    assert torch.allclose(model.weight, before - 0.1)


def test_memory_in_reference_cycles_is_freed_before_the_next_attempt() -> None:
    model, policy, kept = Model(), Policy(), []
    retry = retry_of(model, Precision(World(CPU)), policy, torch.optim.SGD(model.parameters(), lr=0.1))

    def update() -> StepInfo:
        assert all(reference() is None for reference in kept)
        if kept:
            return STEP
        activations = nn.Module()
        activations.me = [activations]  # type: ignore[assignment]
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    gc.disable()
    try:
        retry.run(update)
    finally:
        gc.enable()


def test_compiled_code_is_freed_before_the_next_attempt() -> None:
    """The code was compiled for larger micro-batches."""
    model, policy, num_compiled = Model(), Policy(), 0
    retry = retry_of(model, Precision(World(CPU)), policy, torch.optim.SGD(model.parameters(), lr=0.1))

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nonlocal num_compiled
        num_compiled += 1
        return module.forward

    @torch.compile(backend=backend)
    def double(values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    attempts = iter([torch.OutOfMemoryError(OUT_OF_MEMORY), None])

    def update() -> StepInfo:
        double(torch.ones(4))
        if error := next(attempts):
            raise error
        return STEP

    retry.run(update)
    assert num_compiled == 2


def test_without_compiled_code_the_compiler_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the reset imports Inductor."""
    model, resets = Model(), []
    retry = retry_of(model, Precision(World(CPU)), Policy(), torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.delitem(torch._dynamo.utils.counters["stats"], "unique_graphs", raising=False)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append("reset"))
    attempts = iter([torch.OutOfMemoryError(OUT_OF_MEMORY), None])

    def update() -> StepInfo:
        if error := next(attempts):
            raise error
        return STEP

    retry.run(update)
    assert not resets


# ---------------------------------------------------------------- recognition of out-of-memory errors


def as_worker_error(error: BaseException) -> RemoteError:
    return RemoteError(describe_exception(error))


def as_sample_error(cause: BaseException) -> DataError:
    error = DataError(f"sample 7 cannot be read: {cause}")
    error.__cause__ = cause
    return error


def numpy_memory_error(nbytes: int) -> BaseException:
    """Return the exception that numpy raises for an array larger than the address space."""
    with pytest.raises(MemoryError) as caught:
        np.empty(nbytes, dtype=np.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), ("device", 2 << 30)),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"), ("device", None)),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ("device", None)),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), ("device", None)),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with NCCL_DEBUG=INFO)"
                      "\nLast error:\nCuda failure 2 'out of memory'"), ("device", None)),
        (RuntimeError("NCCL error in: NCCLUtils.hpp:268\nLast error:\nFailed to CUDA calloc async 4 bytes"),
         ("device", None)),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8192 bytes"),
         ("host", 8192)),
        (MemoryError(), ("host", None)),
        (numpy_memory_error(8 << 46), ("host", 8 << 46)),
        (OSError(12, "Cannot allocate memory"), ("host", None)),
        (as_sample_error(MemoryError()), ("host", None)),
        (as_worker_error(MemoryError()), ("host", None)),
        (as_worker_error(as_sample_error(OSError(12, "Cannot allocate memory"))), ("host", None)),
        (RuntimeError("my cache is out of memory"), None),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: Cannot allocate memory (12)"), None),
        (OSError(28, "No space left on device"), None),
        (as_worker_error(ValueError("CUDA error: out of memory")), None),
        (as_sample_error(ValueError("Unable to allocate a seat")), None),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_out_of_memory_errors_are_recognized(error: BaseException, wanted: tuple[str, int | None] | None) -> None:
    result = find_oom_cause(error)
    assert (result and (result.side, result.requested_bytes)) == wanted


@pytest.mark.parametrize("wrapped", [lambda error: error, as_worker_error])
def test_the_cause_names_the_sample_that_exceeded_memory(wrapped: Callable[[BaseException], BaseException]) -> None:
    result = find_oom_cause(wrapped(as_sample_error(MemoryError("of 7 EiB"))))
    assert isinstance(result, OomCause)
    assert "sample 7" in result.text
    assert "of 7 EiB" in result.text


def test_errors_of_updates_are_raised_immediately_with_several_ranks() -> None:
    """The other ranks have continued or wait in a collective, so this rank cannot retry alone."""
    model, policy = Model(), Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    retry = OomRetry(model, [*model.parameters()], optimizer, Precision(World(CPU)), CPU, policy, has_one_rank=False)
    planted = torch.OutOfMemoryError(OUT_OF_MEMORY)

    def update() -> StepInfo:
        raise planted

    with pytest.raises(torch.OutOfMemoryError) as caught:
        retry.run(update)
    assert caught.value is planted
    assert policy.reduced == []


@pytest.mark.parametrize(
    ("error", "changes"),
    [(ValueError("another error"), False), (torch.OutOfMemoryError(OUT_OF_MEMORY), True)],
    ids=["not memory", "weights changed"],
)
def test_a_step_is_not_repeated_after_other_errors_or_changed_weights(error: Exception, changes: bool) -> None:
    model, policy, calls = Model(), Policy(), []
    retry = retry_of(model, Precision(World(CPU)), policy, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        calls.append(error)
        if changes:
            with torch.no_grad():
                model.weight.mul_(2)
        raise error

    def update() -> StepInfo:
        retry.apply(step)
        return STEP

    retry.snapshot.begin()
    with pytest.raises(type(error)):
        retry.apply(step)
    assert calls == [error]
