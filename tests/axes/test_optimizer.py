"""The kernel of an optimizer does not change the update, and its state survives a checkpoint bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.axes.optimizer import (
    OPTIMIZERS,
    adam,
    adamw,
    adamw8bit,
    build_optimizer,
    check_library,
    set_learning_rate,
    sgd,
)
from runner.base.errors import ConfigError, IncompatibleResume, MissingPackage
from runner.base.values import Range
from runner.config.module_names import suggest_module
from runner.tensors.optimizer_state import expected_state_bytes, export_state, import_state, state_bytes
from tests.forkserver import ForkServer
from tests.operations import Operations
from tests.rounding import allowed

Make = Callable[[nn.Module], Optimizer]


def factory(function: Callable[..., Optimizer], **options: Any) -> Make:
    return lambda model: function(list(model.named_parameters()), **options)


EVERY_RULE = {
    "adamw fused": factory(adamw, kernel="fused"),
    "adamw foreach": factory(adamw, kernel="foreach"),
    "adamw for-loop": factory(adamw, kernel="for-loop"),
    "adam": factory(adam, lr_scales={"0": 0.5}),
    "sgd": factory(sgd),
    "sgd nesterov for-loop": factory(sgd, nesterov=True, kernel="for-loop"),
    "sgd without momentum": factory(sgd, momentum=0.0),
    "nadam": factory(OPTIMIZERS["nadam"], lr_scales={"0": 0.5}),
    "rmsprop": factory(OPTIMIZERS["rmsprop"]),
    "rmsprop centered": factory(OPTIMIZERS["rmsprop"], momentum=0.9, centered=True),
    "adafactor": factory(OPTIMIZERS["adafactor"]),
    "lion": factory(OPTIMIZERS["lion"], lr_scales={"0": 0.5}),
    "muon": factory(OPTIMIZERS["muon"]),
    "muon but one layer": factory(OPTIMIZERS["muon"], adamw_for=["3"], lr_scales={"0": 0.5}),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, updates: range) -> None:
    """Run updates whose gradients depend only on the update number, so that resumed runs can be compared."""
    size = next(model.parameters()).shape[1]
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        batch = torch.randn(5, size, generator=generator).to(next(model.parameters()).dtype)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# Groups


def test_by_default_only_matrices_have_weight_decay() -> None:
    """Parameters with fewer than two dimensions are not decayed."""
    model = network()
    decay = {
        name: group["weight_decay"]
        for group in factory(adamw, weight_decay=0.3)(model).param_groups
        for name in group["names"]
    }
    assert decay == {name: 0.3 if p.dim() >= 2 else 0.0 for name, p in model.named_parameters()}
    assert [g["weight_decay"] for g in factory(adamw, weight_decay=0.3, decay_1d=True)(model).param_groups] == [0.3]


@pytest.mark.parametrize("make", EVERY_RULE.values(), ids=EVERY_RULE)
def test_a_parameter_without_gradient_is_not_updated(make: Make) -> None:
    model = network()
    optimizer, before = make(model), deepcopy(model.state_dict())
    first = max(optimizer.param_groups, key=lambda group: len(group["params"]))["params"][0]
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    first.grad = None
    optimizer.step()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name, weight in model.named_parameters() if weight is not first}


# Values that differ from the defaults of each option, and the optimizer of torch that takes the same values.
OF_TORCH: dict[str, tuple[dict[str, Any], Callable[..., Optimizer]]] = {
    "adam": ({"betas": (0.7, 0.8), "eps": 0.3}, torch.optim.Adam),
    "adamw": ({"betas": (0.7, 0.8), "eps": 0.3}, torch.optim.AdamW),
    "sgd": ({"momentum": 0.7, "nesterov": True}, torch.optim.SGD),
    "nadam": (
        {"betas": (0.7, 0.8), "eps": 0.3, "momentum_decay": 0.2, "decoupled": True},
        lambda weights, decoupled, **rest: torch.optim.NAdam(weights, decoupled_weight_decay=decoupled, **rest),
    ),
    "rmsprop": ({"alpha": 0.6, "eps": 0.3, "momentum": 0.5, "centered": True}, torch.optim.RMSprop),
    "adafactor": (
        {"beta2_decay": -0.5, "eps": 0.9, "max_update": 1.05},
        lambda weights, eps, max_update, **rest: torch.optim.Adafactor(weights, eps=(None, eps), d=max_update, **rest),
    ),
}


@pytest.mark.parametrize("option", OF_TORCH)
def test_all_settings_are_passed_to_the_torch_optimizer(option: str) -> None:
    specific, rule = OF_TORCH[option]
    options = {"lr": 0.02, "weight_decay": 0.4, **specific}

    def train_model(make: Make) -> nn.Module:
        model = network(torch.float64)
        train(model, make(model), range(4))
        return model

    theirs = train_model(lambda model: rule(model.parameters(), **options))
    tolerance = allowed(torch.float64, 4)
    assert largest_difference(train_model(factory(OPTIMIZERS[option], decay_1d=True, **options)), theirs) <= tolerance
    for left_out in (
        options
    ):  # leaving a setting out must change the result; otherwise, this test could not detect that it is ignored
        rest = {key: value for key, value in options.items() if key != left_out}
        other = train_model(factory(OPTIMIZERS[option], decay_1d=True, **rest))
        assert largest_difference(other, theirs) > tolerance, left_out


def test_the_check_before_a_sweep_reports_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(MissingPackage):
        check_library("schedulefree", {"lr_scales": {"head": 0.5}}, torch.device("cpu"))
    check_library("adamw", {}, torch.device("cpu"))


@pytest.mark.parametrize("option", [name for name in OPTIMIZERS if name != "adamw8bit"])
def test_groups_list_their_parameters_in_order(option: str) -> None:
    if option == "schedulefree":
        pytest.importorskip("schedulefree", reason="the package schedulefree is not installed")
    model = network()
    optimizer = OPTIMIZERS[option](list(model.named_parameters()), lr_scales={"3": 0.1})
    named = dict(model.named_parameters())
    seen = []
    for group in optimizer.param_groups:
        assert [named[name] is parameter for name, parameter in zip(group["names"], group["params"], strict=True)]
        seen += group["names"]
    assert sorted(seen) == sorted(named)


def test_the_longest_prefix_determines_the_lr_scale() -> None:
    """Prefixes consist of complete components of a name."""
    model = nn.ModuleDict({f"b{i}": nn.Linear(2, 2) for i in (1, 10)})
    optimizer = factory(adamw, lr=1.0, lr_scales={"b1": 0.5, "b1.bias": 0.0})(model)
    scales = {name: group["lr_scale"] for group in optimizer.param_groups for name in group["names"]}
    assert scales == {"b1.weight": 0.5, "b1.bias": 0.0, "b10.weight": 1.0, "b10.bias": 1.0}
    assert all(group["lr"] == group["base_lr"] * group["lr_scale"] for group in optimizer.param_groups)


@pytest.mark.parametrize("function", ["adamw", "sgd", "lion"])
def test_an_lr_scale_of_0_keeps_parameters_unchanged(function: str) -> None:
    model = network()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = build_optimizer(function, [*model.named_parameters()], {"lr": 0.1, "lr_scales": {"0": 0.0}})
    set_learning_rate(optimizer, 1.0)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    unchanged = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert unchanged == {name for name in before if name.startswith("0.")}


def test_an_unknown_module_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        factory(sgd, lr_scales={"heads": 0.1})(nn.ModuleDict({"head": nn.Linear(2, 2)}))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["encoder.0.weight", "encoder.1.weight", "out"], "trainable parameters are in encoder, out"),
        ([], "all parameters are frozen"),
    ],
)
def test_trainable_modules_are_listed_without_a_similar_name(names: list[str], text: str) -> None:
    assert suggest_module("zzz", names) == text


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ConfigError, match="frozen"):
        adamw([])


def test_the_learning_rate_is_rate_times_factor_times_scale() -> None:
    optimizer = factory(sgd, lr=0.2, lr_scales={"0": 0.1})(network())
    assert set_learning_rate(optimizer, 0.5) == pytest.approx(0.1)
    assert {group["lr_scale"]: group["lr"] for group in optimizer.param_groups} == {
        0.1: pytest.approx(0.01),
        1.0: pytest.approx(0.1),
    }
    assert set_learning_rate(optimizer, 1.0) == 0.2, "factors must not accumulate"


def test_a_learning_rate_tensor_is_updated_in_place() -> None:
    optimizer = factory(sgd, lr=0.2)(network())
    rate = torch.tensor(0.2)
    optimizer.param_groups[0]["lr"] = rate
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == pytest.approx(0.1)


# Kernels


@pytest.mark.parametrize("rule", [adamw, adam, sgd])
def test_the_kernel_does_not_change_the_update(rule: Callable[..., Optimizer]) -> None:
    models = {}
    for kernel in ("fused", "foreach", "for-loop"):
        models[kernel] = network(torch.float64)
        train(models[kernel], factory(rule, weight_decay=0.01, kernel=kernel)(models[kernel]), range(10))
    rounded = allowed(torch.float64, 4, growth=10)  # ten updates of four additions, whose order depends on the kernel
    assert largest_difference(models["fused"], models["for-loop"]) <= rounded
    assert largest_difference(models["foreach"], models["for-loop"]) <= rounded
    assert largest_difference(models["fused"], network(torch.float64)) > 1e-3


def test_updates_equal_those_of_torch() -> None:
    ours, theirs = network(torch.float64), network(torch.float64)
    train(ours, factory(adamw, weight_decay=0.1, decay_1d=True, kernel="for-loop")(ours), range(5))
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    train(theirs, reference, range(5))
    assert largest_difference(ours, theirs) == 0.0


FUSED = {"adam": (adam, torch.optim.Adam), "adamw": (adamw, torch.optim.AdamW)}


def same_updates(ours: nn.Module, theirs: nn.Module, mine: Optimizer, reference: Optimizer, updates: int = 5) -> bool:
    """Run the same updates with both optimizers; return whether all weights and states are bitwise equal."""
    for update in range(updates):
        for optimizer in (mine, reference):
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + update)
        train(ours, mine, range(update, update + 1))
        train(theirs, reference, range(update, update + 1))
    states = zip(mine.state.values(), reference.state.values(), strict=True)
    return largest_difference(ours, theirs) == 0.0 and all(
        torch.equal(one[key], other[key]) for one, other in states for key in one
    )


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", ["float32", "frozen", "float64 and float32", "hooks"])
def test_direct_fused_calls_are_bitwise_equal_to_torch(name: str, kind: str) -> None:
    rule, of_torch = FUSED[name]
    ours, theirs = network(), network()
    for model in (ours, theirs):
        if kind == "frozen":
            model[0].requires_grad_(False)
        if kind == "float64 and float32":
            model[3].double()
            model[2].forward = lambda x: torch.tanh(x).double()
    mine = rule([*ours.named_parameters()], decay_1d=True, weight_decay=0.1, eps=1e-8, betas=(0.9, 0.95))
    reference = of_torch(theirs.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    seen: list[str] = []
    if kind == "hooks":
        mine.register_step_pre_hook(lambda *_: seen.append("before"))
        mine.register_step_post_hook(lambda *_: seen.append("after"))
    assert same_updates(ours, theirs, mine, reference)
    assert seen == ["before", "after"] * 5 * (kind == "hooks")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("overflows", [False, True])
def test_direct_fused_calls_skip_updates_as_torch_does(name: str, overflows: bool) -> None:
    rule, of_torch = FUSED[name]
    ours, theirs = network(), network()
    mine = rule([*ours.named_parameters()], decay_1d=True, weight_decay=0.1, eps=1e-8, betas=(0.9, 0.95))
    reference = of_torch(theirs.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    assert same_updates(ours, theirs, mine, reference, updates=1)
    for optimizer in (mine, reference):  # as torch.amp.GradScaler sets them
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(overflows))  # type: ignore[attr-defined]
    assert same_updates(ours, theirs, mine, reference)
    assert (largest_difference(ours, network()) < 2e-3) == overflows


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_takes_two_operations_per_group(name: str) -> None:
    model = network()
    optimizer = FUSED[name][0]([*model.named_parameters()], decay_1d=False)
    train(model, optimizer, range(1))
    model(torch.ones(5, 6)).sum().backward()
    with Operations() as operations:
        optimizer.step()
    assert operations.names == ["_foreach_add_", f"_fused_{name}_"] * 2


@pytest.mark.parametrize(
    ("option", "options", "reference"),
    [
        ("nadam", {"weight_decay": 0.1, "decoupled": True},
         lambda model: torch.optim.NAdam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)),
        ("rmsprop", {"momentum": 0.9, "weight_decay": 0.1},
         lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, weight_decay=0.1)),
        ("adafactor", {"weight_decay": 0.1}, lambda model: torch.optim.Adafactor(model.parameters(), weight_decay=0.1)),
    ],
)  # fmt: skip
def test_an_option_equals_the_torch_optimizer(
    option: str, options: dict[str, Any], reference: Callable[[nn.Module], Optimizer]
) -> None:
    """Both optimizers get the same arguments."""
    ours, theirs = network(torch.float64), network(torch.float64)
    train(ours, factory(OPTIMIZERS[option], decay_1d=True, **options)(ours), range(5))
    train(theirs, reference(theirs), range(5))
    assert largest_difference(ours, theirs) == 0.0
    assert largest_difference(ours, network(torch.float64)) > 0.0


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    ours, theirs = network(torch.float64), network(torch.float64)
    train(ours, factory(OPTIMIZERS["muon"], adamw_for=["3"])(ours), range(5))
    named = dict(theirs.named_parameters())
    muon = torch.optim.Muon([named["0.weight"]], lr=3e-4, adjust_lr_fn="match_rms_adamw")
    options: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "fused": True}
    decayed = torch.optim.AdamW([named["3.weight"]], weight_decay=0.1, **options)
    others = [weight for weight in named.values() if weight.dim() < 2]
    rest = torch.optim.AdamW(others, weight_decay=0.0, **options)
    for update in range(5):
        train(theirs, Together([muon, decayed, rest]), range(update, update + 1))
    assert largest_difference(ours, theirs) == 0.0


class Together(Optimizer):
    """Call the steps of several torch optimizers in turn."""

    def __init__(self, parts: list[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


def test_lion_equals_the_reference_code_of_its_paper() -> None:
    ours, weights = network(torch.float64), network(torch.float64)
    momentum = {weight: torch.zeros_like(weight) for weight in weights.parameters()}
    train(ours, factory(OPTIMIZERS["lion"], decay_1d=True, weight_decay=0.5)(ours), range(4))
    for update in range(4):
        generator = torch.Generator().manual_seed(update)
        weights(torch.randn(5, 6, generator=generator).double()).square().mean().backward()
        with torch.no_grad():
            for weight, kept in momentum.items():
                assert weight.grad is not None
                toward = torch.sign(0.9 * kept + 0.1 * weight.grad)
                kept.copy_(0.99 * kept + 0.01 * weight.grad)
                weight.sub_(1e-4 * (toward + 0.5 * weight))
                weight.grad = None
    # Each of the 4 updates rounds values of order 1 at most 4 times.
    assert largest_difference(ours, weights) <= 16 * torch.finfo(torch.float64).eps


def test_an_unknown_name_in_adamw_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match="adamw_for"):
        factory(OPTIMIZERS["muon"], adamw_for=["head"])(network())


def test_custom_optimizer_state_survives_a_checkpoint() -> None:
    """A task may define its own optimizer."""

    class Own(torch.optim.Adagrad):
        pass

    def make(model: nn.Module) -> Optimizer:
        names, weights = zip(*model.named_parameters(), strict=True)
        return Own([{"params": list(weights), "names": list(names), "base_lr": 0.01, "lr_scale": 1.0}])

    assert_resuming_changes_nothing(make, network(), 3)


def test_auto_selects_exactly_one_kernel() -> None:
    group = factory(adamw)(network()).param_groups[0]
    assert (group["fused"], group["foreach"]) == (True, False)
    complex_model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))})
    group = factory(adamw)(complex_model).param_groups[0]
    assert (group["fused"], group["foreach"]) == (False, True)


COMPLEX = """
import torch
from runner import Task

