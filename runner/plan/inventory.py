"""What the machine has: GPUs as NVML and torch see them, the CPU, memory, versions. Frozen, and the same in JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from runner.base.accelerator import (
    Formats,
    TorchDevice,
    amd_formats,
    compiled_architectures,
    cuda_is_initialized,
    nvidia_formats,
    torch_devices,
)
from runner.base.errors import ConfigError, Problem, SystemLimit
from runner.host.cgroup import cgroup_limits
from runner.host.resources import affinity
from runner.host.subprocesses import in_subprocess
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import Gpu, Nvml, everything, visible

GIB = 2**30
Kind = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True)
class Device:
    """One place that computes; its capability decides what it does natively, not what torch can emulate.

    index         torch's number where it is usable, else the driver's
    uuid          as NVML writes it; empty where there is none
    memory_bytes  all of it
    free_bytes    free when the inventory was taken; None where nobody tells
    capability    NVIDIA compute capability; None for anything else
    why_not       why it cannot be used; empty where it can
    architecture  AMD's name of the architecture, such as gfx90a; empty for anything else

    What is native follows from capability or architecture: runner/base/accelerator.py.
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

    @property
    def formats(self) -> Formats:
        """What its matrix units compute natively."""
        return amd_formats(self.architecture) if self.architecture else nvidia_formats(self.capability, self.name)

    @property
    def native_bf16(self) -> bool:
        """It supports bfloat16 natively. For a CPU see Cpu.native_bf16."""
        return self.formats.bf16

    @property
    def native_tf32(self) -> bool:
        """It computes TensorFloat-32 natively."""
        return self.formats.tf32

    @property
    def fp16_tensor_cores(self) -> bool:
        """It computes float16 natively."""
        return self.formats.fp16

    @property
    def flash_attention(self) -> bool:
        """PyTorch's flash attention runs here."""
        return self.formats.flash

    @property
    def generation(self) -> str:
        """What decides about its formats, in words: `capability 7.5`, `gfx90a` or `no capability`."""
        if self.capability is not None:
            return "capability {}.{}".format(*self.capability)
        return self.architecture or "no capability"

    @property
    def torch_name(self) -> str:
        """The name that torch.device takes: `cuda:0`, `mps` or `cpu`."""
        return f"cuda:{self.index}" if self.kind == "cuda" else self.kind


@dataclass(frozen=True)
class Cpu:
    """The processor, as much of it as this process may use.

    physical_cores  cores without hyper-threads, at most logical_cores
    logical_cores   threads of execution that affinity and cgroup leave to this process, at least 1
    memory_bytes    of the machine, or the cgroup's limit where that is less
    capability      the widest vectors that torch uses here: DEFAULT, AVX2, AVX512, ...
    flags           of the flags that matter for arithmetic (CPU_FLAGS), those it has
    """

    name: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    capability: str = ""
    flags: tuple[str, ...] = ()

    @property
    def native_bf16(self) -> bool:
        """The processor multiplies bfloat16 itself: AVX512_BF16, AMX or Arm's BF16."""
        return any(flag in self.flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))

    @property
    def device(self) -> Device:
        """The CPU as a device to train on."""
        return Device("cpu", 0, self.name, memory_bytes=self.memory_bytes)


@dataclass(frozen=True)
class Inventory:
    """What there is to plan with.

    devices              GPUs in torch's order, then those that are there and cannot be used, with the reason
    shared_memory_bytes  size of /dev/shm, through which loader workers hand over batches; None where there is none
    open_files_limit     files this process may hold open; None where the system has no such limit
    notes                what a person should know: missing libraries, limits, devices that do not answer
    """

    devices: tuple[Device, ...]
    cpu: Cpu
    torch_version: str = ""
    cuda_version: str | None = None
    cudnn_version: int | None = None
    driver_version: str | None = None
    notes: tuple[str, ...] = ()
    shared_memory_bytes: int | None = None
    open_files_limit: int | None = None

    @property
    def usable(self) -> tuple[Device, ...]:
        """The GPUs that training can use, in torch's order."""
        return tuple(device for device in self.devices if device.usable)

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Inventory:
        """Return the inventory that `to_json` wrote."""
        values = json.loads(text)
        cpu = {**values["cpu"], "flags": tuple(values["cpu"]["flags"])}
        devices = [{**each, "capability": _pair(each["capability"])} for each in values["devices"]]
        return Inventory(
            **{
                **values,
                "devices": tuple(Device(**each) for each in devices),
                "cpu": Cpu(**cpu),
                "notes": tuple(values["notes"]),
            }
        )


