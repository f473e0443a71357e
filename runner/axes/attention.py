"""Select the kernels of scaled dot product attention, and report which one ran and why others did not."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.base.accelerator import cuda_is_available, get_accelerator
from runner.base.errors import ConfigError, Problem
from runner.base.gpu_facts import amd_formats

_NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Attention:
    """Attention kernels in order of preference; an empty list leaves the choice to torch.

    reason  why the requested kernel cannot run on this device at all, or empty
    """

    name: str
    kernels: tuple[SDPBackend, ...] = ()
    reason: str = ""

    def context(self) -> AbstractContextManager[None]:
        """Return the context for a forward pass; enter a new one each time (24 us, free for auto)."""
        return sdpa_kernel(list(self.kernels), set_priority=True) if self.kernels else _NULL_CONTEXT


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled dot product attention.

    kind      such as "bfloat16, 128 queries, 128 keys"
    shape     of the queries: (batch, heads, length, head size)
    num_keys  length of the keys
    dtype     of the kernel's inputs, after autocast
    masked    whether there was an explicit mask
    causal    whether is_causal=True was set
    training  whether gradients were required
    kernel    kernel that ran, as in count_kernels; "unseen" if it was not observed
    refusals  each other kernel -> why it did not run
    """

    kind: str
    shape: tuple[int, ...]
    num_keys: int
    dtype: torch.dtype
    masked: bool
    causal: bool
    dropout: float
    training: bool
    kernel: str
    refusals: Mapping[str, str]


def auto(device: torch.device) -> Attention:
    """Let torch choose the fastest kernel that supports the call."""
    return Attention("auto")


def math(device: torch.device) -> Attention:
    """Compute with matrix products and a softmax: supports any input, uses most memory (the full score matrix)."""
    return Attention("math", (SDPBackend.MATH,))


def flash(device: torch.device, *, strict: bool = False) -> Attention:
    """Prefer the flash kernel; unsupported calls use the next best one.

    strict  raise an error for a call that this kernel does not support
    Raises ConfigError with strict if this device lacks the kernel.
    Source: Dao, FlashAttention-2, 2023; needs compute capability 8.0 and float16 or bfloat16 on a GPU.
    """
    return _prefer("flash", SDPBackend.FLASH_ATTENTION, device, strict)


def efficient(device: torch.device, *, strict: bool = False) -> Attention:
    """Prefer the memory-efficient kernel, which supports masks and older GPUs; other calls use the next best one.

    strict  raise an error for a call that this kernel does not support
    Raises ConfigError with strict if this device lacks the kernel.
    Source: Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021; kernels of xFormers.
    """
    return _prefer("efficient", SDPBackend.EFFICIENT_ATTENTION, device, strict)


def cudnn(device: torch.device, *, strict: bool = False) -> Attention:
    """Prefer cuDNN's kernel, designed for H100 and newer; unsupported calls use the next best one.

    strict  raise an error for a call that this kernel does not support
    Raises ConfigError with strict if this device lacks the kernel.
    Source: torch.nn.attention.SDPBackend.CUDNN_ATTENTION.
    """
    return _prefer("cudnn", SDPBackend.CUDNN_ATTENTION, device, strict)


def count_kernels(model_call: Callable[[], object]) -> dict[str, int]:
    """Run `model_call` once and return the number of attention calls per kernel.

    Names are flash, efficient, cudnn, math, overrideable and, on the CPU, flash_for_cpu. Compiled code runs eagerly
    in this call, because a compiled graph hides its operations. Only calls of the forward pass are counted.
    """
    counts: Counter[str] = Counter()
    for (_, kernel), number in count_calls(model_call).items():
        counts[kernel] += number
    return dict(counts)


def count_calls(model_call: Callable[[], object]) -> dict[tuple[str, str], int]:
    """Run `model_call` once and return the number of calls per (kind of call, kernel).

    A kind is formatted as "bfloat16, 128 queries, 128 keys", which distinguishes prefill, decoding and cross attention.
    """
    mode = _CountAttention()
    with _eager(), mode:
        model_call()
    return dict(mode.calls)


def record_calls(model_call: Callable[[], object]) -> tuple[AttentionCall, ...]:
    """Run `model_call` once and return its attention calls in order, with inputs and kernels.

    Only calls of F.scaled_dot_product_attention are recorded, including those in nn.MultiheadAttention; but in eval
    mode without gradients, torch's own encoder layers compute attention elsewhere. Compiled code runs eagerly in this
    call.
    """
    mode = _RecordAttention()
    with _eager(), mode:
        model_call()
    return tuple(mode.calls)