def build():
    return Spectrum()

class Spectrum(Task):
    def __init__(self):
        self.model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(24.0).view(8, 3))
    def loss(self, model, batch):
        return (torch.fft.fft(batch[0]) * self.model["w"]).abs().sum(), len(batch[0])
"""


def test_the_default_kernel_trains_complex_parameters(server: ForkServer, tmp_path: Path) -> None:
    """The plan selects the fused kernel before the parameters are known."""
    (tmp_path / "mine.py").write_text(COMPLEX)
    words = "train --task mine.py device=cpu monitor=off dataloader.num_workers=0 updates=2 global_batch_size=4"
    result = server.run(words, tmp_path)
    assert result.code == 0, result.err


def test_an_unusable_fused_kernel_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"w is complex64.*\n.*kernel=foreach"):
        factory(adamw, kernel="fused")(nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}))
    with pytest.raises(ConfigError, match="weight is on meta"):
        factory(adamw, kernel="fused")(nn.Linear(2, 2, device="meta"))


def test_nesterov_without_momentum_is_rejected() -> None:
    with pytest.raises(ConfigError, match="nesterov"):
        factory(sgd, momentum=0.0, nesterov=True)(network())


# State


def through_a_file(optimizer: Optimizer) -> tuple[dict[str, Tensor], Any]:
    """Return the exported state as a checkpoint restores it: contiguous copies of tensors, and JSON."""
    tensors, rest = export_state(optimizer)
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, json.loads(
        json.dumps(rest)
    )


def assert_resuming_changes_nothing(make: Make, model: nn.Module, updates: int = 3) -> None:
    uninterrupted = model
    optimizer = make(uninterrupted)
    train(uninterrupted, optimizer, range(updates))
    resumed = deepcopy(uninterrupted)
    other = make(resumed)
    import_state(other, *through_a_file(optimizer))
    before, after = export_state(optimizer), export_state(other)
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        assert tensor.dtype == after[0][name].dtype, name
        assert tensor.device == after[0][name].device, name
        assert torch.equal(tensor, after[0][name]), name
    train(uninterrupted, optimizer, range(updates, updates + 5))
    train(resumed, other, range(updates, updates + 5))
    assert largest_difference(uninterrupted, resumed) == 0.0


@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_the_state_survives_a_checkpoint_bit_for_bit(rule: str, updates: int) -> None:
    assert_resuming_changes_nothing(EVERY_RULE[rule], network(), updates)


def test_a_bfloat16_state_survives_bit_for_bit() -> None:
    assert_resuming_changes_nothing(factory(adamw), network(torch.bfloat16))


@pytest.mark.parametrize("kernel", ["fused", "foreach", "for-loop"])
def test_state_survives_with_float64_as_default_dtype(kernel: str) -> None:
    """With this default dtype, torch counts steps in float64, except in its fused kernels."""
    torch.set_default_dtype(torch.float64)
    try:
        assert_resuming_changes_nothing(factory(adamw, kernel=kernel), network(torch.float64))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_empty_state_before_the_first_update_is_restored() -> None:
    model = network()
    fresh = export_state(factory(adamw)(model))
    assert fresh[0] == {}
    optimizer = factory(adamw)(model)
    train(model, optimizer, range(2))
    import_state(optimizer, *fresh)
    assert not optimizer.state


def test_a_parameter_without_updates_has_no_state() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = factory(adamw)(model)
    train(model, optimizer, range(2))
    tensors, rest = export_state(optimizer)
    assert not any(name.startswith("0.") for name in tensors)
    other = factory(adamw)(model)
    import_state(other, tensors, rest)
    assert len(other.state) == len(optimizer.state) == 4


def test_a_run_can_be_resumed_with_another_kernel() -> None:
    model = network()
    optimizer = factory(adamw, kernel="fused")(model)
    train(model, optimizer, range(3))
    resumed = deepcopy(model)
    other = factory(adamw, kernel="for-loop")(resumed)
    import_state(other, *through_a_file(optimizer))
    train(model, optimizer, range(3, 8))
    train(resumed, other, range(3, 8))
    assert largest_difference(model, resumed) <= allowed(
        torch.float32, 2, growth=5
    )  # five updates, each a product and a sum


@pytest.mark.parametrize("kernel", ["fused", "foreach", "for-loop"])
def test_a_run_can_be_resumed_with_another_memory_format(kernel: str) -> None:
    """Fused kernels read raw memory, so a layout unlike that of the parameter gives silently wrong results."""
    uninterrupted = nn.Conv2d(3, 8, 3)
    make = factory(adamw, lr=0.1, kernel=kernel)
    optimizer = make(uninterrupted)

    def step(model: nn.Module, optimizer: Optimizer, update: int) -> None:
        model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(update))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(uninterrupted, optimizer, 0)
    resumed = deepcopy(uninterrupted).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = make(resumed)
    import_state(other, *through_a_file(optimizer))
    assert other.state[resumed.weight]["exp_avg"].stride() == resumed.weight.stride()
    assert resumed.weight.stride() != uninterrupted.weight.stride()
    step(uninterrupted, optimizer, 1)
    step(resumed, other, 1)
    # In another layout, the 27 products of an output are added in a different order. AdamW amplifies errors of
    # gradients that are a hundredth of the largest, and multiplies by the learning rate 0.1. A misread state would
    # differ by about 0.1.
    assert largest_difference(uninterrupted, resumed) <= allowed(torch.float32, 27, growth=100 * 0.1)


def damage(change: str, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    name = "0.weight.exp_avg"
    match change:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["9.weight.exp_avg"] = tensors[name]
        case "shape":
            tensors[name] = tensors[name].T
        case "dtype":
            tensors[name] = tensors[name].double()
        case "optimizer":
            rest["optimizer"] = "torch.SGD"


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ("missing", "0.weight.exp_avg is missing"),
        ("unknown", "9.weight.exp_avg belongs to no parameter"),
        ("shape", r"must be \(8, 6\), but is \(6, 8\)"),
        ("dtype", "must be float32, but is float64"),
        ("optimizer", "torch.SGD, but this run's is torch.AdamW"),
    ],
)
def test_a_mismatched_state_is_rejected_without_changes(change: str, pattern: str) -> None:
    model = network()
    optimizer = factory(adamw)(model)
    train(model, optimizer, range(2))
    tensors, rest = through_a_file(optimizer)
    other = factory(adamw)(network())
    train(network(), other, range(0))
    damage(change, tensors, rest)
    with pytest.raises(IncompatibleResume, match=pattern):
        import_state(other, tensors, rest)
    assert not other.state


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_parameter_loads_an_unsharded_state() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    model = nn.Linear(4, 3, bias=False)
    optimizer = factory(adamw)(model)
    train(model, optimizer, range(2))
    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))})
    other = factory(adamw)(sharded)
    import_state(other, *through_a_file(optimizer))
    mean = other.state[sharded["weight"]]["exp_avg"]
    assert isinstance(mean, DTensor)
    assert torch.equal(mean.full_tensor(), optimizer.state[model.weight]["exp_avg"])
    assert state_bytes(other) == state_bytes(optimizer)
    tensors, rest = export_state(other)
    assert isinstance(tensors["weight.exp_avg"], DTensor)
    import_state(other, tensors, rest)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("rule", "kernel"), [(adamw, "fused"), (adam, "fused"), (sgd, "foreach")])
def test_sharded_parameters_get_a_kernel_that_supports_them(rule: Any, kernel: str) -> None:
    """The optimizer chooses the same kernel as the plan: torch has no sharding strategy for its fused SGD."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, weight = init_device_mesh("cpu", (1,)), torch.randn(4, 3)
    sharded = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))})
    plain = nn.ParameterDict({"weight": nn.Parameter(weight.clone())})
    optimizers = [factory(rule)(model) for model in (sharded, plain)]
    assert optimizers[0].param_groups[0][kernel]
    for model, optimizer in zip((sharded, plain), optimizers, strict=True):
        model["weight"].square().sum().backward()
        optimizer.step()
    assert isinstance(sharded["weight"], DTensor)
    torch.testing.assert_close(sharded["weight"].full_tensor(), plain["weight"])
    if rule is sgd:
        with pytest.raises(ConfigError) as refused:
            factory(sgd, kernel="fused")(sharded)
        assert [problem.where for problem in refused.value.problems] == ["optimizer.kernel"]


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_full_precision_state_has_the_expected_size(rule: str) -> None:
    model = network()
    optimizer = EVERY_RULE[rule](model)
    # the momentum may exist before the first update
    assert state_bytes(optimizer) in (0, expected_state_bytes(optimizer))
    train(model, optimizer, range(1))
    assert state_bytes(optimizer) == expected_state_bytes(optimizer)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_skipped_first_update_leaves_no_state(rule: str) -> None:
    model, other = network(), network()
    optimizer, untouched = EVERY_RULE[rule](model), EVERY_RULE[rule](other)
    rubbish = [torch.full_like(weight, 1e30) for _ in range(4) for weight in model.parameters()]
    del rubbish  # the freed memory contains large values, so a kernel must initialize the state
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    for made in (optimizer, untouched):
        train(model if made is optimizer else other, made, range(2))
    for weight, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, wanted)


