"""Measure rates of the machine: matrix products, memory and copies; interleaved, each part in a subprocess."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from runner.base.accelerator import get_accelerator
from runner.base.errors import AccelRunError
from runner.base.text import first_line
from runner.host.resources import ROOT, affinity
from runner.plan.inventory import Device, Inventory
from runner.tools.doctor import arithmetic
from runner.tools.doctor.arithmetic import FormatUnderTest, time_product
from runner.tools.doctor.findings import CheckContext
from runner.tools.measure.comparison_result import NOISY_SPREAD


@dataclass(frozen=True)
class Rate:
    """A rate, measured in several rounds.

    part    matmul or copies
    device  torch's name
    name    format, or source and destination
    size    of the matrices, or bytes
    per_s   of each round: floating-point operations or bytes per second
    """

    part: str
    device: str
    name: str
    size: int
    per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.per_s)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Quartiles of the rounds; minimum and maximum of fewer than four."""
        if len(self.per_s) < 4:
            return min(self.per_s), max(self.per_s)
        low, _, high = statistics.quantiles(self.per_s, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles, relative to the median."""
        low, high = self.quartiles
        return (high - low) / self.median


@dataclass(frozen=True)
class MachineOperation:
    """An operation to time.

    amount  bytes or floating-point operations
    once    performs the operation and returns its seconds
    """

    part: str
    device: str
    name: str
    size: int
    amount: float
    once: Callable[[], float]

    @property
    def subject(self) -> str:
        return f"{self.device} {self.name}"


@dataclass(frozen=True)
class MachineRequest:
    """The arguments of a part.

    device  auto: all devices; otherwise only this one
    """

    inventory: Inventory
    device: str
    rounds: int

    @property
    def context(self) -> CheckContext:
        """The context of the doctor's checks."""
        return CheckContext(Path(), Path(), self.device, self.inventory)


@dataclass
class MachineResults:
    """Measurements of the parts so far.

    skipped  name of what was not measured -> reason
    threads  number of torch threads on the CPU
    """

    rates: list[Rate] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    threads: int | None = None

    def add(self, part: str, other: MachineResults) -> None:
        self.rates += other.rates
        self.skipped |= other.skipped
        self.notes += other.notes
        self.threads = other.threads or self.threads
        noisy = [rate for rate in fastest_sizes(other.rates) if rate.spread > NOISY_SPREAD]
        if noisy:
            worst = max(noisy, key=lambda rate: rate.spread)
            what = f"half of the rounds of {worst.device} {worst.name} differ by {worst.spread:.0%}"
            cause = "other processes are running, or the machine throttles"
            self.notes.append(f"measurements are noisy in {part}: {what}; {cause}")


def measure_interleaved(
    operations: Sequence[MachineOperation], rounds: int, seconds: float, seed: int = 0
) -> tuple[list[Rate], dict[str, str]]:
    """Time the operations in interleaved rounds; return the rates, and failed operations with the reason.

    After `seconds` no round begins, except the first MIN_ROUNDS. An operation that fails once is dropped with all its
    measurements.
    """
    order, deadline = random.Random(seed), time.monotonic() + seconds
    samples: dict[int, list[float]] = {number: [] for number in range(len(operations))}
    failed: dict[int, str] = {}
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.monotonic() > deadline:
            break
        active = [index for index in samples if index not in failed]
        order.shuffle(active)
        for index in active:
            try:
                samples[index].append(operations[index].amount / operations[index].once())
            except (RuntimeError, AccelRunError) as error:  # no such kernel, or out of memory
                failed[index] = first_line(str(error)) or type(error).__name__
    rates = [
        Rate(operation.part, operation.device, operation.name, operation.size, tuple(samples[index]))
        for index, operation in enumerate(operations)
        if index not in failed
    ]
    subjects = {rate.device + " " + rate.name for rate in rates}
    reasons = {operations[index].subject: why for index, why in failed.items()}
    return rates, {subject: why for subject, why in reasons.items() if subject not in subjects}


def fastest_sizes(rates: Sequence[Rate]) -> list[Rate]:
    """Return the fastest size of each kind of rate."""
    fastest: dict[tuple[str, str, str], Rate] = {}
    for rate in rates:
        key = (rate.part, rate.device, rate.name)
        if key not in fastest or rate.median > fastest[key].median:
            fastest[key] = rate
    return list(fastest.values())


def matmul(request: MachineRequest, seconds: float) -> MachineResults:
    """Measure the rate of matrix products by device, number format and size."""
    results, operations = MachineResults(threads=torch.get_num_threads()), list[MachineOperation]()
    context = request.context
    for precision in chain.from_iterable(arithmetic.formats(device, request.inventory) for device in context.devices):
        if precision.why_not:
            results.skipped[f"{precision.subject} matmul"] = precision.why_not
            continue
        try:
            sizes = _choose_sizes(precision)
        except RuntimeError as error:
            results.skipped[f"{precision.subject} matmul"] = f"not supported on this device: {first_line(str(error))}"
            continue
        for size in sizes:
            once, device = functools.partial(time_product, precision, size), precision.device.torch_name
            operations.append(MachineOperation("matmul", device, precision.name, size, arithmetic.flops(size), once))
    results.rates, failed = measure_interleaved(operations, request.rounds, seconds)
    results.skipped |= {f"{subject} matmul": why for subject, why in failed.items()}
    return results


def _choose_sizes(precision: FormatUnderTest) -> list[int]:
    """Return the largest NUM_SIZES sizes that time and memory allow."""
    free = precision.device.free_bytes or precision.device.memory_bytes
    sizes = [arithmetic.SIDE]
    while sizes[-1] < MAX_SIDE:
        seconds, size = time_product(precision, sizes[-1]), 2 * sizes[-1]
        if seconds * 8 > MAX_PRODUCT_S or 3 * 8 * size**2 > free / 4:
            break
        sizes.append(size)
    return sizes[-NUM_SIZES:]


def copies(request: MachineRequest, seconds: float) -> MachineResults:
    """Measure the rate of copies within each device, and between host and GPU."""
    results, operations = MachineResults(threads=torch.get_num_threads()), list[MachineOperation]()
    for device in request.context.devices:
        if device.kind == "cuda":
            operations += _gpu_copies(device)
        elif device.kind == "cpu":
            operations.append(triad(device))
        else:
            results.skipped[f"{device.torch_name} copies"] = "shares the host's memory"
    results.rates, failed = measure_interleaved(operations, request.rounds, seconds)
    results.skipped |= failed
    return results


def triad(device: Device) -> MachineOperation:
    """Return the operation a = b + s c on float64 arrays that are larger than the caches.

    As in STREAM, two reads and one write are counted.
    Source: McCalpin, STREAM: Sustainable Memory Bandwidth in High Performance Computers.
    """
    torch_device = torch.device(device.torch_name)
    free = device.free_bytes or device.memory_bytes or GIB
    size = min(max(MIN_ARRAY_BYTES, CACHE_FACTOR * cache_bytes(torch_device)), free // 8) // 8

    def once() -> float:
        a, b, c = (torch.full((size,), value, dtype=torch.float64, device=torch_device) for value in (0.0, 1.0, 2.0))
        return arithmetic.time_call(lambda: torch.add(b, c, alpha=3.0, out=a), torch_device)

    return MachineOperation("copies", device.torch_name, "memory, triad", 8 * size, 3.0 * 8 * size, once)


def _gpu_copies(device: Device) -> Iterator[MachineOperation]:
    """Yield copies to, from and within a GPU; a copy within a GPU counts twice, because it reads and writes."""
    torch_device, host = torch.device(device.torch_name), torch.device("cpu")

    def copy_seconds(source: torch.device, target: torch.device, pinned: bool) -> float:
        def allocate(place: torch.device) -> torch.Tensor:
            tensor = torch.ones(COPY_BYTES, dtype=torch.uint8, device=place)
            return tensor.pin_memory() if pinned and place.type == "cpu" else tensor

        original, copy = allocate(source), allocate(target)
        return arithmetic.time_call(lambda: copy.copy_(original, non_blocking=pinned), torch_device)

    kinds = [
        ("host to device, pinned", host, torch_device, True, 1),
        ("host to device, not pinned", host, torch_device, False, 1),
        ("device to host, pinned", torch_device, host, True, 1),
        ("device to host, not pinned", torch_device, host, False, 1),
        ("device to device", torch_device, torch_device, False, 2),
    ]
    for name, source, target, pinned, times in kinds:
        once = functools.partial(copy_seconds, source, target, pinned)
        yield MachineOperation("copies", device.torch_name, name, COPY_BYTES, float(times * COPY_BYTES), once)
    yield triad(device)


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
MIN_ROUNDS = 3  # for any budget
MAX_SIDE, NUM_SIZES = 16384, 3  # largest side of a matrix, number of sizes to measure
MAX_PRODUCT_S = 0.1  # of one matrix product
COPY_BYTES = 256 * MIB
# STREAM's rule: an array has at least four times the size of the last-level caches.
MIN_ARRAY_BYTES, CACHE_FACTOR = 64 * MIB, 4
