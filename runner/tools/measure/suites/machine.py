"""`suite=machine`: matrix products, memory and copies, compared with the peaks in data sheets.

Each part is measured in a separate process; its operations are interleaved in random order.
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
    copies,
    fastest_sizes,
    matmul,
)
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value, save_report
from runner.tools.measure.suites import PARTS


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Measure the requested parts.

    Raises ConfigError for an unknown part or an invalid number.
    """
    for word in suite_request.positional:
        if word not in PARTS:
            what = f"must be one of {', '.join(PARTS)}"
            raise ConfigError(Problem(what, f"suite=machine {word}", did_you_mean(word, PARTS)))
    parts = [part for part in PARTS if part in (suite_request.positional or PARTS)]
    rounds = suite_request.parse_numbers("rounds")[0]
    configuration = compose(suite_request.request)
    inventory = run_in_subprocess(take_inventory)
    device = str(configuration.settings.device)
    request = MachineRequest(inventory, device, rounds)
    results = MachineResults(skipped=skipped_without_gpu(parts, inventory, device))
    for part in parts:
        suite_request.log(f"measuring {part}")
        results.add(part, _measure_in_subprocess(part, request, BUDGET_SHARES[part] * suite_request.budget_s))
    peaks = DataSheetPeaks(profile_facts(suite_request.request.config_dir))
    tables, sources = _make_tables(results.rates, inventory, peaks)
    results.notes += sources
    rates = [encode(rate) | dict(zip(("low", "high"), rate.quartiles, strict=True)) for rate in results.rates]
    for rate, row in zip(results.rates, rates, strict=True):
        row["median"] = rate.median
    data = {"threads": results.threads, "rates": rates}
    return save_report(
        suite_request, "machine", SuiteReport(_summarize(results.rates), tables, results.notes, results.skipped, data)
    )


# ---------------------------------------------------------------- published peaks


@dataclass(frozen=True)
class DataSheetPeaks:
    """Peaks from data sheets, which hardware profiles contain.

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
    ("copies", "memory, triad"): ("memory_bandwidth_gb_s", 1e9),
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
        for rate in (rate for rate in fastest_sizes(rates) if rate.part == part):
            peak, source = peaks.find(devices.get(rate.device, inventory.cpu.device), rate)
            sources.setdefault(source, []).append(f"{rate.device} {rate.name}")
            figures = [each / scale for each in (rate.median, *rate.quartiles)]
            of_peak = None if peak is None else 100 * rate.median / peak
            size = rate.size if part == "matmul" else rate.size // MIB
            rows.append([rate.device, rate.name, size, *figures, len(rate.per_s), peak and peak / scale, of_peak])
        columns = ["device", what, "side" if part == "matmul" else "MiB"]
        columns += [unit, "low", "high", "rounds", f"peak, {unit}", "of peak, %"]
        tables += [SuiteTable(title, columns, rows)] if rows else []
    return tables, [f"peak of {', '.join(names)}: {source}" for source, names in sources.items()]


def _summarize(rates: Sequence[Rate]) -> str:
    """Return a summary of the highest rates of each device."""
    parts = []
    for device in dict.fromkeys(rate.device for rate in rates):
        fastest = [rate for rate in fastest_sizes(rates) if rate.device == device]
        product = max((rate for rate in fastest if rate.part == "matmul"), key=lambda rate: rate.median, default=None)
        memory = next((rate for rate in fastest if rate.name == "memory, triad"), None)
        texts = [f"{product.median / 1e12:.3g} TFLOP/s in {product.name}"] if product else []
        texts += [f"memory at {memory.median / 1e9:.3g} GB/s"] if memory else []
        parts += [f"{device}: {', '.join(texts)}"] if texts else []
    return "; ".join(parts)


def skipped_without_gpu(parts: Sequence[str], inventory: Inventory, device: str) -> dict[str, str]:
    """Return name -> reason for the rates that need a GPU, if no GPU is measured."""
    has_gpu = any(gpu.kind == "cuda" for gpu in inventory.usable)
    is_named = device.startswith("cuda") and any(gpu.torch_name == device for gpu in inventory.usable)
    if is_named or (has_gpu and device in ("auto", "cuda")):
        return {}
    reasons = [f"{gpu.name}: {gpu.why_not}" for gpu in inventory.devices if not gpu.usable]
    why = f"device={device} excludes it" if has_gpu else "; ".join(reasons) or "there is no GPU"
    return {name: why for part, names in _GPU_RATES.items() if part in parts for name in names}


def _measure_in_subprocess(part: str, request: MachineRequest, seconds: float) -> MachineResults:
    """Measure a part in a separate process; if the process dies or cannot start, skip the part with the reason."""
    try:
        return run_in_subprocess(PART_FUNCTIONS[part], request, seconds)
    except BrokenProcessPool:
        why = "its process was killed: find the kernel or driver that causes it with accel-run doctor"
        return MachineResults(skipped={part: why})
    except AccelRunError as error:
        return MachineResults(skipped={part: first_line(str(error.problems[0]))})


PART_FUNCTIONS: Mapping[str, Callable[[MachineRequest, float], MachineResults]] = {
    "matmul": matmul, "copies": copies,
}  # fmt: skip
BUDGET_SHARES = {"matmul": 0.5, "copies": 0.2}  # of the budget; the rest is for start-up
_GPU_RATES = {
    "matmul": tuple(f"GPU {name} matmul" for name in ("fp32", "tf32", "bf16", "fp16", "fp64")),
    "copies": (
        "host to device, pinned", "host to device, not pinned", "device to host, pinned", "device to host, not pinned",
        "device to device", "GPU memory, triad",
    ),
}  # fmt: skip
