"""Nested batches are mapped, compared and measured by their tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from runner.base.batch import BatchSamples, MicroBatch, are_equal, copy_batch, first_shape, map_tensors


class Pair(NamedTuple):
    x: Any
    y: Any


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_all_tensors_are_mapped_and_other_values_unchanged() -> None:
    batch = {"a": [tensor(1), (tensor(2), "text", None)], "b": Pair(tensor(3), 4)}
    result = map_tensors(lambda one: float(one) * 10, batch)
    assert result == {"a": [10.0, (20.0, "text", None)], "b": Pair(30.0, 4)}
    assert isinstance(result["b"], Pair)


def test_containers_keep_their_types() -> None:
    """Only named tuples are constructed with one argument per item. A class with `_fields` need not be a tuple."""

    class Kept(list[Any]):
        _fields = ("x",)

    class Row(tuple[Any, ...]):
        pass

    for batch in (Row((tensor(1), 2)), Kept([tensor(1), 2]), Kept(), torch.Size([3, 4])):
        result = map_tensors(float, batch)
        assert type(result) is type(batch)
        assert list(result) == [float(item) for item in batch]
    other = SimpleNamespace(_fields=("x",), x=tensor(1))
    assert map_tensors(float, other) is other


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (tensor(1, 2), tensor(1, 2), True),
        (tensor(1, 2), tensor(1, 3), False),
        (tensor(1, math.nan), tensor(1, math.nan), True),
        (tensor(1, math.nan), tensor(math.nan, 1), False),
        (tensor(1, math.nan), tensor(1, 2), False),
        (tensor(1), tensor(1, 1), False),  # these tensors would broadcast
        (tensor(1, 2), tensor(1, 2).reshape(2, 1), False),
        ({"x": tensor(1), "y": tensor(2)}, {"x": tensor(1), "y": tensor(2)}, True),
        ({"x": tensor(1), "y": tensor(2)}, {"x": tensor(1), "y": tensor(3)}, False),
        ([tensor(1)], [tensor(1), tensor(1)], False),
        (Pair(tensor(1), "a"), Pair(tensor(1), "b"), True),  # values other than tensors are ignored
        ("a", "b", True),
    ],
)
def test_batches_are_equal_if_all_tensors_are_equal(one: Any, other: Any, equal: bool) -> None:
    assert are_equal(one, other) == equal
    assert are_equal(other, one) == equal


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (torch.zeros(2, 3), (2, 3)),
        ((torch.zeros(4), torch.zeros(5)), (4,)),
        ([[torch.zeros(6)]], (6,)),
        ({"x": torch.zeros(7), "y": torch.zeros(8)}, (7,)),
        ({"x": [torch.zeros(9, 1)]}, (9, 1)),
        ([], None), ({}, None), (None, None), ("text", None),
    ],
)  # fmt: skip
def test_the_shape_of_a_batch_is_that_of_its_first_tensor(batch: Any, shape: tuple[int, ...] | None) -> None:
    assert first_shape(batch) == shape


class Unread(Sequence[int]):
    """Indices of samples that must not be visited."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> NoReturn:
        raise AssertionError("an index was visited")


class OwnBatch:
    """A custom batch class that defines torch's method for page-locked memory."""

    is_pinned = False

    def pin_memory(self) -> OwnBatch:
        pinned = OwnBatch()
        pinned.is_pinned = True
        return pinned


def test_pinning_a_micro_batch_does_not_visit_sample_indices() -> None:
    """For each value that the pinning thread of the DataLoader visits, it takes the interpreter lock from training."""
    item = MicroBatch({"own": [OwnBatch()]}, last=True, samples=BatchSamples(1, 0, Unread(), Unread()))
    pinned = pin_memory(item)
    assert pinned.batch["own"][0].is_pinned
    assert pinned._replace(batch=None) == item._replace(batch=None)


@pytest.mark.parametrize(
    "other", [torch.ones(2, requires_grad=True) * 2, threading.Lock()], ids=["result of autograd", "lock"]
)
def test_tensors_are_copied_even_if_other_values_cannot_be(other: Any) -> None:
    batch: dict[str, Any] = {"x": torch.ones(3), "more": [other, torch.ones(2)]}
    copied = copy_batch(batch)
    assert are_equal(copied, batch)
    for tensor in (copied["x"], copied["more"][1]):
        tensor.zero_()
    assert batch["x"].sum() == 3
    assert batch["more"][1].sum() == 2
    if isinstance(other, torch.Tensor):
        assert copied["more"][0].requires_grad
        assert copied["more"][0].is_leaf


def test_only_tensors_in_host_memory_are_pinned() -> None:
    on_device = torch.empty(2, device="meta")  # such as a batch of a loader that decodes on the GPU
    batch = MicroBatch({"x": on_device, "y": [on_device]}, last=True).pin_memory().batch
    assert batch["x"] is on_device
    assert batch["y"][0] is on_device
