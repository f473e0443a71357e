"""The checks of `accel-run doctor first_contact` that call torch directly; importing this module loads torch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.axes.attention import refusal_reason
from runner.base.accelerator import get_accelerator
from runner.base.loaded_torch import is_stand_in
from runner.base.text import dtype_name, first_line, format_bytes
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.request import Request
from runner.forecast.demand import predict_needs
from runner.monitor.gpu_driver import open_driver
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import predict_memory
from runner.plan.overhead import get_overhead
from runner.plan.planner import make_plan
from runner.plan.update_time import UpdateTime, find_rank_rates, predict_phase_time
from runner.tools.doctor import arithmetic
from runner.tools.doctor.findings import NOT_TIMED, CheckContext, CheckResult, compare, skip

MIB = 2**20
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MAX_PRODUCT_S = 0.04  # maximum seconds of a matrix product whose rate is compared
NATIVE_SPEEDUP = 1.5  # minimum speedup over float32; matrix units are at least twice as fast, emulation is slower


def formats(context: CheckContext) -> Iterator[CheckResult]:
    """Number formats: those that the rules call native are faster than float32, and no others are."""
    numbers = [
        number_format
        for device in context.cuda_gpus
        for number_format in arithmetic.formats(device, context.required_inventory)
    ]
    wanted = [number_format for number_format in numbers if number_format.name != "fp64" and not number_format.why_not]
    rates: dict[str, float] = {}
    for number_format in context.each(wanted, lambda number_format: number_format.subject):
        found = arithmetic.check_format(number_format)
        if found.state != "ok":
            yield found
            continue
        _, rate = arithmetic.fastest_product(number_format, MAX_PRODUCT_S)
        rates[number_format.subject] = rate
        float32 = rates.get(f"{number_format.device.torch_name} fp32", 0.0)
        if number_format.name == "fp32":
            yield dataclasses.replace(found, figures={**found.figures, "gflop_per_s": rate / 1e9})
        elif is_stand_in() or not float32:
            yield skip(
                number_format.subject,
                NOT_TIMED if is_stand_in() else "the rate of fp32 is unknown, so there is nothing to compare with",
            )
        else:
            yield compare_format(number_format, rate / float32)


def compare_format(number_format: arithmetic.FormatUnderTest, speedup: float) -> CheckResult:
    """Compare the prediction that a format is native with its speed relative to float32."""
    is_native = speedup >= NATIVE_SPEEDUP
    seen = f"{speedup:.1f} times the rate of fp32, predicted {'native' if number_format.is_native else 'emulated'}"
    difference = ""
    if number_format.is_native and not is_native:
        difference = (
            f"precision={number_format.name} gains little here; the rule in runner/base/gpu_facts.py calls it native"
        )
    elif is_native and not number_format.is_native:
        difference = (
            f"the rule in runner/base/gpu_facts.py leaves out precision={number_format.name}, which is fast here"
        )
    return compare(
        number_format.subject, "native", (float(number_format.is_native), float(is_native)), seen, difference
    )


def attention(context: CheckContext) -> Iterator[CheckResult]:
    """Attention kernels: torch runs or refuses each one as the rules predict, by kernel and format."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    wanted = [
        (f"{device.torch_name} {kernel} {dtype_name(dtype)}", device, kernel, dtype)
        for device in context.cuda_gpus
        for kernel in KERNELS
        for dtype in dtypes
    ]
    for subject, device, kernel, dtype in context.each(wanted, lambda each: each[0]):
        if is_stand_in() and kernel != "math":
            yield skip(subject, "the simulated GPU has no such kernel")
            continue
        where = torch.device(device.torch_name)
        yield compare_kernel(subject, refusal_reason(kernel, dtype, where), _find_refusal(kernel, dtype, where))


