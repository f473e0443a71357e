"""Inventory of the machine: GPUs as NVML and torch report them, CPU, memory, versions. Frozen and JSON-serializable."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from runner.base.compilers import check_capability, find_missing_compiler
from runner.base.errors import ConfigError, Problem, SystemLimit
from runner.base.gpu_facts import Formats, TorchDevice, TorchView, amd_formats, intel_formats, nvidia_formats
from runner.base.json_converter import decode_valid, encode
from runner.base.loaded_torch import cuda_is_initialized
from runner.host.cgroup import cgroup_limits
from runner.host.resources import affinity
from runner.host.subprocesses import run_in_subprocess
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import NO_DRIVER, Gpu, Nvml, iter_instances, visible

GIB = 2**30
Kind = Literal["cuda", "mps", "xpu", "cpu"]


@dataclass(frozen=True)
class Device:
    """A compute device.

    index         torch's index if the device is usable, else the driver's
    uuid          UUID in NVML's format; empty if there is none
    memory_bytes  total memory
    free_bytes    free memory when the inventory was taken; None if unknown
    capability    NVIDIA compute capability; None for other devices
    why_not       why it cannot be used; empty if it can
    architecture  AMD architecture name, such as gfx90a; for Intel GPUs with matrix units, XMX; else empty
    machine       number of its machine; above 0 only in a plan for several machines that are not present

    Native formats follow from capability or architecture (runner/base/gpu_facts.py), not from what torch accepts,
    because torch emulates some formats.
    """

    kind: Kind
    index: int
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    usable: bool = True
    why_not: str = ""
    architecture: str = ""
    machine: int = 0

    @property
    def formats(self) -> Formats:
        """Formats that its matrix units compute natively."""
        if self.kind == "xpu":
            return intel_formats(self.architecture)
        return amd_formats(self.architecture) if self.architecture else nvidia_formats(self.capability, self.name)

    @property
    def native_bf16(self) -> bool:
        """Whether it computes bfloat16 natively. For a CPU, see Cpu.native_bf16."""
        return self.formats.bf16

    @property
    def generation(self) -> str:
        """The property that determines its formats: `capability 7.5`, `gfx90a` or `no capability`."""
        if self.capability is not None:
            return "capability {}.{}".format(*self.capability)
        return self.architecture or ("no XMX" if self.kind == "xpu" else "no capability")

    @property
    def torch_name(self) -> str:
        """The name for torch.device: `cuda:0`, `xpu:0`, `mps` or `cpu`."""
        return f"{self.kind}:{self.index}" if self.kind in ("cuda", "xpu") else self.kind


@dataclass(frozen=True)
class Cpu:
    """The part of the CPU and of the memory that this process may use.

    physical_cores  number of cores, not counting hyper-threads; at most logical_cores
    logical_cores   hardware threads allowed by affinity and cgroup, at least 1
    memory_bytes    memory of the machine, or the cgroup's limit if lower
    capability      widest vector instructions that torch uses: DEFAULT, AVX2, AVX512, ...
    flags           flags that affect the speed of arithmetic (see CPU_FLAGS)
    """

    name: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    capability: str = ""
    flags: tuple[str, ...] = ()

    @property
    def native_bf16(self) -> bool:
        """Whether it multiplies bfloat16 natively: AVX512_BF16, AMX or Arm's BF16."""
        return any(flag in self.flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))

    @property
    def device(self) -> Device:
        return Device("cpu", 0, self.name, memory_bytes=self.memory_bytes)


