"""Check the GPUs in NVML and torch: driver, versions, indices, other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil  # type: ignore[import-untyped]
from packaging.version import Version

from runner.base.secret import sanitize
from runner.monitor.gpu_driver import open_driver
from runner.monitor.machine_sample import pids_are_of_host
from runner.monitor.nvml import (
    NORMAL_THROTTLING,
    THROTTLE_MEANINGS,
    Gpu,
    GpuProcess,
    Nvml,
    decode_throttle_reasons,
    iter_instances,
    visible,
)
from runner.plan.inventory import GIB, Device, Inventory, take_inventory
from runner.tools.doctor.findings import CheckContext, CheckResult, SharedResult, failed, ok, skip, warn


def driver(context: CheckContext) -> Iterator[CheckResult]:
    """NVML: driver, state of each GPU."""
    with open_driver() as nvml:
        if not nvml.gpus and not nvml.notes:
            yield _judge_missing_gpu(nvml.why_not)
            return
        serves = f", supports CUDA up to {nvml.cuda_version}" if nvml.cuda_version else ""
        seen = f"{nvml.driver_version}{serves}, {len(nvml.gpus)} GPU(s)"
        yield ok("", seen)
        for note in nvml.notes:
            yield failed("", note, nvml.tool.lost, _WHY_LOST)
        for gpu in nvml.gpus:
            yield _judge_state(gpu, nvml)


def processes(context: CheckContext) -> Iterator[CheckResult]:
    """Other processes on each GPU."""
    with open_driver() as nvml:
        if not nvml.gpus:
            yield skip("", "no GPU")
        for gpu in iter_instances(nvml.gpus):
            found = nvml.processes(gpu)
            name = f"GPU {gpu.index}" if gpu in nvml.gpus else gpu.uuid
            if found is None:
                yield skip(name, "the driver does not report its processes")
            elif not found:
                yield _judge_unlisted_processes(name, gpu, nvml)
            else:
                yield _judge_processes(name, found)


def gpus(context: CheckContext) -> Iterator[CheckResult | SharedResult]:
    """GPUs that torch can use, and reasons for the others."""
    inventory = take_inventory()
    yield SharedResult(inventory.to_json())
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
        yield _judge_device(device, inventory)


def versions(context: CheckContext) -> Iterator[CheckResult]:
    """CUDA version of the build and of the driver, cuDNN, NCCL."""
    here = context.required_inventory
    if here.cuda_version is None:
        yield skip("CUDA", f"torch {here.torch_version} was built without it")
        return
    with open_driver() as nvml:
        yield _compare_with_driver(here.cuda_version, nvml)
    if here.cudnn_version is None:
        yield failed("cuDNN", "torch cannot load it", f'pip install --force-reinstall "torch=={here.torch_version}"')
    else:
        yield _check_cudnn(here.cudnn_version, here)
    if here.usable:
        from runner.base.accelerator import nccl_version

        yield ok("NCCL", ".".join(map(str, nccl_version())))


def numbering(context: CheckContext) -> Iterator[CheckResult]:
    """GPU indices in CUDA and NVML, by UUID."""
    with open_driver() as nvml:
        if not nvml.gpus:
            yield skip("", "no GPU")
            return
        seen = [device for device in context.required_inventory.devices if device.kind == "cuda" and device.usable]
        pairs = [(device, nvml.find(device.uuid)) for device in seen if device.uuid]
        differing = [(device, gpu) for device, gpu in pairs if gpu is not None and gpu.index != device.index]
        for device, gpu in differing:
            numbers = f"{device.torch_name} ({device.name}) is GPU {gpu.index} of {nvml.tool.name}: {gpu.uuid}"
            yield warn(device.torch_name, numbers, _suggest_order_fix(), _WHY_ORDER)
        if pairs and not differing:
            yield ok("", f"{len(pairs)} GPU(s) have the number that {nvml.tool.name} shows")
        note = visible(nvml.gpus, os.environ).note
        if note and (not pairs or "CUDA_VISIBLE_DEVICES" in note):
            yield warn("CUDA_VISIBLE_DEVICES" if "VISIBLE" in note else "", note, _suggest_order_fix(), _WHY_ORDER)
        elif not pairs:
            yield ok("", "; ".join(f"GPU {gpu.index} is {gpu.uuid}" for gpu in nvml.gpus))


def compiler(context: CheckContext) -> Iterator[CheckResult]:
    """Triton, a C compiler, and GPUs that Triton supports."""
    if not context.cuda_gpus:
        yield skip("", "no GPU to compile for")
        return
    found = [context.required_inventory.why_not_compiled(gpu) for gpu in context.cuda_gpus]
    for problem in dict.fromkeys(filter(None, found)):
        yield warn("", problem.what, problem.fix)
    if not any(found):
        yield ok("", "Triton and a C compiler are installed")


# ---------------------------------------------------------------- one GPU


def _judge_missing_gpu(why_not: str) -> CheckResult:
    """Return skip for a machine without a GPU, FAIL for a GPU that does not respond."""
    if any(phrase in why_not for phrase in ("not loaded", "no permission", "different versions")):
        return failed("", why_not, "nvidia-smi; sudo modprobe nvidia; restart the machine after a driver update")
    if "nvidia-ml-py" in why_not:
        return failed("", why_not, "pip install nvidia-ml-py")
    return skip("", why_not)


def _judge_state(gpu: Gpu, nvml: Nvml) -> CheckResult:
    """Judge the state of a GPU; readings that it does not report are omitted."""
    now, name = nvml.read(gpu), f"GPU {gpu.index}"
    parts = [gpu.name]
    for reading, template in (
        ("temperature_c", "{:.0f} degC"),
        ("power_w", "{:.0f} W"),
        ("util_percent", "{:.0f} % busy"),
    ):
        value = now.get(reading)
        parts += [template.format(value)] if value is not None else []
    free, total = now.get("memory_free_bytes"), now.get("memory_total_bytes")
    if free is not None and total:
        parts.append(f"{free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if now.get("pcie_generation") and now.get("pcie_width"):
        parts.append(f"PCIe {now['pcie_generation']:.0f} x{now['pcie_width']:.0f}")
    if gpu in nvml.lost:
        return failed(name, f"{gpu.name} is lost: {nvml.lost[gpu]}", nvml.tool.lost, _WHY_LOST)
    if gpu in nvml.denied:
        parts.append(f"no permission to read {', '.join(sorted(nvml.denied[gpu]))}")
    errors = now.get("ecc_uncorrected")
    if errors:
        seen = f"{', '.join(parts)}; {errors:.0f} errors in its memory that ECC could not correct"
        return failed(name, seen, nvml.tool.memory_errors, _WHY_ECC)
    slowed = decode_throttle_reasons(now.get("throttle_reasons"))
    seen = ", ".join(parts) + (f"; clocks are throttled by {', '.join(slowed)}" if slowed else "")
    # Normal reasons need no advice: for example, a busy GPU runs at its power limit.
    advice = [THROTTLE_MEANINGS[reason] for reason in slowed if reason not in NORMAL_THROTTLING]
    if advice:
        fix = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; {'; '.join(advice)}"
        return warn(name, seen, fix, "computation is slower, and the GPU or its cooling may have a problem")
    return ok(name, seen)


def _judge_device(device: Device, inventory: Inventory) -> CheckResult:
    name = device.torch_name if device.usable else f"GPU {device.index}"
    size = f"{device.memory_bytes / GIB:.1f} GiB" if device.memory_bytes else "memory unknown"
    if device.usable:
        generation = f", {device.generation}" if device.capability or device.architecture else ""
        return ok(name, f"{device.name}, {size}{generation}{f', {device.uuid}' if device.uuid else ''}")
    seen = f"{device.name}, {size}: {device.why_not}"
    if device.why_not.startswith(("hidden by", "split into MIG")) and (inventory.usable or "hidden" in device.why_not):
        return skip(name, seen)
    fix = next((fix for phrase, fix in _FIXES.items() if phrase in device.why_not), "nvidia-smi; restart the machine")
    return (warn if inventory.usable else failed)(name, seen, fix)


def _judge_processes(name: str, found: Sequence[GpuProcess]) -> CheckResult:
    ordered = sorted(found, key=lambda process: -(process.used_bytes or 0))
    is_host = pids_are_of_host()
    shown = "; ".join(_format_process(process, is_host) for process in ordered[:_MAX_PROCESSES])
    more = f"; and {len(ordered) - _MAX_PROCESSES} more" if len(ordered) > _MAX_PROCESSES else ""
    fix = "wait for them, end those that are yours, or export CUDA_VISIBLE_DEVICES=UUID of another GPU"
    return warn(name, f"{shown}{more}", fix, figures={"processes": len(found)})


def _judge_unlisted_processes(name: str, gpu: Gpu, nvml: Nvml) -> CheckResult:
    """Judge a GPU without listed processes: memory in use belongs to processes that the driver does not show."""
    now = nvml.read(gpu, ("memory_used_bytes", "util_percent"))
    used, busy = now["memory_used_bytes"], now["util_percent"]
    if used is None and busy is None:
        return skip(name, "the driver lists no processes, and reports neither memory use nor utilization")
    parts = [f"{used / GIB:.1f} GiB are in use"] if used is not None else []
    parts += [f"it is {busy:.0f} % busy"] if busy is not None else []
    is_idle = (used or 0) <= _IDLE_BYTES and (busy or 0) <= _IDLE_PERCENT
    if is_idle or gpu.instances:  # processes on the MIG instances of a GPU explain its memory use and load
        return ok(name, f"no other processes; {' and '.join(parts)}")
    seen = f"{' and '.join(parts)}, by processes that the driver does not show here (in a container?)"
    fix = f"run {nvml.tool.name} on the host to list them, or export CUDA_VISIBLE_DEVICES=UUID of another GPU"
    return warn(name, seen, fix)


def _format_process(process: GpuProcess, is_host: bool) -> str:
    """Format a process: PID, name if the PIDs are those of the host, and memory."""
    name = ""
    with suppress(psutil.Error):
        name = f" {sanitize(psutil.Process(process.pid).name())}" if is_host else ""
    used = process.used_bytes
    return f"process {process.pid}{name}, {'unknown memory' if used is None else f'{used / GIB:.1f} GiB'}"


# ---------------------------------------------------------------- versions


def _compare_with_driver(built_for: str, nvml: Nvml) -> CheckResult:
    """Compare torch's CUDA version with the driver's: an older major version fails, an older minor one is a warning."""
    if nvml.cuda_version is None:
        return skip(
            "CUDA", f"torch is for CUDA {built_for}; {nvml.why_not or 'the driver does not report its CUDA version'}"
        )
    built, supported = Version(built_for), Version(nvml.cuda_version)
    seen = f"torch is for CUDA {built_for}, driver {nvml.driver_version} supports up to {nvml.cuda_version}"
    fix = f"update the driver to one that supports CUDA {built_for}, or install torch for CUDA {nvml.cuda_version}"
    if supported.major < built.major:
        return failed("CUDA", seen, fix)
    if supported < built:
        why = "an older minor version works, except for just-in-time compiled code (PTX)"
        return warn("CUDA", seen, fix, why)
    if built < MINIMA["CUDA"]:
        return warn("CUDA", f"{seen}; {MINIMA['CUDA']} or newer is recommended", "install a newer torch")
    return ok("CUDA", seen)


def _check_cudnn(number: int, here: Inventory) -> CheckResult:
    """Check cuDNN's version, whose encoding changed with version 9: 91002 is 9.10.2, 8907 is 8.9.7."""
    major, minor = (10000, 100) if number >= 90000 else (1000, 100)
    version = Version(f"{number // major}.{number % major // minor}.{number % minor}")
    if version < MINIMA["cuDNN"]:
        return warn("cuDNN", f"{version}, but {MINIMA['cuDNN']} or newer is recommended", "install a newer torch")
    return ok("cuDNN", f"{version} (used by torch {here.torch_version})")