def take_inventory() -> Inventory:
    """Return what is here and now. Never raises for a missing library, driver or permission: it becomes a reason.

    Imports torch. Where torch is built for GPUs they are looked at in a subprocess, so that CUDA is not initialized
    in this process and it can still be forked.
    Raises SystemLimit where Linux has no /proc: memory, cores and the processes of a run are only known from there.
    """
    if platform.system() == "Linux" and not os.access("/proc/meminfo", os.R_OK):
        fix = "mount it (mount -t proc proc /proc), or start the container with an unmasked /proc"
        raise SystemLimit("cannot be read, but is needed for memory and process information", where="/proc", fix=fix)
    torch_view, devices, notes, driver_version = _gpus()
    cpu, cpu_notes = read_cpu(torch_view.cpu_capability)
    return Inventory(
        devices=devices,
        cpu=cpu,
        torch_version=torch_view.version,
        cuda_version=torch_view.cuda_version,
        cudnn_version=torch_view.cudnn_version,
        driver_version=driver_version,
        notes=(*notes, *cpu_notes),
        shared_memory_bytes=_shared_memory_bytes(),
        open_files_limit=_open_files_limit(),
    )


def _gpus() -> tuple[TorchView, tuple[Device, ...], tuple[str, ...], str | None]:
    """Return what torch and NVML say of the GPUs; looked at in a subprocess where that would initialize CUDA here."""
    import torch

    if (torch.version.cuda or torch.version.hip) and not cuda_is_initialized():
        try:
            return in_subprocess(_look_at_gpus)
        except BrokenProcessPool:
            note = "the process that queried the GPUs crashed: the CUDA driver or a CUDA library is broken"
            return (
                TorchView(torch.__version__, cpu_capability=torch.backends.cpu.get_cpu_capability()),
                (),
                (note,),
                None,
            )
    return _look_at_gpus()


def _look_at_gpus() -> tuple[TorchView, tuple[Device, ...], tuple[str, ...], str | None]:
    torch_view = ask_torch()
    with open_driver() as nvml:
        devices, notes = match_devices(nvml, torch_view, os.environ)
        return torch_view, devices, notes, nvml.driver_version


def inventory_of_profile(
    facts: Mapping[str, Any], here: Inventory | None = None, file: Path | None = None
) -> Inventory:
    """Return the inventory of a machine that is not here, made of the `hardware:` facts of a profile, of `file`.

    A profile tells of GPUs only. The CPU and the versions are those of `here`, as a note says; without `here` they
    are one core, no memory and no versions. Raises ConfigError with every fact that is missing or of a wrong type.
    """
    problems: list[Problem] = []
    described = [each for each in facts.get("devices") or () if each.get("kind", "cuda") != "cpu"]
    devices = tuple(_device_of_profile(index, each, file, problems) for index, each in enumerate(described))
    if problems:
        raise ConfigError(problems)
    title = facts.get("title", "another machine")
    if here is None:
        return Inventory(devices, Cpu("unknown CPU", 1, 1, 0), notes=(f"planned for: {title}",))
    note = f"planned for {title}; CPU, memory and versions are those of this machine"
    return dataclasses.replace(here, devices=devices, driver_version=None, notes=(note,))


@dataclass(frozen=True)
class TorchView:
    """What torch says of itself and of the devices it sees.

    architectures  what its CUDA kernels were compiled for: sm_75, compute_120, ...
    complaint      why it sees no CUDA device, in torch's words; empty where it said nothing
    mps_bytes      memory that Metal recommends to use; None where there is no Metal
    """

    version: str
    cuda_version: str | None = None
    cudnn_version: int | None = None
    rocm: bool = False
    architectures: tuple[str, ...] = ()
    devices: tuple[TorchDevice, ...] = ()
    complaint: str = ""
    mps_bytes: int | None = None
    cpu_capability: str = ""


