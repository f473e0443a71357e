"""Rates of the machine: matrix products, memory and copies, disk; interleaved, each part in a subprocess."""

from __future__ import annotations

import functools
import os
import random
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runner.base.accelerator import get_accelerator
from runner.base.errors import AccelRunError
from runner.base.text import first_line
from runner.durable import files
from runner.host.resources import ROOT, affinity
from runner.plan.inventory import Device, Inventory
from runner.tools.doctor import arithmetic
from runner.tools.doctor.arithmetic import FormatUnderTest, product_seconds
from runner.tools.doctor.findings import CheckContext
from runner.tools.doctor.storage import nearest
from runner.tools.measure.comparison_result import RESTLESS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rate:
    """A rate, measured in several rounds.

    part    matmul, copies or disk
    device  torch's name, or the folder of the disk
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
class Turn:
    """What is moved or computed at once, and a function that does so and returns its seconds."""

    part: str
    device: str
    name: str
    size: int
    amount: float
    once: Callable[[], float]

    @property
    def subject(self) -> str:
        """Name for the user."""
        return f"{self.device} {self.name}"


@dataclass(frozen=True)
class MachineRequest:
    """What a part is to measure.

    device  auto: all; else only this one
    root    where runs are written, on the disk that is measured
    """

    inventory: Inventory
    device: str
    rounds: int
    root: Path
    disk_bytes: int

    @property
    def context(self) -> CheckContext:
        """The context of the doctor's checks."""
        return CheckContext(self.root, self.root, self.device, self.inventory)


@dataclass
class MachineResults:
    """What was measured so far.

    skipped  what was not -> why
    threads  of torch on the CPU
    """

    rates: list[Rate] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    threads: int | None = None

    def add(self, part: str, other: MachineResults) -> None:
        """Add the results of a part."""
        self.rates += other.rates
        self.skipped |= other.skipped
        self.notes += other.notes
        self.threads = other.threads or self.threads
        restless = [rate for rate in best(other.rates) if rate.spread > RESTLESS]
        if restless:
            worst = max(restless, key=lambda rate: rate.spread)
            what = f"half of the rounds of {worst.device} {worst.name} differ by {worst.spread:.0%}"
            self.notes.append(f"the machine is restless in {part}: {what}; other processes run, or it throttles")


def in_turns(turns: Sequence[Turn], rounds: int, seconds: float, seed: int = 0) -> tuple[list[Rate], dict[str, str]]:
    """Return the rates, and what failed with its reason; after `seconds`, only the first few rounds still run.

    A turn that fails once is out, with all its measurements.
    """
    order, until = random.Random(seed), time.monotonic() + seconds
    measured: dict[int, list[float]] = {number: [] for number in range(len(turns))}
    failed: dict[int, str] = {}
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > until:
            break
        playing = [place for place in measured if place not in failed]
        order.shuffle(playing)
        for place in playing:
            try:
                measured[place].append(turns[place].amount / turns[place].once())
            except (RuntimeError, AccelRunError) as error:  # no such kernel, out of memory, or a full disk
                failed[place] = first_line(str(error)) or type(error).__name__
    rates = [
        Rate(turn.part, turn.device, turn.name, turn.size, tuple(measured[place]))
        for place, turn in enumerate(turns)
        if place not in failed
    ]
    subjects = {rate.device + " " + rate.name for rate in rates}
    reasons = {turns[place].subject: why for place, why in failed.items()}
    return rates, {subject: why for subject, why in reasons.items() if subject not in subjects}


def best(rates: Sequence[Rate]) -> list[Rate]:
    """Return the fastest size of each kind of rate."""
    found: dict[tuple[str, str, str], Rate] = {}
    for rate in rates:
        key = (rate.part, rate.device, rate.name)
        if key not in found or rate.median > found[key].median:
            found[key] = rate
    return list(found.values())


def matmul(asked: MachineRequest, seconds: float) -> MachineResults:
    import torch

    found, turns = MachineResults(threads=torch.get_num_threads()), list[Turn]()
    context = asked.context
    for number in (number for device in context.devices for number in arithmetic.formats(device, asked.inventory)):
        if number.why_not:
            found.skipped[f"{number.subject} matmul"] = number.why_not
            continue
        try:
            sizes = _sizes(number)
        except RuntimeError as error:
            found.skipped[f"{number.subject} matmul"] = f"not supported on this device: {first_line(str(error))}"
            continue
        for size in sizes:
            once = functools.partial(product_seconds, number, size)
            turns.append(Turn("matmul", number.device.torch_name, number.name, size, arithmetic.flops(size), once))
    found.rates, failed = in_turns(turns, asked.rounds, seconds)
    found.skipped |= {f"{subject} matmul": why for subject, why in failed.items()}
    return found


def _sizes(number: FormatUnderTest) -> list[int]:
    """Return the largest few sizes that time and memory allow."""
    free = number.device.free_bytes or number.device.memory_bytes
    sizes = [arithmetic.SIDE]
    while sizes[-1] < LARGEST:
        took_s, size = product_seconds(number, sizes[-1]), 2 * sizes[-1]
        if took_s * 8 > LONGEST_S or 3 * 8 * size**2 > free / 4:
            break
        sizes.append(size)
    return sizes[-NUM_SIZES:]


