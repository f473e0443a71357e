"""Attention kernels: which run here, and in torch's words why not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from runner.base.text import first_line
from runner.plan.inventory import Device
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, skip, warn

if TYPE_CHECKING:
    import torch

_HEADLINES = {"efficient": "memory efficient"}
KERNELS = ("flash", "efficient", "cudnn", "math")
SHAPE = (1, 12, 1024, 64)  # batch, heads, length, head size: a sample of GPT-2


def attention(context: CheckContext) -> Iterator[CheckResult]:
    """Attention kernels on the shapes of GPT-2, with torch's reason if one does not run."""
    states = {finding.subject: finding.state for finding in context.found}
    pairs = [(device, kernel) for device in context.devices for kernel in KERNELS]
    for device, kernel in context.each(pairs, lambda pair: f"{pair[0].torch_name} {pair[1]}"):
        finding = try_kernel(device, kernel)
        states[finding.subject] = finding.state
        yield finding
    for name in (device.torch_name for device in context.devices):
        if [states.get(f"{name} {kernel}") for kernel in KERNELS] == ["skip", "skip", "skip", "ok"]:
            why = "the full score matrix is written to memory: slower, and far more memory for long sequences"
            fix = "train on a GPU of capability 8.0 or above"
            yield warn(f"{name} fused", "no fused kernel runs here", fix, why)


def reason_of(kernel: str, said: Sequence[str]) -> str:
    """Return why torch refuses a kernel, out of its warnings: a headline per kernel, and the reasons below it."""
    reasons, is_ours = [], False
    for words in (first_line(message).partition(" (Triggered")[0] for message in said):
        if words.endswith("because:"):
            is_ours = _HEADLINES.get(kernel, kernel) in words.lower()
        elif is_ours:
            reasons.append(words)
    return "; ".join(reasons)


# ---------------------------------------------------------------- attention


def try_kernel(device: Device, kernel: str) -> CheckResult:
    """Try one kernel with nothing to fall back on."""
    import torch

    from runner.axes.attention import count_kernels, refusal_reason

    name, where = f"{device.torch_name} {kernel}", torch.device(device.torch_name)
    half = torch.bfloat16 if device.native_bf16 else torch.float16
    dtype = half if device.kind == "cuda" else torch.float32
    inputs = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(where, dtype) for seed in range(3)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ran = count_kernels(lambda: _forward(kernel, inputs))
        except RuntimeError as error:
            reason = reason_of(kernel, [str(each.message) for each in said]) or refusal_reason(
                kernel, SHAPE, dtype, where
            )
            return skip(name, reason or first_line(str(error)))
    if kernel not in {each.removesuffix("_for_cpu") for each in ran}:
        reason = refusal_reason(kernel, SHAPE, dtype, where) or f"torch ran {', '.join(ran) or 'another one'} instead"
        return skip(name, reason)
    wrong, allowed = error_of(kernel, inputs), allowed_error(dtype)
    if not wrong <= allowed:  # also of NaN
        seen = f"output or gradients have a relative error of {wrong:.1e}; rounding explains {allowed:.1e}"
        other = next(each for each in ("math", "flash") if each != kernel)
        return failed(name, seen, f"attention={other}", figures={"error": wrong})
    shown = str(dtype).removeprefix("torch.")
    return ok(name, f"correct in {shown}, forward and backward, error {wrong:.0e}", error=wrong)


def _forward(kernel: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }[kernel]
    with sdpa_kernel([backend]):
        query, key, value = inputs
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def output_and_gradients(kernel: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and the gradients of its sum over the inputs."""
    import torch

    leaves = [each.detach().requires_grad_() for each in inputs]
    output = _forward(kernel, leaves)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def error_of(kernel: str, inputs: list[torch.Tensor]) -> float:
    """Return the typical difference from the plain formula in float64, in units of the typical size, on one head.

    Where one number is off by more than rounding scatters, its share of that counts instead.
    """
    part = [each[:, :1, :128].contiguous() for each in inputs]
    exact = output_and_gradients("math", [each.cpu().double() for each in part])
    pairs = zip(output_and_gradients(kernel, part), exact, strict=True)
    errors = []
    for one, other in pairs:
        difference, size = one.cpu().double() - other, other.square().mean().sqrt()
        errors += [float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size) / _SCATTER]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def allowed_error(dtype: torch.dtype) -> float:
    """Return what rounding explains: of inputs, scores, weights and results, and of sums over the keys in float32."""
    import torch

    return _MARGIN * (torch.finfo(dtype).eps + 4 * math.sqrt(128) * 2.0**-24)


_MARGIN = 4.0  # some kernels round scores and weights once more
_SCATTER = 8.0  # the largest of many errors against a typical one; gradients of the first keys are sums over all rows
