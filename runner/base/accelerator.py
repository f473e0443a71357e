"""Device access beyond tensors: memory, generators, streams and names.

One class per vendor. This is the only file that calls `torch.cuda` and `torch.xpu` (checked by tests/test_layers.py).
An operation that a device does not support is a no-op; a value that it does not report is None, never 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch

from runner.base.gpu_facts import TorchDevice, TorchView

# ---------------------------------------------------------------- device properties


class FreeMemory(NamedTuple):
    """Free and total memory of a device in bytes, as the driver counts them for all processes."""

    free: int
    total: int


class DeviceMemory(NamedTuple):
    """Memory of a device that this process uses, in bytes.

    allocated  occupied by tensors
    reserved   obtained from the driver by torch's caching allocator; at least `allocated`
    """

    allocated: int
    reserved: int


# ---------------------------------------------------------------- devices


class Accelerator:
    """A device without separate memory, streams or generators: the CPU, and the base class of all other devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Memory

    def free_memory(self) -> FreeMemory | None:
        """Return the free memory of the device, as reported by its driver."""
        return None

    def total_bytes(self) -> int | None:
        """Return the maximum number of bytes that torch can allocate."""
        return None

    def current_memory(self) -> DeviceMemory | None:
        """Return the memory that this process uses now."""
        return None

    def peak_memory(self) -> DeviceMemory | None:
        """Return the peak memory of this process since `reset_peak_memory`."""
        return None

    def reset_peak_memory(self) -> None:
        """Reset `peak_memory` to the current memory use."""

    def memory_stats(self) -> Mapping[str, int]:
        """Return the counters of torch's caching allocator, keyed as in `torch.cuda.memory_stats`."""
        return {}

    def memory_table(self) -> str:
        """Return the counters of `memory_stats` as torch's human-readable table."""
        return ""

    def empty_cache(self) -> None:
        """Release unused cached memory to the driver."""

    def limit_memory(self, fraction: float) -> bool:
        """Limit this process to a fraction of the memory. Return False if the device has no such limit."""
        return False

    # Random numbers

    def generator_state(self) -> torch.Tensor | None:
        """Return the state of the device's default generator as a CPU tensor."""
        return None

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Restore a state returned by `generator_state`."""

    # Streams and contexts

    def activate(self) -> None:
        """Make this the current device of the thread.

        Otherwise the thread would use device 0, where CUDA would create a context.
        """

    def index(self) -> int:
        """Return the index of the current device."""
        return 0

    def current_stream(self) -> Any:
        """Return the stream to which this thread submits work."""
        return None

    def page_lock(self, address: int, nbytes: int) -> bool:
        """Page-lock existing host memory. Return False if the system refuses."""
        return False

    # Names

    def name(self) -> str:
        """Return the product name, or an empty string if torch does not know it."""
        return ""

    def uuid(self) -> str:
        """Return the UUID without its prefix, or an empty string if there is none."""
        return ""

    def capability(self) -> tuple[int, int] | None:
        """Return the NVIDIA compute capability."""
        return None

    def architecture(self) -> str:
        """Return the AMD architecture name, such as gfx90a."""
        return ""

    def l2_cache_bytes(self) -> int:
        """Return the size in bytes of the last-level cache, 0 if unknown."""
        return 0


class Metal(Accelerator):
    """An Apple GPU. It shares the host's memory, and torch records no peak usage for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch = torch.mps

    def total_bytes(self) -> int | None:
        return self._torch.recommended_max_memory()

    def current_memory(self) -> DeviceMemory | None:
        return DeviceMemory(self._torch.current_allocated_memory(), self._torch.driver_allocated_memory())

    def empty_cache(self) -> None:
        self._torch.empty_cache()

    def generator_state(self) -> torch.Tensor | None:
        return self._torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        self._torch.set_rng_state(state)


