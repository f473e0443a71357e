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
from runner.base.text import dtype_name

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
        """Return a new context for a forward pass; costs 24 us, or nothing for auto."""
        return sdpa_kernel(list(self.kernels), set_priority=True) if self.kernels else _NULL_CONTEXT


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled dot product attention.

    shape     shape of the queries: (batch, heads, length, head size)
    num_keys  length of the keys
    dtype     dtype of the kernel's inputs, after autocast
    masked    whether there was an explicit mask
    causal    whether is_causal=True was set
    kernel    kernel that ran: flash, efficient, cudnn, math, overrideable, or flash_for_cpu; "unseen" if unknown
    """

    shape: tuple[int, ...]
    num_keys: int
    dtype: torch.dtype
    masked: bool
    causal: bool
    kernel: str


def auto(device: torch.device) -> Attention:
    """Let torch choose the fastest kernel that supports the call."""
    return Attention("auto")


def math(device: torch.device) -> Attention:
    """Compute with matrix products and a softmax: supports any input, but uses the most memory (full score matrix)."""
    return Attention("math", (SDPBackend.MATH,))


def flash(device: torch.device, *, strict: bool = False) -> Attention:
    """Prefer the flash kernel (capability 8.0 and above, no mask); unsupported calls use the next best one.

    strict  raise an error for a call that this kernel does not support
    With strict, raises ConfigError if this device lacks the kernel.
    Source: Dao, FlashAttention-2, 2023; needs compute capability 8.0 and float16 or bfloat16 on a GPU.
    """
    return _prefer("flash", SDPBackend.FLASH_ATTENTION, device, strict)


def efficient(device: torch.device, *, strict: bool = False) -> Attention:
    """Prefer the memory-efficient kernel, which supports masks and older GPUs; other calls use the next best one.

    strict  raise an error for a call that this kernel does not support
    With strict, raises ConfigError if this device lacks the kernel.
    Source: Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021; kernels of xFormers.
    """
    return _prefer("efficient", SDPBackend.EFFICIENT_ATTENTION, device, strict)


def cudnn(device: torch.device, *, strict: bool = False) -> Attention:
    """Prefer cuDNN's kernel, designed for H100 and newer; unsupported calls use the next best one.

    strict  raise an error for a call that this kernel does not support
    With strict, raises ConfigError if this device lacks the kernel.
    Source: torch.nn.attention.SDPBackend.CUDNN_ATTENTION.
    """
    return _prefer("cudnn", SDPBackend.CUDNN_ATTENTION, device, strict)


def count_calls(model_call: Callable[[], object]) -> dict[tuple[str, str], int]:
    """Run `model_call` once and return the number of calls per (kind of call, kernel).

    A kind is formatted as "bfloat16, 128 queries, 128 keys", which distinguishes prefill, decoding and cross attention.
    Compiled code runs eagerly in this call, because a compiled graph hides its operations. Only calls of the forward
    pass are counted.
    """
    mode = _CountAttention()
    with _eager(), mode:
        model_call()
    return dict(mode.calls)


def record_calls(model_call: Callable[[], object]) -> tuple[AttentionCall, ...]:
    """Run `model_call` once and return its calls of F.scaled_dot_product_attention in order.

    Calls inside torch's own modules are not included. Compiled code runs eagerly in this call.
    """
    mode = _RecordAttention()
    with _eager(), mode:
        model_call()
    return tuple(mode.calls)


def refusal_reason(
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    masked: bool = False,
    head_size: int = 64,
    capability: tuple[int, int] | None = None,
) -> str:
    """Return why a device cannot run a kernel with such inputs; empty if it can.

    Restrictions on masks and head sizes are checked only for flash.

    masked      whether an explicit mask is given (is_causal=True is not one)
    capability  compute capability to assume, such as (7, 5); default: the capability of `device`
    Source: the checks of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11 to 2.13.
    """
    if backend == "math":
        return ""
    if device.type == "cpu":
        return "" if backend == "flash" else f"the CPU has no {backend} kernel"
    if device.type != "cuda":
        return f"this option cannot select kernels on {device.type}"
    if capability is None:
        if not cuda_is_available():
            return "there is no CUDA device"
        accelerator = get_accelerator(device)
        capability = accelerator.capability()
        if capability is None:
            return _amd_refusal(backend, accelerator.architecture(), dtype)
    needed = (5, 0) if backend == "efficient" and dtype != torch.bfloat16 else (8, 0)
    if capability < needed:
        found, least = (".".join(map(str, version)) for version in (capability, needed))
        return f"it needs compute capability {least}, but the device has {found}"
    if dtype not in _DTYPES[backend]:
        return f"inputs must be {' or '.join(map(dtype_name, _DTYPES[backend]))}, but are {dtype_name(dtype)}"
    if backend == "flash" and masked:
        return "it does not support an explicit mask, only is_causal=True"
    if backend == "flash" and head_size > 256:
        return f"the head size must be at most 256, but is {head_size}"
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return "it is not deterministic, but backend=deterministic is set" if backend == "cudnn" and strict else ""


def _prefer(name: str, kernel: SDPBackend, device: torch.device, strict: bool) -> Attention:
    """Return the attention that prefers this kernel, after a check that the device supports it at all."""
    reason = refusal_reason(name, torch.float16, device)
    if reason and strict:
        raise ConfigError(
            Problem(f"not available: {reason}", f"attention={name}", "use attention=auto, or attention.strict=false")
        )
    if reason:
        warnings.warn(f"attention={name} is not available ({reason}); the next best kernel is used", stacklevel=3)
    rest = (other for other in _NEXT_BEST if other != kernel)
    return Attention(name, (kernel,) if strict else (kernel, *rest), reason)


def _amd_refusal(backend: str, architecture: str, dtype: torch.dtype) -> str:
    """Check AOTriton, which implements flash and memory-efficient attention on AMD for a few architectures.

    Source: check_flash_attention_hardware_support and check_mem_efficient_hardware_support of sdp_utils.cpp, USE_ROCM.
    """
    if backend == "cudnn":
        return "cuDNN needs an NVIDIA GPU"
    if not amd_formats(architecture).flash:
        return f"AOTriton has no kernels for {architecture or 'this architecture'}"
    if backend == "flash" and dtype not in _HALF:
        return f"inputs must be float16 or bfloat16, but are {dtype_name(dtype)}"
    return ""


class _CountAttention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count attention operations by kind and kernel while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: compiled code runs eagerly (`_eager`), so torch need not disable Dynamo for each operation."""
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
    """Record calls of scaled dot product attention while active.

    A function mode sees the arguments, such as the mask, but not the kernel, which only a dispatch mode sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        counting = _CountAttention()
        with counting:
            output = func(*args, **kwargs)
        query, key, mask, is_causal = _attention_inputs(*args, **kwargs)
        kernel = next((kernel for _, kernel in counting.calls), "unseen")
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
        self.calls.append(
            AttentionCall(tuple(query.shape), key.shape[-2], dtype, mask is not None, bool(is_causal), kernel)
        )
        return output


def _attention_inputs(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Any, bool]:  # fmt: skip
    """Return the arguments on which the choice of a kernel depends, whether passed by position or by name."""
    return query, key, attn_mask, is_causal


def _kind(dtype: torch.dtype, num_queries: int, num_keys: int) -> str:
    return f"{dtype_name(dtype)}, {num_queries} queries, {num_keys} keys"


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly; a no-op if Dynamo was never imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else _NULL_CONTEXT


_NEXT_BEST = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)  # math supports any call
_HALF = (torch.float16, torch.bfloat16)
_DTYPES: Mapping[str, Sequence[torch.dtype]] = {
    "flash": _HALF,
    "efficient": (torch.float16, torch.bfloat16, torch.float32),
    "cudnn": _HALF,
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
