"""What a trace says: on a GPU by a trace written by hand, whose sums are known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.profiling.trace_file import MemoryTimeline, TraceFile, memory


def span(kind: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def allocation(when: float, address: int, nbytes: int, total: int, gpu: int = 0) -> dict[str, Any]:
    args = {"Addr": address, "Bytes": nbytes, "Total Allocated": total, "Device Type": 1, "Device Id": gpu}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": when, "args": args}


def trace(*events: dict[str, Any]) -> TraceFile:
    return TraceFile(json.dumps({"traceEvents": events}).encode())


UPDATES = (span("user_annotation", "ProfilerStep#1", 0, 50), span("user_annotation", "ProfilerStep#2", 50, 90))


def test_the_time_of_a_gpu_is_kernels_copies_and_idle() -> None:
    seen = trace(
        *UPDATES,
        span("kernel", "gemm", 10, 30, tid=7), span("kernel", "relu", 20, 40, tid=8),  # at once: counted once
        span("gpu_memcpy", "HtoD", 35, 50, tid=9),  # 5 of it beside a kernel
        span("kernel", "gemm", 90, 100, tid=7),  # the device is behind: the window ends with it
        span("user_annotation", "accel-run: data", 0, 20),
        span("cuda_runtime", "cudaStreamSynchronize", 60, 61), span("cuda_runtime", "cudaLaunchKernel", 5, 6),
        span("cuda_runtime", "cudaDeviceSynchronize", -9, -8), span("cuda_runtime", "cudaDeviceSynchronize", 95, 99),
        span("user_annotation", "accel-run: wait of the profiler", 80, 85),
        span("cuda_runtime", "cudaDeviceSynchronize", 81, 84),
    )  # fmt: skip
    assert seen.shares() == pytest.approx({"kernels": 0.4, "copies": 0.1, "idle": 0.5})
    assert seen.data_share() == pytest.approx(20 / 90)
    assert seen.device_waits() == {"cudaStreamSynchronize": 0.5}


def test_the_time_of_a_cpu_is_operators_data_and_what_is_between() -> None:
    seen = trace(
        *UPDATES,
        span("user_annotation", "accel-run: data", 0, 9),
        span("cpu_op", "aten::stack", 2, 6),  # makes the batch: part of the wait for it
        span("cpu_op", "aten::linear", 10, 30), span("cpu_op", "aten::addmm", 12, 28),
        span("cpu_op", "autograd::engine::evaluate_function: SlowBackward", 40, 80), span("cpu_op", "aten::mm", 50, 57),
        span("cpu_op", "aten::mm", 10, 90, tid=2),  # of a thread that reads data
    )  # fmt: skip
    assert seen.shares() == pytest.approx({"data": 0.1, "operators": 0.3, "between operators": 0.6})


def test_what_is_set_aside_is_in_no_share_and_no_moment_of_the_memory() -> None:
    seen = trace(
        span("user_annotation", "ProfilerStep#1", 0, 1000), span("user_annotation", "accel-run: aside", 500, 900),
        span("kernel", "gemm", 0, 300, tid=7), span("kernel", "of the evaluation", 500, 800, tid=7),
        span("user_annotation", "accel-run: data", 300, 450),
        span("cuda_runtime", "cudaStreamSynchronize", 600, 601),
        allocation(100, 1, 64, 64), allocation(600, 2, 4096, 4160), allocation(800, 2, -4096, 64),
        allocation(950, 1, -64, 0),
    )  # fmt: skip
    assert seen.shares() == pytest.approx({"kernels": 0.5, "copies": 0.0, "idle": 0.5})
    assert seen.data_share() == pytest.approx(0.25)
    assert seen.device_waits() == {}
    found = memory(seen, True, {}, [])
    assert found is not None
    assert found.times_ms == pytest.approx([0, 0.1, 0.55])
    assert sum(found.at_peak().values()) == 64


def test_an_empty_trace_says_nothing() -> None:
    assert trace().shares() == {}
    assert trace().data_share() is None
    assert memory(trace(*UPDATES), True, {}, []) is None


def test_memory_is_told_by_kind_from_when_it_was_allocated() -> None:
    seen = trace(
        span("user_annotation", "ProfilerStep#1", 0, 10), span("user_annotation", "ProfilerStep#2", 1000, 11_000),
        allocation(5, 1, 64, 1064),  # in the update before: 1000 were there, 600 of them known
        allocation(8, 1, -64, 1000),
        span("user_annotation", "accel-run: data", 1000, 2000), allocation(1500, 2, 100, 1100),
        allocation(3000, 3, 300, 1400), allocation(3100, 3, 999, 999, gpu=1),
        span("cpu_op", "autograd::engine::evaluate_function: X", 5000, 8000),
        allocation(6000, 4, 40, 1440), allocation(6500, 5, 50, 1490), allocation(6600, 3, -300, 1190),
        span("user_annotation", "accel-run: mark 0", 7000, 7001),
        allocation(7500, 5, -50, 1140), allocation(9000, 4, -40, 1100),
    )  # fmt: skip
    found = memory(seen, True, {77: ("parameters", 600)}, [("gradients", [4])])
    assert found is not None
    assert found.times_ms == pytest.approx([0, 0.5, 2, 5, 5.5, 5.6, 6.5, 8])
    assert found.held == {
        "parameters": [600] * 8,
        "gradients": [0, 0, 0, 40, 40, 40, 40, 0],
        "inputs": [0, 100, 100, 100, 100, 100, 100, 100],
        "activations": [0, 0, 300, 300, 300, 0, 0, 0],
        "temporaries": [0, 0, 0, 0, 50, 50, 0, 0],
        "other": [400] * 8,
    }
    assert sum(found.at_peak().values()) == 1490


def test_a_thinner_picture_has_the_same_peak() -> None:
    whole = MemoryTimeline(range(1000), {"activations": [index * 37 % 1000 for index in range(1000)]})
    thin = whole.thinned(10)
    assert len(thin.times_ms) == 10
    assert sum(thin.at_peak().values()) == sum(whole.at_peak().values())