class Cuda(Accelerator):
    """An NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch = torch.cuda

    def free_memory(self) -> FreeMemory | None:
        return FreeMemory(*map(int, self._torch.mem_get_info(self.device)))

    def total_bytes(self) -> int | None:
        return int(self._torch.get_device_properties(self.device).total_memory)

    def current_memory(self) -> DeviceMemory | None:
        return DeviceMemory(self._torch.memory_allocated(self.device), self._torch.memory_reserved(self.device))

    def peak_memory(self) -> DeviceMemory | None:
        return DeviceMemory(self._torch.max_memory_allocated(self.device), self._torch.max_memory_reserved(self.device))

    def reset_peak_memory(self) -> None:
        self._torch.reset_peak_memory_stats(self.device)

    def memory_stats(self) -> Mapping[str, int]:
        # torch.cuda.memory_stats joins and sorts the same names, which takes 1 ms: too long, because a row of metrics
        # may be written every update.
        return dict(_join_names("", self._torch.memory_stats_as_nested_dict(self.device)))

    def memory_table(self) -> str:
        return self._torch.memory_summary(self.device)

    def empty_cache(self) -> None:
        self._torch.empty_cache()

    def limit_memory(self, fraction: float) -> bool:
        self._torch.set_per_process_memory_fraction(fraction, self.device)
        return True

    def generator_state(self) -> torch.Tensor | None:
        return self._torch.get_rng_state(self.device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        self._torch.set_rng_state(state, self.device)

    def activate(self) -> None:
        self._torch.set_device(self.device)

    def index(self) -> int:
        return self._torch.current_device()

    def current_stream(self) -> Any:
        return self._torch.current_stream(self.device)

    def page_lock(self, address: int, nbytes: int) -> bool:
        runtime = self._torch.cudart()  # type: ignore[no-untyped-call]
        if runtime.cudaHostRegister(address, nbytes, 0) == runtime.cudaError.success:
            return True
        # If the system refuses (WSL, a limit on locked memory), the next kernel of this thread raises the pending CUDA
        # error, so run one here to clear it.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)
        return False

    def name(self) -> str:
        return self._torch.get_device_name(self.device)

    def uuid(self) -> str:
        return _device_id(self._torch.get_device_properties(self.device))

    def capability(self) -> tuple[int, int] | None:
        return self._torch.get_device_capability(self.device)

    def l2_cache_bytes(self) -> int:
        return int(getattr(self._torch.get_device_properties(self.device), "L2_cache_size", 0))


class Rocm(Cuda):
    """An AMD GPU: torch's HIP build uses the same functions and also names the device type `cuda`."""

    def capability(self) -> tuple[int, int] | None:
        return None

    def architecture(self) -> str:
        return _architecture(self._torch.get_device_properties(self.device))


class Xpu(Cuda):
    """An Intel GPU: `torch.xpu` has the functions of `torch.cuda`, except for those below."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch: Any = torch.xpu

    def free_memory(self) -> FreeMemory | None:
        try:
            return super().free_memory()
        except RuntimeError:  # integrated GPUs do not report it
            return None

    def memory_table(self) -> str:
        return ""

    def page_lock(self, address: int, nbytes: int) -> bool:
        return False

    def capability(self) -> tuple[int, int] | None:
        return None

    def architecture(self) -> str:
        properties = self._torch.get_device_properties(self.device)
        return "XMX" if getattr(properties, "has_subgroup_matrix_multiply_accumulate", False) else ""

    def l2_cache_bytes(self) -> int:
        return int(getattr(self._torch.get_device_properties(self.device), "last_level_cache_size", 0))


def get_accelerator(device: torch.device) -> Accelerator:
    """Return the `Accelerator` of a device, without creating a context on it."""
    if device.type == "cuda":
        return Rocm(device) if _is_rocm() else Cuda(device)
    if device.type == "xpu":
        return Xpu(device)
    return Metal(device) if device.type == "mps" else Accelerator(device)


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums and counts: float64, or float32 on Metal and XPU, where GPUs may lack float64."""
    return torch.float32 if device.type in ("mps", "xpu") else torch.float64


# ---------------------------------------------------------------- this process


def is_initialized() -> bool:
    """Return whether this process has initialized CUDA, HIP or XPU."""
    return bool(torch.cuda.is_initialized() or torch.xpu.is_initialized())  # type: ignore[no-untyped-call]


def cuda_is_available() -> bool:
    """Return whether torch sees a GPU of device type `cuda`."""
    return torch.cuda.is_available()


