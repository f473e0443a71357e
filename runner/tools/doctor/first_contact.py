"""`accel-run doctor first_contact`: compare the program's predictions for a GPU with measurements.

It is meant for the first run on an untested kind of GPU. Each check compares a prediction on which the plan relies with
a measurement; if they differ, a warning explains the consequence for the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.loaded_torch import is_stand_in
from runner.base.text import format_bytes
from runner.config.request import Request, merge_overrides
from runner.durable.record_files import read_record
from runner.plan.inventory import Device
from runner.tools.doctor import gpu_checks, software
from runner.tools.doctor.findings import (
    NOT_TIMED,
    CheckContext,
    CheckResult,
    DoctorCheck,
    compare,
    failed,
    late_check,
    skip,
    warn,
)

if TYPE_CHECKING:
    from runner.plan.update_time import UpdateTime
    from runner.tools.doctor.contact_checks import RunPrediction

GIB, MIB = 2**30, 2**20
LARGE_GPU_BYTES = 10 * GIB  # a larger GPU trains GPT-2 with 124 million parameters, a smaller one the tiny model
OVERRIDES = ("global_batch_size=16", "micro_batch_size=8", "updates=20", "evaluate.samples=16")
LARGE_OVERRIDES = ("task.size=124m", "global_batch_size=8", "micro_batch_size=4")
MEMORY_TOLERANCE = 0.05  # share of the predicted memory (docs/memory.md)
SEGMENT_BYTES = 2 * MIB  # smallest allocation of torch's allocator from the driver; smaller differences do not count
MAX_WAITS = 2.0  # expected waits per update: a progress line reads the loss and the norm (docs/gpu-costs.md)
SIMULATED = "This GPU is simulated: a dry run of the command on the CPU. The results do not apply to a real GPU."


def contact_checks(request: Request) -> Mapping[str, DoctorCheck]:
    """Return the checks in the order in which they run; together they take at most five minutes.

    request  settings of the run whose memory, times and waits are compared; they override the settings chosen here
    """
    training_check = functools.partial(training, request=request)
    return {
        "torch": DoctorCheck(software.torch, "all computation uses it", 30.0),
        "gpus": DoctorCheck(gpu_checks.gpus, "the checks need a GPU", 30.0, "torch"),
        "formats": DoctorCheck(
            late_check("contact_checks", "formats", "Formats that are faster than float32"),
            "precision=auto selects the best format that the rules call native",
            25.0,
            "gpus",
        ),
        "kernels": DoctorCheck(
            late_check("contact_checks", "attention", "Attention kernels that run or refuse, by format"),
            "attention=auto and the plan rely on these rules",
            20.0,
            "gpus",
        ),
        "context": DoctorCheck(
            late_check("contact_checks", "context_memory", "GPU memory of a process without tensors"),
            "the plan uses this value to decide what fits in memory",
            20.0,
            "gpus",
        ),
        "training": DoctorCheck(
            training_check, "micro_batch_size=auto and memory=budget rely on these predictions", 170.0, "gpus"
        ),
    }


# ---------------------------------------------------------------- a short run


def training(context: CheckContext, *, request: Request) -> Iterator[CheckResult]:
    """A short run on the first GPU: memory, time, kernels and waits."""
    for device in context.each(context.cuda_gpus[:1], lambda device: device.torch_name):
        is_default = not request.task_file and not any(item.startswith("task=") for item in request.overrides)
        is_large = is_default and device.memory_bytes > LARGE_GPU_BYTES and not is_stand_in()
        chosen = merge_overrides(OVERRIDES, LARGE_OVERRIDES if is_large else ())
        # The plan expects flash or efficient attention, which need less memory, but the simulated GPU has neither.
        attention = ("attention=math",) if is_stand_in() else ()
        own = (f"device={device.torch_name}", "checkpoint=off", "tracker=none", "monitor=off", "parallelism=single")
        wanted = dataclasses.replace(
            request, overrides=merge_overrides(merge_overrides(chosen, request.overrides), (*own, *attention))
        )
        context.begin(f"{device.torch_name} trace")
        from runner.tools.doctor.contact_checks import predict_run

        expected = predict_run(wanted, context.required_inventory)
        for command, title, words, compare_run in (
            ("train", "training", (), _compare_training),
            ("profile", "profiling", ("skip=2", "updates=2"), _compare_profile),
        ):
            context.begin(f"{device.torch_name} {command}")
            failure, folder = _run_command(command, wanted, context, *words)
            if failure is not None:
                fix = "run accel-run doctor, then send this page"
                yield failed(device.torch_name, f"{title} ended with {failure}", fix)
                return
            yield from compare_run(device, expected, folder)


def _run_command(command: str, request: Request, context: CheckContext, *words: str) -> tuple[str | None, Path]:
    """Run a command of accel-run; return its failure (None if it succeeded) and the folder of its run."""
    root = context.scratch / command
    line = [sys.executable, "-m", "runner", command, *merge_overrides(request.overrides, words)]
    line += ["run=contact", f"output_root={root}"]
    line += ["--task", str(request.task_file)] if request.task_file else []
    done = subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    folder = root / ("profiles/contact" if command == "profile" else "contact")
    return (f"exit code {done.returncode}: {find_error(done.stderr)}" if done.returncode else None), folder


def find_error(text: str) -> str:
    """Return the line of a command's standard error that describes the error; notes may precede it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("accel-run: ")), lines[0] if lines else "")


