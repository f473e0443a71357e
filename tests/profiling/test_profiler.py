"""The profiler counts and records operators, and synchronizes with the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from runner.profiling.instruments import Operators, Subject, TraceOptions, filter_events
from runner.profiling.profile_report import Findings, format_profile
from runner.profiling.profiler import Session

OPTIONS = TraceOptions(0, 2, 3, "self", with_stack=False, record_shapes=False, only=True)
SUBJECT = Subject("train", "", nn.Linear(1, 1), torch.device("cpu"), 1, lambda file: False, lambda: None)


def operator(
    number: int, name: str, start: float, end: float, kernel: str = "", kernel_us: float = 0.0
) -> FunctionEvent:
    event = FunctionEvent(number, name, 0, start, end, use_device="cuda", stack=[])
    if kernel:
        event.append_kernel(kernel, 0, kernel_us)
    return event


def on_device(number: int, name: str, start: float, end: float) -> FunctionEvent:
    return FunctionEvent(number, name, 0, start, end, device_type=DeviceType.CUDA, use_device="cuda", stack=[])


def of_cuda(number: int, name: str, activity: str) -> FunctionEvent:
    """Return an event of CUDA inside aten::mm, with the kernel that it launches."""
    event = operator(number, name, number - 3, number - 2, "gemm", 75)
    event.activity_type = activity
    return event


@pytest.mark.parametrize("are_kinds_known", [True, False])
def test_the_time_of_a_kernel_counts_once(are_kinds_known: bool) -> None:
    """In torch 2.11 and 2.12, events have no kind."""
    events = EventList(
        [
            operator(1, "aten::mm", 0, 10, "gemm", 75), on_device(2, "gemm", 5, 80),
            operator(3, "aten::relu", 10, 20, "clamp", 25), on_device(4, "clamp", 80, 105),
            of_cuda(5, "cudaLaunchKernel", "cuda_runtime"), of_cuda(6, "Lazy Function Loading", "overhead"),
        ],
        use_device="cuda",
    )  # fmt: skip
    for event in events if not are_kinds_known else ():
        vars(event).pop("activity_type", None)
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):  # EventList reads it since torch 2.14
            vars(event).pop("is_python_function", None)
    findings = Findings("train", "a GPU", 1, 0, {}, {})
    Operators(SUBJECT, OPTIONS).add_rows(findings.operators, filter_events(events).key_averages(), 1)
    assert [(row.name, row.self_device_ms, row.self_cpu_ms) for row in findings.operators.rows] == [
        ("aten::mm", 0.075, 0.010),
        ("aten::relu", 0.025, 0.010),
    ]
    assert [(row.name, row.calls, row.ms) for row in findings.operators.kernels] == [
        ("gemm", 1, 0.075),
        ("clamp", 1, 0.025),
    ]
    text = format_profile(findings, Path("profile"), 140)
    assert text.count("75.0%") == text.count("25.0%") == 2  # once in the table of operators, once in that of kernels


def test_the_device_is_synchronized_before_recording_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    # lint-tests: private: without a GPU, nothing else shows that the profiler waits for the device
    now = Session._synchronize
    # lint-tests: private: as above
    monkeypatch.setattr(Session, "_synchronize", lambda self: (done.append("wait"), now(self))[1])
    session = Session(SUBJECT, OPTIONS, shortened=False)
    session.parts[2].update = lambda: done.append("step")  # type: ignore[method-assign]
    session.update(), session.update()  # these updates have no instrument
    done.clear()
    for _ in range(3):  # one warm-up update and two recorded updates
        session.update()
    session.close()
    assert done[:5] == ["wait", "step", "step", "wait", "step"]


def test_iteration_continues_after_an_error_in_a_batch() -> None:
    """After an out-of-memory error, the update is repeated with smaller micro-batches."""

    class Batches:
        given = iter([MemoryError(), [torch.zeros(2)]])

        def __next__(self) -> object:
            batch = next(self.given)
            if isinstance(batch, MemoryError):
                raise batch
            return batch

    session = Session(SUBJECT, OPTIONS, shortened=False)
    fed = session.iterate(Batches())  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        next(fed)
    assert len(list(fed)) == 1
    session.close()