def ask_torch() -> TorchView:
    """Return what torch sees; its warnings and errors about CUDA become `complaint`."""
    import torch  # here, not above: a plan read from a file must not cost torch's import

    cudnn = cast("Any", torch.backends.cudnn)
    devices: list[TorchDevice] = []
    complaints: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devices.extend(torch_devices())
        except (RuntimeError, AssertionError) as error:  # torch raises both when CUDA does not start
            complaints.append(str(error))
        try:
            cudnn_version = cudnn.version() if torch.version.cuda else None
        except RuntimeError as error:  # an older cuDNN on the library path than the one torch was built with
            cudnn_version = None
            complaints.append(str(error))
    complaints += [str(warning.message) for warning in caught]
    metal = torch.backends.mps.is_available()
    return TorchView(
        version=torch.__version__,
        cuda_version=torch.version.cuda,
        cudnn_version=cudnn_version,
        rocm=torch.version.hip is not None,
        architectures=compiled_architectures() if devices else (),
        devices=tuple(devices),
        complaint=complaints[0].splitlines()[0] if complaints else "",
        mps_bytes=torch.mps.recommended_max_memory() if metal else None,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def match_devices(
    nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Return torch's devices joined with NVML's by UUID, then NVML's that torch cannot use; and notes."""
    pairs = [(known, nvml.find_of_torch(known.uuid, environ) if known.uuid else None) for known in torch_view.devices]
    matched = {gpu for _, gpu in pairs}
    metal = [] if torch_view.mps_bytes is None else [Device("mps", 0, "Apple GPU", memory_bytes=torch_view.mps_bytes)]
    devices = (
        *(_seen(index, known, gpu, nvml, torch_view) for index, (known, gpu) in enumerate(pairs)),
        *metal,
        *(_unseen(gpu, nvml, torch_view, environ) for gpu in nvml.gpus if matched.isdisjoint(everything([gpu]))),
    )
    return devices, tuple(_device_notes(nvml, torch_view, environ))


def read_cpu(capability: str = "", *, root: Path = Path("/")) -> tuple[Cpu, tuple[str, ...]]:
    """Return the CPU as far as this process may use it, and what limits it. `root` holds /proc and /sys."""
    import psutil  # type: ignore[import-untyped]

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


def _seen(index: int, known: TorchDevice, gpu: Gpu | None, nvml: Nvml, torch_view: TorchView) -> Device:
    why_not, free_bytes = _lacks_kernels(known, torch_view), _free_bytes(nvml, gpu)
    return Device(
        kind="cuda",
        index=index,
        name=known.name,
        uuid=gpu.uuid if gpu else known.uuid and (known.uuid if torch_view.rocm else f"GPU-{known.uuid}"),
        memory_bytes=known.memory_bytes,  # what can be allocated; NVML counts a little more
        free_bytes=known.free_bytes if free_bytes is None else free_bytes,
        capability=known.capability,
        usable=not why_not,
        why_not=why_not,
        architecture=known.architecture,
    )


def _unseen(gpu: Gpu, nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]) -> Device:
    free_bytes = _free_bytes(nvml, gpu)  # first: this query finds out whether the GPU is lost
    return Device(
        kind="cuda",
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        memory_bytes=gpu.memory_bytes or 0,
        free_bytes=free_bytes,
        capability=gpu.capability,
        usable=False,
        why_not=_why_unseen(gpu, nvml, torch_view, environ),
    )


def _lacks_kernels(device: TorchDevice, torch_view: TorchView) -> str:
    """Return why this torch build has no kernels for the device, or nothing."""
    if device.capability is None or not torch_view.architectures:
        return ""
    if any(_runs_on(architecture, device.capability) for architecture in torch_view.architectures):
        return ""
    major, minor = device.capability
    return (
        f"this torch build ({torch_view.version}) has no kernels for capability {major}.{minor}, "
        f"only for {', '.join(torch_view.architectures)}: install a build that has"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Machine code (sm_) runs on the same major and an equal or higher minor, PTX (compute_) on all that is newer."""
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if not parts:
        return False
    target = (int(parts[2]), int(parts[3]))
    if parts[4] == "a":  # for this very architecture
        return capability == target
    return capability >= target and (parts[1] == "compute" or capability[0] == target[0])


def _why_unseen(gpu: Gpu, nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]) -> str:
    if gpu in nvml.lost:
        return f"lost: {nvml.lost[gpu]}"
    if torch_view.rocm:
        return f"this torch build is for ROCm ({torch_view.version}): install a CUDA build of torch"
    if torch_view.cuda_version is None:
        return f"this torch build has no CUDA: {torch_view.version}; install a CUDA build of torch"
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible(nvml.gpus, environ).gpus
    if wanted is not None and (torch_view.devices or not any(each in shown for each in everything([gpu]))):
        return f"hidden by CUDA_VISIBLE_DEVICES={wanted}"
    if _major(nvml.cuda_version) < _major(torch_view.cuda_version):
        return (
            f"the driver {nvml.driver_version} (CUDA {nvml.cuda_version}) is too old for this torch build "
            f"(CUDA {torch_view.cuda_version}): update the driver, or install torch for CUDA {nvml.cuda_version}"
        )
    if gpu.mig:
        return "split into MIG instances, and CUDA shows only one per process: select it with CUDA_VISIBLE_DEVICES"
    return f"torch does not see it{': ' + torch_view.complaint if torch_view.complaint else ''}"


def _device_notes(nvml: Nvml, torch_view: TorchView, environ: Mapping[str, str]) -> Iterator[str]:
    yield from nvml.notes
    if not nvml.gpus and nvml.why_not not in nvml.notes and not torch_view.rocm:
        yield nvml.why_not
    for known in torch_view.devices if torch_view.rocm else ():
        if not known.architecture:
            yield f"ROCm: the architecture of {known.name} is not known, so no format is considered native"
    has_no_cudnn = torch_view.cudnn_version is None
    if torch_view.cuda_version and torch_view.complaint and (has_no_cudnn or not torch_view.devices):
        yield f"torch: {torch_view.complaint}"
    order = visible(nvml.gpus, environ).note
    if order and not torch_view.devices:  # torch's own order is known by UUID
        yield order


def _free_bytes(nvml: Nvml, gpu: Gpu | None) -> int | None:
    free = nvml.read(gpu, ["memory_free_bytes"])["memory_free_bytes"] if gpu else None
    return None if free is None else int(free)


def _major(version: str | None) -> int:
    return int(version.split(".")[0]) if version else 10**6  # unknown: nothing to complain about


def _device_of_profile(index: int, facts: Mapping[str, Any], file: Path | None, problems: list[Problem]) -> Device:
    where = f"{file}: hardware.devices[{index}]" if file else f"hardware.devices[{index}]"
    name, memory_gib, capability = facts.get("name"), facts.get("memory_gib"), _pair(facts.get("capability"))
    if not isinstance(name, str):
        problems.append(Problem(f"name must be text, but is {name}", where))
    if isinstance(memory_gib, bool) or not isinstance(memory_gib, (int, float)) or memory_gib <= 0:
        problems.append(Problem(f"memory_gib must be a number above 0, but is {memory_gib}", where))
        memory_gib = 0
    if capability is None:
        problems.append(Problem(f"capability must be two integers, but is {facts.get('capability')}", where))
    return Device("cuda", index, str(name), memory_bytes=int(memory_gib * GIB), capability=capability)


def _pair(values: Sequence[Any] | None) -> tuple[int, int] | None:
    fits = isinstance(values, Sequence) and len(values) == 2 and all(type(value) is int for value in values)
    return (values[0], values[1]) if fits and values else None


# ---------------------------------------------------------------- the processor


def _cpu_facts(root: Path) -> tuple[str, tuple[str, ...]]:
    """Return name and flags out of /proc/cpuinfo, or what the platform knows."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        text = ""
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    facts = {key.strip(): value.strip() for key, value in reversed(lines)}  # the first processor wins
    words = (facts.get("flags") or facts.get("Features") or "").split()
    name = facts.get("model name") or platform.processor() or platform.machine() or "CPU"
    return name, tuple(flag for flag in CPU_FLAGS if flag in words)


def _shared_memory_bytes() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _open_files_limit() -> int | None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


# Flags of /proc/cpuinfo that say how fast arithmetic is: Intel and AMD, then Arm.
CPU_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
