"""Facts about GPUs, without torch: how torch describes them, and the native formats of their matrix units."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TorchDevice:
    """A GPU as torch enumerates and describes it.

    capability    NVIDIA compute capability; None for other vendors, whose numbers have another meaning
    architecture  AMD architecture name, such as gfx90a; for Intel GPUs with matrix units, XMX; else empty
    uuid          ID that the driver's management library also uses: a UUID without prefix, on AMD the PCI address
    free_bytes    free memory, set only if NVML does not know the device and torch was queried; else None
    """

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int] | None
    architecture: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True)
class TorchView:
    """torch's version, build and devices.

    architectures  targets of its CUDA kernels: sm_75, compute_120, ...
    intel          its Intel GPUs
    cuda_error     torch's message about why it finds no CUDA device; empty if there is none
    mps_bytes      maximum memory use that Metal recommends; None if there is no Metal device
    """

    version: str
    cuda_version: str | None = None
    cudnn_version: int | None = None
    rocm: bool = False
    architectures: tuple[str, ...] = ()
    devices: tuple[TorchDevice, ...] = ()
    intel: tuple[TorchDevice, ...] = ()
    cuda_error: str = ""
    mps_bytes: int | None = None
    cpu_capability: str = ""


@dataclass(frozen=True)
class Formats:
    """Formats that the matrix units of a device compute natively; torch emulates the others.

    flash  whether torch's flash attention kernel supports the device
    """

    bf16: bool = False
    tf32: bool = False
    fp16: bool = False
    flash: bool = False


def nvidia_formats(capability: tuple[int, int] | None, name: str = "") -> Formats:
    """Return the native formats of the tensor cores. The GTX 16 series reports capability 7.5 but has no tensor cores.

    Source: NVIDIA CUDA C++ Programming Guide, Compute Capabilities; sdp_utils.cpp for flash attention.
    torch's `is_bf16_supported()` is not used: it returns True for a T4, which only emulates bfloat16.
    """
    if capability is None:
        return Formats()
    ampere = capability >= (8, 0)
    has_cores = capability >= (7, 0) and not re.search(r"\bGTX 16\d\d\b", name)
    return Formats(bf16=ampere, tf32=ampere, fp16=has_cores, flash=ampere)


def amd_formats(architecture: str) -> Formats:
    """Return the native formats of AMD matrix cores (CDNA) and WMMA units (RDNA 3 and later) for an architecture name.

    TF32 is omitted: hipBLASLt supports it only on gfx942, and only if an environment variable enables it.
    Source: AMD Instinct MI200 and MI300 and RDNA3 instruction set references; AOTriton's targets for flash attention.
    """
    if architecture == "gfx908":  # MI100: bfloat16 at half the rate of float16
        return Formats(fp16=True)
    if architecture in _CDNA:
        return Formats(bf16=True, fp16=True, flash=True)
    if architecture.startswith(("gfx11", "gfx12")):
        return Formats(bf16=True, fp16=True)
    return Formats()


_CDNA = ("gfx90a", "gfx942", "gfx950")  # MI200, MI300, MI350


def intel_formats(architecture: str) -> Formats:
    """Return the native formats of Intel's matrix units (XMX), which Arc and Data Center GPUs have.

    `torch.xpu.is_bf16_supported()` is not used: like that of CUDA, it returns True for emulation. TF32 is omitted:
    for XPU it has a separate switch (`torch.backends.mkldnn.allow_tf32`), which `runner/tensors/tf32.py` does not set.
    Source: torch.xpu.get_device_capability, `has_subgroup_matrix_multiply_accumulate`.
    """
    has_units = architecture == "XMX"
    return Formats(bf16=has_units, fp16=has_units)
