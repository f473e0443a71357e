"""Parts of a model that was built without memory are allocated with the values that a normal construction gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.distributed.deferred_init import DeferredInit
from runner.distributed.shard_init import DeferredModel

CPU = torch.device("cpu")


class Model(nn.Module):
    """Two layers that share a weight, a frozen weight, a scalar with two names, and a buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.note = "kept"  # type: ignore[assignment]
        self.second.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.same_scale = self.scale
        self.register_buffer("table", torch.rand(3))
        self.register_buffer("same_table", self.table)


def ordinary() -> Model:
    torch.manual_seed(11)
    return Model()


def deferred() -> tuple[Model, DeferredInit]:
    with DeferredInit(0) as recording:
        model = ordinary()
    recording.replace_leaked(model)
    return model, recording


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def check(model: nn.Module, names: list[str]) -> None:
    """Assert that these tensors have their values, and that the others have no memory."""
    expected = values(ordinary())
    for name, tensor in values(model).items():
        assert tensor.is_meta == (name not in names), name
        assert tensor.is_meta or torch.equal(tensor, expected[name]), name


LAYERS = ["first.weight", "first.bias", "second.weight", "second.bias"]


def test_layers_are_allocated_in_place_and_stay_shared() -> None:
    model, recording = deferred()
    weight = model.first.weight
    vars(weight)["note"] = "kept"
    DeferredModel(recording).materialize(model, [model.first], CPU)
    check(model, ["first.weight", "first.bias", "second.weight"])
    assert model.second.weight is model.first.weight is weight
    assert vars(weight)["note"] == "kept"
    DeferredModel(recording).materialize(model, [model.first, model.second], CPU)
    check(model, LAYERS)
    assert [weight.requires_grad for weight in model.second.parameters()] == [True, False]


@pytest.mark.parametrize("loaded", ["first.weight", "second.weight"])
def test_weights_from_a_checkpoint_are_allocated_without_values(loaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recording = deferred()
    computed: list[Tensor] = []
    compute = recording.value

    def value(tensor: Tensor) -> Tensor:
        computed.append(tensor)
        return compute(tensor)

    monkeypatch.setattr(recording, "value", value)
    DeferredModel(recording, {loaded}).materialize(model, [model.first], CPU)
    assert not model.first.weight.is_meta
    assert len(computed) == 1
    assert torch.equal(model.first.bias, ordinary().first.bias)


def test_layers_temporarily_get_other_weights_of_equal_value() -> None:
    model, recording = deferred()
    before = dict(model.named_parameters(remove_duplicate=False))
    with DeferredModel(recording).materialized(model.second):
        check(model, ["second.weight", "second.bias"])
        assert [weight.requires_grad for weight in model.second.parameters()] == [True, False]
        assert model.first.weight is before["first.weight"]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)


def test_buffers_and_scalars_are_computed_before_sharding() -> None:
    model, recording = deferred()
    model.register_buffer("here", torch.ones(2))
    shards = DeferredModel(recording).prepare(model, CPU)
    expected = values(ordinary())
    for name in ("scale", "same_scale", "table", "same_table"):
        assert torch.equal(values(model)[name], expected[name])
    assert model.scale is model.same_scale
    assert not model.scale.requires_grad
    assert model.table is model.same_table
    assert all(values(model)[name].is_meta for name in LAYERS)
    assert shards.refs.keys() == {*LAYERS}
    assert shards.refs["first.weight"] == shards.refs["second.weight"]
    for name in LAYERS:
        assert torch.equal(recording.value(shards.refs[name]), expected[name])
