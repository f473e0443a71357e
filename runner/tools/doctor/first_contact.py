"""`accel-run doctor first_contact`: compare the program's predictions for a GPU with measurements.

For the first run on an untested kind of GPU. Each check compares a prediction that the plan relies on; a difference is
a warning that explains the consequence for the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.accelerator import get_accelerator, is_stand_in
from runner.base.text import first_line, format_bytes
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.monitor.gpu_driver import open_driver
from runner.plan.inventory import Device
from runner.plan.overhead import get_overhead
from runner.tools.doctor import arithmetic, gpu_checks, kernels, software
from runner.tools.doctor.findings import CheckContext, CheckResult, DoctorCheck, failed, ok, skip, warn

if TYPE_CHECKING:
    from runner.plan.estimate import TimeEstimate

GIB, MIB = 2**30, 2**20
LARGE_GPU_BYTES = 10 * GIB  # a larger GPU trains GPT-2 with 124 million parameters, a smaller one the tiny model
OVERRIDES = ("global_batch_size=16", "micro_batch_size=8", "updates=20", "evaluate.samples=16")
LARGE_OVERRIDES = ("task.size=124m", "global_batch_size=8", "micro_batch_size=4")
NATIVE_SPEEDUP = 1.5  # over float32; matrix units are at least twice as fast, emulation is slower
MEMORY_TOLERANCE = 0.05  # relative to the prediction of the trace; docs/memory.md
SEGMENT_BYTES = 2 * MIB  # the smallest allocation of torch's allocator from the driver; less is no difference
MIN_CONTEXT_BYTES = 100 * MIB  # a context needs 300 to 500 MiB
SAMPLE_INTERVAL_S = 0.5
MAX_WAITS = 2.0  # per update: loss and norm for a line of progress (docs/gpu-costs.md)
SIMULATED = "This GPU is simulated: a rehearsal of the command on the CPU. It says nothing about a real GPU."
NOT_TIMED = "the stand-in computes on the CPU: its times are not compared"


def contact_checks(request: Request) -> Mapping[str, DoctorCheck]:
    """Return the checks in the order in which they run; together they take at most five minutes.

    request  settings of the run whose memory, times and waits are compared; they override the settings chosen here
    """
    training_check = functools.partial(training, request=request)
    return {
        "torch": DoctorCheck(software.torch, "all computation uses it", 30.0),
        "gpus": DoctorCheck(gpu_checks.gpus, "the checks need a GPU", 30.0, "torch"),
        "formats": DoctorCheck(
            formats, "precision=auto selects the best format that the rules call native", 25.0, "gpus"
        ),
        "kernels": DoctorCheck(attention, "attention=auto and the plan rely on these rules", 20.0, "gpus"),
        "context": DoctorCheck(context_memory, "the plan uses this value to decide what fits in memory", 20.0, "gpus"),
        "training": DoctorCheck(
            training_check, "micro_batch_size=auto and memory=budget rely on these predictions", 170.0, "gpus"
        ),
    }


def compare(subject: str, unit: str, pair: tuple[float, float], seen: str, difference: str = "") -> CheckResult:
    """Return the result of a comparison of (predicted, measured).

    difference  consequence of the difference; empty: they agree
    """
    figures = {f"predicted_{unit}": pair[0], f"measured_{unit}": pair[1]}
    if not difference:
        return dataclasses.replace(ok(subject, seen), figures=figures)
    return warn(subject, f"{seen}: {difference}", "send first_contact.json", figures=figures)


# ---------------------------------------------------------------- formats and kernels


def formats(context: CheckContext) -> Iterator[CheckResult]:
    """Formats: exactly those that the rules call native are faster than float32."""
    numbers = [
        number_format
        for device in _gpus(context)
        for number_format in arithmetic.formats(device, context.required_inventory)
    ]
    wanted = [number_format for number_format in numbers if number_format.name != "fp64" and not number_format.why_not]
    rates = {finding.subject: 1e9 * finding.figures.get("gflop_per_s", 0.0) for finding in context.earlier_results}
    for number_format in context.pending(wanted, lambda number_format: number_format.subject):
        found = arithmetic.check_format(number_format)
        if found.state != "ok":
            yield found
            continue
        rate = rates[number_format.subject] = arithmetic.flops_per_second(number_format)
        float32 = rates.get(f"{number_format.device.torch_name} fp32", 0.0)
        if number_format.name == "fp32":
            yield dataclasses.replace(found, figures={**found.figures, "gflop_per_s": rate / 1e9})
        elif is_stand_in() or not float32:
            yield skip(
                number_format.subject, NOT_TIMED if is_stand_in() else "there is no rate of fp32 to compare with"
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
            f"precision={number_format.name} gains little here; the rule in runner/base/accelerator.py calls it native"
        )
    elif is_native and not number_format.is_native:
        difference = (
            f"the rule in runner/base/accelerator.py leaves out precision={number_format.name}, which is fast here"
        )
    return compare(
        number_format.subject, "native", (float(number_format.is_native), float(is_native)), seen, difference
    )


def attention(context: CheckContext) -> Iterator[CheckResult]:
    """Attention kernels: each runs or refuses as the rules predict, by kernel and format."""
    import torch

    from runner.axes.attention import refusal_reason

    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    wanted = [
        (f"{device.torch_name} {kernel} {str(dtype).removeprefix('torch.')}", device, kernel, dtype)
        for device in _gpus(context)
        for kernel in kernels.KERNELS
        for dtype in dtypes
    ]
    for subject, device, kernel, dtype in context.pending(wanted, lambda each: each[0]):
        if is_stand_in() and kernel != "math":
            yield skip(subject, "the stand-in has no such kernel")
            continue
        where = torch.device(device.torch_name)
        yield compare_kernel(
            subject, refusal_reason(kernel, kernels.SHAPE, dtype, where), _find_refusal(kernel, dtype, where)
        )


def _find_refusal(kernel: str, dtype: Any, where: Any) -> str:
    """Run the kernel forward and backward; return why torch refuses it, empty if it runs."""
    import torch

    inputs = [torch.randn(1, 12, 64, 64, device=where).to(dtype) for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kernels.output_and_gradients(kernel, inputs)
        except RuntimeError as error:
            return kernels.parse_refusal(kernel, [str(each.message) for each in caught]) or first_line(str(error))
    return ""


def compare_kernel(subject: str, expected: str, found: str) -> CheckResult:
    """Compare the expected and the actual reason why a kernel does not run; empty: it runs."""
    pair = float(not expected), float(not found)
    seen = "runs, as predicted" if not found else f"refused, as predicted: {found}"
    if expected and not found:
        return compare(subject, "runs", pair, "runs", f"predicted to refuse, because {expected}")
    if found and not expected:
        return compare(subject, "runs", pair, f"refused ({found})", "predicted to run")
    return compare(subject, "runs", pair, seen)


# ---------------------------------------------------------------- memory of a context


def context_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Context: GPU memory of a process without tensors, after kernels and libraries are loaded."""
    import torch

    for device in context.pending(_gpus(context), lambda device: device.torch_name):
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
            difference = "runs predicted to fit may be out of memory; raise the value in runner/plan/overhead.yaml"
        elif measured < predicted / 2:
            difference = "larger runs would fit than predicted; lower the value in runner/plan/overhead.yaml"
        seen = f"predicted at most {format_bytes(predicted)}, measured {format_bytes(int(measured))}"
        yield compare(device.torch_name, "mib", (predicted / MIB, measured / MIB), seen, difference)


