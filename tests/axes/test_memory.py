"""Options that save memory change no result, no parameter name, and no forward pass without gradients."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from runner.axes.memory import (
    MEMORIES,
    budget,
    checkpoint,
    none,
    recompute_blocks,
    selective,
)
from runner.base.errors import ConfigError
from runner.config.allocator_settings import allocator_environment
from runner.config.configuration import compose
from runner.config.request import Request

CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention, an MLP and dropout, with a count of forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.passes = 0
        self.counts = True

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        if self.counts:
            self.passes += 1
        query, key, value = self.mix(inputs)[:, None].chunk(3, dim=-1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        return inputs + nn.functional.dropout(torch.tanh(self.out(mixed)), 0.2, self.training) * scale


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs, scale=0.5)
        return inputs

    def passes(self) -> list[int]:
        return [block.passes for block in self.blocks]  # type: ignore[misc]


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)  # determines dropout
    model.zero_grad()
    model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2))).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


CHECKPOINTS: dict[str, Callable[[Stack], tuple[str, ...]]] = {
    "checkpoint": lambda model: checkpoint(model, list(model.blocks), CPU),
    "every 2nd": lambda model: checkpoint(model, list(model.blocks), CPU, every=2),
    "selective matmul": lambda model: selective(model, list(model.blocks), CPU),
    "selective attention": lambda model: selective(model, list(model.blocks), CPU, save="attention"),
    "budget": lambda model: budget(model, list(model.blocks), CPU),
    "budget of two": lambda model: budget(model, list(model.blocks), CPU, recompute=[0, 2]),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_changes_neither_gradients_nor_names(how: str) -> None:
    plain, model = stack(), stack()
    report = CHECKPOINTS[how](model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert equal(gradients(model), gradients(plain))
    recomputed = 2 if how in ("every 2nd", "budget of two") else 3
    assert f" {recomputed} of 3" in " ".join(report)
    assert sum(model.passes()) == sum(plain.passes()) + recomputed


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_passes_without_gradients_are_not_checkpointed(how: str, context: Any) -> None:
    model = stack().eval()
    CHECKPOINTS[how](model)
    with context():
        result = model(torch.ones(1, 4, 16))
        assert torch.equal(result, stack().eval()(torch.ones(1, 4, 16)))
    assert model.passes() == [1, 1, 1]
    assert result.grad_fn is None


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_works_under_autocast(how: str) -> None:
    plain, model = stack(), stack()
    CHECKPOINTS[how](model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert equal(gradients(model), gradients(plain))


class Conversions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the results of conversions to bfloat16, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result

    def sizes(self) -> list[int]:
        """Return the sizes in bytes of the results that are still alive."""
        return [storage.nbytes() for known in self.storages if (storage := known()) is not None]


@pytest.mark.parametrize("how", ["none", "checkpoint", "selective matmul", "budget"])
def test_converted_weights_are_freed_after_a_checkpointed_block(how: str) -> None:
    model = stack()
    if how != "none":
        CHECKPOINTS[how](model)
    converted = {weight.numel() * 2 for weight in model.parameters() if weight.dim() == 2}
    with torch.autocast("cpu", dtype=torch.bfloat16), Conversions() as conversions:
        model(torch.ones(2, 5, 16)).sum()
        kept = [size for size in conversions.sizes() if size in converted]
    assert len(kept) == (6 if how == "none" else 0)


class Shared(nn.Module):
    """A model that shares a weight between blocks, before and after them, or between calls of one block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.calls = 4 if how == "one block, called four times" else 1
        self.blocks = nn.ModuleList(Block() for _ in range(3 if self.calls == 1 else 1))
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        if how == "between modules":
            self.last.weight = self.first.weight
        elif how == "between blocks":
            self.blocks[1].mix.weight = self.blocks[0].mix.weight  # type: ignore[union-attr]
        elif how == "one module in all blocks":
            for block in self.blocks:
                block.mix = self.blocks[0].mix

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs)
        for block in [*self.blocks] * self.calls:
            inputs = block(inputs)
        result: Tensor = self.last(inputs)
        return result


