"""`suite=machine`: matrix products, memory and copies, compared with the peaks in data sheets.

Each part is measured in a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.json_converter import encode
from runner.base.text import first_line
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.schema import did_you_mean
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Device, Inventory, take_inventory
from runner.tools.doctor.findings import CheckContext
from runner.tools.measure.machine_rates import MIB, TRIAD, MachineResults, Rate, copies, matmul
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value, save_report
from runner.tools.measure.suites import PARTS


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Measure the requested parts.

    Raises ConfigError for an unknown part.
    """
    for word in suite_request.positional:
        if word not in PARTS:
            what = f"must be one of {', '.join(PARTS)}"
            raise ConfigError(Problem(what, f"suite=machine {word}", did_you_mean(word, PARTS)))
    parts = [part for part in PARTS if part in (suite_request.positional or PARTS)]
    configuration = compose(suite_request.request)
    inventory = run_in_subprocess(take_inventory)
    context = CheckContext(Path(), Path(), str(configuration.settings.device), inventory)
    results = MachineResults(skipped=skipped_without_gpu(inventory, context.device))
    for part in parts:
        suite_request.log(f"measuring {part}")
        measured = _measure_in_subprocess(part, context)
        results.rates += measured.rates
        results.skipped |= measured.skipped
        results.threads = measured.threads or results.threads
    peaks = DataSheetPeaks(profile_facts(suite_request.request.config_dir))
    tables, sources = _make_tables(results.rates, inventory, peaks)
    data = {"threads": results.threads, "rates": encode(results.rates)}
    report = SuiteReport(_summarize(results.rates), tables, sources, results.skipped, data)
    return save_report(suite_request, "machine", report)


# ---------------------------------------------------------------- published peaks


@dataclass(frozen=True)
class DataSheetPeaks:
    """Data-sheet peaks from hardware profiles.

    profiles  name -> facts
    """

    profiles: Mapping[str, Mapping[str, Any]]

    def find(self, device: Device, rate: Rate) -> tuple[float | None, str]:
        """Return the peak in the unit of the rate and its source; if it is unknown, None and the reason."""
        if device.kind != "cuda":
            return None, "unknown: clock, vector units and memory channels are not reported here"
        fact, unit = _PEAK_FACTS.get((rate.part, rate.name), ("", 0.0))
        for name, facts in self.profiles.items():
            for listed in facts.get("devices") or ():
                if str(listed.get("name", "")).lower() != device.name.lower():
                    continue
                if fact in listed:
                    source = (listed.get("source") or {}).get(fact, "no source given")
                    return float(listed[fact]) * unit, f"{source} (hardware={name})"
                return None, f"unknown: hardware={name} does not state it"
        return None, f"unknown: there is no hardware profile for {device.name}"


_PEAK_FACTS: Mapping[tuple[str, str], tuple[str, float]] = {
    ("matmul", "fp32"): ("fp32_tflops", 1e12),
    ("matmul", "tf32"): ("tf32_tflops", 1e12),
    ("matmul", "bf16"): ("bf16_tensor_tflops", 1e12),
    ("matmul", "fp16"): ("fp16_tensor_tflops", 1e12),
    ("copies", "device to device"): ("memory_bandwidth_gb_s", 1e9),
    ("copies", TRIAD): ("memory_bandwidth_gb_s", 1e9),
}


# ---------------------------------------------------------------- tables


def _make_tables(
    rates: Sequence[Rate], inventory: Inventory, peaks: DataSheetPeaks
) -> tuple[list[SuiteTable], list[str]]:
    """Return the tables, and the sources of their peaks as notes."""
    devices = {device.torch_name: device for device in (*inventory.usable, inventory.cpu.device)}
    titles = {
        "matmul": ("products of square matrices, at the fastest size", "format", "TFLOP/s", 1e12),
        "copies": ("memory and copies", "what", "GB/s", 1e9),
    }
    tables, sources = [], dict[str, list[str]]()
    for part, (title, what, unit, scale) in titles.items():
        rows: list[list[Value]] = []
        for rate in (rate for rate in rates if rate.part == part):
            peak, source = peaks.find(devices.get(rate.device, inventory.cpu.device), rate)
            sources.setdefault(source, []).append(f"{rate.device} {rate.name}")
            of_peak = None if peak is None else 100 * rate.per_s / peak
            size = rate.size if part == "matmul" else rate.size // MIB
            rows.append([rate.device, rate.name, size, rate.per_s / scale, peak and peak / scale, of_peak])
        columns = ["device", what, "side" if part == "matmul" else "MiB"]
        columns += [unit, f"peak, {unit}", "of peak, %"]
        tables += [SuiteTable(title, columns, rows)] if rows else []
    return tables, [f"peak of {', '.join(names)}: {source}" for source, names in sources.items()]


def _summarize(rates: Sequence[Rate]) -> str:
    """Return a summary of the highest rates of each device."""
    parts = []
    for device in dict.fromkeys(rate.device for rate in rates):
        of_device = [rate for rate in rates if rate.device == device]
        product = max((rate for rate in of_device if rate.part == "matmul"), key=lambda rate: rate.per_s, default=None)
        memory = next((rate for rate in of_device if rate.name == TRIAD), None)
        texts = [f"{product.per_s / 1e12:.3g} TFLOP/s in {product.name}"] if product else []
        texts += [f"memory at {memory.per_s / 1e9:.3g} GB/s"] if memory else []
        parts += [f"{device}: {', '.join(texts)}"] if texts else []
    return "; ".join(parts)


def skipped_without_gpu(inventory: Inventory, device: str) -> dict[str, str]:
    """Return the reason why no GPU is measured; empty if one is."""
    usable = [gpu.torch_name for gpu in inventory.usable if gpu.kind == "cuda"]
    if device in usable or (usable and device in ("auto", "cuda")):
        return {}
    reasons = [f"{gpu.name}: {gpu.why_not}" for gpu in inventory.devices if not gpu.usable]
    return {"GPU": f"device={device} excludes it" if usable else "; ".join(reasons) or "there is no GPU"}


def _measure_in_subprocess(part: str, context: CheckContext) -> MachineResults:
    """Measure a part in a separate process; if the process dies or cannot start, skip the part with the reason."""
    try:
        return run_in_subprocess(PART_FUNCTIONS[part], context)
    except BrokenProcessPool:
        why = "its process was killed: find the kernel or driver that causes it with accel-run doctor"
        return MachineResults(skipped={part: why})
    except AccelRunError as error:
        return MachineResults(skipped={part: first_line(str(error.problems[0]))})


PART_FUNCTIONS: Mapping[str, Callable[[CheckContext], MachineResults]] = {"matmul": matmul, "copies": copies}