# ---------------------------------------------------------------- a short run


@dataclasses.dataclass(frozen=True)
class RunPrediction:
    """The predictions for the run.

    allocated  peak bytes in tensors
    reserved   peak bytes that torch's allocator reserves, without the margin for kernels that a trace does not see
    launches   number of kernels of an update
    seconds    time of an update; None if no hardware profile describes the device
    """

    allocated: int
    reserved: int
    launches: int
    seconds: TimeEstimate | None


def training(context: CheckContext, *, request: Request) -> Iterator[CheckResult]:
    """A short run on the first GPU: memory, time, kernels and waits."""
    for device in context.pending(_gpus(context)[:1], lambda device: device.torch_name):
        is_default = not request.task_file and not any(item.startswith("task=") for item in request.overrides)
        is_large = is_default and device.memory_bytes > LARGE_GPU_BYTES and not is_stand_in()
        chosen = merge_overrides(OVERRIDES, LARGE_OVERRIDES if is_large else ())
        # The stand-in has no flash and efficient attention, which the plan expects and which need less memory.
        attention = ("attention=math",) if is_stand_in() else ()
        own = (f"device={device.torch_name}", "checkpoint=off", "tracker=none", "monitor=off", "parallelism=single")
        wanted = dataclasses.replace(
            request, overrides=merge_overrides(merge_overrides(chosen, request.overrides), (*own, *attention))
        )
        context.begin(f"{device.torch_name} trace")
        expected = predict_run(wanted, context)
        context.begin(f"{device.torch_name} train")
        with _watch_other_gpus(device) as growth:
            failure, folder = _run_command("train", wanted, context)
        if failure is not None:
            yield failed(device.torch_name, f"training ended with {failure}", "accel-run doctor; then send this page")
            return
        yield from _compare_training(device, expected, folder)
        yield compare_contexts(f"{device.torch_name} contexts", growth)
        context.begin(f"{device.torch_name} profile")
        failure, folder = _run_command("profile", wanted, context, "skip=2", "updates=2")
        if failure is not None:
            yield failed(device.torch_name, f"profiling ended with {failure}", "accel-run doctor; then send this page")
            return
        yield from _compare_profile(device, expected, folder)