@pytest.mark.parametrize(
    "how", ["between modules", "between blocks", "one module in all blocks", "one block, called four times"]
)
def test_checkpointing_keeps_gradients_of_shared_weights(how: str) -> None:
    """A gradient is summed in bfloat16 if its weight is converted once, in float32 if converted for each use."""
    torch.manual_seed(0)
    plain = Shared(how)
    model = deepcopy(plain)
    checkpoint(model, list(model.blocks), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert equal(gradients(model), gradients(plain))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo inspects non-leaf inputs
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["checkpoint", "selective matmul"])
def test_a_checkpointed_block_compiles_to_one_graph(how: str) -> None:
    plain, model = stack().eval(), stack().eval()  # no dropout, because compiled code draws different random numbers
    CHECKPOINTS[how](model)
    for block in model.blocks:
        block.counts = False  # type: ignore[assignment]
        block.compile(backend="aot_eager", fullgraph=True)
    assert equal(gradients(model), gradients(plain))


def test_a_copy_of_a_checkpointed_model_uses_its_own_weights() -> None:
    model = stack()
    checkpoint(model, list(model.blocks), CPU)
    copied = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert equal(gradients(copied), gradients(stack()))
    assert model.passes() == [0, 0, 0]


def test_checkpointing_keeps_a_replaced_forward_method() -> None:
    model = stack()
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda *inputs, **named: inner(*inputs, **named) * 2.0
    wanted = gradients(model)
    checkpoint(model, list(model.blocks), CPU)
    assert equal(gradients(model), wanted)


def test_temporary_recomputation_ends_with_its_context() -> None:
    model = stack()
    with recompute_blocks(model, list(model.blocks), range(2)):
        gradients(model)
    assert model.passes() == [2, 2, 1]
    assert equal(gradients(model), gradients(stack()))
    assert model.passes() == [3, 3, 2]


def test_an_invalid_block_number_is_rejected() -> None:
    model = stack()
    with pytest.raises(ConfigError, match="block 3: the task has 3 blocks"):
        budget(model, list(model.blocks), CPU, recompute=[0, 3])


@pytest.mark.parametrize("function", [checkpoint, selective, budget])
def test_a_block_used_twice_is_wrapped_once(function: Any) -> None:
    model = stack()
    model.blocks[2] = model.blocks[1]
    plain = deepcopy(model)
    function(model, list(model.blocks), CPU)
    assert equal(gradients(model), gradients(plain))
    assert model.passes() == [2, 4, 4]


class CountOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def operations_of_backward(model: nn.Module) -> Counter[str]:
    loss = model(torch.randn(2, 5, 16)).square().sum()
    with CountOperations() as counted:
        loss.backward()
    names: Counter[str] = counted.names
    return names


@pytest.mark.parametrize(
    ("how", "products", "attentions"),
    [("checkpoint", 6, 3), ("selective matmul", 0, 0), ("selective attention", 6, 0)],
)
def test_saved_activations_are_not_recomputed(how: str, products: int, attentions: int) -> None:
    model = stack()
    CHECKPOINTS[how](model)
    names = operations_of_backward(model)
    assert names["addmm"] == products
    assert names["_scaled_dot_product_flash_attention_for_cpu"] == attentions


def test_the_report_names_the_saved_operations() -> None:
    both, one = stack(), stack()
    (of_both, *_), (of_one, *_) = (
        selective(both, [*both.blocks], CPU),
        selective(one, [*one.blocks], CPU, save="attention"),
    )
    assert set(of_both.split()) - set(of_one.split()) == {"matrix", "products", "and"}


