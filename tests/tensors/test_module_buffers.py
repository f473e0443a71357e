"""After a forward pass, buffers and frozen parameters are restored to the values that they had before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.tensors import module_buffers
from runner.tensors.module_buffers import TensorVersion, is_writable, overwrite, restore_buffers, restore_forward_state


class Expanded(nn.Module):
    """A module with a buffer that is an expanded view of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("once", torch.zeros(3, 1))
        self.register_buffer("repeated", self.get_buffer("once").expand(2, 3, 4))


class Holder(nn.Module):
    """A module with a persistent and a non-persistent buffer."""

    saved: Tensor | None
    cache: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("saved", torch.arange(4.0))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)


def change_in_place(holder: Holder, name: str) -> None:
    getattr(holder, name).mul_(-2).add_(1)


def change_through_data(holder: Holder, name: str) -> None:
    getattr(holder, name).data[0] = 9.0


def replace(holder: Holder, name: str) -> None:
    setattr(holder, name, getattr(holder, name) * 3 + 1)


def replace_and_change(holder: Holder, name: str) -> None:
    change_in_place(holder, name)
    replace(holder, name)


def remove(holder: Holder, name: str) -> None:
    setattr(holder, name, None)


def resize(holder: Holder, name: str) -> None:
    setattr(holder, name, torch.ones(7))


ALL: list[Callable[[Holder, str], None]] = [
    change_in_place, change_through_data, replace, replace_and_change, remove, resize,
]  # fmt: skip


@pytest.mark.parametrize("change", ALL, ids=lambda change: change.__name__)
def test_a_persistent_buffer_is_restored_in_the_same_object(change: Callable[[Holder, str], None]) -> None:
    holder = Holder()
    before = holder.saved
    with restore_buffers([nn.Linear(2, 2), holder]):
        change(holder, "saved")
    assert holder.saved is before
    assert holder.saved.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("change", ALL[:4], ids=lambda change: change.__name__)
def test_a_non_persistent_buffer_that_keeps_its_shape_is_restored(change: Callable[[Holder, str], None]) -> None:
    holder = Holder()
    before = holder.cache
    with restore_buffers([holder]):
        change(holder, "cache")
    assert holder.cache is before
    assert holder.cache.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("change", "shape"), [(remove, None), (resize, (7,))])
def test_a_resized_non_persistent_buffer_is_not_restored(
    change: Callable[[Holder, str], None], shape: tuple[int] | None
) -> None:
    """The module may have recorded the new size elsewhere."""
    holder = Holder()
    with restore_buffers([holder]):
        change(holder, "cache")
    assert (None if holder.cache is None else tuple(holder.cache.shape)) == shape


def test_buffers_are_restored_after_an_error() -> None:
    holder = Holder()
    with pytest.raises(ValueError, match="mine"), restore_buffers([holder]):
        change_in_place(holder, "saved")
        raise ValueError("mine")
    assert holder.saved is not None
    assert holder.saved.tolist() == [0, 1, 2, 3]


def test_unchanged_buffers_are_not_written_to() -> None:
    """A write would increase the version counter, and autograd would refuse a later backward pass."""
    holder, weight = Holder(), torch.ones(4, requires_grad=True)
    assert holder.saved is not None
    loss = (weight * holder.saved).sum()
    with restore_buffers([holder]):
        pass
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, holder.saved)


def make_expanded() -> tuple[Tensor, Tensor]:
    base = torch.ones(1, 3)
    return base, base.expand(4, 3)


def test_buffers_with_shared_elements_are_skipped_without_an_error() -> None:
    holder, (base, shared) = Holder(), make_expanded()
    holder.saved = shared
    with restore_buffers([holder]):
        base.fill_(5)
    assert holder.saved is shared
    assert holder.saved[3, 2] == 5


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), True), (torch.zeros(2, 3).t(), True), (torch.zeros(()), True), (torch.zeros(0, 3), True),
        (torch.zeros(3).expand(1, 3), True), (make_expanded()[1], False), (torch.zeros(2, 1).expand(2, 2), False),
        (inference_tensor(), False),
    ],
)  # fmt: skip
def test_tensors_with_shared_elements_and_inference_tensors_are_not_writable(tensor: Any, expected: bool) -> None:
    assert is_writable(tensor) is expected


