"""Wrap AMD SMI, the package `amdsmi` of ROCm, to provide the same readings as NVML. No other module imports `amdsmi`.

Checked against the documentation of AMD SMI 26.0 and with a fake module; no AMD GPU was available.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from runner.monitor.nvml import METRICS, Gpu, GpuProcess, Nvml, VendorTool

MIB = 2**20


class AmdSmi(Nvml):
    """The AMD GPUs of this machine, with the methods of `Nvml`. A reading that AMD SMI does not provide is None.

    The `uuid` of a GPU is its PCI address, because torch and AMD SMI report different UUIDs.
    There are no events; uncorrected memory errors are counted.
    """

    tool = VendorTool(
        name="amd-smi",
        lost="amd-smi list; dmesg | grep -i amdgpu; then restart the machine",
        memory_errors="amd-smi bad-pages; amd-smi metric --ecc; amd-smi reset --gpureset while it is idle",
    )

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library
        self._handles: dict[Gpu, Any] = {}
        for handle in self._query(library.amdsmi_get_processor_handles) or ():
            address = self._query(library.amdsmi_get_gpu_device_bdf, handle)
            if not address:
                self.notes = (*self.notes, f"AMD GPU {len(self._handles)} does not respond")
                continue
            asic = self._query(library.amdsmi_get_gpu_asic_info, handle) or {}
            memory = self._query(library.amdsmi_get_gpu_vram_usage, handle) or {}
            total = _number(memory.get("vram_total"))
            gpu = Gpu(
                index=len(self._handles),
                uuid=str(address).lower(),
                name=str(asic.get("market_name") or "AMD GPU"),
                memory_bytes=None if total is None else int(total) * MIB,
            )
            self._handles[gpu] = handle
            driver = self._query(library.amdsmi_get_gpu_driver_info, handle) or {}
            self.driver_version = self.driver_version or driver.get("driver_version")
        self.gpus = tuple(self._handles)
        self.why_not = "" if self.gpus else "; ".join(self.notes) or "AMD SMI shows no GPU"

    def read(self, gpu: Gpu, names: Collection[str] | None = None) -> dict[str, float | None]:
        selected = [metric.name for metric in METRICS if names is None or metric.name in names]
        return {name: self._value(gpu, name) for name in selected}

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        if gpu not in self._handles:
            return None
        info = self._query(self._library.amdsmi_get_gpu_process_list, self._handles[gpu])
        if info is None:
            return None
        used = [(int(item["pid"]), _number(item.get("mem"))) for item in info]
        return tuple(GpuProcess(pid, None if nbytes is None else int(nbytes)) for pid, nbytes in used)

    def watch_events(self, gpus: object) -> None:
        """AMD SMI has no counterpart of XIDs."""

    def close(self) -> None:
        if self._library is not None:
            self._query(self._library.amdsmi_shut_down)
        self._library, self._handles = None, {}

    def _value(self, gpu: Gpu, name: str) -> float | None:  # type: ignore[override]
        query = QUERIES.get(name)
        if query is None or gpu not in self._handles:
            return None
        try:
            return _number(query(self._library, self._handles[gpu]))
        except (self._library.AmdSmiException, AttributeError, KeyError, TypeError) as error:
            if _error_code(error) == _NO_PERMISSION:
                self.denied.setdefault(gpu, set()).add(name)
            return None

    def _query(self, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query, or None if it fails: older versions lack some functions."""
        try:
            return query(*arguments)
        except (self._library.AmdSmiException, AttributeError, KeyError):
            return None


def open_amd_smi() -> AmdSmi | None:
    """Return the AMD GPUs of this machine; None if the package, the driver or the permission is missing."""
    try:
        import amdsmi as library  # type: ignore[import-not-found] # part of ROCm, not on PyPI

        library.amdsmi_init()
    except Exception:  # importing it runs code that may raise any error if a library is missing
        return None
    return AmdSmi(library)


def _number(value: object) -> float | None:
    """Return a reading as a number, or None if it is unavailable: "N/A", or the largest integer of a type."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return None if value in _NOT_AVAILABLE else float(value)


def _error_code(error: Exception) -> int | None:
    code = getattr(error, "get_error_code", None)
    return int(code()) if callable(code) else None


def _read_memory(library: Any, handle: Any, key: str) -> float | None:
    value = _number(library.amdsmi_get_gpu_vram_usage(handle)[key])
    return None if value is None else value * MIB


def _read_free_memory(library: Any, handle: Any) -> float | None:
    total, used = (_read_memory(library, handle, key) for key in ("vram_total", "vram_used"))
    return None if total is None or used is None else total - used


def _read_power(library: Any, handle: Any) -> float | None:
    """Return watts. MI300 reports only the current power, older GPUs only the average."""
    info = library.amdsmi_get_power_info(handle)
    values = (_number(info.get(key)) for key in ("current_socket_power", "average_socket_power"))
    return next((value for value in values if value), None)


def _read_temperature(library: Any, handle: Any, metric: Any) -> float | None:
    kinds = library.AmdSmiTemperatureType
    for sensor in (kinds.EDGE, kinds.HOTSPOT):  # data center GPUs have no edge sensor
        try:
            value = _number(library.amdsmi_get_temp_metric(handle, sensor, metric))
        except library.AmdSmiException:
            continue
        if value is not None:
            return value
    return None


def _read_energy(library: Any, handle: Any) -> float | None:
    """Return the joules used since the driver was loaded; the counter's unit is `counter_resolution` microjoules."""
    info = library.amdsmi_get_energy_count(handle)
    count, unit = _number(info["energy_accumulator"]), _number(info["counter_resolution"])
    return None if count is None or unit is None else count * unit / 1e6


# Reading of METRICS -> query. Readings that AMD SMI lacks, or defines differently (throttling), are omitted.
QUERIES: Mapping[str, Callable[[Any, Any], float | None]] = {
    "util_percent": lambda smi, gpu: smi.amdsmi_get_gpu_activity(gpu)["gfx_activity"],
    "memory_util_percent": lambda smi, gpu: smi.amdsmi_get_gpu_activity(gpu)["umc_activity"],
    "memory_used_bytes": lambda smi, gpu: _read_memory(smi, gpu, "vram_used"),
    "memory_free_bytes": _read_free_memory,
    "memory_total_bytes": lambda smi, gpu: _read_memory(smi, gpu, "vram_total"),
    "temperature_c": lambda smi, gpu: _read_temperature(smi, gpu, smi.AmdSmiTemperatureMetric.CURRENT),
    "temperature_limit_c": lambda smi, gpu: _read_temperature(smi, gpu, smi.AmdSmiTemperatureMetric.CRITICAL),
    "power_w": _read_power,
    "energy_j": _read_energy,
    "sm_clock_mhz": lambda smi, gpu: smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.GFX)["clk"],
    "memory_clock_mhz": lambda smi, gpu: smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.MEM)["clk"],
    "ecc_corrected": lambda smi, gpu: smi.amdsmi_get_gpu_total_ecc_count(gpu)["correctable_count"],
    "ecc_uncorrected": lambda smi, gpu: smi.amdsmi_get_gpu_total_ecc_count(gpu)["uncorrectable_count"],
}
_NO_PERMISSION = 10  # AMDSMI_STATUS_NO_PERM
_NOT_AVAILABLE = (2**16 - 1, 2**32 - 1, 2**64 - 1)