def copies(asked: MachineRequest, seconds: float) -> MachineResults:
    import torch

    found, turns = MachineResults(threads=torch.get_num_threads()), list[Turn]()
    for device in asked.context.devices:
        if device.kind == "cuda":
            turns += _of_gpu(device)
        elif device.kind == "cpu":
            turns.append(triad(device))
        else:
            found.skipped[f"{device.torch_name} copies"] = "shares the host's memory"
    found.rates, failed = in_turns(turns, asked.rounds, seconds)
    found.skipped |= failed
    return found


def triad(device: Device) -> Turn:
    """Return a = b + s c of float64 arrays that are larger than the caches.

    Two arrays are read and one is written, as its authors count.
    Source: McCalpin, STREAM: Sustainable Memory Bandwidth in High Performance Computers.
    """
    import torch

    where = torch.device(device.torch_name)
    free = device.free_bytes or device.memory_bytes or GIB
    size = min(max(LEAST_ARRAY, TIMES_CACHE * cache_bytes(where)), free // 8) // 8

    def once() -> float:
        one, b, c = (torch.full((size,), value, dtype=torch.float64, device=where) for value in (0.0, 1.0, 2.0))
        return arithmetic.seconds(lambda: torch.add(b, c, alpha=3.0, out=one), where)

    return Turn("copies", device.torch_name, "memory, triad", 8 * size, 3.0 * 8 * size, once)


def _of_gpu(device: Device) -> Iterator[Turn]:
    """Yield copies to, from and within a GPU; a copy within it reads and writes its memory."""
    import torch

    where, host = torch.device(device.torch_name), torch.device("cpu")

    def copied(source: torch.device, target: torch.device, pinned: bool) -> float:
        def made(place: torch.device) -> torch.Tensor:
            tensor = torch.ones(COPIED, dtype=torch.uint8, device=place)
            return tensor.pin_memory() if pinned and place.type == "cpu" else tensor

        one, other = made(source), made(target)
        return arithmetic.seconds(lambda: other.copy_(one, non_blocking=pinned), where)

    kinds = [
        ("host to device, pinned", host, where, True, 1),
        ("host to device, not pinned", host, where, False, 1),
        ("device to host, pinned", where, host, True, 1),
        ("device to host, not pinned", where, host, False, 1),
        ("device to device", where, where, False, 2),
    ]
    for name, source, target, pinned, times in kinds:
        once = functools.partial(copied, source, target, pinned)
        yield Turn("copies", device.torch_name, name, COPIED, float(times * COPIED), once)
    yield triad(device)


def cache_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Return the size of the last-level caches of this process's cores; 0 if unknown."""
    if device.type == "cuda":
        return get_accelerator(device).l2_cache_bytes()
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found: dict[tuple[int, str], int] = {}  # level, and the cores that share it -> bytes
    for core in affinity():
        for index in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            level, text, shared = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "size", "shared_cpu_list")
            )
            if text[:-1].isdigit() and text[-1] in units:
                found[int(level), shared] = int(text[:-1]) * units[text[-1]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def disk(asked: MachineRequest, seconds: float) -> MachineResults:
    folder = nearest(asked.root)
    free = shutil.disk_usage(folder).free
    if asked.disk_bytes > free / 2:  # other programs write there too
        much = f"a file of {asked.disk_bytes // MIB:,} MiB would take more than half of the {free // MIB:,} MiB"
        return MachineResults(skipped={"disk": f"{much} that are free in {folder}; use a smaller disk_mib="})
    with _trial_folder(folder) as trial:
        file, data = trial / "data", [os.urandom(MIB)] * (asked.disk_bytes // MIB)  # incompressible
        block = bytearray(MIB)

        def written_s() -> float:
            if file.exists():
                files.remove(file)
            began = time.perf_counter()
            files.write_new(file, data)
            files.fsync_directory(trial)
            return time.perf_counter() - began

        def read_s() -> float:
            if not file.exists():
                written_s()
            with file.open("rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                while opened.readinto(block):
                    pass
                return time.perf_counter() - began

        turns = [
            Turn("disk", str(folder), name, asked.disk_bytes, float(asked.disk_bytes), once)
            for name, once in (("written as a checkpoint is, with fsync", written_s), ("read", read_s))
        ]
        rates, failed = in_turns(turns, asked.rounds, seconds)
    notes = ["the file was written just before it is read: the kernel is asked to drop it from the cache, but may not"]
    return MachineResults(rates, failed, notes if rates else [])


@contextmanager
def _trial_folder(folder: Path) -> Iterator[Path]:
    """Create a folder, removed at the end. Raises StorageError."""
    trial = folder / f"{files.TEMPORARY}machine-{secrets.token_hex(4)}"
    files.new_directory(trial)
    try:
        yield trial
    finally:
        files.remove(trial)


MIB, GIB = 2**20, 2**30
LEAST_ROUNDS = 3  # however small the budget
LARGEST, NUM_SIZES = 16384, 3  # side of a matrix, and sizes that are tried in turns
LONGEST_S = 0.1  # of one product
COPIED = 256 * MIB
LEAST_ARRAY, TIMES_CACHE = 64 * MIB, 4  # STREAM's rule: an array is four times as large as the last cache
