"""The GPUs as NVML and torch see them: driver, versions, numbers, and who else computes on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from runner.base.accelerator import nccl_version
from runner.base.secret import sanitize
from runner.monitor.alerts import SLOWED_ADVICE
from runner.monitor.gpu_driver import open_driver
from runner.monitor.machine_sample import pids_are_of_host
from runner.monitor.nvml import Gpu, GpuProcess, Nvml, everything, slowed_by, visible
from runner.plan.inventory import GIB, Device, Inventory, take_inventory
from runner.tools.doctor.findings import Answer, CheckContext, CheckResult, failed, ok, skip, warn


def driver(context: CheckContext) -> Iterator[CheckResult]:
    """NVML: driver, state of each GPU."""
    with open_driver() as nvml:
        if not nvml.gpus and not nvml.notes:
            yield _no_gpu(nvml.why_not)
            return
        serves = f", serves CUDA up to {nvml.cuda_version}" if nvml.cuda_version else ""
        seen = f"{nvml.driver_version}{serves}, {len(nvml.gpus)} GPU(s)"
        yield ok("", seen)
        for note in nvml.notes:
            yield failed("", note, nvml.tool.lost, _WHY_LOST)
        for gpu in nvml.gpus:
            yield _state(gpu, nvml)


def processes(context: CheckContext) -> Iterator[CheckResult]:
    """Other processes on each GPU."""
    with open_driver() as nvml:
        if not nvml.gpus:
            yield skip("", "no GPU answers")
        for gpu in everything(nvml.gpus):
            found = nvml.processes(gpu)
            name = f"GPU {gpu.index}" if gpu in nvml.gpus else gpu.uuid
            if found is None:
                yield skip(name, "the driver does not report its processes")
            elif not found:
                yield _unlisted(name, gpu, nvml)
            else:
                yield _listed(name, found)


def gpus(context: CheckContext) -> Iterator[CheckResult | Answer]:
    """GPUs that torch can use, and reasons for the others."""
    inventory = take_inventory()
    yield Answer(inventory.to_json())
    wanted = context.device if context.device not in ("auto", "cpu") else ""
    chosen = [device for device in inventory.usable if wanted in ("", device.kind, device.torch_name)]
    if wanted and not chosen:
        known = ", ".join([*(device.torch_name for device in inventory.usable), "cpu"])
        reasons = [device.why_not for device in inventory.devices if not device.usable] or list(inventory.notes[:1])
        because = f": {reasons[0]}" if reasons else ""
        yield failed(wanted, f"{wanted} does not exist; there is {known}{because}", "accel-run doctor device=auto")
        return
    if not inventory.devices:
        yield skip("", "no GPU; training runs on the CPU")
    for device in inventory.devices:
        yield _usable(device, inventory)


def versions(context: CheckContext) -> Iterator[CheckResult]:
    """CUDA version of the build and of the driver, cuDNN, NCCL."""
    here = context.here
    if here.cuda_version is None:
        yield skip("CUDA", f"torch {here.torch_version} was built without it")
        return
    with open_driver() as nvml:
        yield _against(here.cuda_version, nvml)
    if here.cudnn_version is None:
        yield failed("cuDNN", "torch cannot load it", f'pip install --force-reinstall "torch=={here.torch_version}"')
    else:
        yield _at_least("cuDNN", _cudnn(here.cudnn_version), here)
    if here.usable:
        yield ok("NCCL", ".".join(map(str, nccl_version())))


def numbering(context: CheckContext) -> Iterator[CheckResult]:
    """GPU indices in CUDA and NVML, by UUID."""
    with open_driver() as nvml:
        if not nvml.gpus:
            yield skip("", "no GPU answers")
            return
        seen = [device for device in context.here.devices if device.kind == "cuda" and device.usable]
        pairs = [(device, nvml.find(device.uuid)) for device in seen if device.uuid]
        differing = [(device, gpu) for device, gpu in pairs if gpu is not None and gpu.index != device.index]
        for device, gpu in differing:
            numbers = f"{device.torch_name} ({device.name}) is GPU {gpu.index} of {nvml.tool.name}: {gpu.uuid}"
            yield warn(device.torch_name, numbers, _fix_of_order(), _WHY_ORDER)
        if pairs and not differing:
            yield ok("", f"{len(pairs)} GPU(s) have the number that {nvml.tool.name} shows")
        note = visible(nvml.gpus, os.environ).note
        if note and (not pairs or "CUDA_VISIBLE_DEVICES" in note):
            yield warn("CUDA_VISIBLE_DEVICES" if "VISIBLE" in note else "", note, _fix_of_order(), _WHY_ORDER)
        elif not pairs:
            yield ok("", "; ".join(f"GPU {gpu.index} is {gpu.uuid}" for gpu in nvml.gpus))


# ---------------------------------------------------------------- one GPU


def _no_gpu(why_not: str) -> CheckResult:
    """Judge a machine without a GPU: fine where there is none, and not where there is one that does not answer."""
    if any(words in why_not for words in ("not loaded", "no permission", "different versions")):
        return failed(
            "", why_not, "nvidia-smi; sudo modprobe nvidia; restart the machine after an update of the driver"
        )
    if "nvidia-ml-py" in why_not:
        return failed("", why_not, "pip install nvidia-ml-py")
    return skip("", why_not)


def _state(gpu: Gpu, nvml: Nvml) -> CheckResult:
    """Judge what a GPU says of itself; what it does not tell is left out."""
    now, name = nvml.read(gpu), f"GPU {gpu.index}"
    told = [gpu.name]
    for reading, words in (
        ("temperature_c", "{:.0f} degC"),
        ("power_w", "{:.0f} W"),
        ("util_percent", "{:.0f} % busy"),
    ):
        value = now.get(reading)
        told += [words.format(value)] if value is not None else []
    free, whole = now.get("memory_free_bytes"), now.get("memory_total_bytes")
    if free is not None and whole:
        told.append(f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free")
    if now.get("pcie_generation") and now.get("pcie_width"):
        told.append(f"PCIe {now['pcie_generation']:.0f} x{now['pcie_width']:.0f}")
    if gpu in nvml.lost:
        return failed(name, f"{gpu.name} is lost: {nvml.lost[gpu]}", nvml.tool.lost, _WHY_LOST)
    if gpu in nvml.denied:
        told.append(f"no permission to read {', '.join(sorted(nvml.denied[gpu]))}")
    broken = now.get("ecc_uncorrected")
    if broken:
        seen = f"{', '.join(told)}; {broken:.0f} errors of its memory could not be corrected"
        return failed(name, seen, nvml.tool.memory_errors, _WHY_ECC)
    slowed = slowed_by(now.get("throttle_reasons"))
    seen = ", ".join(told) + (f"; clocks are throttled by {', '.join(slowed)}" if slowed else "")
    advice = [SLOWED_ADVICE[reason] for reason in slowed if reason in SLOWED_ADVICE]  # a busy GPU is at its power limit
    if advice:
        fix = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; {'; '.join(advice)}"
        return warn(name, seen, fix, "computation is slower, and the GPU or its cooling may have a problem")
    return ok(name, seen)


def _usable(device: Device, inventory: Inventory) -> CheckResult:
    name = device.torch_name if device.usable else f"GPU {device.index}"
    size = f"{device.memory_bytes / GIB:.1f} GiB" if device.memory_bytes else "memory unknown"
    if device.usable:
        known = f", {device.generation}" if device.capability or device.architecture else ""
        return ok(name, f"{device.name}, {size}{known}{f', {device.uuid}' if device.uuid else ''}")
    seen = f"{device.name}, {size}: {device.why_not}"
    if device.why_not.startswith(("hidden by", "cut into MIG")) and (inventory.usable or "hidden" in device.why_not):
        return skip(name, seen)
    fix = next((fix for words, fix in _WAYS_OUT.items() if words in device.why_not), "nvidia-smi; restart the machine")
    return (warn if inventory.usable else failed)(name, seen, fix)


def _listed(name: str, found: Sequence[GpuProcess]) -> CheckResult:
    """Name who computes on a GPU, the largest first."""
    each = sorted(found, key=lambda process: -(process.used_bytes or 0))
    is_host = pids_are_of_host()
    shown = "; ".join(_told(process, is_host) for process in each[:_SHOWN])
    more = f"; and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
    fix = "wait for them, end those that are yours, or export CUDA_VISIBLE_DEVICES=UUID of another GPU"
    return warn(name, f"{shown}{more}", fix, figures={"processes": len(found)})


def _unlisted(name: str, gpu: Gpu, nvml: Nvml) -> CheckResult:
    """Judge a GPU without listed processes: memory in use then belongs to processes that the driver does not show."""
    now = nvml.read(gpu, ("memory_used_bytes", "util_percent"))
    used, busy = now["memory_used_bytes"], now["util_percent"]
    if used is None and busy is None:
        return skip(name, "the driver lists no processes, and reports neither memory use nor utilization")
    told = [f"{used / GIB:.1f} GiB are in use"] if used is not None else []
    told += [f"it is {busy:.0f} % busy"] if busy is not None else []
    is_idle = (used or 0) <= _IDLE_BYTES and (busy or 0) <= _IDLE_PERCENT
    if is_idle or gpu.instances:  # whose memory and load are those of its instances
        return ok(name, f"no other processes; {' and '.join(told)}")
    seen = f"{' and '.join(told)}, by processes that the driver does not show here (in a container?)"
    fix = f"{nvml.tool.name} on the host lists them; or export CUDA_VISIBLE_DEVICES=UUID of another GPU"
    return warn(name, seen, fix)


def _told(process: GpuProcess, is_host: bool) -> str:
    """Return a process in words: its number, its name where the number is known to be its own, its memory if told."""
    import psutil  # type: ignore[import-untyped]

    name = ""
    with suppress(psutil.Error):
        name = f" {sanitize(psutil.Process(process.pid).name())}" if is_host else ""
    used = process.used_bytes
    return f"process {process.pid}{name}, {'unknown memory' if used is None else f'{used / GIB:.1f} GiB'}"


# ---------------------------------------------------------------- versions


def _against(built_for: str, nvml: Nvml) -> CheckResult:
    """Judge the driver: an older major does not work, an older minor does, but not all of it."""
    if nvml.cuda_version is None:
        return skip(
            "CUDA", f"torch is for CUDA {built_for}; {nvml.why_not or 'the driver does not report its CUDA version'}"
        )
    built, served = _numbers(built_for), _numbers(nvml.cuda_version)
    seen = f"torch is for CUDA {built_for}, driver {nvml.driver_version} supports up to {nvml.cuda_version}"
    fix = f"update the driver to one that supports CUDA {built_for}, or install a torch for at most {nvml.cuda_version}"
    if served[0] < built[0]:
        return failed("CUDA", seen, fix)
    if served < built:
        why = "an older minor version works, except for just-in-time compiled code (PTX)"
        return warn("CUDA", seen, fix, why)
    if built < MINIMA["CUDA"]:
        return warn("CUDA", f"{seen}; {_shown(MINIMA['CUDA'])} or newer is recommended", "install a newer torch")
    return ok("CUDA", seen)


def _at_least(name: str, version: tuple[int, ...], here: Inventory) -> CheckResult:
    if version < MINIMA[name]:
        return warn(
            name, f"{_shown(version)}, but {_shown(MINIMA[name])} or newer is recommended", "install a newer torch"
        )
    return ok(name, f"{_shown(version)} (of torch {here.torch_version})")


def _cudnn(number: int) -> tuple[int, ...]:
    """Return 9.10.2 of 91002, and 8.9.7 of 8907: cuDNN's own counting changed with version 9."""
    major, minor = (10000, 100) if number >= 90000 else (1000, 100)
    return number // major, number % major // minor, number % minor


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _fix_of_order() -> str:
    """Return what makes the numbers agree; where that was said already, only names are certain."""
    by_bus = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    by_name = "export CUDA_VISIBLE_DEVICES=GPU-..., the UUIDs that nvidia-smi -L shows"
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return by_name
    return f"{by_bus}; {by_name}" if "CUDA_VISIBLE_DEVICES" in os.environ else by_bus


MINIMA: dict[str, tuple[int, ...]] = {
    "CUDA": (11, 0),
    "cuDNN": (8, 0),
}  # older ones lack kernels that torch >= 2.11 has
_SHOWN = 4
_IDLE_BYTES, _IDLE_PERCENT = GIB, 5  # older drivers report less than this as used on an idle GPU
_WHY_LOST = "it cannot be used until it responds again"
_WHY_ECC = "memory errors corrupt data: results from this GPU cannot be trusted"
_WHY_ORDER = "CUDA and nvidia-smi number the GPUs differently"
_OTHER_TORCH = "install a torch built for it: https://pytorch.org/get-started/locally"
# words of the reason why torch does not use a GPU -> what to do
_WAYS_OUT = {
    "no CUDA": _OTHER_TORCH,
    "no kernels": _OTHER_TORCH,
    "ROCm": _OTHER_TORCH,
    "too old": "update the driver, or install a torch for an older CUDA: https://pytorch.org/get-started/locally",
    "MIG": "export CUDA_VISIBLE_DEVICES=MIG-...; nvidia-smi -L has the names",
}