def _find_refusal(kernel: str, dtype: Any, where: Any) -> str:
    """Run the kernel forward and backward; return why torch refuses it, empty if it runs."""
    inputs = [torch.randn(1, 12, 64, 64, device=where).to(dtype) for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            output_and_gradients(kernel, inputs)
        except RuntimeError as error:
            return parse_refusal(kernel, [str(each.message) for each in caught]) or first_line(str(error))
    return ""


def output_and_gradients(kernel: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output of causal attention, and the gradients of its sum of squares with respect to the inputs."""
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with sdpa_kernel([KERNELS[kernel]]):
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def parse_refusal(kernel: str, caught: Sequence[str]) -> str:
    """Return why torch refuses a kernel, from its warnings: a headline for each kernel, followed by the reasons."""
    reasons, is_ours = [], False
    for line in (first_line(message).partition(" (Triggered")[0] for message in caught):
        if line.endswith("because:"):
            is_ours = {"efficient": "memory efficient"}.get(kernel, kernel) in line.lower()
        elif is_ours:
            reasons.append(line)
    return "; ".join(reasons)


def compare_kernel(subject: str, expected: str, found: str) -> CheckResult:
    """Compare the expected and the actual reason why a kernel does not run; empty: it runs."""
    pair = float(not expected), float(not found)
    seen = "runs, as predicted" if not found else f"refused, as predicted: {found}"
    if expected and not found:
        return compare(subject, "runs", pair, "runs", f"predicted to refuse, because {expected}")
    if found and not expected:
        return compare(subject, "runs", pair, f"refused ({found})", "predicted to run")
    return compare(subject, "runs", pair, seen)


# ---------------------------------------------------------------- memory of a CUDA context


def context_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Context: GPU memory of a process without tensors, after kernels and libraries are loaded."""
    for device in context.each(context.cuda_gpus, lambda device: device.torch_name):
        with open_driver() as nvml:
            gpu = nvml.find(device.uuid) if device.uuid else None
            before = (nvml.read(gpu, ["memory_used_bytes"])["memory_used_bytes"] if gpu else None) or 0
        where = torch.device(device.torch_name)
        matrix = torch.randn(512, 512, device=where, requires_grad=True)
        image, kernel = (matrix @ matrix)[None, None], torch.ones(1, 1, 3, 3, device=where)
        torch.autograd.backward(torch.nn.functional.conv2d(image, kernel).sum())
        torch.accelerator.synchronize(where)
        accelerator = get_accelerator(where)
        del matrix, image, kernel
        accelerator.empty_cache()
        memory = accelerator.free_memory()
        assert memory is not None
        predicted, measured = (
            get_overhead(device.kind, device.capability).libraries,
            memory.total - memory.free - before,
        )
        difference = ""
        if measured > predicted:
            difference = "a run that should fit may run out of memory; raise the value in runner/plan/overhead.yaml"
        elif measured < predicted / 2:
            difference = "larger runs would fit than predicted; lower the value in runner/plan/overhead.yaml"
        seen = f"predicted at most {format_bytes(predicted)}, measured {format_bytes(int(measured))}"
        yield compare(device.torch_name, "mib", (predicted / MIB, measured / MIB), seen, difference)


# ---------------------------------------------------------------- a prediction of the short run


@dataclasses.dataclass(frozen=True)
class RunPrediction:
    """The predictions for a run: the memory of its most demanding phase, and the updates of its first training phase.

    allocated  peak bytes in tensors
    reserved   peak bytes that torch's allocator reserves, without the margin for memory that kernels allocate
               internally, which a trace does not record
    launches   number of kernel launches in an update
    seconds    time of an update; None if no hardware profile describes the device
    """

    allocated: int
    reserved: int
    launches: int
    seconds: UpdateTime | None


def predict_run(request: Request, inventory: Inventory) -> RunPrediction | str:
    """Predict memory, kernel launches and update time of a run; return the reason if they cannot be predicted."""
    configuration = compose(request)
    needs = predict_needs(configuration, inventory)
    plan = make_plan(configuration, inventory, needs=needs)
    phases = [planned for planned in plan.selected if planned.name in needs.demands]
    phase = next((planned for planned in phases if planned.kind == "train"), None)
    if phase is None:
        return needs.why_not or "there is no training phase"
    demand, rank = needs.demands[phase.name], dataclasses.replace(plan.ranks[0], unseen=0.0)
    peaks = [
        predict_memory(needs.demands[planned.name], planned.batch.micro_batch_size, rank).parts for planned in phases
    ]
    allocated, allocator = max(
        (sum(size for part, size in parts.items() if part not in ("libraries", "allocator")), parts.get("allocator", 0))
        for parts in peaks
    )
    of_pass, passes = demand.at(phase.batch.micro_batch_size).work.launches, phase.batch.accumulation_steps
    seconds = predict_phase_time(plan, phase, demand, find_rank_rates(plan, list(profile_facts().values())))
    return RunPrediction(allocated, allocated + allocator, demand.step.launches + of_pass * passes, seconds)
