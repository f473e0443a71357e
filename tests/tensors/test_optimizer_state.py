"""Optimizer state: changes by a failed step, size, and what an import restores or refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.axes.optimizer import Lion
from runner.base.errors import IncompatibleResume, TaskFault
from runner.tensors.optimizer_state import (
    StepChangeDetector,
    expected_state_bytes,
    export_state,
    import_state,
    state_bytes,
)

Weights = list[tuple[str, nn.Parameter]]


def make_weights(count: int = 2) -> Weights:
    return [(f"layer{number}", nn.Parameter(torch.arange(6.0).view(2, 3) + number)) for number in range(count)]


def make_groups(weights: Weights) -> list[dict[str, Any]]:
    """Return parameter groups like those of the runner: the first weight has a separate one."""
    return [
        {"params": [weight for _, weight in part], "names": [name for name, _ in part]}
        for part in (weights[:1], weights[1:])
        if part
    ]


def give_gradients(weights: Weights, scale: float = 1.0) -> None:
    for number, (_, weight) in enumerate(weights, start=1):
        weight.grad = torch.full_like(weight, scale * number)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda weights: AdamW(make_groups(weights), lr=0.1, foreach=False),
    "adam foreach": lambda weights: Adam(make_groups(weights), lr=0.1, foreach=True),
    "fused adamw": lambda weights: AdamW(make_groups(weights), lr=0.1, fused=True),
    "sgd": lambda weights: SGD(make_groups(weights), lr=0.1, foreach=False),
    "sgd with momentum": lambda weights: SGD(make_groups(weights), lr=0.1, momentum=0.9, foreach=False),
}
OPAQUE: dict[str, Callable[[Any], Optimizer]] = {
    "fused sgd": lambda weights: SGD(make_groups(weights), lr=0.1, fused=True),
    "lion": lambda weights: Lion(
        [{**group, "lr": 0.1, "weight_decay": 0.0} for group in make_groups(weights)], betas=(0.9, 0.99)
    ),
    "rmsprop": lambda weights: torch.optim.RMSprop(make_groups(weights), lr=0.1, momentum=0.5, centered=True),
    "plain rmsprop": lambda weights: torch.optim.RMSprop(make_groups(weights), lr=0.1),
    "adafactor": lambda weights: torch.optim.Adafactor(make_groups(weights), lr=0.1),
    "nadam": lambda weights: torch.optim.NAdam(make_groups(weights), lr=0.1),
}


# ---------------------------------------------------------------- a failed step


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_fails_before_any_change_leaves_no_state(name: str, num_steps: int) -> None:
    """A step initializes the state of its parameters before it allocates memory for its computation."""
    weights = make_weights()
    optimizer = MAKERS[name](weights)
    detector = StepChangeDetector(optimizer)
    for _ in range(num_steps):
        give_gradients(weights)
        detector.begin()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    detector.begin()
    late = nn.Parameter(torch.ones(2))
    optimizer.state[late] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2)} if "adam" in name else {}
    assert detector.is_unchanged()
    assert late not in optimizer.state
    assert repr(optimizer.state_dict()["state"]) == repr(before)


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_changed_one_parameter_is_detected(name: str, num_steps: int) -> None:
    weights = make_weights()
    optimizer = MAKERS[name](weights)
    detector = StepChangeDetector(optimizer)
    for _ in range(num_steps):
        give_gradients(weights)
        optimizer.step()
    detector.begin()
    optimizer.zero_grad()
    give_gradients(weights[1:])
    optimizer.step()
    assert not detector.is_unchanged()


def test_an_incremented_counter_of_a_new_state_is_detected() -> None:
    detector = StepChangeDetector(optimizer := AdamW(make_groups(make_weights())))
    detector.begin()
    for step in (0.0, 1.0):
        optimizer.state[nn.Parameter(torch.ones(2))] = {"step": torch.tensor(step)}
    assert not detector.is_unchanged()


@pytest.mark.parametrize("name", OPAQUE)
def test_failed_steps_without_version_counters_count_as_changes(name: str) -> None:
    detector = StepChangeDetector(OPAQUE[name](make_weights()))
    detector.begin()
    assert not detector.is_unchanged()


# ---------------------------------------------------------------- size


@pytest.mark.parametrize("name", [*MAKERS, *OPAQUE])
def test_the_expected_state_size_equals_the_size_after_a_step(name: str) -> None:
    weights = make_weights(3)
    optimizer = {**MAKERS, **OPAQUE}[name](weights)
    expected = expected_state_bytes(optimizer)
    assert state_bytes(optimizer) == 0
    give_gradients(weights)
    optimizer.step()
    assert state_bytes(optimizer) == expected_state_bytes(optimizer) == expected


class Counting(Optimizer):
    """A custom optimizer. Its state has a table shared by all parameters, a scalar on the host, a number and a copy."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})

    def step(self, closure: Any = None) -> None:
        table = torch.arange(4.0)
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["table"] = table
                state["count"] = torch.tensor(3.0, dtype=torch.float64)
                state["rate"] = 0.5
                state["mean"] = weight.detach().half()