def refusal_reason(
    backend: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    masked: bool = False,
    dropout: float = 0.0,
    training: bool = True,
    capability: tuple[int, int] | None = None,
) -> str:
    """Return why a kernel would refuse a call, judged by shapes and types; empty if no reason is known.

    shape       of the queries: (batch, heads, length, head size)
    masked      whether an explicit mask is given (is_causal=True is not one)
    capability  compute capability to assume, such as (7, 5); default: that of `device`
    Source: the checks of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11 to 2.13.
    """
    if backend == "math":
        return ""
    if len(shape) != 4:
        return f"queries must have 4 dimensions (batch, heads, length, head size), but have {len(shape)}"
    if device.type == "cpu":
        return _cpu_refusal(backend, dropout)
    if device.type != "cuda":
        return f"{device.type} has a separate kernel, which this option does not select"
    if capability is None:
        if not cuda_is_available():
            return "there is no CUDA device"
        accelerator = get_accelerator(device)
        capability = accelerator.capability()
        if capability is None:
            return _amd_refusal(backend, accelerator.architecture(), dtype)
    call = _Call(shape[-1], dtype, masked, dropout, training, capability)
    return next((reason for check in _CHECKS[backend] if (reason := check(call))), "")


def _prefer(name: str, kernel: SDPBackend, device: torch.device, strict: bool) -> Attention:
    """Return the attention that prefers this kernel, after a check that the device supports it at all."""
    # a call that every device with the kernel supports
    reason = refusal_reason(name, (1, 1, 128, 64), torch.float16, device)
    if reason and strict:
        raise ConfigError(
            Problem(
                f"{name} cannot run: {reason}", f"attention={name}", "use attention=auto, or attention.strict=false"
            )
        )
    if reason:
        warnings.warn(f"attention={name} has no effect, the next best kernel is used: {reason}", stacklevel=3)
    rest = (other for other in _NEXT_BEST if other != kernel)
    return Attention(name, (kernel,) if strict else (kernel, *rest), reason)


# Reasons for a kernel to refuse a call


@dataclass(frozen=True)
class _Call:
    head_size: int
    dtype: torch.dtype
    masked: bool
    dropout: float
    training: bool
    capability: tuple[int, int]

    @property
    def half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)


def _cpu_refusal(backend: str, dropout: float) -> str:
    if backend != "flash":
        return f"the CPU has no {backend} kernel"
    return "the CPU's flash kernel has no dropout" if dropout > 0 else ""


def _amd_refusal(backend: str, architecture: str, dtype: torch.dtype) -> str:
    """Check AOTriton, which implements flash and memory-efficient attention on AMD for a few architectures.

    Source: check_flash_attention_hardware_support and check_mem_efficient_hardware_support of sdp_utils.cpp, USE_ROCM.
    """
    if backend == "cudnn":
        return "cuDNN is NVIDIA's"
    if not amd_formats(architecture).flash:
        return f"AOTriton has no kernels for {architecture or 'this architecture'}"
    if backend == "flash" and dtype not in (torch.float16, torch.bfloat16):
        return f"inputs must be float16 or bfloat16, but are {_dtype_name(dtype)}"
    return ""


def _capability_refusal(call: _Call, needed: tuple[int, int]) -> str:
    if call.capability >= needed:
        return ""
    found = _format_capability(call.capability)
    return f"compute capability {_format_capability(needed)} is needed, but the device has {found}"


