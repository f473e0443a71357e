"""Products and convolutions on each device in each format: the numbers against float64, and the rate."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.base.text import first_line
from runner.doctor.findings import CheckContext, CheckResult, failed, ok, skip, warn
from runner.plan.inventory import Device, Inventory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FormatUnderTest:
    """A format of numbers on a device.

    digits    bits of the mantissa, the leading one included
    why_not   why it is not there; empty where it is
    is_own    the device multiplies it itself, so that it should not be slower than float32
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
    """A product of matrices per device and format, compared with float64."""
    yield from _each(context, products, "a product of matrices")


def convolution(context: CheckContext) -> Iterator[CheckResult]:
    """A 3 x 3 convolution per device and format, compared with float64."""
    yield from _each(context, convolutions, "a convolution")


def formats(device: Device, inventory: Inventory) -> list[FormatUnderTest]:
    """Return the formats to try on a device."""
    if device.kind == "cpu":
        own = inventory.cpu.native_bf16
        tf32 = "TF32 is a format of NVIDIA's tensor cores"
        half = "avx512_fp16" in inventory.cpu.flags or "amx_fp16" in inventory.cpu.flags
    else:
        own, half = device.native_bf16, device.fp16_tensor_cores
        missing = "torch has no TF32 on AMD GPUs" if device.architecture else "needs capability 8.0"
        tf32 = "" if device.native_tf32 else missing
    wide = "Metal has no float64" if device.kind == "mps" else ""
    return [
        FormatUnderTest(device, "fp32", 24),
        *([] if device.kind == "cpu" else [FormatUnderTest(device, "tf32", 11, tf32, is_own=True)]),
        FormatUnderTest(device, "bf16", 8, is_own=own),
        FormatUnderTest(device, "fp16", 11, is_own=half),
        FormatUnderTest(device, "fp64", 53, wide),
    ]


# ---------------------------------------------------------------- the two operations


@dataclass(frozen=True)
class OperationUnderTest:
    """An operation that can be made in any size.

    make      (size, device) -> the two factors, the same ones each time
    call      of the factors
    exact     of factors in float64 on the CPU, by another library than torch's
    flops     of a size
    sizes     smallest and largest
    summed    terms of each sum, at the smallest size
    growth    how much more rounding of sums may grow than in a plain sum: Winograd's convolutions lose some bits
    """

    make: Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    exact: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    flops: Callable[[int], float]
    sizes: tuple[int, int]
    summed: int
    growth: float = 1.0