def _compare_training(device: Device, expected: RunPrediction | str, folder: Path) -> Iterator[CheckResult]:
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
    """Compare the peak memory with the predicted one, both in bytes."""
    difference = ""
    if measured > (1 + MEMORY_TOLERANCE) * predicted + SEGMENT_BYTES:
        difference = "kernels allocate memory that the trace does not see; runs near the limit may run out of memory"
    elif measured < (1 - 2 * MEMORY_TOLERANCE) * predicted - SEGMENT_BYTES:
        difference = "the trace counts memory that is not used here; micro_batch_size=auto is smaller than necessary"
    seen = f"predicted {format_bytes(int(predicted))}, measured {format_bytes(int(measured))}"
    return compare(subject, "mib", (predicted / MIB, measured / MIB), seen, difference)


def compare_time(subject: str, expected: UpdateTime | None, measured_ms: float | None) -> CheckResult:
    """Compare the time of an update with the predicted one; None: not predicted or not measured."""
    if is_stand_in():
        return skip(subject, NOT_TIMED)
    if measured_ms is None or expected is None:
        missing = "too few updates were timed" if expected else "no hardware profile describes this GPU"
        return skip(subject, missing, "" if expected else "accel-run benchmark suite=machine")
    predicted_ms = 1e3 * expected.seconds
    difference = ""
    if measured_ms > 1.5 * predicted_ms:
        difference = "slower than predicted; accel-run advise finds what limits it"
    elif measured_ms < predicted_ms / 1.5:
        difference = "faster than predicted; the profile's rates or the assumed launch time are too low"
    return compare(
        subject,
        "ms",
        (predicted_ms, measured_ms),
        f"predicted {expected}, measured {measured_ms:.3g} ms",
        difference,
    )


def _compare_profile(device: Device, expected: RunPrediction | str, folder: Path) -> Iterator[CheckResult]:
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


# ---------------------------------------------------------------- the page


def make_report(
    findings: Sequence[CheckResult], hardware: Mapping[str, Any], overrides: Sequence[str], version: str
) -> dict[str, Any]:
    """Return the content of first_contact.json."""
    return {
        "version": version,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "is_stand_in": is_stand_in(),
        "settings": list(overrides),
        "num_differences": sum(finding.state in ("warn", "FAIL") for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
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


_UNITS = {"mib": "MiB", "ms": "ms", "per_update": "per update"}