# 8 bits

ABSENT = {
    library: pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")
    for library in ("bitsandbytes", "torchao")
}


def wide() -> nn.Sequential:
    """Return a model with one weight of more than 4096 values, the threshold for 8-bit states."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 2))


@ABSENT["bitsandbytes"]
@pytest.mark.parametrize("updates", [0, 3])
def test_bitsandbytes_states_survive_a_checkpoint_bit_for_bit(updates: int) -> None:
    assert_resuming_changes_nothing(factory(adamw8bit, library="bitsandbytes"), wide(), updates)


@ABSENT["bitsandbytes"]
def test_8_bit_states_are_small_and_give_similar_updates() -> None:
    model, reference = wide(), wide()
    optimizer = factory(adamw8bit, lr=1e-3, library="bitsandbytes")(model)
    train(model, optimizer, range(10))
    train(reference, factory(adamw, lr=1e-3)(reference), range(10))
    # 6144 of the 6434 values are stored in 8 bits, with one float per 256 of them and two tables of 256 floats.
    assert 0.25 < state_bytes(optimizer) / expected_state_bytes(optimizer) < 0.35
    # A value changes by at most lr per update, and with 8-bit states by almost as much.
    assert 0.0 < largest_difference(model, reference) < 10 * 1e-3 / 2


@ABSENT["bitsandbytes"]
def test_each_exported_tensor_has_its_own_memory() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    optimizer = factory(adamw8bit, library="bitsandbytes")(model)
    train(model, optimizer, range(1))
    tensors = export_state(optimizer)[0]
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors)


@ABSENT["bitsandbytes"]
def test_bitsandbytes_reports_that_it_undoes_channels_last() -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.warns(UserWarning, match="undoes channels_last for 1"):
        factory(adamw8bit, library="bitsandbytes")(model)
    assert model.weight.is_contiguous()


@ABSENT["torchao"]
def test_torchao_states_survive_a_checkpoint_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # compilation takes 38 s and does not change the state
    assert_resuming_changes_nothing(factory(adamw8bit, library="torchao"), wide())


def loader_without(*missing: str) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        raise OSError("libcudart.so.99: cannot open shared object file\nlong story")

    return load


def test_a_missing_library_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", loader_without("bitsandbytes", "torchao"))
    with pytest.raises(ConfigError, match=r"not installed.*not installed(.|\n)*pip install bitsandbytes"):
        factory(adamw8bit)(network())
    with pytest.raises(ConfigError, match="pip install torchao"):
        factory(adamw8bit, library="torchao")(network())


def test_a_library_that_fails_to_load_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", loader_without("torchao"))
    with pytest.raises(ConfigError, match=r"bitsandbytes: libcudart.so.99: cannot open shared object file;"):
        factory(adamw8bit)(network())


def test_an_old_bitsandbytes_is_rejected_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "0.45.5"

    monkeypatch.setitem(sys.modules, "bitsandbytes", Old)
    with pytest.raises(ConfigError, match=r"0\.50 or newer"):
        factory(adamw8bit, library="bitsandbytes")(network())


def boundary_values(hint: Any) -> list[float]:
    """Return numbers at the ends of the range of a key or, if it has no range, on both sides of 0."""
    ranges = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)]
    if hint is float:
        ranges = [Range("any")]
    ends = [
        value
        for each in ranges
        for value in (each.low, each.low + 1e-6, each.high, each.high - 1e-6, -10.0, -0.5, 0.5, 10.0, 1e9)
        if math.isfinite(value) and each.allows(value)
    ]
    return ends if get_origin(hint) is not Annotated or get_args(hint)[0] is float else [int(end) for end in ends]


@pytest.mark.parametrize("option", [name for name in OPTIMIZERS if name not in ("adamw8bit", "schedulefree")])
def test_all_numbers_in_the_declared_range_are_accepted(option: str) -> None:
    for key, hint in get_type_hints(OPTIMIZERS[option], include_extras=True).items():
        for value in boundary_values(hint):
            factory(OPTIMIZERS[option], **{key: value})(network())