@dataclass(frozen=True)
class Inventory:
    """Hardware and software available for planning.

    devices  GPUs in torch's order, then unusable ones with the reason
    no_gpu   why there are no devices; empty if there are some
    no_cpu_compiler, no_gpu_compiler  why TorchInductor cannot compile for the CPU or CUDA; None if it can, or if the
                                      machine is not present
    notes    messages for the user: missing libraries, limits, devices that do not respond
    """

    devices: tuple[Device, ...]
    cpu: Cpu
    torch_version: str = ""
    cuda_version: str | None = None
    cudnn_version: int | None = None
    driver_version: str | None = None
    no_gpu: str = ""
    no_cpu_compiler: Problem | None = None
    no_gpu_compiler: Problem | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Device, ...]:
        """GPUs that training can use, in torch's order."""
        return tuple(device for device in self.devices if device.usable)

    def why_not_compiled(self, gpu: Device | None) -> Problem | None:
        """Return why TorchInductor cannot compile for `gpu`, or for the CPU if `gpu` is None. Return None if it can."""
        if gpu is None:
            return self.no_cpu_compiler
        # Checked first, because installing Triton does not make an old GPU usable.
        problem = check_capability(gpu.torch_name, gpu.capability)
        return problem or (self.no_gpu_compiler if gpu.kind == "cuda" else None)

    def to_json(self) -> str:
        return json.dumps(encode(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Inventory:
        """Restore the inventory from the output of `to_json`."""
        return decode_valid(Inventory, json.loads(text))


def take_inventory() -> Inventory:
    """Take the inventory of this machine. A missing library, driver or permission becomes a reason, not an exception.

    Imports torch. If torch is built for GPUs, they are queried in a subprocess, so that CUDA is not initialized in
    this process, which can then still be forked.
    Raises SystemLimit if /proc/meminfo cannot be read: memory, cores and processes are read from /proc.
    """
    if not os.access("/proc/meminfo", os.R_OK):
        fix = "mount it (mount -t proc proc /proc), or start the container with an unmasked /proc"
        raise SystemLimit("cannot be read, but is needed for memory and process information", where="/proc", fix=fix)
    from runner.base import accelerator  # reading a plan from a file must not import torch

    if accelerator.is_gpu_build() and not cuda_is_initialized():
        try:
            return run_in_subprocess(_take_here, accelerator.query_torch)
        except BrokenProcessPool:
            note = "the process that queried the GPUs crashed: the CUDA driver or a CUDA library is broken"
            torch_view = accelerator.torch_version()
            cpu, notes = read_cpu(torch_view.cpu_capability)
            return Inventory((), cpu, torch_view.version, notes=(note, *notes))
    return _take_here(accelerator.query_torch)


def _take_here(query_torch: Callable[[], TorchView]) -> Inventory:
    """Return the inventory of this machine as this process sees it."""
    torch_view = query_torch()
    cpu, cpu_notes = read_cpu(torch_view.cpu_capability)
    with open_driver() as nvml:
        devices, notes = match_devices(nvml, torch_view, os.environ)
        return Inventory(
            devices=devices,
            cpu=cpu,
            torch_version=torch_view.version,
            cuda_version=torch_view.cuda_version,
            cudnn_version=torch_view.cudnn_version,
            driver_version=nvml.driver_version,
            no_gpu="" if devices else nvml.why_not,
            no_cpu_compiler=find_missing_compiler("cpu"),
            no_gpu_compiler=find_missing_compiler("cuda"),
            notes=(*notes, *cpu_notes),
        )


def inventory_from_profile(
    facts: Mapping[str, Any], this_machine: Inventory | None = None, file: Path | None = None
) -> Inventory:
    """Return the inventory of a machine that is not present, from the `hardware:` facts of the profile in `file`.

    A profile describes only GPUs. CPU and versions are those of `this_machine`, with a note; if it is None, there is
    one core, and memory and versions are unknown. Raises ConfigError listing facts that are missing or invalid.
    """
    problems: list[Problem] = []
    gpu_facts = [device for device in facts.get("devices") or () if device.get("kind", "cuda") != "cpu"]
    devices = tuple(_device_from_profile(index, gpu, file, problems) for index, gpu in enumerate(gpu_facts))
    if problems:
        raise ConfigError(problems)
    title = facts.get("title", "another machine")
    if this_machine is None:
        return Inventory(devices, Cpu("unknown CPU", 1, 1, 0), notes=(f"planned for: {title}",))
    note = f"planned for {title}; CPU, memory and versions are those of this machine"
    return dataclasses.replace(
        this_machine,
        devices=devices,
        driver_version=None,
        no_cpu_compiler=None,
        no_gpu_compiler=None,
        notes=(note,),
    )


def match_devices(
    nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Return the devices (torch's, joined with NVML's by UUID, then those that only NVML reports) and notes."""
    pairs = [
        (torch_device, nvml.find_torch_device(torch_device.uuid, environ) if torch_device.uuid else None)
        for torch_device in torch_view.devices
    ]
    matched = {gpu for _, gpu in pairs}
    metal = [] if torch_view.mps_bytes is None else [Device("mps", 0, "Apple GPU", memory_bytes=torch_view.mps_bytes)]
    devices = (
        *(_cuda_device(index, torch_device, gpu, nvml, torch_view) for index, (torch_device, gpu) in enumerate(pairs)),
        *metal,
        *(_intel_device(index, torch_device) for index, torch_device in enumerate(torch_view.intel)),
        *(
            _unusable_device(gpu, nvml, torch_view, environ)
            for gpu in nvml.gpus
            if matched.isdisjoint(iter_instances([gpu]))
        ),
    )
    return devices, tuple(_device_notes(nvml, torch_view, environ))


def read_cpu(capability: str = "", *, root: Path = Path("/")) -> tuple[Cpu, tuple[str, ...]]:
    """Return the cores and memory that this process may use, and notes about limits. `root` contains /proc and /sys."""
    allowed = len(affinity())
    present, memory = os.cpu_count() or 1, int(psutil.virtual_memory().total)
    quota, memory_limit = cgroup_limits(root)
    notes = []
    if allowed < present:
        notes.append(f"this process may use {allowed} of {present} CPU threads (affinity)")
    if quota is not None and quota < allowed:
        notes.append(f"the cgroup grants {quota:g} of {allowed} CPU threads")
        allowed = max(1, int(quota))
    if memory_limit is not None and memory_limit < memory:
        notes.append(f"the cgroup grants {memory_limit / GIB:.1f} of {memory / GIB:.1f} GiB memory")
        memory = memory_limit
    name, flags = _cpu_facts(root)
    physical = min(psutil.cpu_count(logical=False) or allowed, allowed)
    return Cpu(name, physical, allowed, memory, capability, flags), tuple(notes)


# ---------------------------------------------------------------- GPUs


def _cuda_device(index: int, torch_device: TorchDevice, gpu: Gpu | None, nvml: Nvml, torch_view: TorchView) -> Device:
    why_not, free_bytes = _explain_missing_kernels(torch_device, torch_view), _free_bytes(nvml, gpu)
    is_nvml_format = torch_view.rocm or not torch_device.uuid
    uuid = torch_device.uuid if is_nvml_format else f"GPU-{torch_device.uuid}"
    return Device(
        kind="cuda",
        index=index,
        name=torch_device.name,
        uuid=gpu.uuid if gpu else uuid,
        memory_bytes=torch_device.memory_bytes,  # usable memory; NVML reports slightly more
        free_bytes=torch_device.free_bytes if free_bytes is None else free_bytes,
        capability=torch_device.capability,
        usable=not why_not,
        why_not=why_not,
        architecture=torch_device.architecture,
    )


def _intel_device(index: int, torch_device: TorchDevice) -> Device:
    return Device(
        kind="xpu",
        index=index,
        name=torch_device.name,
        uuid=torch_device.uuid,
        memory_bytes=torch_device.memory_bytes,
        free_bytes=torch_device.free_bytes,
        architecture=torch_device.architecture,
    )


def _unusable_device(gpu: Gpu, nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]) -> Device:
    free_bytes = _free_bytes(nvml, gpu)  # first, because this query detects a lost GPU
    return Device(
        kind="cuda",
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        memory_bytes=gpu.memory_bytes or 0,
        free_bytes=free_bytes,
        capability=gpu.capability,
        usable=False,
        why_not=_explain_unusable(gpu, nvml, torch_view, environ),
    )


def _explain_missing_kernels(device: TorchDevice, torch_view: TorchView) -> str:
    if device.capability is None or not torch_view.architectures:
        return ""
    if any(_is_compatible(architecture, device.capability) for architecture in torch_view.architectures):
        return ""
    major, minor = device.capability
    return (
        f"this torch build ({torch_view.version}) has no kernels for capability {major}.{minor}, "
        f"only for {', '.join(torch_view.architectures)}: install a build that has them"
    )


def _is_compatible(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture runs on a device of this capability.

    Machine code (sm_) needs the same major version and at least the same minor one; PTX (compute_) also runs on newer
    major versions.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if not parts:
        return False
    target = (int(parts[2]), int(parts[3]))
    if parts[4] == "a":  # for exactly this architecture
        return capability == target
    return capability >= target and (parts[1] == "compute" or capability[0] == target[0])


def _explain_unusable(gpu: Gpu, nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]) -> str:
    if gpu in nvml.lost:
        return f"lost: {nvml.lost[gpu]}"
    if torch_view.rocm:
        return f"this torch build is for ROCm ({torch_view.version}): install a CUDA build of torch"
    if torch_view.cuda_version is None:
        return f"this torch build has no CUDA: {torch_view.version}; install a CUDA build of torch"
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible(nvml.gpus, environ).gpus
    if visible_devices is not None and (
        torch_view.devices or not any(instance in shown for instance in iter_instances([gpu]))
    ):
        return f"hidden by CUDA_VISIBLE_DEVICES={visible_devices}"
    if _major(nvml.cuda_version) < _major(torch_view.cuda_version):
        return (
            f"the driver {nvml.driver_version} (CUDA {nvml.cuda_version}) is too old for this torch build "
            f"(CUDA {torch_view.cuda_version}): update the driver, or install torch for CUDA {nvml.cuda_version}"
        )
    if gpu.mig:
        return "split into MIG instances, and CUDA shows only one per process: select it with CUDA_VISIBLE_DEVICES"
    return f"torch does not see it{': ' + torch_view.cuda_error if torch_view.cuda_error else ''}"


def _device_notes(nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]) -> Iterator[str]:
    yield from nvml.notes
    if not nvml.gpus and nvml.why_not not in (NO_DRIVER, *nvml.notes) and not (torch_view.rocm or torch_view.intel):
        yield nvml.why_not  # not for NO_DRIVER: no GPU is expected, and if one is requested, the error gives the reason
    for torch_device in torch_view.devices if torch_view.rocm else ():
        if not torch_device.architecture:
            yield f"ROCm: the architecture of {torch_device.name} is not known, so no precision is considered native"
    has_no_cudnn = torch_view.cudnn_version is None
    if torch_view.cuda_version and torch_view.cuda_error and (has_no_cudnn or not torch_view.devices):
        yield f"torch: {torch_view.cuda_error}"
    order = visible(nvml.gpus, environ).note
    if order and not torch_view.devices:  # torch's own devices are matched by UUID, so the order is certain
        yield order


def _free_bytes(nvml: Nvml, gpu: Gpu | None) -> int | None:
    free = nvml.read(gpu, ["memory_free_bytes"])["memory_free_bytes"] if gpu else None
    return None if free is None else int(free)


def _major(version: str | None) -> int:
    return int(version.split(".")[0]) if version else 10**6  # unknown version: no message


def _device_from_profile(index: int, facts: Mapping[str, Any], file: Path | None, problems: list[Problem]) -> Device:
    where = f"{file}: hardware.devices[{index}]" if file else f"hardware.devices[{index}]"
    name, memory_gib, capability = facts.get("name"), facts.get("memory_gib"), _parse_pair(facts.get("capability"))
    if not isinstance(name, str):
        problems.append(Problem(f"name must be a string, but is {name}", where))
    if isinstance(memory_gib, bool) or not isinstance(memory_gib, (int, float)) or memory_gib <= 0:
        problems.append(Problem(f"memory_gib must be a number above 0, but is {memory_gib}", where))
        memory_gib = 0
    if capability is None:
        problems.append(Problem(f"capability must be two integers, but is {facts.get('capability')}", where))
    return Device("cuda", index, str(name), memory_bytes=int(memory_gib * GIB), capability=capability)


def _parse_pair(values: Sequence[Any] | None) -> tuple[int, int] | None:
    fits = isinstance(values, Sequence) and len(values) == 2 and all(type(value) is int for value in values)
    return (values[0], values[1]) if fits and values else None


# ---------------------------------------------------------------- the processor


def _cpu_facts(root: Path) -> tuple[str, tuple[str, ...]]:
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        text = ""
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    facts = {key.strip(): value.strip() for key, value in reversed(lines)}  # values of the first processor are used
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    name = facts.get("model name") or platform.processor() or platform.machine() or "CPU"
    return name, tuple(flag for flag in CPU_FLAGS if flag in flags)


# Flags of /proc/cpuinfo that affect the speed of arithmetic: Intel and AMD, then Arm.
CPU_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
