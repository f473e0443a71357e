"""`accel-run doctor first_contact`: what the program predicts of a GPU beside what the GPU does.

Made for the first minutes on a kind of GPU that the program has not run on. Each row of the table below is a prediction
that the plan relies on; a difference is a warning with a sentence that says what it means for the plan.
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
from runner.plan.overhead import overhead_of
from runner.tools.doctor import arithmetic, gpu_checks, kernels, software
from runner.tools.doctor.findings import CheckContext, CheckResult, DoctorCheck, failed, ok, skip, warn

if TYPE_CHECKING:
    from runner.plan.estimate import Seconds

GIB, MIB = 2**30, 2**20
LARGE = 10 * GIB  # a GPU with more trains GPT-2 of 124 million parameters here, another one the tiny model
WORDS = ("global_batch_size=16", "micro_batch_size=8", "updates=20", "evaluate.samples=16")
OF_LARGE = ("task.size=124m", "global_batch_size=8", "micro_batch_size=4")
NATIVE_SPEEDUP = 1.5  # over float32; matrix units are at least twice as fast, emulation is slower
MEMORY_TOLERANCE = 0.05  # of what the trace predicts; docs/memory.md
SEGMENT = 2 * MIB  # the smallest that torch's allocator takes from the driver; less is no difference
LEAST_CONTEXT = 100 * MIB  # of a GPU's memory; drivers need 300 to 500 MiB for one
LOOK_EVERY_S = 0.5
MOST_WAITS = 2.0  # an update: loss and norm for a line of progress (docs/gpu-costs.md)
NOT_TIMED = "the stand-in computes on the CPU: its times are not compared"


def contact_checks(request: Request) -> Mapping[str, DoctorCheck]:
    """Return the checks in the order in which they are made; together they take at most five minutes.

    request  settings of the run whose memory, times and waits are compared; they win over those chosen here
    """
    trains = functools.partial(training, request=request)
    return {
        "torch": DoctorCheck(software.torch, "it computes everything", 30.0),
        "gpus": DoctorCheck(gpu_checks.gpus, "there must be one", 30.0, "torch"),
        "formats": DoctorCheck(
            formats, "precision=auto takes the best format that the rules call native", 25.0, "gpus"
        ),
        "kernels": DoctorCheck(attention, "attention=auto and the plan rely on these rules", 20.0, "gpus"),
        "context": DoctorCheck(context_memory, "the plan judges with this figure what fits", 20.0, "gpus"),
        "training": DoctorCheck(
            trains, "micro_batch_size=auto, memory=budget and what fits rely on these predictions", 170.0, "gpus"
        ),
    }


def compared(subject: str, unit: str, pair: tuple[float, float], seen: str, difference: str = "") -> CheckResult:
    """Return predicted beside measured. `difference` says what it means that they differ; empty where they agree."""
    figures = {f"predicted_{unit}": pair[0], f"measured_{unit}": pair[1]}
    if not difference:
        return dataclasses.replace(ok(subject, seen), figures=figures)
    return warn(subject, f"{seen}: {difference}", "send first_contact.json", figures=figures)


# ---------------------------------------------------------------- formats and kernels


def formats(context: CheckContext) -> Iterator[CheckResult]:
    """Whether the formats that the rules call native are faster than float32, and no others."""
    numbers = [number for device in _gpus(context) for number in arithmetic.formats(device, context.here)]
    wanted = [number for number in numbers if number.name != "fp64" and not number.why_not]
    rates = {finding.subject: 1e9 * finding.figures.get("gflop_per_s", 0.0) for finding in context.found}
    for number in context.each(wanted, lambda number: number.subject):
        found = arithmetic.try_format(number)
        if found.state != "ok":
            yield found
            continue
        rate = rates[number.subject] = arithmetic.rate(number)
        float32 = rates.get(f"{number.device.torch_name} fp32", 0.0)
        if number.name == "fp32":
            yield dataclasses.replace(found, figures={**found.figures, "gflop_per_s": rate / 1e9})
        elif is_stand_in() or not float32:
            yield skip(number.subject, NOT_TIMED if is_stand_in() else "there is no rate of fp32 to compare with")
        else:
            yield of_format(number, rate / float32)


def of_format(number: arithmetic.FormatUnderTest, speedup: float) -> CheckResult:
    """Compare whether a format is native with its rate, as a multiple of float32's."""
    is_native = speedup >= NATIVE_SPEEDUP
    seen = f"{speedup:.1f} times the rate of fp32, predicted {'native' if number.is_own else 'emulated'}"
    difference = ""
    if number.is_own and not is_native:
        difference = (
            f"precision={number.name} gains little here; the rule in runner/base/accelerator.py calls it native"
        )
    elif is_native and not number.is_own:
        difference = f"the rule in runner/base/accelerator.py leaves out precision={number.name}, which is fast here"
    return compared(number.subject, "native", (float(number.is_own), float(is_native)), seen, difference)


