"""`suite=machine`: matrix products, memory, copies and disk, compared with the limits of the data sheets.

Each part is measured in a separate process; within a part, everything is interleaved in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.json_converter import encode
from runner.base.text import first_line
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.schema import did_you_mean
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Device, Inventory, take_inventory
from runner.tools.measure.machine_rates import (
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


def run(wanted: SuiteRequest) -> SuiteReport:
    """Measure the requested parts.

    Raises ConfigError for an unknown part or an invalid number.
    """
    parts = _parts(wanted.words)
    rounds, disk_mib = (_number(wanted.options, key) for key in ("rounds", "disk_mib"))
    configuration = compose(wanted.request)
    inventory = run_in_subprocess(take_inventory)
    device = str(configuration.settings.device)
    asked = MachineRequest(inventory, device, rounds, configuration.settings.root, disk_mib * MIB)
    found = MachineResults(skipped=skipped_without_gpu(parts, inventory, device))
    for part in parts:
        wanted.say(f"measures {part}")
        found.add(part, _in_process(part, asked, SHARES[part] * wanted.budget_s))
    peaks = DataSheetPeaks(profile_facts(wanted.request.config_dir))
    tables, sources = _tables(found.rates, inventory, peaks)
    found.notes += sources
    rates = [encode(rate) | dict(zip(("low", "high"), rate.quartiles, strict=True)) for rate in found.rates]
    for rate, row in zip(found.rates, rates, strict=True):
        row["median"] = rate.median
    data = {"threads": found.threads, "rates": rates}
    return saved(wanted, "machine", SuiteReport(_summary(found.rates), tables, found.notes, found.skipped, data))


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
    """Return the parts to measure."""
    for word in words:
        if word not in PARTS:
            what = f"must be one of {', '.join(PARTS)}"
            raise ConfigError(Problem(what, f"suite=machine {word}", did_you_mean(word, PARTS)))
    return [part for part in PARTS if part in (words or PARTS)]


def _number(options: Mapping[str, str], key: str) -> int:
    text = options[key]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(Problem("must be a whole number above 0", f"{key}={text}", f"use {key}=64"))
    return int(text)


def _in_process(part: str, asked: MachineRequest, seconds: float) -> MachineResults:
    """Measure a part in a separate process; if that dies or cannot start, return the reason."""
    try:
        return run_in_subprocess(MEASURED[part], asked, seconds)
    except BrokenProcessPool:
        why = "its process was killed: accel-run doctor shows which kernel or driver does that"
        return MachineResults(skipped={part: why})
    except AccelRunError as error:
        return MachineResults(skipped={part: first_line(str(error.problems[0]))})


MEASURED: Mapping[str, Callable[[MachineRequest, float], MachineResults]] = {
    "matmul": matmul, "copies": copies, "disk": disk,
}  # fmt: skip
SHARES = {"matmul": 0.4, "copies": 0.15, "disk": 0.15}  # of the budget; the rest is for start-up
_OF_GPU = {
    "matmul": tuple(f"GPU {name} matmul" for name in ("fp32", "tf32", "bf16", "fp16", "fp64")),
    "copies": (
        "host to device, pinned", "host to device, not pinned", "device to host, pinned", "device to host, not pinned",
        "device to device", "GPU memory, triad",
    ),
}  # fmt: skip