def device_count() -> int:
    """Return the number of GPUs of device type `cuda`."""
    return torch.cuda.device_count()


def current_device() -> torch.device:
    """Return this thread's current GPU, with its index."""
    return torch.device("cuda", torch.cuda.current_device())


def default_generator(index: int) -> torch.Generator:
    """Return the default random generator of a GPU."""
    return torch.cuda.default_generators[index]


def torch_devices() -> Iterator[TorchDevice]:
    """Yield torch's GPUs in order. Raises RuntimeError or AssertionError if the driver cannot be initialized."""
    is_rocm = _is_rocm()
    for index in range(torch.cuda.device_count() if cuda_is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield TorchDevice(
            properties.name,
            _device_id(properties),
            properties.total_memory,
            None if is_rocm else (properties.major, properties.minor),
            _architecture(properties) if is_rocm else "",
            torch.cuda.mem_get_info(index)[0] if is_rocm else None,  # no NVML on AMD
        )


def intel_devices() -> Iterator[TorchDevice]:
    """Yield torch's Intel GPUs in order."""
    for index in range(torch.xpu.device_count() if torch.xpu.is_available() else 0):
        device = Xpu(torch.device("xpu", index))
        free = device.free_memory()
        yield TorchDevice(
            device.name(),
            device.uuid(),
            device.total_bytes() or 0,
            None,
            device.architecture(),
            free.free if free else None,
        )


def device_uuids() -> list[str]:
    """Return the UUIDs of torch's GPUs of device type `cuda` without prefix, in order."""
    return [_device_id(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def torch_version() -> TorchView:
    """Return torch's version and CPU capability, without querying devices."""
    return TorchView(torch.__version__, cpu_capability=torch.backends.cpu.get_cpu_capability())


def is_gpu_build() -> bool:
    """Return whether torch was built for GPUs of any vendor but Apple."""
    return bool(torch.version.cuda or torch.version.hip or torch.version.xpu)


def query_torch() -> TorchView:
    """Query the version, build and devices of torch; warnings and errors about CUDA become `cuda_error`."""
    cudnn = cast("Any", torch.backends.cudnn)
    devices: list[TorchDevice] = []
    errors: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devices.extend(torch_devices())
        except (RuntimeError, AssertionError) as error:  # torch raises both if CUDA cannot be initialized
            errors.append(str(error))
        try:
            cudnn_version = cudnn.version() if torch.version.cuda else None
        except RuntimeError as error:  # a cuDNN on the library path that is older than the one torch was built with
            cudnn_version = None
            errors.append(str(error))
    errors += [str(warning.message) for warning in caught]
    metal = torch.backends.mps.is_available()
    intel = tuple(intel_devices())
    return TorchView(
        version=torch.__version__,
        cuda_version=torch.version.cuda,
        cudnn_version=cudnn_version,
        rocm=torch.version.hip is not None,
        architectures=tuple(torch.cuda.get_arch_list()) if devices else (),
        devices=tuple(devices),
        intel=intel,
        cuda_error=errors[0].splitlines()[0] if errors else "",
        mps_bytes=torch.mps.recommended_max_memory() if metal else None,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL (RCCL on AMD) library that ships with torch."""
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def page_unlock(address: int) -> None:
    """Undo `page_lock`."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@contextmanager
def warn_on_synchronization() -> Iterator[None]:
    """Make torch warn at each point where the host synchronizes with a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _is_rocm() -> bool:
    return torch.version.hip is not None


def _join_names(prefix: str, counters: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in counters.items():
        if type(value) is int:
            yield prefix + name, value
        else:
            yield from _join_names(f"{prefix}{name}.", value)


def _device_id(properties: Any) -> str:
    """Return the UUID of a GPU or, on AMD, its PCI address: AMD SMI and HIP give the same GPU different UUIDs."""
    bus = getattr(properties, "pci_bus_id", None)
    if bus is not None and _is_rocm():
        return (
            f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
        )
    return str(getattr(properties, "uuid", ""))


def _architecture(properties: Any) -> str:
    """Return the base architecture, e.g. gfx90a for gfx90a:sramecc+:xnack-."""
    return str(getattr(properties, "gcnArchName", "")).partition(":")[0]
