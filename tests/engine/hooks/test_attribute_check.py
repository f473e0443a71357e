"""Attributes that a forward pass changes are state if they affect the loss, as are parameters outside the model."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runner.base.errors import TaskFault
from runner.config.request import Request
from runner.distributed.world import World
from runner.engine.hooks.attribute_check import AttributeCheck
from runner.engine.opening import open_phase

TASK = Path(__file__).parents[1] / "task_that_keeps_attributes.py"


class Checked:
    """A phase whose evaluations are checked. The loss depends on the attribute `kept` of the task."""

    def __init__(self, phase: Any) -> None:
        self.phase, self.task = phase, phase.parts.task
        self.num_losses = 0
        self.hook = AttributeCheck(phase)

    def find_change(self, change: Callable[[Any], Any], read: Callable[[Any], float]) -> str | None:
        """Return the message about a change in an evaluation, or None."""

        def count(task: Any) -> float:
            self.num_losses += 1
            return read(task)

        self.task.read = count
        self.hook.begin()
        try:
            with self.hook.during_evaluation():
                change(self.task)
        except TaskFault as fault:
            return str(fault)
        return None


@contextmanager
def opened(folder: Path) -> Iterator[Any]:
    """Yield the phase of a run whose updates have one micro-batch."""
    settings = ("updates=9", "global_batch_size=4", "device=cpu", "run=small", "monitor=off", "checkpoint=off",
                f"output_root={folder}", "backend.threads=1")  # fmt: skip
    with open_phase(Request(settings, TASK)) as phase:
        yield phase


@pytest.fixture(scope="module")
def phase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("attributes")) as one:
        yield one


@pytest.fixture
def checked(phase: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checked]:
    result = Checked(phase)
    batch = phase.loader.fetcher[next(phase.order.micro_batches(0))]
    monkeypatch.setattr(phase.feed, "peek", lambda: batch)
    before = dict(vars(result.task))
    yield result
    vars(result.task).clear()
    vars(result.task).update(before)
    phase.work.loss.first_call_context = nullcontext


def first(task: Any) -> float:
    """Return the first of the kept numbers."""
    return float(next(iter(task.kept)))


def replace(value: Any) -> Callable[[Any], None]:
    return lambda task: setattr(task, "kept", value)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], float]]] = {
    "a counter": (1, replace(2), lambda task: task.kept),
    "another type": (1, replace(1.5), lambda task: task.kept),
    "none to a number": (None, replace(3.0), lambda task: task.kept or 0.0),
    "a text": ("a", replace("ab"), lambda task: len(task.kept)),
    "a tensor in place": (torch.zeros(2), lambda task: task.kept.add_(1), first),
    "another tensor": (torch.zeros(2), replace(torch.ones(2)), first),
    "an array in place": (np.zeros(2), lambda task: task.kept.__iadd__(1), first),
    "another array": (np.zeros(2), replace(np.ones(2)), first),
    "an element of a list": ([0.0, 5.0], lambda task: task.kept.__setitem__(0, 1.5), first),
    "the length of a list": ([0.0], lambda task: task.kept.append(1.5), lambda task: len(task.kept)),
    "a full deque": (collections.deque([0.0, 1.5], 2), lambda task: task.kept.append(3.0), first),
    "another tuple": ((0.0,), replace((1.5,)), first),
    "a value of a dict": ({"a": 0.5, "b": 0.5}, lambda task: task.kept.update(a=1.5), lambda task: task.kept["a"]),
    "a key of a dict": ({"a": 0.5}, lambda task: task.kept.update(b=0.5), lambda task: len(task.kept)),
    "a set": ({1}, lambda task: task.kept.add(2), lambda task: len(task.kept)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_affects_the_loss_is_rejected_but_not_undone(name: str, checked: Checked) -> None:
    kept, change, read = CHANGES[name]
    checked.task.kept = kept
    found = checked.find_change(change, read)
    assert found is not None
    assert "task.kept" in found
    assert 'self.model.register_buffer("kept"' in found
    now = checked.task.kept
    checked.task.kept = kept
    change(checked.task)
    assert type(now) is type(checked.task.kept)
    checked.task.kept = now
    assert read(checked.task) != 0.0


SAME: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "an array": (np.zeros(2), lambda task: task.kept.__iadd__(0)),
    "an equal list": ([0.0, 5.0], lambda task: setattr(task, "kept", list(task.kept))),
    "an equal dict": ({"a": 5.0}, lambda task: setattr(task, "kept", dict(task.kept))),
    "an equal set": ({5}, lambda task: setattr(task, "kept", set(task.kept))),
    "an equal text": ("ab", lambda task: setattr(task, "kept", "".join(["a", "b"]))),
    "a tensor": (torch.zeros(2), lambda task: None),
    "an unchecked type": (object(), replace(object())),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_attribute_with_equal_content_needs_no_forward_pass(name: str, checked: Checked) -> None:
    checked.task.kept, change = SAME[name]
    assert checked.find_change(change, lambda task: 1.0) is None
    assert checked.num_losses == 0


def test_a_memory_map_is_not_read(checked: Checked, tmp_path: Path) -> None:
    """A memory-mapped array may be larger than memory."""
    checked.task.kept = np.memmap(tmp_path / "rows.bin", mode="w+", shape=(2,))
    assert checked.find_change(lambda task: task.kept.__iadd__(1), first) is None
    assert checked.num_losses == 0


def test_a_tensor_without_versions_is_compared_by_identity(checked: Checked) -> None:
    with torch.inference_mode():
        checked.task.kept = torch.zeros(1)
    assert checked.find_change(lambda task: None, first) is None


def rename(task: Any) -> None:
    task.new = task.old
    del task.old


def test_added_and_removed_attributes_are_state(checked: Checked) -> None:
    checked.task.old = 1.0
    found = checked.find_change(rename, lambda task: len(vars(task)))
    assert found is None  # the loss depends on the number of attributes, which stays the same
    checked = Checked(checked.phase)
    checked.task.old = 1.0
    found = checked.find_change(lambda task: delattr(task, "old"), lambda task: float(hasattr(task, "old")))
    assert found is not None
    assert "task.old" in found
    assert not hasattr(checked.task, "old")
    checked = Checked(checked.phase)
    found = checked.find_change(lambda task: setattr(task, "late", 1.0), lambda task: float(hasattr(task, "late")))
    assert found is not None
    assert "task.late" in found
    assert checked.task.late == 1.0


@pytest.mark.parametrize(("difference", "is_state"), [(4.0, False), (-4.0, False), (4.5, True), (-4.5, True)])
@pytest.mark.parametrize("noise", [1.0, -1.0])
def test_a_difference_up_to_four_times_the_noise_is_ignored(
    noise: float, difference: float, is_state: bool, checked: Checked
) -> None:
    losses = chain([100.0, 100.0 + noise], repeat(100.0 + difference))
    checked.task.kept = 0
    assert (checked.find_change(replace(1), lambda task: next(losses)) is not None) == is_state


@pytest.mark.parametrize("old", [math.nan, math.inf, None])
def test_a_failing_or_nonfinite_loss_with_the_old_value_is_inconclusive(old: float | None, checked: Checked) -> None:
    checked.task.kept = old
    assert checked.find_change(replace(2.5), lambda task: task.kept + 0.0) is None
    assert checked.task.kept == 2.5


def change_parts(task: Any) -> None:
    for name in [name for name in vars(task) if name.startswith("part")]:
        setattr(task, name, 2)


@pytest.mark.parametrize(
    ("num_parts", "read", "named"),
    [
        (3, lambda task: task.part1, [1]),  # the loss uses one of them
        (3, lambda task: task.part0 + 10 * task.part2, [0, 2]),
        (
            2,
            lambda task: float(task.part0 == 1 and task.part1 == 1),
            [0, 1],
        ),  # only both together
        (8, lambda task: task.part7, [7]),
        (9, lambda task: task.part8, list(range(9))),  # too many to try one by one
    ],
)
def test_the_message_names_the_attributes_that_affect_the_loss(
    num_parts: int, read: Callable[[Any], float], named: list[int], checked: Checked
) -> None:
    for number in range(num_parts):
        setattr(checked.task, f"part{number}", 1)
    found = checked.find_change(change_parts, read)
    assert found is not None
    listed = found.partition(": ")[2].partition("\n")[0]
    if len(named) < 4:
        assert [number for number in range(num_parts) if f"task.part{number}" in listed] == named
    assert "task.part0" in listed or 0 not in named


@pytest.mark.parametrize(("module", "name"), [("", "kept"), ("0", "0.kept")])
def test_an_attribute_of_a_module_is_named_with_the_module(module: str, name: str, checked: Checked) -> None:
    holder: Any = checked.task.model.get_submodule(module)
    holder.kept = 1
    try:
        found = checked.find_change(lambda task: setattr(holder, "kept", 2), lambda task: holder.kept)
    finally:
        del holder.kept
    assert found is not None
    assert f": {name}" in found
    assert 'self.register_buffer("kept"' in found
    assert "self.model.register_buffer" not in found


class Frozen(dict[str, int]):
    def __copy__(self) -> None:
        raise TypeError("it is frozen")


@pytest.mark.parametrize(
    "value",
    [np.array([np.zeros(3), np.zeros(4)], dtype=object), torch.eye(3).to_sparse(), Frozen(a=1), np.array([math.nan])],
    ids=["array of arrays", "sparse", "no copy", "NaN"],
)
def test_an_attribute_that_cannot_be_compared_is_not_reported(value: Any, checked: Checked) -> None:
    checked.task.kept = value
    assert checked.find_change(lambda task: None, lambda task: len(task.kept) * 1.0) is None


def test_only_the_first_evaluation_is_checked(checked: Checked) -> None:
    checked.task.kept = 0
    assert checked.find_change(lambda task: None, lambda task: task.kept) is None
    assert checked.find_change(replace(1), lambda task: task.kept) is None


@pytest.mark.parametrize("off", ["update", "is_lockstep", "places_model"])
def test_a_resumed_run_and_a_model_with_collectives_are_not_checked(
    off: str, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = checked.phase
    monkeypatch.setattr(phase.position if off == "update" else phase.parts.parallel, off, 1)
    checked.task.kept = 0
    assert checked.find_change(replace(1), lambda task: task.kept) is None


@pytest.mark.parametrize(
    ("is_here", "is_there", "has_samples", "is_found"),
    [(True, False, True, True), (False, True, True, True), (True, False, False, False), (False, True, False, True)],
)
def test_a_change_found_on_one_rank_ends_all_ranks(
    is_here: bool,
    is_there: bool,
    has_samples: bool,
    is_found: bool,
    checked: Checked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank without a change, or without samples, joins the collectives and finds nothing itself."""
    # from the other rank: changed parameters, whether attributes changed, and those that affect the loss
    there = iter([[], is_there, [["task", "there"]] if is_there else []])
    monkeypatch.setattr(World, "gather", lambda _, value: [value, next(there)])
    micro_batch = checked.phase.feed.peek()
    monkeypatch.setattr(checked.phase.feed, "peek", lambda: micro_batch._replace(is_counted=has_samples))
    checked.task.kept = 0
    found = checked.find_change(replace(1) if is_here else lambda task: None, lambda task: task.kept)
    assert (found is not None) == is_found
    assert next(there, None) is None
    if found is not None:
        assert ("task.kept" if is_here else "task.there") in found
    assert (checked.num_losses > 0) == (is_here and has_samples)


