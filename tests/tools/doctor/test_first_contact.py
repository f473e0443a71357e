"""`accel-run doctor first_contact`: each difference from the expected values is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runner.config.request import Request
from runner.plan.inventory import Cpu, Device, Inventory
from runner.plan.update_time import Part, UpdateTime
from runner.tools.doctor.arithmetic import FormatUnderTest
from runner.tools.doctor.contact_checks import compare_format, compare_kernel, parse_refusal
from runner.tools.doctor.first_contact import (
    MIB,
    compare_memory,
    compare_time,
    contact_checks,
    find_error,
    format_page,
    make_report,
)
from tests.forkserver import ForkServer

T4 = Device("cuda", 0, "Tesla T4", memory_bytes=15 << 30, capability=(7, 5))
A100 = Device("cuda", 0, "NVIDIA A100", memory_bytes=40 << 30, capability=(8, 0))
ABOUT_15_MS = UpdateTime((Part("all", 0.015, ""),))


def test_all_checks_take_at_most_five_minutes() -> None:
    assert sum(check.limit_s for check in contact_checks(Request()).values()) <= 300


@pytest.mark.parametrize(
    ("device", "name", "speedup", "state"),
    [(A100, "bf16", 8.0, "ok"), (A100, "bf16", 1.0, "warn"), (T4, "bf16", 0.3, "ok"), (T4, "bf16", 4.0, "warn")],
)
def test_a_format_counts_as_native_if_it_is_fast(device: Device, name: str, speedup: float, state: str) -> None:
    result = compare_format(FormatUnderTest(device, name, 8, is_native=device.native_bf16), speedup)
    assert result.state == state
    assert result.figures["predicted_native"] == device.native_bf16


@pytest.mark.parametrize(
    ("expected", "result", "state"),
    [("", "", "ok"), ("too old", "too old", "ok"), ("too old", "", "warn"), ("", "no kernel image", "warn")],
)
def test_unexpected_kernel_support_is_a_difference(expected: str, result: str, state: str) -> None:
    assert compare_kernel("cuda:0 flash", expected, result).state == state


def test_rejected_kernels_have_the_reason_of_torch() -> None:
    disabled = "Memory Efficient attention has been runtime disabled."
    too_old = "Flash attention only supports sm80 and above. This is a sm 7.5 gpu."
    warned = [
        "Memory efficient kernel not used because: (Triggered internally at /pytorch/sdp_utils.cpp:904.)",
        f"{disabled} (Triggered internally at /pytorch/sdp_utils_cpp.h:558.)",
        "Flash attention kernel not used because: (Triggered internally at /pytorch/sdp_utils.cpp:906.)",
        f"{too_old} (Triggered internally at x:1.)",
        "cuDNN attention kernel not used because: (Triggered internally at /pytorch/sdp_utils.cpp:908.)",
    ]
    assert parse_refusal("flash", warned) == too_old
    assert parse_refusal("efficient", warned) == disabled
    assert parse_refusal("cudnn", warned) == ""


def test_failed_runs_are_reported_by_their_error() -> None:
    error = "accel-run: AttributeError: no such thing"
    assert find_error("\n".join(["", "a note", error, "  more"])) == error
    assert find_error("Segmentation fault\n") == "Segmentation fault"
    assert not find_error("")


@pytest.mark.parametrize(("measured", "state"), [(100, "ok"), (104, "ok"), (120, "warn"), (80, "warn")])
def test_memory_may_deviate_by_the_documented_tolerance(measured: int, state: str) -> None:
    assert compare_memory("cuda:0 reserved memory", 100 * MIB, measured * MIB).state == state


@pytest.mark.parametrize(
    ("expected", "measured_ms", "state"),
    [(ABOUT_15_MS, 15.0, "ok"), (ABOUT_15_MS, 23.0, "warn"), (ABOUT_15_MS, 9.9, "warn"), (ABOUT_15_MS, 10.1, "ok"),
     (None, 15.0, "skip"),
     (ABOUT_15_MS, None, "skip")],
)  # fmt: skip
def test_times_beyond_the_tolerance_are_differences(
    expected: UpdateTime | None, measured_ms: float | None, state: str
) -> None:
    assert compare_time("cuda:0 update time", expected, measured_ms).state == state


def test_the_page_describes_every_difference() -> None:
    findings = [
        compare_kernel("cuda:0 flash", "", "no kernel image"),
        compare_memory("cuda:0 reserved", 100 * MIB, 300 * MIB),
    ]
    hardware = json.loads(Inventory((T4,), Cpu("a processor", 1, 1, 0)).to_json())
    content = json.loads(json.dumps(make_report(findings, hardware, ["task=gpt"], "1.0")))
    text = format_page(content)
    assert content["num_differences"] == 2
    for finding in findings:
        assert finding.seen in text
    assert "Tesla T4" in text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("args", ["", "device=cpu"])
def test_the_absence_of_a_gpu_is_reported(args: str, server: ForkServer, tmp_path: Path) -> None:
    result = server.run(f"doctor first_contact {args}", tmp_path)
    assert result.code == 69
    assert "accel-run doctor" in result.err
    assert not list(tmp_path.glob("outputs/*"))
