"""Wrap NVML, the driver's interface to the GPUs: properties, metrics and processes. No other module uses NVML.

Does not import torch. If the library, the driver or the permission is missing, `open_nvml` returns an Nvml without
GPUs, with the reason. A missing reading is None, never 0.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Gpu:
    """The constant properties of a GPU, or of a MIG instance.

    index         the driver's index, in bus order; CUDA's may differ (see `visible`)
    uuid          `GPU-...`, or `MIG-...` for an instance
    memory_bytes  None if the driver does not report it
    mig           whether MIG is enabled; None if the GPU does not support it
    instances     the MIG instances, in the driver's order
    mig_name      older name of an instance: MIG-<GPU uuid>/<GPU instance>/<compute instance>
    instance_id   ID of the GPU instance in error events; None for a full GPU
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    mig: bool | None = None
    instances: tuple[Gpu, ...] = ()
    mig_name: str = ""
    instance_id: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A compute process on a GPU; its memory is None if the driver hides it (containers, Windows)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Metric:
    """A changing value of a GPU: a row of METRICS.

    query    returns the value; may raise NVML's exceptions
    reading  name of the monitor's reading after `gpu0/`, by default `name`; its value is divided by `scale`
    seldom   whether the monitor reads it less often, because it hardly changes
    """

    name: str
    unit: str
    query: Callable[[GpuReading], float]
    reading: str = ""
    scale: float = 1
    seldom: bool = False


class GpuReading:
    """A GPU at one time: a query that several metrics share is run once."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    @cached_property
    def memory(self) -> Any:
        """Bytes as in nvidia-smi: version 2 reports the driver's reserve separately; version 1 counts it as used."""
        try:
            return self.nvml.nvmlDeviceGetMemoryInfo(self.handle, version=self.nvml.nvmlMemory_v2)
        except (self.nvml.NVMLError, AttributeError, TypeError):
            return self.nvml.nvmlDeviceGetMemoryInfo(self.handle)

    @cached_property
    def rates(self) -> Any:
        """Percent of the time in which the SMs (`gpu`) and the memory bus (`memory`) were busy."""
        return self.nvml.nvmlDeviceGetUtilizationRates(self.handle)


@dataclass(frozen=True)
class GpuEvent:
    """An error reported by the driver.

    gpu          the physical GPU
    code         number of an XID
    instance_id  GPU instance of the error; None: unknown, or the full GPU
    """

    gpu: Gpu
    kind: Literal["xid", "ecc corrected", "ecc uncorrected"]
    code: int = 0
    instance_id: int | None = None

    def concerns(self, gpu: Gpu) -> bool:
        """Return whether the error may concern `gpu`, which may be an instance."""
        is_other = None not in (self.instance_id, gpu.instance_id) and self.instance_id != gpu.instance_id
        return gpu.index == self.gpu.index and not is_other


class VendorTool(NamedTuple):
    """Command lines of the vendor's tool that doctor recommends.

    name           the tool that lists GPUs and processes
    lost           the command for a GPU that does not respond
    memory_errors  the command for a GPU with uncorrected memory errors
    """

    name: str = "nvidia-smi"
    lost: str = "nvidia-smi; dmesg | grep -i xid; then restart the machine"
    memory_errors: str = "nvidia-smi -q -d ECC,PAGE_RETIREMENT; nvidia-smi -r while it is idle"