# ---------------------------------------------------------------- parameters outside the model


def permute(task: Any) -> None:
    with torch.no_grad():
        task.outside.weight.copy_(task.outside.weight.flip(1))  # keeps the norm


def copy_scaled(factor: float) -> Callable[[Any], None]:
    return lambda task: setattr(task.outside.weight, "data", task.outside.weight.data * factor)


EPS = torch.finfo(torch.float32).eps
WRITES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "none": (lambda task: None, False),
    "in place": (permute, True),
    "in place, without a version": (lambda task: task.outside.weight.data.mul_(1 + 4 * EPS), True),
    "a conversion": (lambda task: task.outside.double(), False),
    "in place, in half precision": (lambda task: task.half.weight.data.mul_(2), True),
    "a copy": (copy_scaled(1.0), False),
    "a copy of another value": (copy_scaled(1.5), True),
    "a copy summed in another order": (copy_scaled(1 + 2 * EPS), False),
    "a copy that is slightly different": (copy_scaled(1 + 32 * EPS), True),
    "another module": (lambda task: setattr(task, "another", nn.Linear(4, 1)), False),
    "a removed module": (lambda task: delattr(task, "outside"), False),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_outside_the_model_must_keep_its_values(name: str, checked: Checked) -> None:
    write, is_refused = WRITES[name]
    checked.task.outside = nn.Linear(4, 1).requires_grad_(False)
    nn.init.constant_(checked.task.outside.weight, 0.75)
    checked.task.half = nn.Linear(4, 1, bias=False).bfloat16()
    found = checked.find_change(write, lambda task: 0.0)
    assert (found is not None) == is_refused
    if found is not None:
        owner = "half" if "half" in name else "outside"
        assert f"task.{owner}.weight" in found
        assert f"self.model.{owner} = {owner}" in found


