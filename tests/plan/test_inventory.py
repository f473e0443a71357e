"""The inventory: usable devices, unusable ones with reasons; from NVML, torch or a profile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.accelerator import query_torch
from runner.base.errors import ConfigError
from runner.base.gpu_facts import TorchDevice, TorchView
from runner.monitor.nvml import Gpu, Nvml
from runner.plan.inventory import (
    GIB,
    Cpu,
    Device,
    Inventory,
    inventory_from_profile,
    match_devices,
    read_cpu,
    take_inventory,
)
from tests.nvml_stub import MIB, PAIR, T4, NvmlStub, as_text

# Takes the inventory twice, the second time with the GPUs of $THEN. One process, because importing torch takes seconds.
TAKE = """
import collections, json, os, pathlib, sys
import torch
from runner.plan.inventory import take_inventory
events = collections.Counter()
sys.addaudithook(lambda event, _: events.update([event]))
taken = [json.loads(take_inventory().to_json())]
opened, started = events["open"], events["subprocess.Popen"] + events["os.fork"] + events["os.posix_spawn"]
if "THEN" in os.environ:
    pathlib.Path(os.environ["NVML_STUB"]).write_text(os.environ["THEN"])
    taken.append(json.loads(take_inventory().to_json()))
print(json.dumps({"opened": opened, "started": started, "taken": taken}))
"""

needs_a_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch has CUDA, which does not use the NVML stub"
)


class OtherNvml(Nvml):
    """An NVML with the given GPUs, each with 1 GiB free."""

    def __init__(self, gpus: Sequence[Gpu], cuda_version: str = "13.0") -> None:
        super().__init__(why_not="" if gpus else "no driver")
        self.gpus, self.cuda_version, self.driver_version = tuple(gpus), cuda_version, "580.0"

    def read(self, gpu: Gpu, names: Collection[str] | None = None) -> dict[str, float | None]:
        return super().read(gpu, names) | {"memory_free_bytes": GIB}


# The driver lists GPUs by bus ID, here the slow one first. CUDA lists the fastest GPU first.
SLOW = Gpu(0, "GPU-0000aaaa", "NVIDIA GeForce RTX 2080 Ti", 11 * GIB, (7, 5))
FAST = Gpu(1, "GPU-1111bbbb", "NVIDIA GeForce RTX 3070", 8 * GIB, (8, 6))
CUDA_BUILD = TorchView("2.13.0+cu130", cuda_version="13.0", architectures=("sm_75", "sm_80", "sm_90", "compute_120"))


def torch_with(*gpus: Gpu, **changes: Any) -> TorchView:
    """Return what a CUDA build of torch reports on a machine with these GPUs, in this order."""
    devices = tuple(TorchDevice(gpu.name, gpu.uuid[4:], gpu.memory_bytes or 0, gpu.capability) for gpu in gpus)
    return replace(CUDA_BUILD, devices=devices, **changes)


@pytest.mark.slow
@needs_a_cpu_build
def test_gpus_are_unusable_without_a_cuda_build_of_torch(nvml_stub: NvmlStub) -> None:
    alone, pair = nvml_stub.run(TAKE, T4, THEN=as_text(PAIR))["taken"]
    (t4,) = alone["devices"]

    assert (t4["name"], t4["memory_bytes"], t4["capability"]) == ("Tesla T4", 15360 * MIB, [7, 5])
    assert t4["free_bytes"] == (15360 - 8192 - 400) * MIB
    assert alone["driver_version"] == "580.159.03"
    assert [(each["index"], each["memory_bytes"]) for each in pair["devices"]] == [(0, 11264 * MIB), (1, 8192 * MIB)]
    assert not any(each["usable"] for each in (t4, *pair["devices"]))
    assert all("no CUDA" in each["why_not"] for each in (t4, *pair["devices"]))


@pytest.mark.slow
@needs_a_cpu_build
def test_an_inventory_without_gpu_has_a_reason(nvml_stub: NvmlStub) -> None:
    answer = nvml_stub.run(TAKE, None)
    (result,) = answer["taken"]

    assert result["devices"] == []
    assert "no NVIDIA driver" in result["no_gpu"]
    assert not any("NVIDIA" in note for note in result["notes"]), "a machine without GPUs is not a problem"
    assert result["cpu"]["logical_cores"] >= result["cpu"]["physical_cores"] >= 1
    assert result["cpu"]["memory_bytes"] > GIB / 4
    assert answer["opened"] < 200, "only files of /proc and /sys: milliseconds, whereas importing torch takes a second"
    assert answer["started"] == 0, "no process is started"


def test_an_inventory_survives_serialization_to_json() -> None:
    here = take_inventory()
    with_gpus = replace(here, devices=match_devices(OtherNvml([SLOW, FAST]), torch_with(FAST), {})[0])

    assert Inventory.from_json(with_gpus.to_json()) == with_gpus
    assert Inventory.from_json(here.to_json()) == here


def test_missing_compilers_are_part_of_the_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    here = take_inventory()
    assert here.no_cpu_compiler is not None
    assert here.no_gpu_compiler is not None
    assert Inventory.from_json(here.to_json()) == here


def test_torch_and_driver_order_are_matched_by_uuid() -> None:
    devices, notes = match_devices(OtherNvml([SLOW, FAST]), torch_with(FAST, SLOW), {})

    assert [(each.index, each.name, each.uuid) for each in devices] == [
        (0, FAST.name, FAST.uuid),
        (1, SLOW.name, SLOW.uuid),
    ]
    assert [each.torch_name for each in devices] == ["cuda:0", "cuda:1"]
    assert all(each.usable and each.free_bytes == GIB for each in devices)
    assert notes == (), "with UUIDs the order is certain, so there is no warning"


def test_a_hidden_gpu_is_listed_with_the_variable() -> None:
    devices, _ = match_devices(OtherNvml([SLOW, FAST]), torch_with(FAST), {"CUDA_VISIBLE_DEVICES": "GPU-1111"})

    assert [(each.name, each.usable) for each in devices] == [(FAST.name, True), (SLOW.name, False)]
    assert devices[1].why_not.split()[-1] == "CUDA_VISIBLE_DEVICES=GPU-1111"


def test_hidden_gpus_are_not_attributed_to_the_driver() -> None:
    devices, _ = match_devices(OtherNvml([SLOW], "11.4"), CUDA_BUILD, {"CUDA_VISIBLE_DEVICES": ""})

    assert devices[0].why_not.split()[-1] == "CUDA_VISIBLE_DEVICES="


def test_a_cudnn_version_mismatch_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library path contains an older cuDNN than torch was built with."""

    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 10, 2) but found (8, 9, 7)")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    view = replace(query_torch(), devices=torch_with(FAST).devices)
    devices, notes = match_devices(OtherNvml([FAST]), view, {})
    assert view.cudnn_version is None
    assert [device.usable for device in devices] == [True]
    assert any("cuDNN version incompatibility" in note for note in notes)


