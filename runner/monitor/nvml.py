"""Wrap NVML, the driver's interface to the GPUs: properties, metrics and processes. No other module uses NVML.

Nothing here imports torch. Where the library, the driver or the permission is missing, the answer is an Nvml without
GPUs that says why; where one reading is missing, it is None and never 0.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Gpu:
    """What does not change of one GPU, or of one MIG instance of it.

    index         the driver's number, in bus order; CUDA numbers differently (see `visible`)
    uuid          `GPU-...`, or `MIG-...` for an instance
    memory_bytes  as the driver reports it, None where it does not
    mig           True where the GPU is cut into instances, None where the GPU does not know the word
    instances     the MIG instances, in the driver's order
    mig_name      of an instance, its older name: MIG-<GPU uuid>/<GPU instance>/<compute instance>
    instance_id   number of the GPU instance, which error events carry; None for a whole GPU
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    pci_bus_id: str = ""
    mig: bool | None = None
    instances: tuple[Gpu, ...] = ()
    mig_name: str = ""
    instance_id: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU; its memory is None where the driver hides it (containers, Windows)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Metric:
    """One changing number of a GPU: a row of METRICS.

    query  may raise what NVML raises
    pace   how often it is worth asking: `always`; `seldom` for what hardly changes; `in turn`, one GPU after the
           other, for a query in which the driver itself waits
    """

    name: str
    unit: str
    query: Callable[[GpuReading], float]
    pace: Literal["always", "seldom", "in turn"] = "always"


class GpuReading:
    """A GPU at one moment: what several metrics are read from is asked for once."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    @cached_property
    def memory(self) -> Any:
        """Bytes as nvidia-smi shows them: version 2 tells what the driver reserves, version 1 counts it as used."""
        try:
            return self.nvml.nvmlDeviceGetMemoryInfo(self.handle, version=self.nvml.nvmlMemory_v2)
        except (self.nvml.NVMLError, AttributeError, TypeError):
            return self.nvml.nvmlDeviceGetMemoryInfo(self.handle)

    @cached_property
    def rates(self) -> Any:
        """Percent of the time in which the SMs (`gpu`) and the memory's bus (`memory`) were busy."""
        return self.nvml.nvmlDeviceGetUtilizationRates(self.handle)


@dataclass(frozen=True)
class GpuEvent:
    """An error that the driver reported.

    gpu          the physical GPU
    code         number of an XID
    instance_id  the GPU instance in which it happened; None: not known, or the whole GPU
    """

    gpu: Gpu
    kind: Literal["xid", "ecc corrected", "ecc uncorrected"]
    code: int = 0
    instance_id: int | None = None

    def concerns(self, gpu: Gpu) -> bool:
        """Return whether this error may have happened in `gpu`, which may be an instance."""
        is_other = None not in (self.instance_id, gpu.instance_id) and self.instance_id != gpu.instance_id
        return gpu.index == self.gpu.index and not is_other


