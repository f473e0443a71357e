"""Lines that wait, or would: each is named, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.observe.device_waits import RealWaits, Wait, WouldWait

MODEL = nn.Linear(3, 3)
HERE = torch.empty(0).device  # where a task was told to compute
NAME = str(HERE)
HOST = torch.device("cpu")
HOST_BY_NAME: str = "cpu"
EITHER = torch.device("cpu")
if torch.cuda.is_available():
    EITHER = torch.device("cuda")


@contextmanager
def watched(waits: Any) -> Iterator[None]:
    waits.start()
    try:
        yield
    finally:
        waits.stop()


def found(call: Callable[[Tensor], Any]) -> list[Wait]:
    """Return what is found in a call that is given a batch."""
    waits = WouldWait(MODEL, lambda file: file == __file__)
    batch = torch.arange(6.0).reshape(2, 3)
    with watched(waits):
        (batch,) = waits.batch((batch,))
        call(batch)
        waits.update()
    return waits.table()


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("item", lambda x: x.sum().item()), ("item", lambda x: float(MODEL(x).mean().detach())),
        ("item", lambda x: bool(x.any())),
        ("item", lambda x: x[x.argmax() % 2]), ("item", lambda x: f"{x.sum():.3f}"), ("tolist", lambda x: x.tolist()),
        ("copy_ to the host", lambda x: torch.empty(2, 3).copy_(x)), ("to", lambda x: x.to(torch.zeros(1))),
        ("cpu", lambda x: x.cpu()), ("to", lambda x: x.to("cpu")),
        ("to", lambda x: x.to(torch.device("cpu"))), ("to", lambda x: (x + 1).to(device=torch.device("cpu")).sum()),
        ("to", lambda x: x.to(HOST)), ("to", lambda x: x.to(device=HOST_BY_NAME)),
        ("numpy", lambda x: (x + 1).numpy()),
        ("nonzero", lambda x: x.nonzero()), ("nonzero", lambda x: torch.where(x > 1)),
        ("indexing by a mask", lambda x: x[x > 1]), ("masked_select", lambda x: x.masked_select(x > 1)),
        ("unique", lambda x: x.unique()), ("equal", lambda x: torch.equal(x, x)),
        ("tensor of numbers on the device", lambda x: torch.tensor([1.0, 2.0], device=x.device)),
        ("item", lambda x: torch.zeros(3, device=x.device).sum().item()),
        ("linalg", lambda x: torch.linalg.inv(x @ x.T)),
        ("item", lambda x: torch.nn.functional.one_hot(x.long())),
    ],
)  # fmt: skip
def test_a_call_that_would_wait_is_found(what: str, call: Callable[[Tensor], Any]) -> None:
    waits = found(call)
    assert {wait.what for wait in waits} == {what}
    assert all(wait.in_task and "test_device_waits.py:" in wait.place for wait in waits)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.one_hot(x.long(), 9),
        lambda x: torch.empty(2, 3).copy_(x, non_blocking=True), lambda x: torch.empty_like(x).copy_(x),
        lambda x: torch.empty(2, 3).copy_(x, non_blocking=True).tolist(), lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: torch.ones(2).copy_(torch.zeros(2)), lambda x: torch.ones(3, device=x.device).copy_(x[0]),
        lambda x: torch.rand(()).item(), lambda x: torch.tensor([1, 2]).tolist(),
        lambda x: x.to(x.device), lambda x: x.to(MODEL.weight.device), lambda x: x.to(device=HERE),
        lambda x: x.to(NAME), lambda x: x.to(EITHER), lambda x: x.to(device=torch.device(NAME)),
        lambda x: torch.arange(3)[torch.ones(3) > 0],
        lambda x: MODEL(x).sum().backward(), lambda x: x.masked_fill(x > 1, 0.0),
        lambda x: x.clone().__setitem__(x > 1, 0.0),
        lambda x: x[torch.tensor([0, 1])], lambda x: len(x) + x.shape[0] + x.numel(), lambda x: x.to(torch.float64),
    ],
)  # fmt: skip
def test_what_waits_for_nothing_is_not_found(call: Callable[[Tensor], Any]) -> None:
    assert found(call) == []


def test_a_batch_that_is_a_view_of_the_data_set_makes_no_wait_of_what_the_data_set_reads() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    waits = WouldWait(MODEL, lambda file: file == __file__)
    with watched(waits):
        (batch,) = waits.batch((rows[:1],))
        rows.sum().item()
        assert waits.table() == []
        batch.sum().item()
    assert len(waits.lines()) == 1


def test_what_was_fetched_is_not_fetched_again() -> None:
    def call(x: Tensor) -> None:
        x.cpu().tolist()
        x.sum().item()

    assert [(wait.what, wait.per_update) for wait in found(call)] == [("cpu", 1.0), ("item", 1.0)]


def test_a_line_in_a_backward_pass_of_the_task_is_found_and_one_of_torch_has_the_name_of_its_node() -> None:
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * gradients[0].sum().item()

    waits = found(lambda x: Asks.apply(MODEL(x)).sum().backward())
    assert [(wait.place.partition(" in ")[2], wait.what) for wait in waits] == [("backward", "item")]


def test_an_evaluation_may_wait() -> None:
    MODEL.eval()
    try:
        assert found(lambda x: x.sum().item()) == []
    finally:
        MODEL.train()


def test_what_torch_warns_of_on_cuda_is_named_and_other_warnings_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = RealWaits(MODEL, lambda file: file == __file__)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with watched(waits):
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
                warnings.warn("mind the gap", stacklevel=1)
                waits.update()
    (wait,) = waits.table()
    assert (wait.per_update, wait.in_task) == (1.0, True)
    assert "test_what_torch_warns_of" in wait.place
    assert {str(other.message) for other in others} == {"mind the gap"}
    assert modes == ["warn", 0]


def test_what_torch_tells_of_after_a_backward_pass_is_no_line_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits = RealWaits(MODEL, lambda file: False)
    told = partial(warnings.warn, "called a synchronizing CUDA operation (Triggered internally at ...)")

    def hold_back(*_: Any) -> None:  # as the engine does with what its nodes are warned of
        torch.autograd.Variable._execution_engine.queue_callback(told)

    loss = MODEL(torch.ones(2, 3)).sum()
    loss.grad_fn.register_prehook(hold_back)
    with watched(waits):
        loss.backward()
        told()  # beside it the caller is named
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)  # let through it were an error
        waits.update()
    places = [wait.place for wait in waits.table()]
    assert len(places) == 2
    assert sum(place.endswith("backward pass") for place in places) == 1