def products() -> OperationUnderTest:
    """Return the product of two square matrices; the size is their side."""
    import torch

    def make(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        one, other = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
        return one, other

    def exact(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(one.numpy() @ other.numpy())

    return OperationUnderTest(make, torch.matmul, exact, lambda size: 2.0 * size**3, (256, 8192), 256)


def convolutions() -> OperationUnderTest:
    """Return a block of a ResNet: 64 channels of 56 x 56; the size counts the images."""
    import torch
    from torch.nn import functional

    def make(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        images = torch.randn(size, _CHANNELS, _SIDE, _SIDE, generator=generator, device=device)
        kernels = torch.randn(_CHANNELS, _CHANNELS, 3, 3, generator=generator, device=device)
        return images.to(memory_format=torch.channels_last), kernels.to(memory_format=torch.channels_last)

    def call(images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(images, kernels, padding=1)

    def exact(images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        patches = functional.unfold(images, 3, padding=1)
        product = kernels.reshape(len(kernels), -1).numpy() @ patches.numpy()
        return torch.from_numpy(product).reshape(len(images), len(kernels), *images.shape[2:])

    def flops(size: int) -> float:
        return 2.0 * size * _CHANNELS * _CHANNELS * 9 * _SIDE**2

    return OperationUnderTest(make, call, exact, flops, sizes=(1, 512), summed=9 * _CHANNELS, growth=8.0)


# ---------------------------------------------------------------- trying one


def _each(context: CheckContext, work: Callable[[], OperationUnderTest], what: str) -> Iterator[CheckResult]:
    made = work()
    rates = {finding.subject: finding.figures.get("gflop_per_s", 0.0) for finding in context.found}
    wanted = [number for device in context.devices for number in formats(device, context.here)]
    for number in context.each(wanted, lambda number: number.subject):
        if number.why_not:
            yield skip(number.subject, number.why_not)
            continue
        try:
            finding = try_format(number, made, what)
        except RuntimeError as error:  # torch has no such kernel; where the device has the format, that is wrong
            if number.is_own or number.name not in ("bf16", "fp16"):
                raise
            finding = skip(number.subject, f"not supported on this device: {first_line(str(error))}")
        rate = rates[number.subject] = finding.figures.get("gflop_per_s", 0.0)
        float32 = rates.get(f"{number.device.torch_name} fp32", 0.0)
        if finding.state == "ok" and number.is_own and rate < float32:
            seen = f"{finding.seen}: slower than fp32, although the device has native instructions for it"
            finding = warn(number.subject, seen, "precision=fp32", figures=finding.figures)
        yield finding


def try_format(number: FormatUnderTest, work: OperationUnderTest, what: str) -> CheckResult:
    """Compute `work` in this format: FAIL where rounding does not explain the error, else ok with the rate."""
    import torch

    dtype, device = dtype_of(number), torch.device(number.device.torch_name)
    with torch.inference_mode(), float32_of(number):
        error, allowed = error_of(number, work, device, dtype), allowed_error(number, work)
        if not error <= allowed:  # also of NaN
            seen = f"{what} has a relative error of {error:.1e}; rounding explains {allowed:.1e}"
            return failed(number.subject, seen, _fix(number), _WHY_WRONG, {"error": error})
        rate = _rate(number, work, device, dtype)
    return ok(
        number.subject,
        f"{_in_words(rate)}, error {error:.0e}".replace("0e+00", "0"),
        gflop_per_s=rate / 1e9,
        error=error,
    )


def dtype_of(number: FormatUnderTest) -> torch.dtype:
    """Return what torch calls the format; TF32 is a way to multiply float32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(number.name, torch.float32)


def float32_of(number: FormatUnderTest) -> AbstractContextManager[None]:
    """Return a context in which float32 products are what their name says."""
    from runner.base.tf32 import float32_matmul

    if number.name not in ("fp32", "tf32"):
        return nullcontext()
    return float32_matmul("high" if number.name == "tf32" else "highest", cudnn=number.name == "tf32")


def error_of(number: FormatUnderTest, work: OperationUnderTest, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference from float64, in units of the typical size of a number of the result."""
    import torch

    one, other = (factor.to(dtype) for factor in work.make(work.sizes[0], torch.device("cpu")))
    expected = work.exact(one.double(), other.double())
    found = work.call(one.to(device), other.to(device)).cpu().double()
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def allowed_error(number: FormatUnderTest, work: OperationUnderTest) -> float:
    """Return what rounding explains: that of factors and result, and that of the sum, which is at most float32's.

    Errors of a sum of n terms grow as the square root of n where they are random.
    Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019.
    """
    of_sum = 2.0 ** -max(24, number.digits)
    return _MARGIN * (2.0**-number.digits + work.growth * math.sqrt(work.summed) * of_sum)


def _rate(number: FormatUnderTest, work: OperationUnderTest, device: torch.device, dtype: torch.dtype) -> float:
    """Return floating-point operations per second, of the largest size that takes about ENOUGH_S."""
    size, most = work.sizes
    while True:
        one, other = (factor.to(dtype) for factor in work.make(size, device))
        once_s = seconds(functools.partial(work.call, one, other), device)
        growth = work.flops(2 * size) / work.flops(size)
        bytes_next = (one.nbytes + other.nbytes) * 4 * 3
        free = number.device.free_bytes or number.device.memory_bytes
        if once_s * growth > _ENOUGH_S or 2 * size > most or bytes_next > free / 4:
            return work.flops(size) / once_s
        size *= 2


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, the best of several; the first, which chooses kernels, does not count."""
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


def _in_words(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


_CHANNELS, _SIDE = 64, 56
_MARGIN = 16.0  # the largest of many thousand errors against a typical one
_ENOUGH_S, _MEASURED_S, _BURST_S = 0.04, 0.03, 0.005
_WHY_WRONG = "with wrong results of a device, driver or library, training is useless"