def test_unknown_optimizers_are_expected_to_have_two_tensors_per_parameter() -> None:
    weights = make_weights()
    optimizer = Counting(make_groups(weights))
    assert expected_state_bytes(optimizer) == 2 * 2 * 6 * 4
    optimizer.step()
    actual = 4 * 4 + 2 * 8 + 2 * 6 * 2  # the shared table counts once
    assert state_bytes(optimizer) == expected_state_bytes(optimizer) == actual


class InTwoParts(Tensor):
    """A tensor subclass that stores its first row and the others separately, as quantized tensors store scales."""

    @property
    def first(self) -> Tensor:
        return self.detach().as_subclass(Tensor)[:1]

    @property
    def others(self) -> Tensor:
        return self.detach().as_subclass(Tensor)[1:]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "others"], None


@pytest.mark.parametrize(
    ("make", "num_tensors"), [(lambda weights: Counting(make_groups(weights)), 2), (MAKERS["sgd with momentum"], 1)]
)
def test_all_parts_of_tensor_subclasses_count_in_the_expected_size(
    make: Callable[[Any], Optimizer], num_tensors: int
) -> None:
    weight = nn.Parameter(torch.ones(3, 2).as_subclass(InTwoParts))
    assert expected_state_bytes(make([("layer", weight)])) == num_tensors * 3 * 2 * 4


# ---------------------------------------------------------------- export and import


