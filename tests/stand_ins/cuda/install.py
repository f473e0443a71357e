"""Add the device type "cuda" to a CPU build of torch, by defining the functions of torch._C that Python calls.

torch.cuda's own Python code runs on top of them (lazy initialization, errors after a fork, memory statistics), except
for streams and events, whose classes exist only in CUDA builds.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from tests.stand_ins.cuda.batch_norm import give_batch_norm
from tests.stand_ins.cuda.devices import VARIABLE, Device, decode

REPORT = "STAND_IN_REPORT"  # folder in which each process writes its counts


class Properties(types.SimpleNamespace):
    """The result of torch.cuda.get_device_properties."""


class CudaRuntime:
    """The functions of torch._C._cudart; cudaHostRegister can be made to fail, as on WSL."""

    class cudaError:  # noqa: N801 - torch's name
        success = 0
        memory_allocation = 2

    def __init__(self, native: Any) -> None:
        self._native = native

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        if os.environ.get("STAND_IN_REFUSES_REGISTRATION") == "1":
            self._native.leave_error("out of memory")
            return 2
        self._native.register_host_memory(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        return 0 if self._native.unregister_host_memory(pointer) else 1

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        result: tuple[int, int] = self._native.free_and_total(device)
        return result

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return {0: "no error", 2: "out of memory"}.get(code, "unknown error")


_DEVICES: list[Device] = []  # devices that this process sees


def install() -> None:
    """Install the stand-in in torch, with the devices described in the environment."""
    import torch

    if hasattr(torch._C, "_cuda_getDeviceCount"):
        return
    import _stand_in

    _give_bindings(torch, _stand_in, _DEVICES)
    _give_storage(torch, _stand_in)
    _give_streams(torch)
    _give_nccl(torch, _stand_in)
    give_batch_norm()
    describe()


def describe() -> None:
    """Set the devices of this process from its environment, which may differ from that of its parent process.

    Raises RuntimeError if this process or, before the fork, its parent has used CUDA.
    """
    import _stand_in
    import torch

    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA was used before its devices were described")
    _DEVICES[:] = _visible(decode(os.environ[VARIABLE]))
    _stand_in.set_num_devices(len(_DEVICES))
    for index, device in enumerate(_DEVICES):
        _stand_in.set_device_memory(index, device.memory, int(device.context_gib * 2**30))
    if folder := os.environ.get(REPORT):
        _report_at_exit(_stand_in, Path(folder))


def _visible(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES names, in that order; an invalid index ends the list."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if any(device.mig_uuid for device in devices):
        return devices[:1] if named is None else tuple(each for each in devices if each.mig_uuid == named)
    if named is None:
        return devices
    result = []
    for word in filter(None, (word.strip() for word in named.split(","))):
        index = int(word) if word.lstrip("-").isdigit() else _index_of(word, devices)
        if not 0 <= index < len(devices):
            break
        result.append(devices[index])
    return tuple(result)


def _index_of(uuid: str, devices: tuple[Device, ...]) -> int:
    matches = [index for index, device in enumerate(devices) if device.uuid.startswith(uuid)]
    return matches[0] if len(matches) == 1 else -1


def _give_bindings(torch: Any, native: Any, devices: list[Device]) -> None:
    state = {"poisoned": False, "bad_fork": False}

    def after_fork() -> None:
        if state["poisoned"]:
            state["bad_fork"] = True
            native.after_fork_in_child()

    os.register_at_fork(after_in_child=after_fork)

    def count() -> int:
        # cudaGetDeviceCount initializes the driver, so forked children cannot use it afterwards
        state["poisoned"] = True
        return 0 if state["bad_fork"] else len(devices)

    def init() -> None:
        if not devices:
            raise RuntimeError("No CUDA GPUs are available")
        state["poisoned"] = True
        torch.cuda.default_generators = tuple(native.default_generator(index) for index in range(len(devices)))
        torch.cuda._get_device_properties = lambda index: _properties(devices[index])

    bindings = {
        "_cuda_getDeviceCount": count,
        "_cuda_isInBadFork": lambda: state["bad_fork"],
        "_cuda_init": init,
        "_cuda_getDevice": torch._C._accelerator_getDeviceIndex,
        "_cuda_setDevice": torch._C._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": torch._C._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": torch._C._accelerator_maybeExchangeDevice,
        "_cuda_synchronize": lambda: native.synchronize(torch._C._accelerator_getDeviceIndex()),
        "_cuda_getArchFlags": lambda: "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_memoryStats": native.memory_statistics,
        "_cuda_resetPeakMemoryStats": native.reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": native.reset_accumulated,
        "_cuda_emptyCache": native.empty_cache,
        "_cuda_setMemoryFraction": native.set_memory_fraction,
        "_cuda_memorySnapshot": lambda *_: {"segments": native.memory_segments(), "device_traces": []},
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_get_sync_debug_mode": native.sync_debug_mode,
        "_cuda_set_sync_debug_mode": native.set_sync_debug_mode,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getCurrentRawStream": lambda index: torch.accelerator.current_stream(index).stream_id,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),  # used by torch._inductor
    }
    for name, function in bindings.items():
        setattr(torch._C, name, function)
    torch.cuda._cudart = CudaRuntime(native)
    torch.cuda.nvtx._nvtx = types.SimpleNamespace(
        rangePushA=native.push_range, rangePop=native.pop_range, markA=lambda message: None
    )
    torch.cuda._is_in_bad_fork = bindings["_cuda_isInBadFork"]
    torch.cuda._exchange_device = bindings["_cuda_exchangeDevice"]
    torch.cuda._maybe_exchange_device = bindings["_cuda_maybeExchangeDevice"]
    torch.cuda.is_current_stream_capturing = torch.cuda.graphs.is_current_stream_capturing = lambda: False
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.is_available = lambda: False
    torch.backends.cudnn.version = lambda: 91900


def _properties(device: Device) -> Properties:
    return Properties(
        name=device.name, major=device.capability[0], minor=device.capability[1], total_memory=device.memory,
        multi_processor_count=device.multiprocessors, L2_cache_size=4 * 2**20,
        uuid=device.uuid.removeprefix("GPU-").removeprefix("MIG-"),
        is_integrated=0, is_multi_gpu_board=0, regs_per_multiprocessor=65536, max_threads_per_multi_processor=1024,
        shared_memory_per_block=49152, warp_size=32, gcnArchName="", pci_bus_id=device.number + 1,
        pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _give_storage(torch: Any, native: Any) -> None:
    original = torch._C.StorageBase.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return original(self, size)
        native.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_


def _give_streams(torch: Any) -> None:
    class Stream(torch.Stream):  # type: ignore[misc]
        """torch.cuda.Stream over the generic stream."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            torch.cuda._lazy_init()
            if given:
                return super().__new__(cls, **given)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

    class Event(torch.Event):  # type: ignore[misc]
        """torch.cuda.Event over the generic event."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

    def current_stream(device: Any = None) -> Any:
        torch.cuda._lazy_init()
        return torch.accelerator.current_stream(device)

    torch.cuda.Stream = torch.cuda.streams.Stream = Stream
    torch.cuda.Event = torch.cuda.streams.Event = Event
    torch.cuda.current_stream = current_stream
    torch.cuda.set_stream = torch.accelerator.set_stream


def _give_nccl(torch: Any, native: Any) -> None:
    version = types.ModuleType("torch.cuda.nccl")
    version.version = lambda: (2, 29, 3)  # type: ignore[attr-defined]
    torch.cuda.nccl = sys.modules["torch.cuda.nccl"] = version
    distributed = torch.distributed.distributed_c10d
    distributed.ProcessGroupNCCL = native.ProcessGroupNCCL
    torch._C._distributed_c10d.ProcessGroupNCCL = native.ProcessGroupNCCL
    distributed._NCCL_AVAILABLE = True  # lint-tests: private: torch's module, which has another name here
    if distributed.default_pg_nccl_timeout is None:
        distributed.default_pg_nccl_timeout = distributed.default_pg_timeout / 3  # ten minutes


def _report_at_exit(native: Any, folder: Path) -> None:
    """Write one file for each process, even if it ends with os._exit."""
    leave = os._exit

    def write() -> None:
        result = native.counts()
        if result["operations"]:
            content = {**result, "contexts": native.contexts(), "misuses": native.misuses(), "pid": os.getpid()}
            (folder / f"{os.getpid()}.json").write_text(json.dumps(content))

    def write_and_leave(code: int) -> None:
        write()
        leave(code)

    atexit.register(write)
    os._exit = write_and_leave  # type: ignore[assignment]
