"""Check which attention kernels run on this machine, with torch's reason for those that do not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.axes.attention import count_kernels, refusal_reason
from runner.base.text import first_line
from runner.plan.inventory import Device
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, skip, warn

_HEADLINES = {"efficient": "memory efficient"}
KERNELS = ("flash", "efficient", "cudnn", "math")
SHAPE = (1, 12, 1024, 64)  # batch, heads, length, head size: a sample of GPT-2


def attention(context: CheckContext) -> Iterator[CheckResult]:
    """Attention kernels on the shapes of GPT-2, with torch's reason if one does not run."""
    states = {finding.subject: finding.state for finding in context.earlier_results}
    pairs = [(device, kernel) for device in context.devices for kernel in KERNELS]
    for device, kernel in context.pending(pairs, lambda pair: f"{pair[0].torch_name} {pair[1]}"):
        finding = check_kernel(device, kernel)
        states[finding.subject] = finding.state
        yield finding
    for name in (device.torch_name for device in context.devices):
        if [states.get(f"{name} {kernel}") for kernel in KERNELS] == ["skip", "skip", "skip", "ok"]:
            why = "the full score matrix is written to memory: slower, and far more memory for long sequences"
            fix = "train on a GPU of capability 8.0 or above"
            yield warn(f"{name} fused", "no fused kernel runs here", fix, why)


def parse_refusal(kernel: str, caught: Sequence[str]) -> str:
    """Return why torch refuses a kernel, from its warnings: a headline per kernel, followed by the reasons."""
    reasons, is_ours = [], False
    for line in (first_line(message).partition(" (Triggered")[0] for message in caught):
        if line.endswith("because:"):
            is_ours = _HEADLINES.get(kernel, kernel) in line.lower()
        elif is_ours:
            reasons.append(line)
    return "; ".join(reasons)


# ---------------------------------------------------------------- attention


def check_kernel(device: Device, kernel: str) -> CheckResult:
    """Check one kernel, without fallback."""
    name, where = f"{device.torch_name} {kernel}", torch.device(device.torch_name)
    half = torch.bfloat16 if device.native_bf16 else torch.float16
    dtype = half if device.kind == "cuda" else torch.float32
    inputs = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(where, dtype) for seed in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ran = count_kernels(lambda: _forward(kernel, inputs))
        except RuntimeError as error:
            reason = parse_refusal(kernel, [str(each.message) for each in caught]) or refusal_reason(
                kernel, SHAPE, dtype, where
            )
            return skip(name, reason or first_line(str(error)))
    if kernel not in {each.removesuffix("_for_cpu") for each in ran}:
        reason = refusal_reason(kernel, SHAPE, dtype, where) or f"torch ran {', '.join(ran) or 'another one'} instead"
        return skip(name, reason)
    deviation, allowed = measure_error(kernel, inputs), allowed_error(dtype)
    if not deviation <= allowed:  # also true for NaN
        seen = f"output or gradients have a relative error of {deviation:.1e}; rounding explains {allowed:.1e}"
        other = "flash" if kernel == "math" else "math"
        return failed(name, seen, f"attention={other}", figures={"error": deviation})
    dtype_name = str(dtype).removeprefix("torch.")
    return ok(name, f"correct in {dtype_name}, forward and backward, error {deviation:.0e}", error=deviation)


def _forward(kernel: str, inputs: list[torch.Tensor]) -> torch.Tensor:
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
    """Return the output, and the gradients of its sum of squares with respect to the inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = _forward(kernel, leaves)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def measure_error(kernel: str, inputs: list[torch.Tensor]) -> float:
    """Return the error relative to the math formula in float64, on one head.

    It is the RMS of the difference relative to the RMS of the result, or the largest difference divided by _SCATTER if
    that is larger.
    """
    part = [tensor[:, :1, :128].contiguous() for tensor in inputs]
    exact = output_and_gradients("math", [tensor.cpu().double() for tensor in part])
    pairs = zip(output_and_gradients(kernel, part), exact, strict=True)
    errors = []
    for actual, expected in pairs:
        difference, size = actual.cpu().double() - expected, expected.square().mean().sqrt()
        errors += [float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size) / _SCATTER]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def allowed_error(dtype: torch.dtype) -> float:
    """Return the error that rounding explains: inputs, scores, weights and results, and float32 sums over the keys."""
    return _MARGIN * (torch.finfo(dtype).eps + 4 * math.sqrt(128) * 2.0**-24)


_MARGIN = 4.0  # some kernels round scores and weights twice
_SCATTER = 8.0  # largest error relative to the RMS; gradients of the first keys are sums over all rows