def test_an_old_driver_is_reported_with_both_versions() -> None:
    cuda_error = "driver too old"
    (device,), notes = match_devices(OtherNvml([FAST], "12.4"), replace(CUDA_BUILD, cuda_error=cuda_error), {})

    for part in ("580.0", "CUDA 12.4", "CUDA 13.0"):
        assert part in device.why_not
    assert notes == (f"torch: {cuda_error}",)


def test_other_cuda_errors_are_reported_verbatim() -> None:
    (device,), _ = match_devices(OtherNvml([FAST]), replace(CUDA_BUILD, cuda_error="CUDA error 802"), {})

    assert device.why_not.endswith(": CUDA error 802")


def test_a_gpu_without_kernels_is_unusable() -> None:
    pascal = Gpu(0, "GPU-1080", "NVIDIA GeForce GTX 1080", 8 * GIB, (6, 1))
    (device,), _ = match_devices(OtherNvml([pascal]), torch_with(pascal), {})

    assert not device.usable
    assert "capability 6.1" in device.why_not


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 6), True),  # same major, higher minor version
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),  # SASS does not run on another major version
        ("compute_80", (9, 0), True),  # PTX runs on later versions
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 1), True),
    ],
)
def test_kernels_run_on_compatible_capabilities(architecture: str, capability: tuple[int, int], *, runs: bool) -> None:
    gpu = Gpu(0, "GPU-x", "x", GIB, capability)
    (device,), _ = match_devices(OtherNvml([gpu]), torch_with(gpu, architectures=(architecture,)), {})

    assert device.usable is runs


def test_a_gpu_missing_in_nvml_is_usable() -> None:
    (device,), notes = match_devices(OtherNvml([]), torch_with(FAST), {})

    assert device.usable
    assert device.uuid == FAST.uuid
    assert device.free_bytes is None
    assert notes == ("no driver",)


def test_a_mig_instance_replaces_its_gpu() -> None:
    instance = Gpu(0, "MIG-77aa", "NVIDIA A100 MIG 3g.40gb", 40 * GIB, (8, 0))
    parent = Gpu(0, "GPU-a100", "NVIDIA A100", 80 * GIB, (8, 0), mig=True, instances=(instance,))
    (device,), _ = match_devices(OtherNvml([parent]), torch_with(instance), {"CUDA_VISIBLE_DEVICES": "MIG-77aa"})

    assert device.usable
    assert device.uuid == "MIG-77aa"


@pytest.mark.parametrize(("wanted", "result"), [(None, 0), ("MIG-77bb", 1), ("MIG-GPU-a100/2/0", 1)])
def test_a_mig_instance_has_its_own_free_memory(wanted: str | None, result: int) -> None:
    """Before CUDA 12, cudaDeviceProp has the UUID of the GPU, and CUDA lists one instance, by default the first."""
    instances = tuple(
        Gpu(0, f"MIG-77{name}", "NVIDIA A100 MIG 3g.40gb", 40 * GIB, mig_name=f"MIG-GPU-a100/{number}/0")
        for number, name in ((1, "aa"), (2, "bb"))
    )
    parent = Gpu(0, "GPU-a100", "NVIDIA A100", 80 * GIB, (8, 0), mig=True, instances=instances)
    seen = replace(CUDA_BUILD, devices=(TorchDevice(instances[0].name, "a100", 40 * GIB, (8, 0)),))
    environ = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    (device,), _ = match_devices(OtherNvml([parent]), seen, environ)

    assert device.uuid == instances[result].uuid
    assert device.usable