def _suggest_order_fix() -> str:
    """Return a fix for different numbering; if CUDA_DEVICE_ORDER is already set, only UUIDs are reliable."""
    by_bus = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    by_name = "export CUDA_VISIBLE_DEVICES=GPU-..., with the UUIDs that nvidia-smi -L lists"
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return by_name
    return f"{by_bus}; {by_name}" if "CUDA_VISIBLE_DEVICES" in os.environ else by_bus


MINIMA = {"CUDA": Version("11.0"), "cuDNN": Version("8.0")}  # older versions lack kernels that torch >= 2.11 uses
_MAX_PROCESSES = 4
_IDLE_BYTES, _IDLE_PERCENT = GIB, 5  # upper limits of an idle GPU, on which older drivers report some memory as used
_WHY_LOST = "it cannot be used until it responds again"
_WHY_ECC = "memory errors corrupt data: results from this GPU cannot be trusted"
_WHY_ORDER = "CUDA and nvidia-smi number the GPUs differently"
_OTHER_TORCH = "install a torch built for it: https://pytorch.org/get-started/locally"
# phrase in the reason why torch does not use a GPU -> fix
_FIXES = {
    "no CUDA": _OTHER_TORCH,
    "no kernels": _OTHER_TORCH,
    "ROCm": _OTHER_TORCH,
    "too old": "update the driver, or install a torch for an older CUDA: https://pytorch.org/get-started/locally",
    "MIG": "export CUDA_VISIBLE_DEVICES=MIG-..., with a name that nvidia-smi -L lists",
}
