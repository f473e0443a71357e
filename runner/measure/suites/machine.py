"""What the machine can do: products of matrices, memory, copies and disk, and how far an update is from that.

Each part is measured in a process of its own; within a part all cells take turns, in an order drawn anew each round.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.accelerator import accelerator_of
from runner.base.configuration import Configuration, Request, compose, facts_of_profiles, merge_overrides
from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.host import ROOT, affinity
from runner.base.picture import png
from runner.base.schema import did_you_mean
from runner.base.subprocesses import in_subprocess
from runner.base.text import first_line
from runner.doctor import arithmetic
from runner.doctor.arithmetic import FormatUnderTest, OperationUnderTest
from runner.doctor.findings import CheckContext
from runner.doctor.storage import nearest
from runner.durable import files
from runner.measure.compare import RESTLESS, CompareLimits, Comparison, Variant, VariantResult
from runner.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.measure.suite_common import kept
from runner.plan.inventory import Device, Inventory, take_inventory

if TYPE_CHECKING:
    import torch

    from runner.measure.roofline import RooflinePoint, Roofs

# Its own words, and what they are when nobody says: rounds of each cell at most, and MiB of the file that is written.
OPTIONS = {"rounds": "7", "disk_mib": "64"}


def run(wanted: SuiteRequest) -> SuiteReport:
    """Measure the parts that are wanted, and draw the roofline; all that was measured is in `machine.json` too.

    Raises ConfigError for an unknown part or a number that is none.
    """
    parts = _parts(wanted.words)
    rounds, disk_mib = (_number(wanted.options, key) for key in OPTIONS)
    configuration = compose(wanted.request)
    inventory = in_subprocess(take_inventory)
    device = str(configuration.settings.device)
    asked = MachineRequest(inventory, device, rounds, configuration.settings.root, disk_mib * MIB)
    found = MachineResults(skipped=skipped_without_gpu(parts, inventory, device))
    for part in (part for part in parts if part in MEASURED):
        wanted.say(f"measures {part}")
        found.add(part, _apart(part, asked, SHARES[part] * wanted.budget_s))
    peaks = DataSheetPeaks(facts_of_profiles(wanted.request.config_dir))
    tables, sources = _tables(found.rates, inventory, peaks)
    found.notes += sources
    headline, update = _summary(found.rates), dict[str, Any]()
    written: list[Path] = []
    files.make_directory(wanted.folder)
    if "roofline" in parts:
        wanted.say("measures an update")
        try:
            judgement, update, written = _roofline(wanted, configuration, found)
            headline = judgement or headline
        except AccelRunError as error:  # what was measured of the machine stands without it
            found.skipped["roofline"] = first_line(str(error.problems[0]))
    data = {
        "threads": found.threads,
        "rates": [_as_json(rate) for rate in found.rates],
        "update": update or None,
    }
    return kept(wanted, "machine", SuiteReport(headline, tables, found.notes, found.skipped, data, written))


@dataclass(frozen=True)
class Rate:
    """How fast something is, as measured in several rounds.

    part    matmul, copies or disk
    device  as torch calls it, or the folder of the disk
    name    the format, or what is moved from where to where
    size    of the matrices, or bytes
    per_s   of each round: floating-point operations, or bytes, per second
    """

    part: str
    device: str
    name: str
    size: int
    per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.per_s)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between these; the lowest and the highest, where there are fewer than four."""
        if len(self.per_s) < 4:
            return min(self.per_s), max(self.per_s)
        low, _, high = statistics.quantiles(self.per_s, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Turn:
    """A cell: what is moved or computed at once, and what does so and returns the seconds that it took."""

    part: str
    device: str
    name: str
    size: int
    amount: float
    once: Callable[[], float]

    @property
    def subject(self) -> str:
        """What people call it."""
        return f"{self.device} {self.name}"


@dataclass(frozen=True)
class MachineRequest:
    """What a part is to measure.

    device  auto: all there are; else only this one
    root    where runs are written, on the disk that is measured
    """

    inventory: Inventory
    device: str
    rounds: int
    root: Path
    disk_bytes: int

    @property
    def context(self) -> CheckContext:
        """What the doctor calls it."""
        return CheckContext(self.root, self.root, self.device, self.inventory)


@dataclass
class MachineResults:
    """What was measured so far.

    skipped  what was not -> why
    threads  that torch computes with on the CPU
    """

    rates: list[Rate] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    threads: int | None = None

    def add(self, part: str, other: MachineResults) -> None:
        """Take in what a part has found."""
        self.rates += other.rates
        self.skipped |= other.skipped
        self.notes += other.notes
        self.threads = other.threads or self.threads
        restless = [rate for rate in best(other.rates) if _spread(rate) > RESTLESS]
        if restless:
            worst = max(restless, key=_spread)
            what = f"half of the rounds of {worst.device} {worst.name} lie {_spread(worst):.0%} apart"
            self.notes.append(f"the machine is restless in {part}: {what}; other processes run, or it throttles")


def in_turns(turns: Sequence[Turn], rounds: int, seconds: float, seed: int = 0) -> tuple[list[Rate], dict[str, str]]:
    """Return the rate of each, and of those that failed the reason; none begins a round after `seconds` but the first.

    A cell that fails once is out, with what was measured of it.
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
            except (RuntimeError, AccelRunError) as error:  # no such kernel, no memory left, or a full disk
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
    """Return of each thing the size at which it is fastest, in the order in which they came."""
    found: dict[tuple[str, str, str], Rate] = {}
    for rate in rates:
        key = (rate.part, rate.device, rate.name)
        if key not in found or rate.median > found[key].median:
            found[key] = rate
    return list(found.values())


# ---------------------------------------------------------------- products of matrices


def matmul(asked: MachineRequest, seconds: float) -> MachineResults:
    import torch

    work, found, turns = arithmetic.products(), MachineResults(threads=torch.get_num_threads()), list[Turn]()
    context = asked.context
    for number in (number for device in context.devices for number in arithmetic.formats(device, asked.inventory)):
        if number.why_not:
            found.skipped[f"{number.subject} matmul"] = number.why_not
            continue
        try:
            sizes = _sizes(number, work)
        except RuntimeError as error:
            found.skipped[f"{number.subject} matmul"] = f"not supported on this device: {first_line(str(error))}"
            continue
        for size in sizes:
            once = functools.partial(product_seconds, number, work, size)
            turns.append(Turn("matmul", number.device.torch_name, number.name, size, work.flops(size), once))
    found.rates, failed = in_turns(turns, asked.rounds, seconds)
    found.skipped |= {f"{subject} matmul": why for subject, why in failed.items()}
    return found


def product_seconds(number: FormatUnderTest, work: OperationUnderTest, size: int) -> float:
    """Return the seconds of one product of that size."""
    import torch

    device = torch.device(number.device.torch_name)
    with torch.inference_mode(), arithmetic.float32_of(number):
        one, other = (factor.to(arithmetic.dtype_of(number)) for factor in work.make(size, device))
        return arithmetic.seconds(functools.partial(work.call, one, other), device)


def _sizes(number: FormatUnderTest, work: OperationUnderTest) -> list[int]:
    """Return the sizes to try, the last few of those that a product of LONGEST_S and the memory allow."""
    free = number.device.free_bytes or number.device.memory_bytes
    sizes = [work.sizes[0]]
    while sizes[-1] < LARGEST:
        took_s, size = product_seconds(number, work, sizes[-1]), 2 * sizes[-1]
        if took_s * work.flops(size) / work.flops(sizes[-1]) > LONGEST_S or 3 * 8 * size**2 > free / 4:
            break
        sizes.append(size)
    return sizes[-NUM_SIZES:]


# ---------------------------------------------------------------- memory and copies


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
    """Return a = b + s c of float64 numbers, of which none stays in a cache from one time to the next.

    Counted as its authors do: two arrays are read and one is written.
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
    """Yield what is moved to, from and within a GPU; a copy within it reads and writes its memory."""
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
    """Return the size of the last caches before the memory, of all cores of ours together; 0 where nobody tells."""
    if device.type == "cuda":
        return accelerator_of(device).l2_cache_bytes()
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


# ---------------------------------------------------------------- disk


def disk(asked: MachineRequest, seconds: float) -> MachineResults:
    folder = nearest(asked.root)
    free = shutil.disk_usage(folder).free
    if asked.disk_bytes > free / 2:  # others write there too
        much = f"a file of {asked.disk_bytes // MIB:,} MiB would take more than half of the {free // MIB:,} MiB"
        return MachineResults(skipped={"disk": f"{much} that are free in {folder}; use disk_mib={OPTIONS['disk_mib']}"})
    with _trial_folder(folder) as trial:
        file, data = trial / "data", [os.urandom(MIB)] * (asked.disk_bytes // MIB)  # no file system makes it smaller
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
    notes = ["what the disk reads was written just before: the kernel was asked to forget it, and need not obey"]
    return MachineResults(rates, failed, notes if rates else [])


@contextmanager
def _trial_folder(folder: Path) -> Iterator[Path]:
    """A new folder in that one, gone at the end. Raises StorageError."""
    trial = folder / f"{files.TEMPORARY}machine-{secrets.token_hex(4)}"
    files.new_directory(trial)
    try:
        yield trial
    finally:
        files.remove(trial)


# ---------------------------------------------------------------- what is published


@dataclass(frozen=True)
class DataSheetPeaks:
    """What data sheets say of devices, as the hardware profiles have it.

    profiles  name -> facts
    """

    profiles: Mapping[str, Mapping[str, Any]]

    def of(self, device: Device, rate: Rate) -> tuple[float | None, str]:
        """Return the peak in what the rate is measured in, and its source; None, and why it is not known."""
        if rate.part == "disk":
            return None, "not known: no data sheet of this disk is at hand"
        if device.kind != "cuda":
            return None, "not known: it follows from clock, vector units and memory channels, which nobody tells here"
        fact, unit = _FACTS.get((rate.part, rate.name), ("", 0.0))
        for name, facts in self.profiles.items():
            for known in facts.get("devices") or ():
                if str(known.get("name", "")).lower() != device.name.lower():
                    continue
                if fact in known:
                    source = (known.get("source") or {}).get(fact, "no source given")
                    return float(known[fact]) * unit, f"{source} (hardware={name})"
                return None, f"not known: hardware={name} has no figure for it"
        return None, f"not known: no hardware profile is of {device.name}"


_FACTS: Mapping[tuple[str, str], tuple[str, float]] = {
    ("matmul", "fp32"): ("fp32_tflops", 1e12),
    ("matmul", "tf32"): ("tf32_tflops", 1e12),
    ("matmul", "bf16"): ("bf16_tensor_tflops", 1e12),
    ("matmul", "fp16"): ("fp16_tensor_tflops", 1e12),
    ("copies", "device to device"): ("memory_bandwidth_gb_s", 1e9),
    ("copies", "memory, triad"): ("memory_bandwidth_gb_s", 1e9),
}


# ---------------------------------------------------------------- the update


def _roofline(
    wanted: SuiteRequest, configuration: Configuration, found: MachineResults
) -> tuple[str, dict[str, Any], list[Path]]:
    """Measure an update, and draw it under the roofs of its device; return the sentence, the data and the picture."""
    from runner.measure.roofline import drawn, judged

    share = SHARES["roofline"] * wanted.budget_s
    point, opened = measured_update(wanted.request, share, found, configuration.choices["task"].name)
    device = _name_of(str(opened["device"]))
    roofs = _roofs(found.rates, device, str(opened["device_name"]))
    if roofs is None or point.format not in roofs.compute:
        found.skipped["roofline"] = f"no roof was measured for {point.format} on {device}"
        return "", {}, []
    if device == "cpu" and found.threads != opened["threads"]:
        what = f"the roofs are of {found.threads} threads, the update of {opened['threads']} (backend.threads)"
        found.notes.append(what)
    if configuration.choices["parallelism"].name != "single":
        found.notes.append("the update on the roofline is made by one process, all samples of it")
    has_flops = point.count.flops > 0
    if not has_flops:
        found.skipped["the update on the roofline"] = "it computes no product, convolution or attention to be counted"
    else:
        found.notes.append(_HOW_COUNTED)
    data = {
        "task": point.name,
        "device": device,
        "format": point.format,
        "seconds": point.seconds,
        **dataclasses.asdict(point.count),
        "roofs": dict(roofs.compute),
        "memory_bytes_per_s": roofs.memory,
    }
    picture = wanted.file("roofline.png")
    files.atomic_write(picture, png(drawn(roofs, point if has_flops else None)))
    return judged(roofs, point) if has_flops else "", data, [picture]


def measured_update(
    request: Request, seconds: float, found: MachineResults, task: str
) -> tuple[RooflinePoint, dict[str, Any]]:
    """Return an update of one process as measured and counted, and what it is made of.

    Where the model is compiled, what is counted is the same update without that.
    """
    from runner.measure.counting import Count
    from runner.measure.roofline import RooflinePoint

    alone = dataclasses.replace(request, overrides=merge_overrides(request.overrides, ("parallelism=single",)))
    limits = CompareLimits(budget_s=seconds)
    with Comparison(alone) as arena:
        with arena.alone(Variant(task), limits) as (ask, measured):
            took = _blocks(ask, measured, seconds)
            values = measured.opened["values"]
            is_compiled = values["compile"] != "off"
            told = None if is_compiled else ask({"do": "count"})
        if told is None:
            with arena.alone(Variant("counted", ("compile=off",)), limits) as (ask, _):
                told = ask({"do": "count"})
    rate = Rate("update", task, "update", 1, tuple(1 / each for each in took))
    if _spread(rate) > RESTLESS:
        found.notes.append(f"half of the blocks of updates lie {_spread(rate):.0%} apart: the machine is restless")
    return RooflinePoint(task, Count(**told), statistics.median(took), str(values["precision"])), measured.opened


def _blocks(ask: Callable[[Mapping[str, Any]], dict[str, Any]], measured: VariantResult, seconds: float) -> list[float]:
    """Return the seconds of an update, block by block."""
    until, took = time.monotonic() + seconds, list[float]()
    order = {"do": "make", "updates": measured.updates, "unpaid": measured.unpaid}
    while len(took) < LEAST_ROUNDS or (len(took) < BLOCKS and time.monotonic() < until):
        took.append(ask(order)["seconds"] / measured.updates)
    return took


def _roofs(rates: Sequence[Rate], device: str, device_name: str) -> Roofs | None:
    """Return what was measured of a device as roofs; None where its memory or all formats are missing."""
    from runner.measure.roofline import Roofs

    mine = [rate for rate in best(rates) if rate.device == device]
    compute = {rate.name: rate.median for rate in mine if rate.part == "matmul"}
    memory = next((rate.median for rate in mine if rate.name == "memory, triad"), None)
    return Roofs(device_name, compute, memory) if compute and memory else None


def _name_of(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


# ---------------------------------------------------------------- what is said


def _tables(rates: Sequence[Rate], inventory: Inventory, peaks: DataSheetPeaks) -> tuple[list[SuiteTable], list[str]]:
    """Return the tables, and as notes where their peaks are from."""
    devices = {device.torch_name: device for device in (*inventory.usable, inventory.cpu.device)}
    titles = {
        "matmul": ("products of square matrices, at the fastest size", "format", "TFLOP/s", 1e12),
        "copies": ("memory and copies", "what", "GB/s", 1e9),
        "disk": ("disk", "what", "GB/s", 1e9),
    }
    tables, sources = [], dict[str, list[str]]()
    for part, (title, what, unit, scale) in titles.items():
        rows: list[list[Value]] = []
        for rate in (rate for rate in best(rates) if rate.part == part):
            peak, source = peaks.of(devices.get(rate.device, inventory.cpu.device), rate)
            sources.setdefault(source, []).append(f"{rate.device} {rate.name}")
            low, high = rate.quartiles
            figures = [rate.median / scale, low / scale, high / scale]
            of_peak = None if peak is None else 100 * rate.median / peak
            size = rate.size if part == "matmul" else rate.size // MIB
            rows.append([rate.device, rate.name, size, *figures, len(rate.per_s), peak and peak / scale, of_peak])
        columns = ["folder" if part == "disk" else "device", what, "side" if part == "matmul" else "MiB"]
        columns += [unit, "low", "high", "rounds", f"peak, {unit}", "of peak, %"]
        tables += [SuiteTable(title, columns, rows)] if rows else []
    return tables, [f"peak of {', '.join(names)}: {source}" for source, names in sources.items()]


def _summary(rates: Sequence[Rate]) -> str:
    """Return in a sentence what each device does at most."""
    parts = []
    for device in dict.fromkeys(rate.device for rate in rates if rate.part != "disk"):
        mine = [rate for rate in best(rates) if rate.device == device]
        product = max((rate for rate in mine if rate.part == "matmul"), key=lambda rate: rate.median, default=None)
        memory = next((rate for rate in mine if rate.name == "memory, triad"), None)
        words = [f"{product.median / 1e12:.3g} TFLOP/s in {product.name}"] if product else []
        words += [f"memory at {memory.median / 1e9:.3g} GB/s"] if memory else []
        parts += [f"{device}: {', '.join(words)}"] if words else []
    return "; ".join(parts)


def _as_json(rate: Rate) -> dict[str, Any]:
    low, high = rate.quartiles
    return {**dataclasses.asdict(rate), "median": rate.median, "low": low, "high": high}


def _spread(rate: Rate) -> float:
    """Return the distance of the quartiles in relation to the median."""
    low, high = rate.quartiles
    return (high - low) / rate.median


def skipped_without_gpu(parts: Sequence[str], inventory: Inventory, device: str) -> dict[str, str]:
    """Return what needs a GPU and is not measured -> why, where none is looked at."""
    if any(each.kind == "cuda" for each in inventory.usable) and device in ("auto", "cuda"):
        return {}
    if device.startswith("cuda") and any(each.torch_name == device for each in inventory.usable):
        return {}
    reasons = [f"{each.name}: {each.why_not}" for each in inventory.devices if not each.usable]
    has_gpu = any(each.kind == "cuda" for each in inventory.usable)
    why = f"device={device} leaves it out" if has_gpu else "; ".join(reasons) or "there is no GPU"
    of_gpu = {"matmul": _MATMUL_OF_GPU, "copies": _COPIES_OF_GPU}
    return {name: why for part, names in of_gpu.items() if part in parts for name in names}


# ---------------------------------------------------------------- what was asked


def _parts(words: Sequence[str]) -> list[str]:
    """Return the parts to measure: all without words, and what a roofline is made of with it."""
    for word in words:
        if word not in SHARES:
            what = f"must be one of {', '.join(SHARES)}"
            raise ConfigError(Problem(what, f"suite=machine {word}", did_you_mean(word, SHARES)))
    wanted = set(words or SHARES)
    wanted |= {"matmul", "copies"} if "roofline" in wanted else set()
    return [part for part in SHARES if part in wanted]


def _number(options: Mapping[str, str], key: str) -> int:
    text = options[key]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(Problem("must be a whole number above 0", f"{key}={text}", f"use {key}={OPTIONS[key]}"))
    return int(text)


def _apart(part: str, asked: MachineRequest, seconds: float) -> MachineResults:
    """Return what a part finds in a process of its own; where that dies or cannot begin, the reason."""
    try:
        return in_subprocess(MEASURED[part], asked, seconds)
    except BrokenProcessPool:
        return MachineResults(
            skipped={part: "its process was killed: accel-run doctor tells which kernel or driver does that"}
        )
    except AccelRunError as error:
        return MachineResults(skipped={part: first_line(str(error.problems[0]))})


MIB, GIB = 2**20, 2**30
MEASURED: Mapping[str, Callable[[MachineRequest, float], MachineResults]] = {
    "matmul": matmul,
    "copies": copies,
    "disk": disk,
}
SHARES = {"matmul": 0.4, "copies": 0.15, "disk": 0.15, "roofline": 0.1}  # of the seconds; the rest is start-up
LEAST_ROUNDS = 3  # however small the budget
BLOCKS = 9  # of updates
LARGEST, NUM_SIZES = 16384, 3  # side of a matrix, and sizes that are tried in turns
LONGEST_S = 0.1  # of one product
COPIED = 256 * MIB
LEAST_ARRAY, TIMES_CACHE = 64 * MIB, 4  # STREAM's rule: an array is four times as large as the last cache
_MATMUL_OF_GPU = tuple(f"GPU {name} matmul" for name in ("fp32", "tf32", "bf16", "fp16", "fp64"))
_COPIES_OF_GPU = (
    "host to device, pinned", "host to device, not pinned", "device to host, pinned", "device to host, not pinned",
    "device to device", "GPU memory, triad",
)  # fmt: skip
_HOW_COUNTED = (
    "the update's FLOP are those of products, convolutions and attention as torch counts them, its bytes what all its"
    " operations read and write if no cache kept any of it: its true intensity lies further right"
)