def test_native_formats_of_amd_gpus_depend_on_the_architecture() -> None:
    """AMD capabilities look like NVIDIA's, but have a different meaning. A missing NVML is not reported."""
    amd = [
        TorchDevice("AMD Instinct MI210", "", 64 * GIB, None, "gfx90a", 60 * GIB),
        TorchDevice("AMD Radeon RX 6800", "", 16 * GIB, None, "gfx1030", 15 * GIB),
    ]
    view = TorchView("2.13.0+rocm", rocm=True, devices=tuple(amd))
    (new, old), notes = match_devices(OtherNvml([]), view, {})

    assert new.usable
    assert new.free_bytes == 60 * GIB
    assert (new.native_bf16, new.formats.fp16, new.formats.flash, new.formats.tf32) == (True, True, True, False)
    assert new.generation == "gfx90a"
    assert not old.native_bf16
    assert not notes


def test_native_formats_of_intel_gpus_depend_on_matrix_units() -> None:
    intel = (TorchDevice("Intel Arc B580", "8680e20b", 12 * GIB, None, "XMX", 11 * GIB),)
    (device,), notes = match_devices(OtherNvml([]), TorchView("2.13.0+xpu", intel=intel), {})
    assert not notes, "NVML is not needed"
    assert (device.torch_name, device.native_bf16, device.generation) == ("xpu:0", True, "XMX")
    assert Inventory.from_json(Inventory((device,), Cpu("a CPU", 1, 1, GIB)).to_json()).devices == (device,)


def test_unknown_amd_gpus_use_float32() -> None:
    amd = TorchView("2.13.0+rocm", rocm=True, devices=(TorchDevice("AMD Instinct MI50", "", 16 * GIB, None),))
    (device,), notes = match_devices(OtherNvml([]), amd, {})

    assert device.usable
    assert not device.native_bf16
    assert any("ROCm" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "capability", "fp16", "bf16_tf32_flash"),
    [
        ("NVIDIA GeForce GTX 1080", (6, 1), False, False),
        ("Tesla V100", (7, 0), True, False),
        ("Tesla T4", (7, 5), True, False),
        ("NVIDIA GeForce GTX 1650", (7, 5), False, False),
        ("NVIDIA A100", (8, 0), True, True),
        ("NVIDIA GeForce RTX 4080", (8, 9), True, True),
        ("NVIDIA H200", (9, 0), True, True),
        ("CPU", None, False, False),
    ],
)
def test_native_formats_depend_on_the_compute_capability(
    name: str, capability: tuple[int, int] | None, *, fp16: bool, bf16_tf32_flash: bool
) -> None:
    device = Device("cuda", 0, name, capability=capability)

    assert device.formats.fp16 is fp16
    assert {device.native_bf16, device.formats.tf32, device.formats.flash} == {bf16_tf32_flash}


def system(root: Path, **files: str) -> Path:
    """Write the files of a small /proc and /sys. `__` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_and_memory_are_limited_by_the_cgroup(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__self__cgroup="0::/\n",
        proc__cpuinfo="processor : 0\nmodel name : Test CPU\nflags : fpu avx2 avx512f avx512_bf16\n\nprocessor : 1\n",
    )
    system(root / "sys/fs/cgroup", **{"memory.max": "1073741824", "cpu.max": "100000 100000"})
    cpu, notes = read_cpu("AVX512", root=root)

    assert cpu == Cpu("Test CPU", 1, 1, GIB, "AVX512", ("avx2", "avx512f", "avx512_bf16"))
    assert cpu.native_bf16
    assert any("cgroup grants 1.0 of" in note for note in notes)


def test_a_profile_describes_an_absent_machine() -> None:
    facts = {"title": "a T4", "devices": [{"name": "Tesla T4", "memory_gib": 15.0, "capability": [7, 5]}]}
    here = replace(take_inventory(), torch_version="1.2.3")
    absent = inventory_from_profile(facts, here)
    (device,) = absent.devices

    assert device == Device("cuda", 0, "Tesla T4", memory_bytes=15 * GIB, capability=(7, 5))
    assert (absent.cpu, absent.torch_version) == (here.cpu, "1.2.3")
    assert "a T4" in absent.notes[0]
    assert "this machine" in absent.notes[0]
    assert inventory_from_profile(facts).cpu.logical_cores == 1


def test_all_invalid_facts_are_reported_together() -> None:
    facts = {"devices": [{"name": 3, "memory_gib": "much"}, {"name": "x", "memory_gib": 8, "capability": [8, True]}]}
    with pytest.raises(ConfigError) as caught:
        inventory_from_profile(facts)

    assert [problem.where for problem in caught.value.problems] == ["hardware.devices[0]"] * 3 + ["hardware.devices[1]"]
