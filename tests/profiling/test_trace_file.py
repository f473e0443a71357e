"""Figures from a trace file, tested with handmade traces whose sums are known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.profiling.trace_file import TraceFile


def span(kind: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def trace(*events: dict[str, Any]) -> TraceFile:
    return TraceFile(json.dumps({"traceEvents": events}).encode())


UPDATES = (span("user_annotation", "ProfilerStep#1", 0, 50), span("user_annotation", "ProfilerStep#2", 50, 90))


def test_gpu_time_is_kernels_copies_and_idle_time() -> None:
    seen = trace(
        *UPDATES,
        span("kernel", "gemm", 10, 30, tid=7), span("kernel", "relu", 20, 40, tid=8),  # concurrent: counted once
        span("gpu_memcpy", "HtoD", 35, 50, tid=9),  # 5 of it during a kernel
        span("kernel", "gemm", 90, 100, tid=7),  # the device lags behind; the window ends with it
        span("user_annotation", "accel-run: data", 0, 20),
        span("cuda_runtime", "cudaStreamSynchronize", 60, 61), span("cuda_runtime", "cudaLaunchKernel", 5, 6),
        span("cuda_runtime", "cudaDeviceSynchronize", -9, -8), span("cuda_runtime", "cudaDeviceSynchronize", 95, 99),
        span("user_annotation", "accel-run: wait of the profiler", 80, 85),
        span("cuda_runtime", "cudaDeviceSynchronize", 81, 84),
    )  # fmt: skip
    assert seen.shares() == pytest.approx({"kernels": 0.4, "copies": 0.1, "idle": 0.5})
    assert seen.data_share() == pytest.approx(20 / 90)
    assert seen.device_waits() == {"cudaStreamSynchronize": 0.5}


def test_cpu_time_is_operators_data_and_gaps() -> None:
    seen = trace(
        *UPDATES,
        span("user_annotation", "accel-run: data", 0, 9),
        span("cpu_op", "aten::stack", 2, 6),  # builds the batch: part of the data wait
        span("cpu_op", "aten::linear", 10, 30), span("cpu_op", "aten::addmm", 12, 28),
        span("cpu_op", "autograd::engine::evaluate_function: SlowBackward", 40, 80), span("cpu_op", "aten::mm", 50, 57),
        span("cpu_op", "aten::mm", 10, 90, tid=2),  # of a data thread
    )  # fmt: skip
    assert seen.shares() == pytest.approx({"data": 0.1, "operators": 0.3, "between operators": 0.6})


def test_excluded_spans_are_in_no_share() -> None:
    seen = trace(
        span("user_annotation", "ProfilerStep#1", 0, 1000), span("user_annotation", "accel-run: aside", 500, 900),
        span("kernel", "gemm", 0, 300, tid=7), span("kernel", "of the evaluation", 500, 800, tid=7),
        span("user_annotation", "accel-run: data", 300, 450),
        span("cuda_runtime", "cudaStreamSynchronize", 600, 601),
    )  # fmt: skip
    assert seen.shares() == pytest.approx({"kernels": 0.5, "copies": 0.0, "idle": 0.5})
    assert seen.data_share() == pytest.approx(0.25)
    assert seen.device_waits() == {}


def test_an_empty_trace_has_no_figures() -> None:
    assert trace().shares() == {}
    assert trace().data_share() is None