def test_parameters_that_are_nan_count_as_unchanged(checked: Checked) -> None:
    nn.init.constant_(checked.task.outside.weight, math.nan)
    assert checked.find_change(copy_scaled(1.0), lambda task: 0.0) is None


class OfLayer(nn.Parameter):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: OfLayer(torch.ones(4)),
        lambda: nn.Parameter(torch.ones(4, dtype=torch.int8), False),
        lambda: nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), False),
        lambda: nn.Parameter(torch.eye(2).to_sparse()),
    ],
    ids=["a subclass", "int8", "float8", "sparse"],
)
def test_parameters_of_packed_formats_are_not_compared(make: Callable[[], nn.Parameter], checked: Checked) -> None:
    checked.task.outside.packed = make()
    with torch.no_grad():
        assert checked.find_change(lambda task: task.outside.packed.zero_(), lambda task: 0.0) is None


def test_a_submodule_stored_on_the_task_counts_as_part_of_the_model(checked: Checked) -> None:
    checked.task.same = checked.task.model[0]
    with torch.no_grad():
        assert checked.find_change(lambda task: task.same.weight.add_(1), lambda task: 0.0) is None


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize(("at_loss", "has_attribute"), [(1, True), (1, False), (2, True), (2, False), (3, False)])
def test_attributes_are_compared_in_the_first_update_and_parameters_in_the_first_two(
    at_loss: int, has_attribute: bool, tmp_path: Path
) -> None:
    with opened(tmp_path) as phase:
        task, num_losses = phase.parts.task, 0
        task.kept = 0

        def read(task: Any) -> float:
            nonlocal num_losses
            num_losses += 1
            if num_losses == at_loss:
                if has_attribute:
                    task.kept += 1
                else:
                    permute(task)
            return float(task.kept)

        task.read = read
        done = []
        is_refused = at_loss == 1 or (at_loss == 2 and not has_attribute)
        with pytest.raises(TaskFault) if is_refused else nullcontext() as raised:
            done += list(phase.updates())
    assert len(done) == (0 if is_refused else 9)
    if raised is not None:
        assert ("task.kept" if has_attribute else "task.outside.weight") in str(raised.value)
        assert phase.position.update == at_loss


@pytest.mark.parametrize("has_gradient", [True, False])
def test_gradients_of_parameters_outside_the_model_are_reported_once(
    has_gradient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as phase:
        warned: list[str] = []
        monkeypatch.setattr(phase.run.observers.screen, "warn", warned.append)
        phase.parts.task.outside.requires_grad_(has_gradient)
        phase.parts.task.read = lambda task: task.outside.weight.sum()
        list(phase.updates())
    assert ["task.outside.weight" in text for text in warned] == [True] * has_gradient