def export_copy(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, rest = export_state(optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(rest)


@pytest.mark.parametrize("name", [*MAKERS, *OPAQUE])
def test_steps_after_importing_a_state_are_the_same_bit_for_bit(name: str) -> None:
    make = {**MAKERS, **OPAQUE}[name]
    weights = make_weights()
    optimizer = make(weights)
    for scale in (1.0, -0.5):
        give_gradients(weights, scale)
        optimizer.step()
    tensors, rest = export_copy(optimizer)
    others = [(name, nn.Parameter(weight.detach().clone())) for name, weight in weights]
    resumed = make(others)
    give_gradients(others, 7.0)
    resumed.step()  # a state that the import replaces
    for (_, other), (_, weight) in zip(others, weights, strict=True):
        other.data.copy_(weight)
    import_state(resumed, tensors, rest)
    for each, its in ((optimizer, weights), (resumed, others)):
        give_gradients(its, 0.25)
        each.step()
    for (_, other), (_, weight) in zip(others, weights, strict=True):
        assert torch.equal(other, weight)
    assert [[*state] for state in resumed.state.values()] == [[*state] for state in optimizer.state.values()]


class Factors(Optimizer):
    """A custom optimizer with tensors in nested containers, like the factors of Shampoo and SOAP."""

    def __init__(self, weights: Any, extra: Any = None) -> None:
        super().__init__(weights, {})
        self.extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["factors"] = [torch.eye(size) for size in weight.shape]
                    state["roots"] = {"left": [None, torch.ones(weight.shape[0])], "names": ["a"], "none": []}
                if self.extra is not None:
                    state["extra"] = self.extra
                state["step"] += 1
                state["factors"][0] += weight.grad @ weight.grad.T
                state["roots"]["left"][1] += state["factors"][0].sum(1)
                weight.sub_(state["roots"]["left"][1][:, None] * weight.grad, alpha=0.01)


def test_tensors_in_state_containers_are_restored_bit_for_bit() -> None:
    weights, others = make_weights(), make_weights()
    optimizer, resumed = Factors(make_groups(weights)), Factors(make_groups(others))
    give_gradients(weights)
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    import_state(resumed, tensors, json.loads(json.dumps(rest)))
    for (_, other), (_, weight) in zip(others, weights, strict=True):
        other.data.copy_(weight)
        assert resumed.state[other]["roots"]["left"][0] is None
        assert resumed.state[other]["roots"]["names"] == ["a"]
        assert resumed.state[other]["roots"]["none"] == []
        assert resumed.state[other]["step"] == 1
    for each, its in ((optimizer, weights), (resumed, others)):
        give_gradients(its, 0.25)
        each.step()
    for (_, other), (_, weight) in zip(others, weights, strict=True):
        assert torch.equal(other, weight)
        assert torch.equal(resumed.state[other]["factors"][1], optimizer.state[weight]["factors"][1])


def test_tensors_in_state_containers_count_in_the_state_size() -> None:
    optimizer = Factors(make_groups(weights := make_weights()))
    give_gradients(weights)
    optimizer.step()
    rows, columns = weights[0][1].shape
    assert state_bytes(optimizer) == len(weights) * 4 * (rows * rows + columns * columns + rows)


def test_a_tensor_missing_from_a_container_is_reported() -> None:
    optimizer = Factors(make_groups(weights := make_weights()))
    give_gradients(weights)
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    del tensors["layer0.factors.1"]
    with pytest.raises(IncompatibleResume):
        import_state(Factors(make_groups(make_weights())), tensors, rest)


@pytest.mark.parametrize("value", [{1: 2.0}, {3}, [object()]])
def test_a_value_that_a_checkpoint_cannot_store_is_refused(value: Any) -> None:
    optimizer = Factors(make_groups(weights := make_weights()), value)
    give_gradients(weights)
    optimizer.step()
    with pytest.raises(TaskFault):
        export_state(optimizer)


def test_the_state_of_an_unknown_optimizer_is_restored_unchanged() -> None:
    weights = make_weights()
    optimizer = Counting(make_groups(weights))
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    assert len({tensor.data_ptr() for tensor in export_state(optimizer)[0].values()}) == len(tensors), (
        "each tensor must have its own memory"
    )
    assert export_state(optimizer)[0]["layer0.table"] is not optimizer.state[weights[0][1]]["table"]
    assert export_state(optimizer)[0]["layer0.mean"].data_ptr() == optimizer.state[weights[0][1]]["mean"].data_ptr()
    resumed = Counting(make_groups(others := make_weights()))
    import_state(resumed, tensors, rest)
    for (_, one), (_, other) in zip(weights, others, strict=True):
        expected, found = optimizer.state[one], resumed.state[other]
        assert found.keys() == expected.keys()
        assert found["rate"] == 0.5
        for key in ("table", "count", "mean"):
            assert torch.equal(found[key], expected[key])
            assert found[key].dtype == expected[key].dtype
            assert not found[key].requires_grad


class WithSharedState(Optimizer):
    """An optimizer with state that belongs to no parameter, like the step count of MADGRAD, partly from the start."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})
        self.state: Any
        self.state["k"] = torch.tensor([0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["shared"] or {"gains": [torch.ones(3)], "rate": 1.0}
        self.state["shared"] = shared
        shared["gains"][0] *= 0.8
        shared["rate"] *= 0.5
        self.state["k"] += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=float(shared["gains"][0][0]) * shared["rate"] / int(self.state["k"]))


def test_state_that_belongs_to_no_parameter_is_restored() -> None:
    weights, others = make_weights(), make_weights()
    optimizer, resumed = WithSharedState(make_groups(weights)), WithSharedState(make_groups(others))
    give_gradients(weights)
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    import_state(resumed, tensors, json.loads(json.dumps(rest)))
    for (_, one), (_, other) in zip(weights, others, strict=True):
        other.data.copy_(one.data)
    for each, its in ((optimizer, weights), (resumed, others)):
        give_gradients(its, 0.25)
        each.step()
    assert resumed.state["k"].dtype == torch.int64
    assert all(torch.equal(other, one) for (_, one), (_, other) in zip(weights, others, strict=True))


def test_a_missing_tensor_of_shared_state_is_reported() -> None:
    optimizer = WithSharedState(make_groups(weights := make_weights()))
    give_gradients(weights)
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    del tensors["<state>.shared.gains.0"]
    with pytest.raises(IncompatibleResume):
        import_state(WithSharedState(make_groups(make_weights())), tensors, rest)


def test_state_from_the_constructor_is_kept_if_a_checkpoint_lacks_it() -> None:
    optimizer = WithSharedState(make_groups(make_weights()))
    rest = {"optimizer": export_state(optimizer)[1]["optimizer"], "numbers": {}}
    import_state(optimizer, {}, rest)
    assert optimizer.state["k"].tolist() == [0]


def test_state_under_an_unsupported_key_is_refused() -> None:
    optimizer = WithSharedState(make_groups(make_weights()))
    optimizer.state[3] = {"gain": 1.0}
    with pytest.raises(TaskFault):
        export_state(optimizer)


def test_parameters_without_state_have_none_after_an_import() -> None:
    weights = make_weights(3)
    optimizer = AdamW(make_groups(weights))
    give_gradients(weights[1:2])
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    assert {name.partition(".")[0] for name in tensors} == {"layer1"}
    others = make_weights(3)
    resumed = AdamW(make_groups(others))
    import_state(resumed, tensors, rest)
    assert list(resumed.state) == [others[1][1]]


def rename(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    tensors["other.step"] = tensors.pop("layer1.step")


def drop(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    del tensors["layer0.exp_avg"]


def cut(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    tensors["layer1.exp_avg"] = tensors["layer1.exp_avg"][:1]


def widen(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    tensors["layer1.exp_avg"] = tensors["layer1.exp_avg"].double()


def add_number(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    rest["numbers"]["layer0.rate"] = 1.0


def change_kind(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    rest["optimizer"] = "torch.Adam"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rename, "layer1.step"), (drop, "layer0.exp_avg"), (cut, "(1, 3)"), (widen, "float64"),
        (add_number, "layer0.rate"), (change_kind, "torch.Adam,"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_mismatched_state_is_refused_and_changes_nothing(change: Callable[..., None], named: str) -> None:
    weights = make_weights()
    optimizer = AdamW(make_groups(weights))
    give_gradients(weights)
    optimizer.step()
    tensors, rest = export_copy(optimizer)
    change(tensors, rest)
    before = repr(optimizer.state_dict()["state"])
    with pytest.raises(IncompatibleResume) as caught:
        import_state(optimizer, tensors, rest)
    assert named in str(caught.value)
    assert repr(optimizer.state_dict()["state"]) == before


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*MAKERS, *OPAQUE])
def test_imported_state_has_the_types_of_state_created_by_torch(name: str, default: torch.dtype) -> None:
    make = {**MAKERS, **OPAQUE}[name]
    torch.set_default_dtype(default)
    try:
        weights = make_weights()
        optimizer = make(weights)
        give_gradients(weights)
        optimizer.step()
        tensors, rest = export_copy(optimizer)
        resumed = make(others := make_weights())
        import_state(resumed, tensors, rest)
        for (_, one), (_, other) in zip(weights, others, strict=True):
            for key, value in optimizer.state[one].items():
                found = resumed.state[other][key]
                if isinstance(value, Tensor):
                    assert (found.dtype, found.device, found.shape) == (value.dtype, value.device, value.shape), key
                    assert not found.requires_grad
    finally:
        torch.set_default_dtype(torch.float32)
