"""What the machine can do: products of matrices, memory, copies and disk, and how far an update is from that.

Each part is measured in a process of its own; within a part all cells take turns, in an order drawn anew each round.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.picture import png
from runner.base.text import first_line
from runner.config.config_files import facts_of_profiles
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, merge_overrides
from runner.config.schema import did_you_mean
from runner.durable import files
from runner.host.subprocesses import in_subprocess
from runner.plan.inventory import Device, Inventory, take_inventory
from runner.tools.measure.compare import CompareLimits, Comparison
from runner.tools.measure.comparison_result import RESTLESS, Variant, VariantResult
from runner.tools.measure.machine_rates import (
    LEAST_ROUNDS,
    MIB,
    MachineRequest,
    MachineResults,
    Rate,
    best,
    copies,
    disk,
    matmul,
    spread,
)
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.tools.measure.suite_common import kept

if TYPE_CHECKING:
    from runner.tools.measure.roofline import RooflinePoint, Roofs

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


# ---------------------------------------------------------------- products of matrices


# ---------------------------------------------------------------- memory and copies


# ---------------------------------------------------------------- disk


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
    from runner.tools.measure.roofline import drawn, judged

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
    from runner.tools.measure.counting import Count
    from runner.tools.measure.roofline import RooflinePoint

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
    if spread(rate) > RESTLESS:
        found.notes.append(f"half of the blocks of updates lie {spread(rate):.0%} apart: the machine is restless")
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
    from runner.tools.measure.roofline import Roofs

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


MEASURED: Mapping[str, Callable[[MachineRequest, float], MachineResults]] = {
    "matmul": matmul,
    "copies": copies,
    "disk": disk,
}
SHARES = {"matmul": 0.4, "copies": 0.15, "disk": 0.15, "roofline": 0.1}  # of the seconds; the rest is start-up
BLOCKS = 9  # of updates
_MATMUL_OF_GPU = tuple(f"GPU {name} matmul" for name in ("fp32", "tf32", "bf16", "fp16", "fp64"))
_COPIES_OF_GPU = (
    "host to device, pinned", "host to device, not pinned", "device to host, pinned", "device to host, not pinned",
    "device to device", "GPU memory, triad",
)  # fmt: skip
_HOW_COUNTED = (
    "the update's FLOP are those of products, convolutions and attention as torch counts them, its bytes what all its"
    " operations read and write if no cache kept any of it: its true intensity lies further right"
)