class Nvml:
    """The GPUs of this machine; none, with `why_not`, if NVML is not available.

    why_not         why there are no GPUs; empty if there are
    driver_version  e.g. "580.159.03"
    cuda_version    the newest CUDA that the driver supports, e.g. "13.0"
    gpus            physical GPUs in bus order
    notes           GPUs that do not respond, with the reason
    lost            GPU -> why it no longer responds; it is not queried again
    denied          GPU -> metrics that this user may not read
    """

    tool = VendorTool()

    def __init__(self, library: Any = None, why_not: str = "") -> None:
        self.why_not = why_not
        self.driver_version: str | None = None
        self.cuda_version: str | None = None
        self.gpus: tuple[Gpu, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.lost: dict[Gpu, str] = {}
        self.denied: dict[Gpu, set[str]] = {}
        self._library = library
        self._handles: dict[Gpu, Any] = {}
        self._events: tuple[Any, Mapping[int | None, Gpu]] | None = None
        if library is not None:
            self.driver_version = _query(library, library.nvmlSystemGetDriverVersion)
            version = _query(library, library.nvmlSystemGetCudaDriverVersion)
            self.cuda_version = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
            self._find_gpus(library)

    def read(self, gpu: Gpu, names: Collection[str] | None = None) -> dict[str, float | None]:
        """Return the current values of the metrics in `names` (None: all metrics); a value is None if not available."""
        selected = [metric for metric in METRICS if names is None or metric.name in names]
        handle = self._handles.get(gpu)
        if handle is None:
            return {metric.name: None for metric in selected}
        reading = GpuReading(self._library, handle)
        return {metric.name: self._value(gpu, metric, reading) for metric in selected}

    def _value(self, gpu: Gpu, metric: Metric, reading: GpuReading) -> float | None:
        if gpu in self.lost:
            return None
        try:
            value = metric.query(reading)
        # Mismatch and AttributeError: the installed driver or nvidia-ml-py is older and lacks this function.
        except (self._library.NVMLError, self._library.NVMLLibraryMismatchError, AttributeError) as error:
            code = getattr(error, "value", None)
            if code in _LOST:
                self.lost[gpu] = _LOST[code]
            elif code == _NO_PERMISSION:
                self.denied.setdefault(gpu, set()).add(metric.name)
            return None
        return None if value in _NOT_AVAILABLE else value

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        """Return the compute processes on this GPU, None if the driver does not report them."""
        if gpu not in self._handles:
            return None
        found = _query(self._library, self._library.nvmlDeviceGetComputeRunningProcesses, self._handles[gpu])
        return None if found is None else tuple(GpuProcess(item.pid, item.usedGpuMemory) for item in found)

    def watch_events(self, gpus: Sequence[Gpu]) -> None:
        """Start recording errors of these GPUs, and of GPUs that contain these MIG instances; `events` returns them."""
        if self._library is None:
            return
        events = _query(self._library, self._library.nvmlEventSetCreate)
        indices = {gpu.index for gpu in gpus}
        watched = {}
        for gpu in self.gpus if events is not None else ():
            handle = self._handles[gpu]
            # Only supported types: NVML rejects the whole registration if it does not support one of them.
            types = (_query(self._library, self._library.nvmlDeviceGetSupportedEventTypes, handle) or 0) & sum(_EVENTS)
            if gpu.index in indices and types:
                try:
                    self._library.nvmlDeviceRegisterEvents(handle, types, events)
                except self._library.NVMLError as error:
                    if getattr(error, "value", None) == _NO_PERMISSION:
                        for watched_gpu in (chosen for chosen in gpus if chosen.index == gpu.index):
                            self.denied.setdefault(watched_gpu, set()).add("errors (XID)")
                    continue
                watched[_address(handle)] = gpu
        self._events = (events, watched) if events is not None else None

    def events(self) -> list[GpuEvent]:
        """Return the errors since the last call; does not wait."""
        found: list[GpuEvent] = []
        while self._events is not None and len(found) < _MAX_EVENTS:
            event_set, gpus = self._events
            data = _query(self._library, self._library.nvmlEventSetWait_v2, event_set, 0)
            if data is None:  # no more events, which NVML reports as a timeout
                break
            gpu, kind = gpus.get(_address(data.device)), _EVENTS.get(data.eventType)
            if gpu is not None and kind is not None:
                # Only XIDs contain the instance, and only on Ampere and later.
                is_xid = kind == "xid"
                instance_id = None if not is_xid or data.gpuInstanceId in _NOT_AVAILABLE else int(data.gpuInstanceId)
                found.append(GpuEvent(gpu, kind, int(data.eventData) if is_xid else 0, instance_id))
        return found

    def find(self, uuid: str) -> Gpu | None:
        """Return the GPU or MIG instance with this UUID, with or without the prefix GPU- or MIG-."""
        key = strip_uuid_prefix(uuid)
        return next((gpu for gpu in iter_instances(self.gpus) if strip_uuid_prefix(gpu.uuid) == key), None)

    def find_torch_device(self, uuid: str, environ: Mapping[str, str] = os.environ) -> Gpu | None:
        """Return the GPU to which torch assigns this UUID.

        CUDA shows one instance of a GPU that is split into MIG instances, and older versions of CUDA give it the UUID
        of the whole GPU, which has more memory than the instance.
        """
        gpu = self.find(uuid)
        if gpu is None or not gpu.mig or not gpu.instances:
            return gpu
        return next((shown for shown in visible(self.gpus, environ).gpus if shown in gpu.instances), gpu.instances[0])

    def close(self) -> None:
        """Shut NVML down; a second call does nothing."""
        if self._library is not None:
            if self._events is not None:
                _query(self._library, self._library.nvmlEventSetFree, self._events[0])
            _query(self._library, self._library.nvmlShutdown)
        self._library = self._events = None
        self._handles = {}

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_gpus(self, library: Any) -> None:
        gpus, notes = [], []
        for index in range(_query(library, library.nvmlDeviceGetCount) or 0):
            try:
                handle = library.nvmlDeviceGetHandleByIndex(index)
                uuid = library.nvmlDeviceGetUUID(handle)
            except library.NVMLError as error:
                notes.append(f"GPU {index} does not respond: {error}")
                continue
            gpu = _describe(library, handle, index, uuid, self._find_instances(library, handle, index, uuid))
            self._handles[gpu] = handle
            gpus.append(gpu)
        self.gpus, self.notes = tuple(gpus), tuple(notes)
        self.why_not = "" if gpus else "; ".join(notes) or "NVML reports no GPU"

    def _find_instances(self, library: Any, parent: Any, index: int, parent_uuid: str) -> tuple[Gpu, ...]:
        instances = []
        for number in range(_query(library, library.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            handle = _query(library, library.nvmlDeviceGetMigDeviceHandleByIndex, parent, number)
            uuid = handle and _query(library, library.nvmlDeviceGetUUID, handle)
            if not uuid:
                continue  # an unused slot
            ids = [
                _query(library, library.nvmlDeviceGetGpuInstanceId, handle),
                _query(library, library.nvmlDeviceGetComputeInstanceId, handle),
            ]
            mig_name = "" if None in ids else f"MIG-{parent_uuid}/{ids[0]}/{ids[1]}"
            instance = replace(_describe(library, handle, index, uuid), mig_name=mig_name, instance_id=ids[0])
            self._handles[instance] = handle
            instances.append(instance)
        return tuple(instances)


@dataclass(frozen=True)
class Visible:
    """The GPUs that CUDA shows to a process, in CUDA's order if it is known; `note` states what is uncertain."""

    gpus: tuple[Gpu, ...]
    note: str = ""


def open_nvml() -> Nvml:
    """Return the machine's GPUs. Never raises: if there are none, `why_not` has the reason.

    NVML counts its users: call close() on each result.
    """
    try:
        import pynvml as library  # imported here: takes 30 ms, which commands that use no GPU save
    except ImportError as error:
        return Nvml(why_not=f"the package nvidia-ml-py is not installed ({error})")
    try:
        library.nvmlInit()
    except (library.NVMLError, OSError) as error:
        return Nvml(why_not=_REASONS.get(getattr(error, "value", None), f"NVML failed to start: {error}"))
    return Nvml(library)


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> Visible:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects by index, UUID, prefix of a UUID, or MIG name.

    As in CUDA, the list ends at the first entry that is not a GPU, and is empty if a GPU occurs twice.
    CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and does not document the ranking. With
    different GPUs, indices are assumed to follow bus order, and the note says so; only a UUID is reliable.
    Source: CUDA C++ Programming Guide, CUDA Environment Variables.
    """
    selected = environ.get("CUDA_VISIBLE_DEVICES")
    if selected is None:
        return Visible(tuple(gpus), _order_note(gpus, environ))
    entries = [entry.strip() for entry in selected.split(",")] if selected.strip() else []
    is_by_name = bool(entries) and entries[0].startswith(("GPU-", "MIG-"))
    found: list[Gpu] = []
    note = "" if is_by_name else _order_note(gpus, environ)
    for entry in entries:
        gpu = _find_by_name(entry, gpus) if is_by_name else _find_by_index(entry, gpus)
        if gpu is None:
            if not entry.startswith("-"):
                note = (
                    f"CUDA_VISIBLE_DEVICES={selected}: {entry!r} is not a unique GPU; it and later entries are ignored"
                )
            break
        if gpu in found:
            return Visible((), f"CUDA_VISIBLE_DEVICES={selected} names a GPU twice, so CUDA shows none")
        found.append(gpu)
    if gpus and not found and (not entries or entries[0].startswith("-")):
        note = f"CUDA_VISIBLE_DEVICES={selected} hides {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    return Visible(tuple(found), note)


def iter_instances(gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    """Yield each GPU, followed by its MIG instances."""
    for gpu in gpus:
        yield gpu
        yield from gpu.instances


def strip_uuid_prefix(uuid: str) -> str:
    """Return a UUID without GPU- or MIG-, which NVML includes and torch omits."""
    return re.sub(r"^(GPU|MIG)-", "", str(uuid)).lower()


def decode_throttle_reasons(throttle_reasons: float | None) -> tuple[str, ...]:
    """Decode the bits of the metric `throttle_reasons`; return the reasons that reduce the clocks."""
    bits = int(throttle_reasons or 0)
    return tuple(reason for bit, reason in THROTTLE_REASONS.items() if bits & bit)


def _query(library: Any, query: Callable[..., Result], *arguments: Any) -> Result | None:
    """Return the result of a query, or None if it fails. An older driver or library lacks some functions."""
    try:
        result = query(*arguments)
    except (library.NVMLError, library.NVMLLibraryMismatchError, AttributeError):
        return None
    return None if isinstance(result, (int, float)) and result in _NOT_AVAILABLE else result


def _describe(library: Any, handle: Any, index: int, uuid: str, instances: tuple[Gpu, ...] = ()) -> Gpu:
    mig_mode = _query(library, library.nvmlDeviceGetMigMode, handle)
    memory = _query(library, lambda: int(GpuReading(library, handle).memory.total))
    return Gpu(
        index=index,
        uuid=uuid,
        name=_query(library, library.nvmlDeviceGetName, handle) or "GPU without a name",
        memory_bytes=memory or None,
        capability=_query(library, library.nvmlDeviceGetCudaComputeCapability, handle),
        mig=None if mig_mode is None else bool(mig_mode[0]),
        instances=instances,
    )


def _find_by_index(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    digits = re.match(r"\+?\d+", entry)  # CUDA reads "1abc" as 1, like C's strtoul
    number = int(digits.group()) if digits else -1
    return gpus[number] if 0 <= number < len(gpus) else None


def _find_by_name(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    matches = [
        gpu for gpu in iter_instances(gpus) if gpu.uuid.startswith(entry) or (gpu.mig_name and gpu.mig_name == entry)
    ]
    return matches[0] if len(matches) == 1 and entry not in ("GPU-", "MIG-") else None


def _order_note(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2:
        return ""
    return (
        "CUDA numbers different GPUs by speed, the driver by PCI bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both"
        " use the same numbers"
    )


def _address(handle: Any) -> int | None:
    """Return the address in a handle, to compare handles: an event contains a new object with the same address."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _temperature(reading: GpuReading) -> float:
    nvml = reading.nvml
    try:
        return float(nvml.nvmlDeviceGetTemperatureV(reading.handle, nvml.NVML_TEMPERATURE_GPU))
    except (nvml.NVMLError, AttributeError):  # an older driver; the function below is deprecated
        return float(nvml.nvmlDeviceGetTemperature(reading.handle, nvml.NVML_TEMPERATURE_GPU))


def _temperature_limit(reading: GpuReading) -> float:
    nvml = reading.nvml
    return float(nvml.nvmlDeviceGetTemperatureThreshold(reading.handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))


def _throttle_reasons(reading: GpuReading) -> float:
    try:
        return int(reading.nvml.nvmlDeviceGetCurrentClocksEventReasons(reading.handle))
    except (reading.nvml.NVMLError, AttributeError):  # an older driver
        return int(reading.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(reading.handle))


def _clock(reading: GpuReading, domain: str) -> float:
    kinds = {"sm": reading.nvml.NVML_CLOCK_SM, "memory": reading.nvml.NVML_CLOCK_MEM}
    return int(reading.nvml.nvmlDeviceGetClockInfo(reading.handle, kinds[domain]))


def _ecc(reading: GpuReading, kind: str) -> float:
    """Return the number of memory errors since the driver was loaded."""
    nvml = reading.nvml
    kinds = {"corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}
    return int(nvml.nvmlDeviceGetTotalEccErrors(reading.handle, kinds[kind], nvml.NVML_VOLATILE_ECC))


_NOT_AVAILABLE = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # NVML_VALUE_NOT_AVAILABLE, 32 and 64 bit
NO_DRIVER = "no NVIDIA driver is installed (libnvidia-ml.so.1 not found)"
_REASONS: Mapping[Any, str] = {  # by NVML_ERROR_...
    4: "no permission to query the NVIDIA driver",  # NO_PERMISSION
    9: "the NVIDIA driver is not loaded",  # DRIVER_NOT_LOADED
    12: NO_DRIVER,  # LIBRARY_NOT_FOUND
    # LIB_RM_VERSION_MISMATCH, after an update of the driver
    18: "the library and the kernel module of the NVIDIA driver have different versions; restart the machine",
}

# Bits of nvmlClocksEventReason..., without idle (1), clocks set by the user (2) and display clocks (256).
THROTTLE_REASONS: Mapping[int, str] = {
    4: "power limit",
    8: "hardware slowdown",
    16: "sync boost",
    32: "software temperature limit",
    64: "hardware temperature limit",
    128: "power brake",
    512: "board limit",
    1024: "reliability",
}

THROTTLE_MEANINGS: Mapping[str, str] = {
    "power limit": "at its power limit, which is normal for a busy GPU",
    "board limit": "at the limit of its board, which is normal for a busy GPU",
    "sync boost": "synchronized with the clocks of another GPU",
    "software temperature limit": "too warm: improve the cooling, or lower the power limit",
    "hardware temperature limit": "much too warm: the hardware throttles itself; check the cooling",
    "hardware slowdown": "the hardware throttles itself: check cooling and power supply",
    "power brake": "the power supply requests lower power: check it and its cables",
    "reliability": "at its voltage limit, which is normal for a busy GPU",
}
# Normal for a busy GPU.
NORMAL_THROTTLING = ("power limit", "board limit", "sync boost", "reliability")

_NO_PERMISSION = 4
_LOST: Mapping[Any, str] = {  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
    15: "it has fallen off the bus; restart the machine, and check its power and seating if this happens again",
    16: "it must be reset before it can be used again: nvidia-smi --gpu-reset, or restart the machine",
}
_MAX_EVENTS = 64  # per call: a failing GPU may report them endlessly
_EVENTS: Mapping[int, Literal["xid", "ecc corrected", "ecc uncorrected"]] = {
    0x1: "ecc corrected",  # nvmlEventTypeSingleBitEccError
    0x2: "ecc uncorrected",  # nvmlEventTypeDoubleBitEccError
    0x8: "xid",  # nvmlEventTypeXidCriticalError
}

GIB, MB = 2**30, 1e6
METRICS: tuple[Metric, ...] = (
    Metric("util_percent", "%", lambda gpu: gpu.rates.gpu, "util"),
    Metric("memory_util_percent", "%", lambda gpu: gpu.rates.memory, "memory_util"),
    Metric("memory_used_bytes", "B", lambda gpu: gpu.memory.used, "memory_gib", GIB),
    Metric("memory_reserved_bytes", "B", lambda gpu: gpu.memory.reserved, "memory_reserved_gib", GIB),
    Metric("memory_free_bytes", "B", lambda gpu: gpu.memory.free, "memory_free_gib", GIB),
    Metric("memory_total_bytes", "B", lambda gpu: gpu.memory.total, "memory_total_gib", GIB),
    Metric("temperature_c", "degC", _temperature),
    Metric("temperature_limit_c", "degC", _temperature_limit, seldom=True),
    Metric("power_w", "W", lambda gpu: gpu.nvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000),
    Metric("power_limit_w", "W", lambda gpu: gpu.nvml.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1000, seldom=True),
    Metric("energy_j", "J", lambda gpu: gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000),
    Metric("sm_clock_mhz", "MHz", lambda gpu: _clock(gpu, "sm"), "clock_mhz"),
    Metric("memory_clock_mhz", "MHz", lambda gpu: _clock(gpu, "memory")),
    Metric("throttle_reasons", "bits", _throttle_reasons),
    Metric("pcie_generation", "", lambda gpu: gpu.nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu.handle), seldom=True),
    Metric("pcie_width", "lanes", lambda gpu: gpu.nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu.handle), seldom=True),
    Metric("ecc_corrected", "errors", lambda gpu: _ecc(gpu, "corrected"), seldom=True),
    Metric("ecc_uncorrected", "errors", lambda gpu: _ecc(gpu, "uncorrected"), seldom=True),
)