def saved_bytes(model: nn.Module) -> int:
    """Return the number of bytes that a forward pass saves for the backward pass."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(2, 5, 16))
    return sum(sizes)


def test_checkpointing_stores_fewer_activations() -> None:
    plain, half, full = stack(), stack(), stack()
    CHECKPOINTS["every 2nd"](half)
    CHECKPOINTS["checkpoint"](full)
    assert saved_bytes(full) < saved_bytes(half) / 2 < saved_bytes(plain) / 2


@pytest.mark.parametrize("function", [checkpoint, selective, budget])
def test_checkpointing_without_blocks_reports_no_effect(function: Any) -> None:
    with pytest.warns(UserWarning, match="defines no blocks"):
        report = function(nn.Linear(2, 2), [], CPU)
    assert "no effect" in report[0]


# Layout


def image_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3), nn.Flatten(), nn.Linear(128, 2))
    model.register_parameter("position", nn.Parameter(torch.zeros(1, 4, 5, 6)))
    return model


def test_channels_last_changes_only_the_layout_of_convolutions() -> None:
    plain, model = image_model(), image_model()
    report = none(model, [], CPU)
    assert any("2 tensors" in line for line in report)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
        is_weight = name in ("0.weight", "2.weight")
        assert parameter.is_contiguous(memory_format=torch.channels_last) == is_weight or parameter.dim() != 4, name
    image = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(model(image), plain(image))
    assert none(model, [], CPU) == (), "a second call has no effect"


def test_channels_last_can_be_disabled() -> None:
    """`auto` does not convert models without 2-D convolutions."""
    assert none(image_model(), [], CPU, channels_last=False) == ()
    assert none(image_model(), [], torch.device("mps")) == ()
    assert none(nn.Linear(2, 2), [], CPU) == ()
    with pytest.warns(UserWarning, match="no 2-D convolutions"):
        none(nn.Linear(2, 2), [], CPU, channels_last=True)


# Limits


@pytest.mark.parametrize("option", MEMORIES)
@pytest.mark.parametrize("key", [{"fraction": 0.5}, {"allocator": "expandable_segments:True"}])
def test_limits_without_effect_on_the_cpu_are_reported(option: str, key: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="no effect on cpu"):
        report = MEMORIES[option](stack(), [nn.Linear(2, 2)], CPU, **key)
    assert any("effect on cpu" in line for line in report)


@pytest.mark.parametrize("option", MEMORIES)
def test_a_fraction_of_0_is_an_invalid_setting(option: str) -> None:
    with pytest.raises(ConfigError, match=r"memory.fraction=0: must be a number above 0 and at most 1"):
        compose(Request((f"memory={option}", "memory.fraction=0")))


def test_allocator_settings_in_the_environment_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    lines = none(nn.Linear(2, 2), [], CPU)
    assert any(line.endswith(": expandable_segments:True") for line in lines)


def test_late_allocator_settings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    cuda = torch.device("cuda")
    with pytest.warns(UserWarning, match="PYTORCH_ALLOC_CONF is max_split_size_mb:64"):
        none(nn.Linear(2, 2), [], cuda, allocator="expandable_segments:true")
    none(nn.Linear(2, 2), [], cuda, allocator="max_split_size_mb: 64")


GOOD = {
    "expandable_segments:true": "expandable_segments:True",
    " max_split_size_mb : 256 , backend:native": "max_split_size_mb:256,backend:native",
    "garbage_collection_threshold:0.8": "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:[256:1, 512:2,>:8]": "roundup_power2_divisions:[256:1,512:2,>:8]",
    "roundup_power2_divisions:4": "roundup_power2_divisions:4",
}


@pytest.mark.parametrize("text", GOOD)
def test_allocator_settings_are_joined_in_one_variable(text: str) -> None:
    assert allocator_environment(text) == {"PYTORCH_ALLOC_CONF": GOOD[text]}


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"),
    reason="this version of torch cannot check allocator settings",
)
@pytest.mark.parametrize("text", GOOD.values())
def test_torch_accepts_all_valid_allocator_settings(text: str) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_without_allocator_settings_no_variable_is_set() -> None:
    assert allocator_environment(None) == allocator_environment("") == {}


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("expandable_segment:True", r"did you mean expandable_segments\?"),
        ("expandable_segments", "must be True or False, but is empty"),
        ("expandable_segments:yes", "must be True or False, but is yes"),
        ("max_split_size_mb:19", "at least 20, but is 19"),
        ("garbage_collection_threshold:1.0", "below 1, but is 1.0"),
        ("roundup_power2_divisions:3", "a power of 2"),
        ("roundup_power2_divisions:[256:3]", "a power of 2"),
        ("backend:cudamallocasync", "native or cudaMallocAsync"),
        ("nonsense", "has no setting nonsense"),
    ],
)
def test_an_invalid_allocator_setting_is_rejected(text: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        allocator_environment(text)


def test_all_invalid_allocator_settings_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        allocator_environment("backend:x,foo:1,expandable_segments:True")
    assert len(caught.value.problems) == 2


def test_allocator_settings_are_read_without_importing_torch() -> None:
    code = (
        "import sys; from runner.config.allocator_settings import allocator_environment as read; "
        "read('expandable_segments:True'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