class Nvml:
    """The GPUs of this machine; one without GPUs, and with `why_not`, where NVML cannot be asked.

    why_not         why there is nothing to see; empty where there are GPUs
    driver_version  e.g. "580.159.03"
    cuda_version    the newest CUDA that the driver serves, e.g. "13.0"
    gpus            physical GPUs in bus order
    notes           GPUs that are there but do not answer, with the reason
    lost            GPU -> why it answers no more; it is not asked again
    denied          GPU -> metrics that this user may not read
    """

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
            self.driver_version = _asked(library, library.nvmlSystemGetDriverVersion)
            version = _asked(library, library.nvmlSystemGetCudaDriverVersion)
            self.cuda_version = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
            self._find_gpus(library)

    def read(self, gpu: Gpu, names: Collection[str] | None = None) -> dict[str, float | None]:
        """Return the present value of each metric of METRICS, None where the GPU does not tell.

        names  which ones; None: all but those for which the driver waits (`in turn`)
        """
        wanted = [each for each in METRICS if (each.pace != "in turn" if names is None else each.name in names)]
        handle = self._handles.get(gpu)
        if handle is None:
            return {metric.name: None for metric in wanted}
        look = GpuReading(self._library, handle)
        return {metric.name: self._value(gpu, metric, look) for metric in wanted}

    def _value(self, gpu: Gpu, metric: Metric, look: GpuReading) -> float | None:
        if gpu in self.lost:
            return None
        try:
            value = metric.query(look)
        except (self._library.NVMLError, self._library.NVMLLibraryMismatchError, AttributeError) as error:
            code = getattr(error, "value", None)
            if code in _LOST:
                self.lost[gpu] = _LOST[code]
            elif code == _NO_PERMISSION:
                self.denied.setdefault(gpu, set()).add(metric.name)
            return None
        return None if value in _NOT_AVAILABLE else value

    def processes(self, gpu: Gpu) -> tuple[GpuProcess, ...] | None:
        """Return who computes on this GPU, None where the driver does not tell."""
        if gpu not in self._handles:
            return None
        found = _asked(self._library, self._library.nvmlDeviceGetComputeRunningProcesses, self._handles[gpu])
        return None if found is None else tuple(GpuProcess(item.pid, item.usedGpuMemory) for item in found)

    def watch_events(self, gpus: Sequence[Gpu]) -> None:
        """Errors of these GPUs, and of those that they are instances of, are kept for `events` from now on."""
        if self._library is None:
            return
        events = _asked(self._library, self._library.nvmlEventSetCreate)
        numbers = {gpu.index for gpu in gpus}
        watched = {}
        for gpu in self.gpus if events is not None else ():
            handle = self._handles[gpu]
            types = (_asked(self._library, self._library.nvmlDeviceGetSupportedEventTypes, handle) or 0) & sum(_EVENTS)
            if gpu.index in numbers and types:
                try:
                    self._library.nvmlDeviceRegisterEvents(handle, types, events)
                except self._library.NVMLError as error:
                    if getattr(error, "value", None) == _NO_PERMISSION:
                        for each in (chosen for chosen in gpus if chosen.index == gpu.index):
                            self.denied.setdefault(each, set()).add("errors (XID)")
                    continue
                watched[_address(handle)] = gpu
        self._events = (events, watched) if events is not None else None

    def events(self) -> list[GpuEvent]:
        """Return what was reported since the last call; waits for nothing."""
        found: list[GpuEvent] = []
        while self._events is not None and len(found) < _MOST_EVENTS:
            event_set, gpus = self._events
            data = _asked(self._library, self._library.nvmlEventSetWait_v2, event_set, 0)
            if data is None:  # nothing more for now, which NVML calls a timeout
                break
            gpu, kind = gpus.get(_address(data.device)), _EVENTS.get(data.eventType)
            if gpu is not None and kind is not None:
                # Of all events only an XID names the instance, on Ampere and later.
                is_xid = kind == "xid"
                instance_id = None if not is_xid or data.gpuInstanceId in _NOT_AVAILABLE else int(data.gpuInstanceId)
                found.append(GpuEvent(gpu, kind, int(data.eventData) if is_xid else 0, instance_id))
        return found

    def find(self, uuid: str) -> Gpu | None:
        """Return the GPU or MIG instance with this UUID, whether or not it is written with its GPU- or MIG-."""
        key = bare_uuid(uuid)
        return next((gpu for gpu in everything(self.gpus) if bare_uuid(gpu.uuid) == key), None)

    def find_of_torch(self, uuid: str, environ: Mapping[str, str] = os.environ) -> Gpu | None:
        """Return the GPU to which torch gives this UUID.

        CUDA shows one instance of a GPU that is split into MIG instances, and older versions of CUDA give it the UUID
        of the whole GPU, whose memory is not that of the instance.
        """
        gpu = self.find(uuid)
        if gpu is None or not gpu.mig or not gpu.instances:
            return gpu
        return next((each for each in visible(self.gpus, environ).gpus if each in gpu.instances), gpu.instances[0])

    def close(self) -> None:
        """Let go of the driver; closing twice is harmless."""
        if self._library is not None:
            if self._events is not None:
                _asked(self._library, self._library.nvmlEventSetFree, self._events[0])
            _asked(self._library, self._library.nvmlShutdown)
        self._library = self._events = None
        self._handles = {}

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_gpus(self, library: Any) -> None:
        gpus, notes = [], []
        for index in range(_asked(library, library.nvmlDeviceGetCount) or 0):
            try:
                handle = library.nvmlDeviceGetHandleByIndex(index)
                uuid = library.nvmlDeviceGetUUID(handle)
            except library.NVMLError as error:
                notes.append(f"GPU {index} does not answer: {error}")
                continue
            gpu = _describe(library, handle, index, uuid, self._find_instances(library, handle, index, uuid))
            self._handles[gpu] = handle
            gpus.append(gpu)
        self.gpus, self.notes = tuple(gpus), tuple(notes)
        self.why_not = "" if gpus else "; ".join(notes) or "NVML answers, and shows no GPU"

    def _find_instances(self, library: Any, parent: Any, index: int, parent_uuid: str) -> tuple[Gpu, ...]:
        instances = []
        for number in range(_asked(library, library.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            handle = _asked(library, library.nvmlDeviceGetMigDeviceHandleByIndex, parent, number)
            uuid = handle and _asked(library, library.nvmlDeviceGetUUID, handle)
            if not uuid:
                continue  # a place that no instance occupies
            ids = [
                _asked(library, library.nvmlDeviceGetGpuInstanceId, handle),
                _asked(library, library.nvmlDeviceGetComputeInstanceId, handle),
            ]
            mig_name = "" if None in ids else f"MIG-{parent_uuid}/{ids[0]}/{ids[1]}"
            instance = replace(_describe(library, handle, index, uuid), mig_name=mig_name, instance_id=ids[0])
            self._handles[instance] = handle
            instances.append(instance)
        return tuple(instances)


@dataclass(frozen=True)
class Visible:
    """The GPUs that CUDA shows to a process, in CUDA's order as far as it can be known; `note` says how far."""

    gpus: tuple[Gpu, ...]
    note: str = ""


def open_nvml() -> Nvml:
    """Return the machine's GPUs, or an Nvml without GPUs that says why; never raises.

    Each call opens NVML once more, which the driver counts; close() what you opened.
    """
    try:
        import pynvml as library  # here: it takes 30 ms, and commands that look at no GPU need not wait
    except ImportError as error:
        return Nvml(why_not=f"the package nvidia-ml-py is not installed ({error})")
    try:
        library.nvmlInit()
    except (library.NVMLError, OSError) as error:
        return Nvml(why_not=_REASONS.get(getattr(error, "value", None), f"NVML does not start: {error}"))
    return Nvml(library)


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> Visible:
    """Return what CUDA_VISIBLE_DEVICES leaves of these GPUs: indices, UUIDs, their beginnings, or MIG names.

    Like CUDA, the list ends at its first entry that names no GPU, and a GPU named twice leaves none at all.
    CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and does not say how it ranks them. So
    between unlike GPUs an index is a guess in bus order, which the note says; only a UUID is certain.
    Source: CUDA C++ Programming Guide, CUDA Environment Variables.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return Visible(tuple(gpus), _order_note(gpus, environ))
    entries = [entry.strip() for entry in wanted.split(",")] if wanted.strip() else []
    by_name = bool(entries) and entries[0].startswith(("GPU-", "MIG-"))
    found: list[Gpu] = []
    note = "" if by_name else _order_note(gpus, environ)
    for entry in entries:
        gpu = _named(entry, gpus) if by_name else _numbered(entry, gpus)
        if gpu is None:
            if not entry.startswith("-"):
                note = f"CUDA_VISIBLE_DEVICES={wanted}: {entry!r} names no single GPU; it and what follows are left out"
            break
        if gpu in found:
            return Visible((), f"CUDA_VISIBLE_DEVICES={wanted} names a GPU twice, so CUDA shows none")
        found.append(gpu)
    if gpus and not found and (not entries or entries[0].startswith("-")):
        note = f"CUDA_VISIBLE_DEVICES={wanted} hides {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    return Visible(tuple(found), note)


def everything(gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    """Yield each GPU, and after it its MIG instances."""
    for gpu in gpus:
        yield gpu
        yield from gpu.instances


def bare_uuid(uuid: str) -> str:
    """Return a UUID without GPU- or MIG-: NVML writes the prefix, torch leaves it out."""
    return re.sub(r"^(GPU|MIG)-", "", str(uuid)).lower()


def slowed_by(throttle_reasons: float | None) -> tuple[str, ...]:
    """Return in words what holds the clocks down, of the bits that the metric `throttle_reasons` reads."""
    bits = int(throttle_reasons or 0)
    return tuple(words for bit, words in THROTTLE_REASONS.items() if bits & bit)


def _asked(library: Any, query: Callable[..., Answer], *arguments: Any) -> Answer | None:
    """Return the answer, None where there is none. An older driver or library lacks whole functions."""
    try:
        answer = query(*arguments)
    except (library.NVMLError, library.NVMLLibraryMismatchError, AttributeError):
        return None
    return None if isinstance(answer, (int, float)) and answer in _NOT_AVAILABLE else answer


def _describe(library: Any, handle: Any, index: int, uuid: str, instances: tuple[Gpu, ...] = ()) -> Gpu:
    mig_mode = _asked(library, library.nvmlDeviceGetMigMode, handle)
    pci = _asked(library, library.nvmlDeviceGetPciInfo, handle)
    memory = _asked(library, lambda: int(GpuReading(library, handle).memory.total))
    return Gpu(
        index=index,
        uuid=uuid,
        name=_asked(library, library.nvmlDeviceGetName, handle) or "GPU without a name",
        memory_bytes=memory or None,
        capability=_asked(library, library.nvmlDeviceGetCudaComputeCapability, handle),
        pci_bus_id=_text(pci.busId) if pci else "",
        mig=None if mig_mode is None else bool(mig_mode[0]),
        instances=instances,
    )


def _numbered(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    digits = re.match(r"\+?\d+", entry)  # CUDA reads "1abc" as 1, like C's strtoul
    number = int(digits.group()) if digits else -1
    return gpus[number] if 0 <= number < len(gpus) else None


def _named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    fits = [gpu for gpu in everything(gpus) if gpu.uuid.startswith(entry) or (gpu.mig_name and gpu.mig_name == entry)]
    return fits[0] if len(fits) == 1 and entry not in ("GPU-", "MIG-") else None


def _order_note(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2:
        return ""
    return "CUDA numbers unlike GPUs fastest first, the driver by bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID for one order"


def _address(handle: Any) -> int | None:
    """Return what tells handles apart: NVML gives an event's device as a pointer of its own."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _temperature(look: GpuReading) -> float:
    nvml = look.nvml
    try:
        return float(nvml.nvmlDeviceGetTemperatureV(look.handle, nvml.NVML_TEMPERATURE_GPU))
    except (nvml.NVMLError, AttributeError):  # an older driver; the call below is the one being retired
        return float(nvml.nvmlDeviceGetTemperature(look.handle, nvml.NVML_TEMPERATURE_GPU))


def _temperature_limit(look: GpuReading) -> float:
    nvml = look.nvml
    return float(nvml.nvmlDeviceGetTemperatureThreshold(look.handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))


def _throttle_reasons(look: GpuReading) -> float:
    try:
        return int(look.nvml.nvmlDeviceGetCurrentClocksEventReasons(look.handle))
    except (look.nvml.NVMLError, AttributeError):  # an older driver has only the older name
        return int(look.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(look.handle))


def _clock(look: GpuReading, domain: str) -> float:
    kinds = {"sm": look.nvml.NVML_CLOCK_SM, "memory": look.nvml.NVML_CLOCK_MEM}
    return int(look.nvml.nvmlDeviceGetClockInfo(look.handle, kinds[domain]))


def _pcie(look: GpuReading, direction: str) -> float:
    """Bytes a second that the GPU received (`rx`) or sent (`tx`): the driver counts for 20 ms, and this call waits."""
    counters = {"rx": look.nvml.NVML_PCIE_UTIL_RX_BYTES, "tx": look.nvml.NVML_PCIE_UTIL_TX_BYTES}
    return 1000 * int(look.nvml.nvmlDeviceGetPcieThroughput(look.handle, counters[direction]))  # it tells KB/s


def _ecc(look: GpuReading, kind: str) -> float:
    """Memory errors since the driver was loaded."""
    nvml = look.nvml
    kinds = {"corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}
    return int(nvml.nvmlDeviceGetTotalEccErrors(look.handle, kinds[kind], nvml.NVML_VOLATILE_ECC))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


_NOT_AVAILABLE = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # NVML_VALUE_NOT_AVAILABLE, 32 and 64 bit
_REASONS: Mapping[Any, str] = {
    4: "NVML: no permission to ask the NVIDIA driver",
    9: "NVML: the NVIDIA driver is not loaded",
    12: "NVML: no NVIDIA driver is installed (libnvidia-ml.so.1 is not found)",
    18: "NVML: the driver's library and kernel module have different versions; restart the machine",
}

# What holds the clocks down; idling (1), clocks chosen by somebody (2) and display clocks (256) do not count.
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

_NO_PERMISSION = 4
_LOST: Mapping[Any, str] = {
    15: "it has fallen off the bus; restart the machine, and have its power and seating checked if it comes again",
    16: "it must be reset before it can be used again: nvidia-smi --gpu-reset, or restart the machine",
}
_MOST_EVENTS = 64  # at one look: a GPU in trouble may report them without end
_EVENTS: Mapping[int, Literal["xid", "ecc corrected", "ecc uncorrected"]] = {
    0x1: "ecc corrected",  # nvmlEventTypeSingleBitEccError
    0x2: "ecc uncorrected",  # nvmlEventTypeDoubleBitEccError
    0x8: "xid",  # nvmlEventTypeXidCriticalError
}

METRICS: tuple[Metric, ...] = (
    Metric("util_percent", "%", lambda gpu: gpu.rates.gpu),
    Metric("memory_util_percent", "%", lambda gpu: gpu.rates.memory),
    Metric("memory_used_bytes", "B", lambda gpu: gpu.memory.used),
    Metric("memory_reserved_bytes", "B", lambda gpu: gpu.memory.reserved),
    Metric("memory_free_bytes", "B", lambda gpu: gpu.memory.free),
    Metric("memory_total_bytes", "B", lambda gpu: gpu.memory.total),
    Metric("temperature_c", "degC", _temperature),
    Metric("temperature_limit_c", "degC", _temperature_limit, "seldom"),
    Metric("power_w", "W", lambda gpu: gpu.nvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000),
    Metric("power_limit_w", "W", lambda gpu: gpu.nvml.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1000, "seldom"),
    Metric("energy_j", "J", lambda gpu: gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000),
    Metric("sm_clock_mhz", "MHz", lambda gpu: _clock(gpu, "sm")),
    Metric("memory_clock_mhz", "MHz", lambda gpu: _clock(gpu, "memory")),
    Metric("throttle_reasons", "bits", _throttle_reasons),
    Metric("pcie_generation", "", lambda gpu: gpu.nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu.handle), "seldom"),
    Metric("pcie_width", "lanes", lambda gpu: gpu.nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu.handle), "seldom"),
    Metric("pcie_rx_bytes_s", "B/s", lambda gpu: _pcie(gpu, "rx"), "in turn"),
    Metric("pcie_tx_bytes_s", "B/s", lambda gpu: _pcie(gpu, "tx"), "in turn"),
    Metric("ecc_corrected", "errors", lambda gpu: _ecc(gpu, "corrected"), "seldom"),
    Metric("ecc_uncorrected", "errors", lambda gpu: _ecc(gpu, "uncorrected"), "seldom"),
)
