"""Queries of the devices of each vendor: NVIDIA, AMD (torch's HIP build), Apple, Intel, and the CPU."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from runner.axes.attention import refusal_reason
from runner.base.accelerator import (
    Cuda,
    DeviceMemory,
    Metal,
    Rocm,
    Xpu,
    get_accelerator,
    intel_devices,
    torch_devices,
    widest_dtype,
)
from runner.base.gpu_facts import Formats, amd_formats, intel_formats
from runner.tensors.global_rng import random_state, restore_random_state

CPU, GPU, APPLE, INTEL = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps"), torch.device("xpu", 0)


@pytest.fixture
def amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an MI210 with the HIP build of torch."""
    properties = SimpleNamespace(name="AMD Instinct MI210", total_memory=64 << 30, major=9, minor=0,
                                 gcnArchName="gfx90a:sramecc+:xnack-", uuid="36363636")  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 64 << 30))


@pytest.fixture
def intel_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate an Arc B580 with the XPU build of torch."""
    properties = SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics",
        total_memory=12 << 30,
        uuid="8680e20b",
        has_subgroup_matrix_multiply_accumulate=True,
        last_level_cache_size=18 << 20,
    )
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (11 << 30, 12 << 30))
    return properties


def test_an_intel_gpu_is_queried_through_torch_xpu(intel_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("memory_allocated", 1), ("memory_reserved", 2)):
        monkeypatch.setattr(torch.xpu, name, lambda device, value=value: value)
    device = get_accelerator(INTEL)
    assert type(device) is Xpu
    assert device.current_memory() == DeviceMemory(allocated=1, reserved=2)
    assert (device.name(), device.uuid(), device.l2_cache_bytes()) == (intel_gpu.name, "8680e20b", 18 << 20)
    assert device.capability() is None
    assert not device.page_lock(0, 4096)
    (seen,) = intel_devices()
    assert (seen.memory_bytes, seen.free_bytes, seen.architecture) == (12 << 30, 11 << 30, "XMX")


def test_integrated_intel_gpus_may_not_report_free_memory(
    intel_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: object) -> None:
        raise RuntimeError("The device does not support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    intel_gpu.has_subgroup_matrix_multiply_accumulate = False
    (seen,) = intel_devices()
    assert (seen.free_bytes, seen.architecture) == (None, "")


def test_intel_gpus_with_matrix_units_support_half_precision() -> None:
    assert intel_formats("XMX") == Formats(bf16=True, fp16=True)
    assert intel_formats("") == Formats()


def test_sums_use_float32_if_float64_may_be_missing() -> None:
    assert {widest_dtype(device) for device in (CPU, GPU)} == {torch.float64}
    assert {widest_dtype(device) for device in (APPLE, INTEL)} == {torch.float32}


def test_the_generator_of_an_intel_gpu_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: states[-1])
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: states.append(state))
    tensors, rest = random_state(INTEL)
    states.append(torch.tensor([8], dtype=torch.uint8))
    restore_random_state(tensors, rest, INTEL)
    assert states[-1] == 7


def test_a_cpu_has_no_streams_but_supports_every_dtype() -> None:
    """A CPU has no events either."""
    cpu = get_accelerator(CPU)
    cpu.reset_peak_memory()
    cpu.empty_cache()
    cpu.activate()
    assert (
        cpu.free_memory()
        is cpu.total_bytes()
        is cpu.current_memory()
        is cpu.peak_memory()
        is cpu.generator_state()
        is None
    )
    assert not cpu.memory_stats()
    assert not cpu.limit_memory(0.5)
    assert not cpu.page_lock(0, 4096)
    assert cpu.capability() is None
    assert not cpu.architecture()


def test_the_build_of_torch_determines_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert type(get_accelerator(GPU)) is Cuda
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert type(get_accelerator(GPU)) is Rocm
    assert type(get_accelerator(APPLE)) is Metal


def test_memory_figures_are_those_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("memory_allocated", 1), ("memory_reserved", 2), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4)
    assert get_accelerator(GPU).current_memory() == DeviceMemory(allocated=1, reserved=2)
    assert get_accelerator(GPU).peak_memory() == DeviceMemory(allocated=3, reserved=4)


def test_an_amd_gpu_has_an_architecture_but_no_capability(amd_gpu: None) -> None:
    assert get_accelerator(GPU).architecture() == "gfx90a"
    assert get_accelerator(GPU).capability() is None
    (seen,) = torch_devices()
    assert (seen.architecture, seen.capability, seen.free_bytes) == ("gfx90a", None, 60 << 30)


@pytest.mark.parametrize(
    ("architecture", "formats"),
    [
        ("gfx900", Formats()), ("gfx906", Formats()), ("gfx1030", Formats()), ("", Formats()),
        ("gfx908", Formats(fp16=True)),
        ("gfx90a", Formats(bf16=True, fp16=True, flash=True)), ("gfx942", Formats(bf16=True, fp16=True, flash=True)),
        ("gfx1100", Formats(bf16=True, fp16=True)), ("gfx1151", Formats(bf16=True, fp16=True)),
        ("gfx1201", Formats(bf16=True, fp16=True)),
    ],
)  # fmt: skip
def test_dtypes_of_an_amd_gpu_depend_on_its_architecture(architecture: str, formats: Formats) -> None:
    assert amd_formats(architecture) == formats


def test_nvidia_rules_do_not_apply_to_amd_gpus(amd_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules restrict attention kernels."""
    assert not refusal_reason("flash", torch.bfloat16, GPU)
    assert not refusal_reason("efficient", torch.float32, GPU)
    assert refusal_reason("flash", torch.float32, GPU)
    assert refusal_reason("cudnn", torch.bfloat16, GPU)
    old = SimpleNamespace(gcnArchName="gfx1030")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: old)
    assert "gfx1030" in refusal_reason("flash", torch.bfloat16, GPU)


def test_an_apple_gpu_reports_its_memory_but_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"current_allocated_memory": 1, "driver_allocated_memory": 2, "recommended_max_memory": 3}
    for name, value in figures.items():
        monkeypatch.setattr(torch.mps, name, lambda value=value: value)
    gpu = get_accelerator(APPLE)
    assert gpu.current_memory() == DeviceMemory(allocated=1, reserved=2)
    assert gpu.total_bytes() == 3
    assert gpu.peak_memory() is None


def test_the_generator_of_an_apple_gpu_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    tensors, rest = random_state(APPLE)
    states.append(torch.tensor([8], dtype=torch.uint8))
    restore_random_state(tensors, rest, APPLE)
    assert states[-1] == 7


def test_checking_cuda_initialization_does_not_import_torch() -> None:
    code = (
        "import sys, runner.base.loaded_torch as t; assert not t.cuda_is_initialized() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
