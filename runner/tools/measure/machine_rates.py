"""Measure rates of the machine: matrix products, memory and copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from runner.base.accelerator import get_accelerator
from runner.base.errors import AccelRunError
from runner.base.text import first_line
from runner.host.resources import ROOT, affinity
from runner.plan.inventory import Device
from runner.tools.doctor import arithmetic
from runner.tools.doctor.arithmetic import FormatUnderTest
from runner.tools.doctor.findings import CheckContext


@dataclass(frozen=True)
class Rate:
    """The highest rate of an operation.

    part    matmul or copies
    device  torch's name
    name    format, or source and destination
    size    side of the matrices, or number of bytes
    per_s   floating-point operations or bytes per second
    """

    part: str
    device: str
    name: str
    size: int
    per_s: float


@dataclass
class MachineResults:
    """Measurements of the parts so far.

    skipped  name of what was not measured -> reason
    threads  number of torch threads on the CPU
    """

    rates: list[Rate] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    threads: int | None = None

    def measure(self, name: str, measure: Callable[[], Rate]) -> None:
        """Add a rate; if it cannot be measured, add the reason."""
        try:
            self.rates.append(measure())
        except (RuntimeError, AccelRunError) as error:  # no such kernel, or out of memory
            self.skipped[name] = f"not supported on this device: {first_line(str(error)) or type(error).__name__}"


def matmul(context: CheckContext) -> MachineResults:
    """Measure the rate of matrix products by device and number format, each at its fastest size."""
    results, inventory = MachineResults(threads=torch.get_num_threads()), context.required_inventory
    for precision in chain.from_iterable(arithmetic.formats(device, inventory) for device in context.devices):
        if precision.why_not:
            results.skipped[f"{precision.subject} matmul"] = precision.why_not
        else:
            results.measure(f"{precision.subject} matmul", lambda precision=precision: _fastest_product(precision))  # type: ignore[misc]
    return results


def _fastest_product(precision: FormatUnderTest) -> Rate:
    size, per_s = arithmetic.fastest_product(precision, MAX_PRODUCT_S, REPETITIONS)
    return Rate("matmul", precision.device.torch_name, precision.name, size, per_s)


def copies(context: CheckContext) -> MachineResults:
    """Measure the rate of copies within each device, and between host and GPU."""
    results, host = MachineResults(threads=torch.get_num_threads()), torch.device("cpu")
    for device in context.devices:
        if device.kind not in ("cpu", "cuda"):
            results.skipped[f"{device.torch_name} copies"] = "shares the host's memory"
            continue
        gpu = torch.device(device.torch_name)
        for name, source, target, pinned in (
            ("host to device, pinned", host, gpu, True),
            ("host to device, not pinned", host, gpu, False),
            ("device to host, pinned", gpu, host, True),
            ("device to host, not pinned", gpu, host, False),
            ("device to device", gpu, gpu, False),
        ):
            if device.kind == "cuda":
                results.measure(
                    f"{gpu} {name}",
                    lambda name=name, source=source, target=target, pinned=pinned: _copy(name, source, target, pinned),  # type: ignore[misc]
                )
        results.measure(f"{device.torch_name} {TRIAD}", lambda device=device: triad(device))  # type: ignore[misc]
    return results


def triad(device: Device) -> Rate:
    """Measure a = b + s c on float64 arrays that are larger than the caches.

    As in STREAM, two reads and one write are counted.
    Source: McCalpin, STREAM: Sustainable Memory Bandwidth in High Performance Computers.
    """
    torch_device = torch.device(device.torch_name)
    free = device.free_bytes or device.memory_bytes or GIB
    size = min(max(MIN_ARRAY_BYTES, CACHE_FACTOR * cache_bytes(torch_device)), free // 8) // 8
    a, b, c = (torch.full((size,), value, dtype=torch.float64, device=torch_device) for value in (0.0, 1.0, 2.0))
    seconds = _best_of(lambda: torch.add(b, c, alpha=3.0, out=a), torch_device)
    return Rate("copies", device.torch_name, TRIAD, 8 * size, 3.0 * 8 * size / seconds)


def _copy(name: str, source: torch.device, target: torch.device, pinned: bool) -> Rate:
    """Measure a copy; a copy within a GPU counts twice, because it reads and writes."""

    def allocate(place: torch.device) -> torch.Tensor:
        tensor = torch.ones(COPY_BYTES, dtype=torch.uint8, device=place)
        return tensor.pin_memory() if pinned and place.type == "cpu" else tensor

    original, copy = allocate(source), allocate(target)
    device = target if target.type == "cuda" else source
    seconds = _best_of(lambda: copy.copy_(original, non_blocking=pinned), device)
    return Rate("copies", str(device), name, COPY_BYTES, (2 if source == target else 1) * COPY_BYTES / seconds)


def _best_of(call: Callable[[], object], device: torch.device) -> float:
    return min(arithmetic.time_call(call, device) for _ in range(REPETITIONS))


def cache_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Return the size of the last-level caches of this process's cores; 0 if unknown."""
    if device.type == "cuda":
        return get_accelerator(device).l2_cache_bytes()
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes: dict[tuple[int, str], int] = {}  # (level, cores that share the cache) -> bytes
    for core in affinity():
        for index in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            level, text, shared = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "size", "shared_cpu_list")
            )
            if text[:-1].isdigit() and text[-1] in units:
                sizes[int(level), shared] = int(text[:-1]) * units[text[-1]]
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


MIB, GIB = 2**20, 2**30
TRIAD = "memory, triad"
REPETITIONS = 3  # the shortest time counts, because other processes only lengthen it
MAX_PRODUCT_S = 0.1  # maximum seconds of one matrix product
COPY_BYTES = 256 * MIB
# STREAM's rule: an array has at least four times the size of the last-level caches.
MIN_ARRAY_BYTES, CACHE_FACTOR = 64 * MIB, 4
