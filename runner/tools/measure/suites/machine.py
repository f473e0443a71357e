"""`suite=machine`: matrix products, memory, copies and disk, and how close an update comes to these limits.

Each part is measured in a separate process; within a part, everything is interleaved in random order.
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
from runner.base.json_converter import encode
from runner.base.picture import png
from runner.base.text import first_line
from runner.config.config_files import facts_of_profiles
from runner.config.configuration import Configuration, compose
from runner.config.request import Request, merge_overrides
from runner.config.schema import did_you_mean
from runner.durable import files
from runner.host.subprocesses import in_subprocess
from runner.plan.inventory import Device, Inventory, take_inventory
from runner.tools.measure.compare import Ask, CompareLimits, Comparison
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
)
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value, saved
from runner.tools.measure.suites import PARTS

if TYPE_CHECKING:
    from runner.tools.measure.roofline import RooflinePoint, Roofs


def run(wanted: SuiteRequest) -> SuiteReport:
    """Measure the requested parts and draw the roofline.

    Raises ConfigError for an unknown part or an invalid number.
    """
    parts = _parts(wanted.words)
    rounds, disk_mib = (_number(wanted.options, key) for key in ("rounds", "disk_mib"))
    configuration = compose(wanted.request)
    inventory = in_subprocess(take_inventory)
    device = str(configuration.settings.device)
    asked = MachineRequest(inventory, device, rounds, configuration.settings.root, disk_mib * MIB)
    found = MachineResults(skipped=skipped_without_gpu(parts, inventory, device))
    for part in (part for part in parts if part in MEASURED):
        wanted.say(f"measures {part}")
        found.add(part, _in_process(part, asked, SHARES[part] * wanted.budget_s))
    peaks = DataSheetPeaks(facts_of_profiles(wanted.request.config_dir))
    tables, sources = _tables(found.rates, inventory, peaks)
    found.notes += sources
    headline, update = _summary(found.rates), dict[str, Any]()
    written: list[Path] = []
    if "roofline" in parts:
        wanted.say("measures an update")
        try:
            sentence, update, written = _roofline(wanted, configuration, found)
            headline = sentence or headline
        except AccelRunError as error:
            found.skipped["roofline"] = first_line(str(error.problems[0]))
    rates = [encode(rate) | dict(zip(("low", "high"), rate.quartiles, strict=True)) for rate in found.rates]
    for rate, row in zip(found.rates, rates, strict=True):
        row["median"] = rate.median
    data = {"threads": found.threads, "rates": rates, "update": update or None}
    return saved(wanted, "machine", SuiteReport(headline, tables, found.notes, found.skipped, data, written))


# ---------------------------------------------------------------- published peaks


@dataclass(frozen=True)
class DataSheetPeaks:
    """Peaks from data sheets, as hardware profiles state them.

    profiles  name -> facts
    """

    profiles: Mapping[str, Mapping[str, Any]]

    def of(self, device: Device, rate: Rate) -> tuple[float | None, str]:
        """Return the peak in the unit of the rate, and its source; None, and why it is unknown."""
        if rate.part == "disk":
            return None, "unknown: there is no data sheet of this disk"
        if device.kind != "cuda":
            return None, "unknown: clock, vector units and memory channels are not reported here"
        fact, unit = _FACTS.get((rate.part, rate.name), ("", 0.0))
        for name, facts in self.profiles.items():
            for known in facts.get("devices") or ():
                if str(known.get("name", "")).lower() != device.name.lower():
                    continue
                if fact in known:
                    source = (known.get("source") or {}).get(fact, "no source given")
                    return float(known[fact]) * unit, f"{source} (hardware={name})"
                return None, f"unknown: hardware={name} does not state it"
        return None, f"unknown: no hardware profile is of {device.name}"


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
    """Measure an update, and draw it under the roofs of its device; return the sentence, the data and the plot."""
    from runner.tools.measure.roofline import drawn, judged

    share = SHARES["roofline"] * wanted.budget_s
    point, opened = measured_update(wanted.request, share, found, configuration.choices["task"].name)
    device = "cuda:0" if opened["device"] == "cuda" else str(opened["device"])
    roofs = _roofs(found.rates, device, str(opened["device_name"]))
    if roofs is None or point.format not in roofs.compute:
        found.skipped["roofline"] = f"no roof was measured for {point.format} on {device}"
        return "", {}, []
    if device == "cpu" and found.threads != opened["threads"]:
        threads = f"the roofs are of {found.threads} threads, the update of {opened['threads']} (backend.threads)"
        found.notes.append(threads)
    if configuration.choices["parallelism"].name != "single":
        found.notes.append("the update on the roofline runs in one process, with all its samples")
    has_flops = point.count.flops > 0
    if has_flops:
        found.notes.append(_HOW_COUNTED)
    else:
        found.skipped["the update on the roofline"] = "it has no product, convolution or attention to count"
    data = {
        "task": point.name, "device": device, "format": point.format, "seconds": point.seconds, **encode(point.count),
        "roofs": dict(roofs.compute), "memory_bytes_per_s": roofs.memory,
    }  # fmt: skip
    files.make_directory(wanted.folder)
    plot = wanted.file("roofline.png")
    files.atomic_write(plot, png(drawn(roofs, point if has_flops else None)))
    return judged(roofs, point) if has_flops else "", data, [plot]


def measured_update(
    request: Request, seconds: float, found: MachineResults, task: str
) -> tuple[RooflinePoint, dict[str, Any]]:
    """Return the time and the counts of an update of one process, and what it consists of.

    Compiled code cannot be counted: for a compiled model, the counts are those of the same update without compilation.
    """
    from runner.tools.measure.counting import Count
    from runner.tools.measure.roofline import RooflinePoint

    alone = dataclasses.replace(request, overrides=merge_overrides(request.overrides, ("parallelism=single",)))
    limits = CompareLimits(budget_s=seconds)
    with Comparison(alone) as comparison:
        with comparison.alone(Variant(task), limits) as (ask, measured):
            took = _blocks_s(ask, measured, seconds)
            values = measured.opened["values"]
            count = ask({"do": "count"}) if values["compile"] == "off" else None
        if count is None:
            with comparison.alone(Variant("counted", ("compile=off",)), limits) as (ask, _):
                count = ask({"do": "count"})
    rate = Rate("update", task, "update", 1, tuple(1 / each for each in took))
    if rate.spread > RESTLESS:
        found.notes.append(f"half of the blocks of updates differ by {rate.spread:.0%}: the machine is restless")
    return RooflinePoint(task, Count(**count), statistics.median(took), str(values["precision"])), measured.opened


def _blocks_s(ask: Ask, measured: VariantResult, seconds: float) -> list[float]:
    """Return the seconds of an update, block by block."""
    until, took = time.monotonic() + seconds, list[float]()
    order = {"do": "run", "updates": measured.updates, "untimed": measured.untimed}
    while len(took) < LEAST_ROUNDS or (len(took) < BLOCKS and time.monotonic() < until):
        took.append(ask(order)["seconds"] / measured.updates)
    return took


def _roofs(rates: Sequence[Rate], device: str, device_name: str) -> Roofs | None:
    """Return the measured rates of a device as roofs; None without its memory or any format."""
    from runner.tools.measure.roofline import Roofs

    mine = [rate for rate in best(rates) if rate.device == device]
    compute = {rate.name: rate.median for rate in mine if rate.part == "matmul"}
    memory = next((rate.median for rate in mine if rate.name == "memory, triad"), None)
    return Roofs(device_name, compute, memory) if compute and memory else None


# ---------------------------------------------------------------- tables


def _tables(rates: Sequence[Rate], inventory: Inventory, peaks: DataSheetPeaks) -> tuple[list[SuiteTable], list[str]]:
    """Return the tables, and the sources of their peaks as notes."""
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
            figures = [each / scale for each in (rate.median, *rate.quartiles)]
            of_peak = None if peak is None else 100 * rate.median / peak
            size = rate.size if part == "matmul" else rate.size // MIB
            rows.append([rate.device, rate.name, size, *figures, len(rate.per_s), peak and peak / scale, of_peak])
        columns = ["folder" if part == "disk" else "device", what, "side" if part == "matmul" else "MiB"]
        columns += [unit, "low", "high", "rounds", f"peak, {unit}", "of peak, %"]
        tables += [SuiteTable(title, columns, rows)] if rows else []
    return tables, [f"peak of {', '.join(names)}: {source}" for source, names in sources.items()]


def _summary(rates: Sequence[Rate]) -> str:
    """Return the highest rates of each device."""
    parts = []
    for device in dict.fromkeys(rate.device for rate in rates if rate.part != "disk"):
        mine = [rate for rate in best(rates) if rate.device == device]
        product = max((rate for rate in mine if rate.part == "matmul"), key=lambda rate: rate.median, default=None)
        memory = next((rate for rate in mine if rate.name == "memory, triad"), None)
        words = [f"{product.median / 1e12:.3g} TFLOP/s in {product.name}"] if product else []
        words += [f"memory at {memory.median / 1e9:.3g} GB/s"] if memory else []
        parts += [f"{device}: {', '.join(words)}"] if words else []
    return "; ".join(parts)


def skipped_without_gpu(parts: Sequence[str], inventory: Inventory, device: str) -> dict[str, str]:
    """Return what needs a GPU -> why it is not measured, if no GPU is."""
    has_gpu = any(each.kind == "cuda" for each in inventory.usable)
    is_named = device.startswith("cuda") and any(each.torch_name == device for each in inventory.usable)
    if is_named or (has_gpu and device in ("auto", "cuda")):
        return {}
    reasons = [f"{each.name}: {each.why_not}" for each in inventory.devices if not each.usable]
    why = f"device={device} excludes it" if has_gpu else "; ".join(reasons) or "there is no GPU"
    return {name: why for part, names in _OF_GPU.items() if part in parts for name in names}


# ---------------------------------------------------------------- request


def _parts(words: Sequence[str]) -> list[str]:
    """Return the parts to measure; a roofline needs matmul and copies."""
    for word in words:
        if word not in PARTS:
            what = f"must be one of {', '.join(PARTS)}"
            raise ConfigError(Problem(what, f"suite=machine {word}", did_you_mean(word, PARTS)))
    wanted = set(words or PARTS)
    wanted |= {"matmul", "copies"} if "roofline" in wanted else set()
    return [part for part in PARTS if part in wanted]


def _number(options: Mapping[str, str], key: str) -> int:
    text = options[key]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(Problem("must be a whole number above 0", f"{key}={text}", f"use {key}=64"))
    return int(text)


def _in_process(part: str, asked: MachineRequest, seconds: float) -> MachineResults:
    """Measure a part in a separate process; if that dies or cannot start, return the reason."""
    try:
        return in_subprocess(MEASURED[part], asked, seconds)
    except BrokenProcessPool:
        why = "its process was killed: accel-run doctor shows which kernel or driver does that"
        return MachineResults(skipped={part: why})
    except AccelRunError as error:
        return MachineResults(skipped={part: first_line(str(error.problems[0]))})


MEASURED: Mapping[str, Callable[[MachineRequest, float], MachineResults]] = {
    "matmul": matmul, "copies": copies, "disk": disk,
}  # fmt: skip
SHARES = {"matmul": 0.4, "copies": 0.15, "disk": 0.15, "roofline": 0.1}  # of the budget; the rest is for start-up
BLOCKS = 9  # of updates
_OF_GPU = {
    "matmul": tuple(f"GPU {name} matmul" for name in ("fp32", "tf32", "bf16", "fp16", "fp64")),
    "copies": (
        "host to device, pinned", "host to device, not pinned", "device to host, pinned", "device to host, not pinned",
        "device to device", "GPU memory, triad",
    ),
}  # fmt: skip
_HOW_COUNTED = (
    "FLOP of an update: products, convolutions and attention, as torch counts them. Bytes: what all operations read and"
    " write without caches. Its true intensity is higher"
)
