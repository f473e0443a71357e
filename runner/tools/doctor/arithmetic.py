"""Check matrix products on each device in each number format against float64, and measure their speed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from runner.base.text import first_line
from runner.plan.inventory import Device, Inventory
from runner.tensors.tf32 import float32_matmul
from runner.tools.doctor.findings import CheckContext, CheckResult, failed, ok, skip

Product = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
SIDE, MAX_TIMED_SIDE = 256, 16384  # side of the matrices of the accuracy test; largest side that is timed


@dataclass(frozen=True)
class FormatUnderTest:
    """A number format on a device.

    digits     bits of the mantissa, including the implicit one
    why_not    why the device does not support the format; empty if it does
    is_native  whether the device has native instructions for the format
    """

    device: Device
    name: str
    digits: int
    why_not: str = ""
    is_native: bool = False

    @property
    def subject(self) -> str:
        return f"{self.device.torch_name} {self.name}"


def matmul(context: CheckContext) -> Iterator[CheckResult]:
    """Matrix multiplication per device and format: accuracy against float64."""
    wanted = [
        number_format for device in context.devices for number_format in formats(device, context.required_inventory)
    ]
    for number_format in context.each(wanted, lambda number_format: number_format.subject):
        if number_format.why_not:
            yield skip(number_format.subject, number_format.why_not)
            continue
        try:
            yield check_format(number_format)
        except RuntimeError as error:  # torch may lack kernels for bf16 and fp16, but only where they are not native
            if number_format.is_native or number_format.name not in ("bf16", "fp16"):
                raise
            yield skip(number_format.subject, f"not supported on this device: {first_line(str(error))}")


def formats(device: Device, inventory: Inventory) -> list[FormatUnderTest]:
    """Return the number formats to test on a device, with the reason for those that it does not support."""
    if device.kind == "cpu":
        bf16 = inventory.cpu.native_bf16
        tf32 = "TF32 is a format of NVIDIA's tensor cores"
        half = "avx512_fp16" in inventory.cpu.flags or "amx_fp16" in inventory.cpu.flags
    else:
        bf16, half = device.native_bf16, device.formats.fp16
        missing = "torch has no TF32 on AMD GPUs" if device.architecture else "needs capability 8.0"
        tf32 = "" if device.formats.tf32 else missing
    fp64 = {"mps": "Metal has no float64", "xpu": "many Intel GPUs have no float64"}.get(device.kind, "")
    return [
        FormatUnderTest(device, "fp32", 24),
        *([] if device.kind == "cpu" else [FormatUnderTest(device, "tf32", 11, tf32, is_native=True)]),
        FormatUnderTest(device, "bf16", 8, is_native=bf16),
        FormatUnderTest(device, "fp16", 11, is_native=half),
        FormatUnderTest(device, "fp64", 53, fp64),
    ]


def check_format(number_format: FormatUnderTest, product: Product | None = None) -> CheckResult:
    """Return FAIL if a product in this format has a larger error than rounding can explain, otherwise ok."""
    error, allowed = measure_error(number_format, product), allowed_error(number_format)
    if not error <= allowed:  # also true for NaN
        seen = f"a matrix product has a relative error of {error:.1e}; rounding explains at most {allowed:.1e}"
        return failed(number_format.subject, seen, _fix(number_format), _WHY_WRONG, {"error": error})
    return ok(number_format.subject, f"correct, error {error:.0e}".replace("0e+00", "0"), error=error)


def measure_error(number_format: FormatUnderTest, product: Product | None = None) -> float:
    """Return the largest error of a product in this format, relative to the RMS of the product in float64."""
    left, right = (factor.to(get_dtype(number_format)) for factor in random_matrices(SIDE, torch.device("cpu")))
    expected = torch.from_numpy(left.double().numpy() @ right.double().numpy())  # by NumPy, independently of torch
    device = torch.device(number_format.device.torch_name)
    with torch.inference_mode(), float32_mode(number_format):
        actual = (product or torch.matmul)(left.to(device), right.to(device)).cpu().double()
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())


def allowed_error(number_format: FormatUnderTest) -> float:
    """Return the largest error that rounding of the factors, the sums and the result can explain.

    Sums are assumed to be accumulated in float32 or in a more accurate format.

    Random rounding errors of a sum of n terms grow with the square root of n.
    Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019.
    """
    sum_error = 2.0 ** -max(24, number_format.digits)
    return _MARGIN * (2.0**-number_format.digits + math.sqrt(SIDE) * sum_error)


# ---------------------------------------------------------------- speed


def random_matrices(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two square random matrices, the same for each call."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    return left, right


def flops(size: int) -> float:
    """Return the number of floating-point operations of a product of two square matrices."""
    return 2.0 * size**3


def get_dtype(number_format: FormatUnderTest) -> torch.dtype:
    """Return the torch dtype of the format; float32 for TF32, which is a mode of float32 products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(number_format.name, torch.float32)


def float32_mode(number_format: FormatUnderTest) -> AbstractContextManager[None]:
    """Return a context manager in which float32 products use exactly this format."""
    if number_format.name not in ("fp32", "tf32"):
        return nullcontext()
    return float32_matmul("high" if number_format.name == "tf32" else "highest", cudnn=number_format.name == "tf32")


def time_product(number_format: FormatUnderTest, size: int) -> float:
    """Return the seconds of one product of square matrices."""
    device = torch.device(number_format.device.torch_name)
    with torch.inference_mode(), float32_mode(number_format):
        left, right = (factor.to(get_dtype(number_format)) for factor in random_matrices(size, device))
        return time_call(functools.partial(torch.matmul, left, right), device)


def fastest_product(number_format: FormatUnderTest, max_s: float, repetitions: int = 1) -> tuple[int, float]:
    """Return the side of the square matrices whose product has the highest rate, and the rate in FLOP/s.

    max_s        maximum expected seconds of a product; larger products are not measured
    repetitions  number of measurements of each size; the shortest one counts
    """
    size, rates = SIDE, dict[int, float]()
    free = number_format.device.free_bytes or number_format.device.memory_bytes
    while True:
        seconds = min(time_product(number_format, size) for _ in range(repetitions))
        rates[size] = flops(size) / seconds
        size *= 2
        if seconds * 8 > max_s or size > MAX_TIMED_SIDE or 3 * 8 * size**2 > free / 4:
            fastest = max(rates, key=lambda size: rates[size])
            return fastest, rates[fastest]


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the best of several, after a warm-up."""

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
        call_s = (time.perf_counter() - start) / repeats
        best = min(best, call_s)
        repeats = max(1, min(64, int(_BURST_S / call_s)))  # amortize the synchronization
    return best


def _fix(number_format: FormatUnderTest) -> str:
    if number_format.name == "fp32" and number_format.device.kind == "cuda":
        return "unset NVIDIA_TF32_OVERRIDE; if it is not set, do not train here: reinstall torch, or check the GPU"
    return f"do not train with precision={number_format.name} here: reinstall torch, or check the device"


_MARGIN = 16.0  # upper bound of the largest of many thousand errors, as a multiple of their RMS
_MEASURED_S, _BURST_S = 0.03, 0.005  # seconds of all timed calls, and of the calls between two synchronizations
_WHY_WRONG = "wrong results from a device, driver or library make training useless"