def predict_run(request: Request, context: CheckContext) -> RunPrediction | str:
    """Predict the run; return the reason if that is not possible."""
    from runner.forecast.demand import predict_needs
    from runner.plan.memory_fit import predict_memory
    from runner.plan.planner import make_plan
    from runner.plan.prediction_text import estimate_phase_time, find_rank_peaks

    configuration = compose(request)
    needs = predict_needs(configuration, context.required_inventory)
    plan = make_plan(configuration, context.required_inventory, needs=needs)
    phase = next((planned for planned in plan.phases if planned.name in needs.demands), None)
    if phase is None:
        return needs.why_not or "there is no training phase"
    demand, rank = needs.demands[phase.name], dataclasses.replace(plan.ranks[0], unseen=0.0)
    parts = predict_memory(demand, phase.batch.micro_batch_size, rank).parts
    allocated = sum(size for part, size in parts.items() if part not in ("libraries", "allocator"))
    of_pass, passes = demand.at(phase.batch.micro_batch_size).work.launches, phase.batch.accumulation_steps
    seconds = estimate_phase_time(plan, phase, demand, find_rank_peaks(plan, list(profile_facts().values())))
    return RunPrediction(
        allocated, allocated + parts.get("allocator", 0), demand.step.launches + of_pass * passes, seconds
    )


def _run_command(command: str, request: Request, context: CheckContext, *words: str) -> tuple[str | None, Path]:
    """Run a command of accel-run; return its failure, None if it succeeded, and its folder."""
    root = context.scratch / command
    line = [sys.executable, "-m", "runner", command, *merge_overrides(request.overrides, words)]
    line += ["run=contact", f"output_root={root}"]
    line += ["--task", str(request.task_file)] if request.task_file else []
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    folder = root / ("profiles/contact" if command == "profile" else "contact")
    return (f"exit code {done.returncode}: {find_error(done.stderr)}" if done.returncode else None), folder


