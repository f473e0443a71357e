"""Matrix products on each device in each format: correct to rounding, compared with float64."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.base.text import first_line
from runner.plan.inventory import Device, Inventory
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, skip

if TYPE_CHECKING:
    import torch

Product = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
SIDE, LARGEST = 256, 8192  # of the matrices whose product is compared, and of the largest one that is timed


@dataclass(frozen=True)
class FormatUnderTest:
    """A number format on a device.

    digits    bits of the mantissa, including the leading one
    why_not   why the device lacks it; empty if it has it
    is_own    the device has native instructions for it
    """

    device: Device
    name: str
    digits: int
    why_not: str = ""
    is_own: bool = False

    @property
    def subject(self) -> str:
        return f"{self.device.torch_name} {self.name}"


def matmul(context: CheckContext) -> Iterator[CheckResult]:
    """Matrix multiplication per device and format: accuracy against float64."""
    wanted = [number for device in context.devices for number in formats(device, context.here)]
    for number in context.each(wanted, lambda number: number.subject):
        if number.why_not:
            yield skip(number.subject, number.why_not)
            continue
        try:
            yield try_format(number)
        except RuntimeError as error:  # torch has no such kernel; that is a failure if the device has the format
            if number.is_own or number.name not in ("bf16", "fp16"):
                raise
            yield skip(number.subject, f"not supported on this device: {first_line(str(error))}")


def formats(device: Device, inventory: Inventory) -> list[FormatUnderTest]:
    """Return the formats to test on a device."""
    if device.kind == "cpu":
        own = inventory.cpu.native_bf16
        tf32 = "TF32 is a format of NVIDIA's tensor cores"
        half = "avx512_fp16" in inventory.cpu.flags or "amx_fp16" in inventory.cpu.flags
    else:
        own, half = device.native_bf16, device.fp16_tensor_cores
        missing = "torch has no TF32 on AMD GPUs" if device.architecture else "needs capability 8.0"
        tf32 = "" if device.native_tf32 else missing
    wide = {"mps": "Metal has no float64", "xpu": "many Intel GPUs have no float64"}.get(device.kind, "")
    return [
        FormatUnderTest(device, "fp32", 24),
        *([] if device.kind == "cpu" else [FormatUnderTest(device, "tf32", 11, tf32, is_own=True)]),
        FormatUnderTest(device, "bf16", 8, is_own=own),
        FormatUnderTest(device, "fp16", 11, is_own=half),
        FormatUnderTest(device, "fp64", 53, wide),
    ]


def try_format(number: FormatUnderTest, product: Product | None = None) -> CheckResult:
    """Return FAIL if rounding does not explain the error of a product in this format."""
    error, allowed = error_of(number, product), allowed_error(number)
    if not error <= allowed:  # also of NaN
        seen = f"a matrix product has a relative error of {error:.1e}; rounding explains {allowed:.1e}"
        return failed(number.subject, seen, _fix(number), _WHY_WRONG, {"error": error})
    return ok(number.subject, f"correct, error {error:.0e}".replace("0e+00", "0"), error=error)


def error_of(number: FormatUnderTest, product: Product | None = None) -> float:
    """Return the largest difference from float64, relative to the typical size of an element of the result."""
    import torch

    one, other = (factor.to(dtype_of(number)) for factor in factors(SIDE, torch.device("cpu")))
    expected = torch.from_numpy(one.double().numpy() @ other.double().numpy())  # by another library than torch's
    device = torch.device(number.device.torch_name)
    with torch.inference_mode(), float32_of(number):
        found = (product or torch.matmul)(one.to(device), other.to(device)).cpu().double()
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def allowed_error(number: FormatUnderTest) -> float:
    """Return the error that rounding explains: of factors and result, and of the sum, which is at most float32's.

    Errors of a sum of n terms grow as the square root of n if they are random.
    Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019.
    """
    of_sum = 2.0 ** -max(24, number.digits)
    return _MARGIN * (2.0**-number.digits + math.sqrt(SIDE) * of_sum)


# ---------------------------------------------------------------- also for measuring


def factors(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two square random matrices, the same ones each time."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    return one, other


def flops(size: int) -> float:
    """Return the floating-point operations of a product of two square matrices."""
    return 2.0 * size**3


def dtype_of(number: FormatUnderTest) -> torch.dtype:
    """Return torch's type of the format; TF32 is a way to multiply float32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(number.name, torch.float32)


def float32_of(number: FormatUnderTest) -> AbstractContextManager[None]:
    """Return a context in which products of float32 use exactly this format."""
    from runner.base.tf32 import float32_matmul

    if number.name not in ("fp32", "tf32"):
        return nullcontext()
    return float32_matmul("high" if number.name == "tf32" else "highest", cudnn=number.name == "tf32")


def product_seconds(number: FormatUnderTest, size: int) -> float:
    """Return the seconds of one product of that size."""
    import torch

    device = torch.device(number.device.torch_name)
    with torch.inference_mode(), float32_of(number):
        one, other = (factor.to(dtype_of(number)) for factor in factors(size, device))
        return seconds(functools.partial(torch.matmul, one, other), device)


def rate(number: FormatUnderTest) -> float:
    """Return floating-point operations per second, of the largest size that takes about _ENOUGH_S."""
    size = SIDE
    while True:
        once_s = product_seconds(number, size)
        free = number.device.free_bytes or number.device.memory_bytes
        if once_s * 8 > _ENOUGH_S or 2 * size > LARGEST or 3 * 8 * (2 * size) ** 2 > free / 4:
            return flops(size) / once_s
        size *= 2


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the best of several, after one that chooses kernels."""
    import torch

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    call()
    wait()
    repeats, best, began = 1, math.inf, time.perf_counter()
    while time.perf_counter() - began < _MEASURED_S:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        took = (time.perf_counter() - start) / repeats
        best = min(best, took)
        repeats = max(1, min(64, int(_BURST_S / took)))  # a GPU is to be waited for seldom
    return best


def _fix(number: FormatUnderTest) -> str:
    if number.name == "fp32" and number.device.kind == "cuda":
        return "unset NVIDIA_TF32_OVERRIDE; else do not train here: reinstall torch, or check the GPU"
    return f"do not train with precision={number.name} here: reinstall torch, or check the device"


_MARGIN = 16.0  # the largest of many thousand errors against a typical one
_ENOUGH_S, _MEASURED_S, _BURST_S = 0.04, 0.03, 0.005
_WHY_WRONG = "with wrong results of a device, driver or library, training is useless"
