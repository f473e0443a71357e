"""All attention kernels give the same results, and the kernel that ran is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from runner.axes.attention import (
    ATTENTIONS,
    Attention,
    auto,
    count_calls,
    cudnn,
    efficient,
    flash,
    math,
    record_calls,
    refusal_reason,
)
from runner.base.errors import ConfigError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def count_kernels(call: Callable[[], object]) -> dict[str, int]:
    """Return the number of attention calls by kernel."""
    counts: Counter[str] = Counter()
    for (_, kernel), number in count_calls(call).items():
        counts[kernel] += number
    return dict(counts)


def query(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def attend(**options: Any) -> Tensor:
    return scaled_dot_product_attention(query(), query(), query(), **options)


@pytest.mark.filterwarnings("ignore:attention=")  # ignores warnings about kernels that this device lacks
@pytest.mark.parametrize("option", ATTENTIONS)
def test_the_kernel_does_not_change_the_result(option: str) -> None:
    with ATTENTIONS[option](CPU).context():
        result = attend(is_causal=True)
    with math(CPU).context():
        assert_close(result, attend(is_causal=True))  # float32 sums in a different order


@pytest.mark.filterwarnings("ignore:attention=")
@pytest.mark.parametrize("option", ATTENTIONS)
def test_every_option_supports_all_kinds_of_calls(option: str) -> None:
    choice = ATTENTIONS[option](CPU)
    mask = torch.ones(8, 8, dtype=torch.bool)
    for options in ({"dropout_p": 0.5}, {"attn_mask": mask}, {}):
        with choice.context():
            attend(**options)


def test_contexts_are_reentrant_and_restore_the_kernel_selection() -> None:
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    for choice in (math(CPU), flash(CPU), auto(CPU)):
        for _ in range(2):
            with choice.context(), choice.context():
                pass
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before


def test_auto_enters_no_context() -> None:
    assert auto(CPU).context() is auto(CPU).context()


@pytest.mark.parametrize(
    ("choice", "options", "kernel"),
    [
        (auto(CPU), {}, "flash_for_cpu"),
        (flash(CPU), {"is_causal": True}, "flash_for_cpu"),
        (flash(CPU), {"dropout_p": 0.1}, "math"),
        (flash(CPU, strict=True), {}, "flash_for_cpu"),
        (math(CPU), {}, "math"),
        (math(CPU), {"attn_mask": torch.zeros(8, 8)}, "math"),
    ],
)
def test_used_kernels_are_counted(choice: Attention, options: dict[str, Any], kernel: str) -> None:
    def call() -> None:
        with choice.context():
            attend(**options)
            with torch.no_grad():
                attend(**options)

    assert count_kernels(call) == {kernel: 2}


def test_attention_inside_torch_modules_is_counted() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    assert count_kernels(lambda: layer(torch.randn(2, 5, 16))) == {"flash_for_cpu": 1}


def test_calls_are_counted_by_dtype_and_shape() -> None:
    short = query(torch.bfloat16)[:, :, :1]

    def decode() -> None:
        scaled_dot_product_attention(short, query(torch.bfloat16), query(torch.bfloat16))
        attend()
        attend()

    assert count_calls(decode) == {
        ("bfloat16, 1 queries, 8 keys", "flash_for_cpu"): 1,
        ("float32, 8 queries, 8 keys", "flash_for_cpu"): 2,
    }


def test_each_call_reports_its_arguments_and_kernel() -> None:
    key, mask = torch.randn(2, 3, 5, 16), torch.ones(8, 5, dtype=torch.bool)

    def call() -> None:
        attend(is_causal=True)
        scaled_dot_product_attention(query(), key, key, attn_mask=mask)
        with math(CPU).context(), torch.autocast("cpu", torch.bfloat16):
            attend(dropout_p=0.1)

    causal, masked, chosen = record_calls(call)
    assert (causal.masked, causal.causal, causal.kernel) == (False, True, "flash_for_cpu")
    assert (causal.shape, causal.dtype) == ((2, 3, 8, 16), torch.float32)
    assert (masked.masked, masked.causal, masked.num_keys) == (True, False, 5)
    assert (chosen.kernel, chosen.dtype) == ("math", torch.bfloat16)


def test_arguments_may_be_positional_or_named() -> None:
    key, mask = torch.randn(2, 3, 5, 16), torch.ones(8, 5, dtype=torch.bool)

    def call() -> None:
        scaled_dot_product_attention(query(), key, key, mask)
        scaled_dot_product_attention(query=query(), key=key, value=key, attn_mask=mask)

    for recorded in record_calls(call):
        assert (recorded.masked, recorded.num_keys) == (True, 5)


def test_a_model_without_attention_has_no_kernels() -> None:
    assert count_kernels(lambda: torch.softmax(torch.randn(4, 4), -1) @ torch.randn(4, 4)) == {}


def test_attention_in_compiled_code_is_counted() -> None:
    class Block(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return scaled_dot_product_attention(inputs, inputs, inputs)

    block = Block()
    block.compile(backend="eager")
    block(query())
    assert count_kernels(lambda: block(query())) == {"flash_for_cpu": 1}


@pytest.mark.parametrize("function", [efficient, cudnn])
def test_unsupported_kernels_are_reported_or_rejected_if_strict(function: Any) -> None:
    with pytest.warns(UserWarning, match="not available .the CPU has no"):
        choice = function(CPU)
    assert "CPU" in choice.reason
    with pytest.raises(ConfigError, match="the CPU has no"):
        function(CPU, strict=True)


def test_strict_rejects_unsupported_calls() -> None:
    with (
        flash(CPU, strict=True).context(),
        pytest.warns(UserWarning, match="kernel"),
        pytest.raises(RuntimeError, match="kernel"),
    ):
        attend(dropout_p=0.5)


@pytest.mark.parametrize(
    ("backend", "dtype", "capability", "reason"),
    [
        ("flash", torch.float16, (7, 5), "8.0, but the device has 7.5"),
        ("flash", torch.float32, (9, 0), "but are float32"),
        ("flash", torch.bfloat16, (8, 0), ""),
        ("efficient", torch.float16, (7, 5), ""),
        ("efficient", torch.float32, (7, 5), ""),
        ("efficient", torch.bfloat16, (7, 5), "compute capability 8.0"),
        ("efficient", torch.float64, (9, 0), "but are float64"),
        ("efficient", torch.float16, (3, 7), "needs compute capability 5.0"),
        ("cudnn", torch.bfloat16, (9, 0), ""),
        ("cudnn", torch.float32, (9, 0), "but are float32"),
        ("math", torch.float64, (3, 0), ""),
    ],
)
def test_unsupported_dtypes_and_gpus_are_rejected_with_a_reason(
    backend: str, dtype: torch.dtype, capability: tuple[int, int], reason: str
) -> None:
    result = refusal_reason(backend, dtype, CUDA, capability=capability)
    assert reason in result
    assert bool(reason) == bool(result)


def test_flash_does_not_support_masks_and_large_heads() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA, "capability": (8, 0)}
    assert "mask" in refusal_reason("flash", masked=True, **options)
    assert "512" in refusal_reason("flash", head_size=512, **options)
    assert not refusal_reason("flash", head_size=256, **options)
    assert not refusal_reason("efficient", masked=True, **options)


def test_cudnn_attention_is_rejected_in_deterministic_runs() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in refusal_reason("cudnn", torch.bfloat16, CUDA, capability=(9, 0))
    finally:
        torch.use_deterministic_algorithms(False)


def test_kernels_of_other_devices_are_rejected_with_a_reason() -> None:
    assert refusal_reason("flash", torch.float32, CPU) == ""
    assert "mps" in refusal_reason("flash", torch.float16, torch.device("mps"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_a_reason_for_rejection() -> None:
    assert "no CUDA device" in refusal_reason("flash", torch.float16, CUDA)