def test_a_buffer_that_is_none_does_not_prevent_restoring_others() -> None:
    holder = Holder()
    holder.register_buffer("absent", None)
    with restore_buffers([holder]):
        change_in_place(holder, "saved")
    assert torch.equal(holder.saved, torch.arange(4.0))  # type: ignore[arg-type]
    assert holder.absent is None


class Teacher(nn.Module):
    """A trained and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.ones(3))
        self.slow = nn.Parameter(torch.arange(3.0), requires_grad=False)


def move_in_place(model: Teacher) -> None:
    model.slow.lerp_(model.fast, 0.5)


def move_through_data(model: Teacher) -> None:
    model.slow.data.mul_(2).add_(1)


def share_memory(model: Teacher) -> None:
    model.slow.data = model.fast.data


@pytest.mark.parametrize("move", [move_in_place, move_through_data, share_memory], ids=lambda move: move.__name__)
def test_a_frozen_parameter_is_restored(move: Callable[[Teacher], None]) -> None:
    model = Teacher()
    slow = model.slow
    with restore_forward_state([model]), torch.no_grad():
        move(model)
    assert model.slow is slow
    assert slow.tolist() == [0, 1, 2]
    assert model.fast.tolist() == [1, 1, 1]
    with torch.no_grad():
        model.fast += 1
    assert slow.tolist() == [0, 1, 2]


def test_the_version_of_a_frozen_parameter_reflects_changes() -> None:
    """Restoring the values neither hides a change nor counts as one."""
    model = Teacher()
    model.constant = nn.Parameter(torch.ones(2), requires_grad=False)
    slow, constant = TensorVersion.of(model.slow), TensorVersion.of(model.constant)
    with restore_forward_state([model]):
        move_in_place(model)
    assert slow.is_changed(model.slow)
    assert not constant.is_changed(model.constant)


def test_frozen_parameters_too_large_to_copy_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Teacher()
    monkeypatch.setattr(module_buffers, "MAX_FROZEN_BYTES", model.slow.nbytes - 1)
    with restore_forward_state([model]):
        pass
    with pytest.raises(TaskFault) as caught, restore_forward_state([model]):
        move_in_place(model)
    assert "slow" in caught.value.problems[0].fix


def test_modified_replaced_and_unversioned_tensors_count_as_changed() -> None:
    tensor = torch.zeros(2)
    version = TensorVersion.of(tensor)
    assert not version.is_changed(tensor)
    assert version.is_changed(torch.zeros(2))
    assert version.is_changed(None)
    tensor.add_(1)
    assert version.is_changed(tensor)
    assert not TensorVersion.of(None).is_changed(None)
    assert TensorVersion.of(None).is_changed(tensor)
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    assert TensorVersion.of(unversioned).is_changed(unversioned)


def test_elements_of_a_buffer_still_share_memory_after_loading() -> None:
    model, once = Expanded(), torch.arange(3.0).view(3, 1)
    Parallel(World(torch.device("cpu"))).load(model, {"once": once, "repeated": once.expand(2, 3, 4).clone()})
    assert torch.equal(model.get_buffer("repeated"), once.expand(2, 3, 4))
    model.get_buffer("once").add_(1)
    assert torch.equal(model.get_buffer("repeated"), (once + 1).expand(2, 3, 4))


def test_different_values_for_shared_elements_are_refused() -> None:
    with pytest.raises(RuntimeError):
        overwrite(Expanded().get_buffer("repeated"), torch.randn(2, 3, 4))