def find_error(text: str) -> str:
    """Return the line that describes the error in the standard error of a command, where notes may come first."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("accel-run: ")), lines[0] if lines else "")


@contextmanager
def _watch_other_gpus(device: Device) -> Iterator[dict[str, float]]:
    """Sample the memory of other GPUs during the block; yield UUID -> largest growth in bytes."""
    growth: dict[str, float] = {}
    stopped = threading.Event()

    def watch() -> None:
        with open_driver() as nvml:
            if not device.uuid or nvml.find(device.uuid) not in nvml.gpus:  # unknown, or a MIG instance
                return
            others = {gpu.uuid: gpu for gpu in nvml.gpus if gpu != nvml.find(device.uuid)}
            before: dict[str, float] = {}
            while True:
                for uuid, gpu in others.items():
                    used = nvml.read(gpu, ["memory_used_bytes"])["memory_used_bytes"]
                    if used is not None:
                        growth[uuid] = max(growth.get(uuid, 0.0), used - before.setdefault(uuid, used))
                if stopped.wait(SAMPLE_INTERVAL_S):
                    return

    watcher = threading.Thread(target=watch, name="memory of other GPUs", daemon=True)
    watcher.start()
    try:
        yield growth
    finally:
        stopped.set()
        watcher.join(5.0)  # NVML responds within milliseconds, or hangs


def compare_contexts(subject: str, growth: Mapping[str, float]) -> CheckResult:
    """Check that the run used no memory on other GPUs.

    growth  UUID of another GPU -> growth of its used memory in bytes during the run
    """
    if not growth:
        return skip(subject, "NVML shows no other GPU")
    others = [uuid for uuid, size in growth.items() if size > MIN_CONTEXT_BYTES]
    difference = f"the run opens a context on {', '.join(others)}, or another program started there" if others else ""
    seen = f"memory used on {len(others)} of {len(growth)} other GPUs, predicted none"
    return compare(subject, "gpus", (0.0, float(len(others))), seen, difference)


def _compare_training(device: Device, expected: RunPrediction | str, folder: Path) -> Iterator[CheckResult]:
    from runner.durable.record_files import read_record

    evidence, name = read_record(folder).evidence, device.torch_name
    assert evidence is not None, "a successful run records its evidence"
    if isinstance(expected, str):
        yield warn(f"{name} memory", f"not predicted: {expected}", "send first_contact.json")
        return
    for what, predicted, measured_gib in (
        ("allocated memory", expected.allocated, evidence.device_peak_gib),
        ("reserved memory", expected.reserved, evidence.device_peak_reserved_gib),
    ):
        yield compare_memory(f"{name} {what}", predicted, (measured_gib or 0.0) * GIB)
    yield compare_time(f"{name} update time", expected.seconds, evidence.step_time_ms)


def compare_memory(subject: str, predicted: float, measured: float) -> CheckResult:
    """Compare predicted and measured bytes."""
    difference = ""
    if measured > (1 + MEMORY_TOLERANCE) * predicted + SEGMENT_BYTES:
        difference = "kernels allocate memory that the trace does not see; runs near the limit may be out of memory"
    elif measured < (1 - 2 * MEMORY_TOLERANCE) * predicted - SEGMENT_BYTES:
        difference = "the trace counts memory that is not used here; micro_batch_size=auto is smaller than necessary"
    seen = f"predicted {format_bytes(int(predicted))}, measured {format_bytes(int(measured))}"
    return compare(subject, "mib", (predicted / MIB, measured / MIB), seen, difference)


def compare_time(subject: str, expected: TimeEstimate | None, measured_ms: float | None) -> CheckResult:
    """Compare the time of an update with the estimated range; None: not estimated or not measured."""
    if is_stand_in():
        return skip(subject, NOT_TIMED)
    if measured_ms is None or expected is None:
        missing = "too few updates were timed" if expected else "no hardware profile describes this GPU"
        return skip(subject, missing, "" if expected else "accel-run benchmark machine")
    low, high = 1e3 * expected.low, 1e3 * expected.high
    difference = ""
    if measured_ms > 1.5 * high:
        difference = "slower than estimated; accel-run advise finds what limits it"
    elif measured_ms < low / 1.5:
        difference = "faster than estimated; the profile's peaks or the assumed launch time are too low"
    return compare(
        subject,
        "ms",
        ((low + high) / 2, measured_ms),
        f"estimated {expected}, measured {measured_ms:.3g} ms",
        difference,
    )


def _compare_profile(device: Device, expected: RunPrediction | str, folder: Path) -> Iterator[CheckResult]:
    """Compare the waits and kernels of an update with those in the profile."""
    name, summary = device.torch_name, json.loads((folder / "profile/summary.json").read_text(encoding="utf-8"))
    waits = [wait for wait in summary["waits"] if not wait["in_task"]]
    number = sum(wait["per_update"] for wait in waits)
    places = ", ".join(f"{wait['place']} ({wait['per_update']:g})" for wait in waits)
    difference = "the training loop waits for the device at these places" if number > MAX_WAITS else ""
    seen = f"{number:g} per update{f', at {places}' if places else ''}; at most {MAX_WAITS:g} are expected"
    yield compare(f"{name} waits", "per_update", (MAX_WAITS, number), seen, difference)
    launched = summary["kernels_per_update"]
    if not launched or isinstance(expected, str):
        yield skip(f"{name} kernels", "the profiler recorded no kernels here")
        return
    difference = ""
    if not expected.launches / 2 <= launched <= expected.launches * 2:
        difference = "estimated times of small models depend on this number; a trace counts operators, not kernels"
    seen = f"predicted {expected.launches:,} per update, launched {launched:,.0f}"
    yield compare(f"{name} kernels", "per_update", (expected.launches, launched), seen, difference)


def _gpus(context: CheckContext) -> Sequence[Device]:
    return [device for device in context.gpus if device.kind == "cuda"]


# ---------------------------------------------------------------- the page


def make_report(
    findings: Sequence[CheckResult], hardware: Mapping[str, Any], overrides: Sequence[str], version: str
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "version": version,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "is_stand_in": is_stand_in(),
        "settings": list(overrides),
        "num_differences": sum(finding.state in ("warn", "FAIL") for finding in findings),
        "findings": [finding.to_json() for finding in findings],
        "hardware": hardware,
    }


def format_page(content: Mapping[str, Any]) -> str:
    """Return the page to send, in Markdown."""
    findings = [CheckResult(**values) for values in content["findings"]]
    hardware = content["hardware"]
    names = [device["name"] for device in hardware["devices"] if device["usable"]]
    versions = (
        f"torch {hardware['torch_version']}, CUDA {hardware['cuda_version']}, driver {hardware['driver_version']}"
    )
    lines = [
        f"# First contact: {', '.join(names)}" + (" (simulated)" if content["is_stand_in"] else ""),
        "",
        f"accel-run {content['version']}, {versions}, {content['date']}",
        *(["", SIMULATED] if content["is_stand_in"] else []),
        "",
        "| what | predicted | measured | |",
        "|---|---|---|---|",
        *(_row(finding) for finding in findings if any(key.startswith("predicted_") for key in finding.figures)),
        "",
        f"## {content['num_differences']} differences",
        "",
        *(
            f"- {finding.check}, {finding.subject}: {finding.seen}"
            for finding in findings
            if finding.state in ("warn", "FAIL")
        ),
        "",
        "## Not compared",
        "",
        *(f"- {finding.check}, {finding.subject}: {finding.seen}" for finding in findings if finding.state == "skip"),
        "",
        "All figures are in first_contact.json beside this file.",
    ]
    return "\n".join(lines) + "\n"


def _row(finding: CheckResult) -> str:
    unit = next(key.removeprefix("predicted_") for key in finding.figures if key.startswith("predicted_"))
    values = [finding.figures[f"{side}_{unit}"] for side in ("predicted", "measured")]
    if unit in ("runs", "native"):
        cells = [f"{unit}: {'yes' if value else 'no'}" for value in values]
    else:
        cells = [f"{value:,.4g} {_UNITS[unit]}" for value in values]
    return f"| {finding.check}, {finding.subject} | {cells[0]} | {cells[1]} | {finding.state} |"


_UNITS = {"gpus": "GPUs", "mib": "MiB", "ms": "ms", "per_update": "per update"}