def _format_capability(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _dtype_refusal(call: _Call) -> str:
    return "" if call.half else f"inputs must be float16 or bfloat16, but are {_dtype_name(call.dtype)}"


def _flash_mask_refusal(call: _Call) -> str:
    return "it has an explicit mask (is_causal=True is not one)" if call.masked else ""


def _flash_head_refusal(call: _Call) -> str:
    if call.head_size > 256:
        return f"the head size must be at most 256, but is {call.head_size}"
    small_cache = (8, 6) <= call.capability <= (8, 9) or call.capability >= (12, 0)
    if call.training and small_cache and call.head_size > 192 and (call.head_size <= 224 or call.dropout > 0):
        return f"capability {_format_capability(call.capability)} has no backward for a head size of {call.head_size}"
    return ""


def _efficient_dtype_refusal(call: _Call) -> str:
    if call.dtype == torch.bfloat16:
        return "" if call.capability >= (8, 0) else f"bfloat16: {_capability_refusal(call, (8, 0))}"
    is_supported = call.dtype in (torch.float16, torch.float32)
    return "" if is_supported else f"inputs must be float16, bfloat16 or float32, but are {_dtype_name(call.dtype)}"


def _efficient_head_refusal(call: _Call) -> str:
    tensor_cores = call.capability >= (8, 0) or (call.capability >= (7, 0) and call.half)
    multiple = (8 if call.half else 4) if tensor_cores else 1
    return _head_multiple_refusal(multiple, call)


def _cudnn_head_refusal(call: _Call) -> str:
    limit = 256 if call.capability in ((9, 0), (10, 0), (10, 3)) else 128  # 256 with cuDNN above 9.22
    if call.head_size > limit:
        return f"the head size must be at most {limit}, but is {call.head_size}"
    if call.training and 128 < call.head_size < 256:  # check_cudnn_d256_bprop_head_dim, since torch 2.14
        return f"cuDNN has no backward for a head size of {call.head_size}, only up to 128 and for 256"
    return _head_multiple_refusal(8, call)


def _cudnn_determinism_refusal(call: _Call) -> str:
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return "it is not deterministic, and backend=deterministic" if strict else ""


def _cudnn_dropout_refusal(call: _Call) -> str:
    return "" if (call.dropout * 16).is_integer() else f"dropout must be a multiple of 1/16, but is {call.dropout}"


def _head_multiple_refusal(multiple: int, call: _Call) -> str:
    fits = call.head_size % multiple == 0
    return "" if fits else f"the head size must be a multiple of {multiple}, but is {call.head_size}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CHECKS: Mapping[str, Sequence[Callable[[_Call], str]]] = {
    "flash": (lambda call: _capability_refusal(call, (8, 0)), _dtype_refusal, _flash_mask_refusal, _flash_head_refusal),
    "efficient": (lambda call: _capability_refusal(call, (5, 0)), _efficient_dtype_refusal, _efficient_head_refusal),
    "cudnn": (
        lambda call: _capability_refusal(call, (8, 0)),
        _dtype_refusal,
        _cudnn_head_refusal,
        _cudnn_determinism_refusal,
        _cudnn_dropout_refusal,
    ),
}


# Which kernel ran


class _CountAttention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count attention operations by kind and kernel while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code runs eagerly inside (`_eager`), so torch's guard around each operation is not needed."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if name in _OPERATIONS:
            query, key = args[0], args[1]
            self.calls[_kind(query.dtype, query.shape[-2], key.shape[-2]), _OPERATIONS[name]] += 1
        elif name == "_safe_softmax":  # called by torch's math kernel only
            scores = args[0]
            self.calls[_kind(scores.dtype, scores.shape[-2], scores.shape[-1]), "math"] += 1
        return func(*args, **(kwargs or {}))


class _RecordAttention(TorchFunctionMode):
    """Record each call of scaled dot product attention while active: this level sees masks, the one below kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return self._record_call(*args, **kwargs)
        if func is not functional.multi_head_attention_forward:
            return func(*args, **kwargs)
        # torch disables this mode inside such a function, which looks up the attention function by name.
        functional.scaled_dot_product_attention = self._record_call
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = _ATTENTION

    def _record_call(self, *args: Any, **kwargs: Any) -> Any:
        counting = _CountAttention()
        with counting:
            output = _ATTENTION(*args, **kwargs)
        kernel = next((kernel for _, kernel in counting.calls), "unseen")
        self.calls.append(_describe_call(*args, kernel=kernel, **kwargs))
        return output


def _describe_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    kernel: str,
    **others: Any,
) -> AttentionCall:
    """Describe a call that `kernel` computed."""
    device = query.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    masked = attn_mask is not None
    refusals = {}
    for name, enabled in _IS_ENABLED.items():
        if kernel in (name, f"{name}_for_cpu"):
            continue
        reason = refusal_reason(name, query.shape, dtype, device, masked=masked, dropout=dropout_p, training=training)
        disabled = "" if enabled() else "disabled by the selected attention option"
        refusals[name] = reason or disabled or f"could run, but torch preferred {kernel}"
    kind = _kind(dtype, query.shape[-2], key.shape[-2])
    return AttentionCall(
        kind, tuple(query.shape), key.shape[-2], dtype, masked, is_causal, dropout_p, training, kernel, refusals
    )


def _kind(dtype: torch.dtype, num_queries: int, num_keys: int) -> str:
    return f"{_dtype_name(dtype)}, {num_queries} queries, {num_keys} keys"


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly; a no-op if Dynamo was never imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else _NULL_CONTEXT


_NEXT_BEST = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)  # math supports any call
_ATTENTION = functional.scaled_dot_product_attention
_IS_ENABLED: Mapping[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
_OPERATIONS: Mapping[str, str] = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_for_cpu",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "_scaled_dot_product_attention_math_for_mps": "math",
}

ATTENTIONS: Mapping[str, Callable[..., Attention]] = {
    "auto": auto,
    "math": math,
    "flash": flash,
    "efficient": efficient,
    "cudnn": cudnn,
}