def attention(context: CheckContext) -> Iterator[CheckResult]:
    """Whether each attention kernel runs or refuses as the rules say, by kernel and format."""
    import torch

    from runner.axes.attention import refusal_reason

    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    wanted = [
        (f"{device.torch_name} {kernel} {str(dtype).removeprefix('torch.')}", device, kernel, dtype)
        for device in _gpus(context)
        for kernel in kernels.KERNELS
        for dtype in dtypes
    ]
    for subject, device, kernel, dtype in context.each(wanted, lambda each: each[0]):
        if is_stand_in() and kernel != "math":
            yield skip(subject, "the stand-in has no such kernel")
            continue
        where = torch.device(device.torch_name)
        yield of_kernel(subject, refusal_reason(kernel, kernels.SHAPE, dtype, where), _refusal(kernel, dtype, where))


def _refusal(kernel: str, dtype: Any, where: Any) -> str:
    """Return why torch does not run the kernel forward and backward, empty where it does."""
    import torch

    inputs = [torch.randn(1, 12, 64, 64, device=where).to(dtype) for _ in range(3)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kernels.output_and_gradients(kernel, inputs)
        except RuntimeError as error:
            return kernels.reason_of(kernel, [str(each.message) for each in said]) or first_line(str(error))
    return ""


def of_kernel(subject: str, expected: str, found: str) -> CheckResult:
    """Compare two reasons why a kernel does not run; empty where it does."""
    pair = float(not expected), float(not found)
    seen = "runs, as predicted" if not found else f"refused, as predicted: {found}"
    if expected and not found:
        return compared(subject, "runs", pair, "runs", f"predicted to refuse, because {expected}")
    if found and not expected:
        return compared(subject, "runs", pair, f"refused ({found})", "predicted to run")
    return compared(subject, "runs", pair, seen)


# ---------------------------------------------------------------- memory of a context


def context_memory(context: CheckContext) -> Iterator[CheckResult]:
    """What a process holds on a GPU before its first tensor, and after kernels and libraries are loaded."""
    import torch

    for device in context.each(_gpus(context), lambda device: device.torch_name):
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
        predicted, measured = overhead_of(device.kind, device.capability).libraries, memory.total - memory.free - before
        difference = ""
        if measured > predicted:
            difference = "what is said to fit may not fit; runner/plan/overhead.yaml must say more for this GPU"
        elif measured < predicted / 2:
            difference = "more would fit than is said; runner/plan/overhead.yaml may say less for this GPU"
        seen = f"predicted at most {format_bytes(predicted)}, measured {format_bytes(int(measured))}"
        yield compared(device.torch_name, "mib", (predicted / MIB, measured / MIB), seen, difference)


# ---------------------------------------------------------------- a short run


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is predicted of the run.

    allocated  bytes in tensors at most
    reserved   bytes that torch's allocator takes for them, without the margin for kernels that a trace does not see
    launches   kernels of an update
    seconds    of an update; None where no profile describes the device
    """

    allocated: int
    reserved: int
    launches: int
    seconds: Seconds | None


def training(context: CheckContext, *, request: Request) -> Iterator[CheckResult]:
    """Memory, time, kernels and waits of a short run on the first GPU."""
    for device in context.each(_gpus(context)[:1], lambda device: device.torch_name):
        is_ours = not request.task_file and not any(word.startswith("task=") for word in request.overrides)
        is_large = is_ours and device.memory_bytes > LARGE and not is_stand_in()
        chosen = merge_overrides(WORDS, OF_LARGE if is_large else ())
        # On the stand-in, flash and efficient attention, which the plan expects and which hold less, are not there.
        attention = ("attention=math",) if is_stand_in() else ()
        own = (f"device={device.torch_name}", "checkpoint=off", "tracker=none", "monitor=off", "parallelism=single")
        wanted = dataclasses.replace(
            request, overrides=merge_overrides(merge_overrides(chosen, request.overrides), (*own, *attention))
        )
        context.begin(f"{device.torch_name} trace")
        expected = expectation(wanted, context)
        context.begin(f"{device.torch_name} train")
        with _growth_of_others(device) as grown:
            ended, folder = _run("train", wanted, context)
        if ended is not None:
            yield failed(device.torch_name, f"training ended with {ended}", "accel-run doctor; then send this page")
            return
        yield from _of_training(device, expected, folder)
        yield of_contexts(f"{device.torch_name} contexts", grown)
        context.begin(f"{device.torch_name} profile")
        ended, folder = _run("profile", wanted, context, "skip=2", "updates=2")
        if ended is not None:
            yield failed(device.torch_name, f"profiling ended with {ended}", "accel-run doctor; then send this page")
            return
        yield from _of_profile(device, expected, folder)


def expectation(request: Request, context: CheckContext) -> Expected | str:
    """Return what is predicted of the run, or why nothing is."""
    from runner.forecast.demand import predict_needs
    from runner.plan.memory_fit import predicted
    from runner.plan.planner import make_plan
    from runner.plan.prediction_text import peaks_of_ranks, seconds_of

    configuration = compose(request)
    needs = predict_needs(configuration, context.here)
    plan = make_plan(configuration, context.here, needs=needs)
    phase = next((each for each in plan.phases if each.name in needs.demands), None)
    if phase is None:
        return needs.why_not or "no phase trains"
    demand, rank = needs.demands[phase.name], dataclasses.replace(plan.ranks[0], unseen=0.0)
    parts = predicted(demand, phase.batch.micro_batch_size, rank).parts
    allocated = sum(size for part, size in parts.items() if part not in ("libraries", "allocator"))
    of_pass, passes = demand.at(phase.batch.micro_batch_size).work.launches, phase.batch.accumulation_steps
    seconds = seconds_of(plan, phase, demand, peaks_of_ranks(plan, list(profile_facts().values())))
    return Expected(allocated, allocated + parts.get("allocator", 0), demand.step.launches + of_pass * passes, seconds)


def _run(command: str, request: Request, context: CheckContext, *words: str) -> tuple[str | None, Path]:
    """Run a command of accel-run; return how it failed, None where it did not, and its folder."""
    root = context.scratch / command
    line = [sys.executable, "-m", "runner", command, *merge_overrides(request.overrides, words)]
    line += ["run=contact", f"output_root={root}"]
    line += ["--task", str(request.task_file)] if request.task_file else []
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    said = [text for text in done.stderr.splitlines() if text.strip()]
    folder = root / ("profiles/contact" if command == "profile" else "contact")
    return (f"exit code {done.returncode}: {said[0] if said else ''}" if done.returncode else None), folder


@contextmanager
def _growth_of_others(device: Device) -> Iterator[dict[str, float]]:
    """Yield other GPU -> bytes by which its memory in use has grown at most; complete at the end of the block."""
    grown: dict[str, float] = {}
    is_over = threading.Event()

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
                        grown[uuid] = max(grown.get(uuid, 0.0), used - before.setdefault(uuid, used))
                if is_over.wait(LOOK_EVERY_S):
                    return

    watcher = threading.Thread(target=watch, name="growth of others", daemon=True)
    watcher.start()
    try:
        yield grown
    finally:
        is_over.set()
        watcher.join(5.0)  # NVML answers in milliseconds, or never


def of_contexts(subject: str, grown: Mapping[str, float]) -> CheckResult:
    """Compare the number of other GPUs on which the run took memory with none.

    grown  other GPU -> bytes by which its memory in use has grown during the run
    """
    if not grown:
        return skip(subject, "NVML shows no other GPU")
    others = [uuid for uuid, size in grown.items() if size > LEAST_CONTEXT]
    difference = f"the run opens a context on {', '.join(others)}, or another program started there" if others else ""
    seen = f"memory taken on {len(others)} of {len(grown)} other GPUs, predicted none"
    return compared(subject, "gpus", (0.0, float(len(others))), seen, difference)


def _of_training(device: Device, expected: Expected | str, folder: Path) -> Iterator[CheckResult]:
    from runner.durable.record_files import read_record

    found, name = read_record(folder).evidence, device.torch_name
    assert found is not None, "a run that ended well has left its evidence"
    if isinstance(expected, str):
        yield warn(f"{name} memory", f"not predicted: {expected}", "send first_contact.json")
        return
    for what, predicted, measured_gib in (
        ("allocated memory", expected.allocated, found.device_peak_gib),
        ("reserved memory", expected.reserved, found.device_peak_reserved_gib),
    ):
        yield of_memory(f"{name} {what}", predicted, (measured_gib or 0.0) * GIB)
    yield of_time(f"{name} update time", expected.seconds, found.step_time_ms)


def of_memory(subject: str, predicted: float, measured: float) -> CheckResult:
    """Compare bytes."""
    difference = ""
    if measured > (1 + MEMORY_TOLERANCE) * predicted + SEGMENT:
        difference = "kernels here hold what the trace does not see; runs near the limit may be out of memory"
    elif measured < (1 - 2 * MEMORY_TOLERANCE) * predicted - SEGMENT:
        difference = "the trace counts what is not held here; micro_batch_size=auto is smaller than it could be"
    seen = f"predicted {format_bytes(int(predicted))}, measured {format_bytes(int(measured))}"
    return compared(subject, "mib", (predicted / MIB, measured / MIB), seen, difference)


def of_time(subject: str, expected: Seconds | None, measured_ms: float | None) -> CheckResult:
    """Compare the time of an update with the range that was estimated; None: not estimated, not measured."""
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
    return compared(
        subject,
        "ms",
        ((low + high) / 2, measured_ms),
        f"estimated {expected}, measured {measured_ms:.3g} ms",
        difference,
    )


def _of_profile(device: Device, expected: Expected | str, folder: Path) -> Iterator[CheckResult]:
    """Waits and kernels of an update, as the profiler has seen them."""
    name, found = device.torch_name, json.loads((folder / "profile/summary.json").read_text(encoding="utf-8"))
    waits = [wait for wait in found["waits"] if not wait["in_task"]]
    number = sum(wait["per_update"] for wait in waits)
    places = ", ".join(f"{wait['place']} ({wait['per_update']:g})" for wait in waits)
    difference = "the host waits for the device in the loop; see the places" if number > MOST_WAITS else ""
    seen = f"{number:g} an update{f', at {places}' if places else ''}; at most {MOST_WAITS:g} are expected"
    yield compared(f"{name} waits", "per_update", (MOST_WAITS, number), seen, difference)
    launched = sum(kernel["calls"] for kernel in found["kernels"])
    if not launched or isinstance(expected, str):
        yield skip(f"{name} kernels", "the profiler recorded no kernels here")
        return
    difference = ""
    if not expected.launches / 2 <= launched <= expected.launches * 2:
        difference = "the time of small models is estimated by this number; a trace counts operators, not kernels"
    seen = f"predicted {expected.launches:,} an update, launched {launched:,.0f}"
    yield compared(f"{name} kernels", "per_update", (expected.launches, launched), seen, difference)


def _gpus(context: CheckContext) -> Sequence[Device]:
    return [device for device in context.gpus if device.kind == "cuda"]


# ---------------------------------------------------------------- the page


def report(
    findings: Sequence[CheckResult], hardware: Mapping[str, Any], words: Sequence[str], version: str
) -> dict[str, Any]:
    """Return what the JSON file holds."""
    return {
        "version": version,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "is_stand_in": is_stand_in(),
        "settings": list(words),
        "num_differences": sum(finding.state in ("warn", "FAIL") for finding in findings),
        "findings": [finding.to_json() for finding in findings],
        "hardware": hardware,
    }


def page(content: Mapping[str, Any]) -> str:
    """Return the page to send, in Markdown."""
    findings = [CheckResult(**each) for each in content["findings"]]
    hardware = content["hardware"]
    names = [each["name"] for each in hardware["devices"] if each["usable"]]
    versions = (
        f"torch {hardware['torch_version']}, CUDA {hardware['cuda_version']}, driver {hardware['driver_version']}"
    )
    lines = [
        f"# First contact: {', '.join(names)}",
        "",
        f"accel-run {content['version']}, {versions}, {content['date']}",
        *(["", "On a stand-in for a GPU, which computes on the CPU: a rehearsal."] if content["is_stand_in"] else []),
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
    both = [finding.figures[f"{side}_{unit}"] for side in ("predicted", "measured")]
    if unit in ("runs", "native"):
        cells = [f"{unit}: {'yes' if number else 'no'}" for number in both]
    else:
        cells = [f"{number:,.4g} {_UNITS[unit]}" for number in both]
    return f"| {finding.check}, {finding.subject} | {cells[0]} | {cells[1]} | {finding.state} |"


_UNITS = {"gpus": "GPUs", "mib": "MiB", "ms": "ms", "per_update": "an update"}
