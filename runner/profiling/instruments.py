"""The instruments of a profile: each records a few updates and adds its findings."""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, record_function

from runner.host.scratch import shared_folder
from runner.profiling.device_waits import DeviceWaits, IsTaskFile
from runner.profiling.module_times import ModuleTimes
from runner.profiling.profile_report import Findings, Kernel, Operator, OperatorFindings


@dataclass(frozen=True)
class Subject:
    """The training that is profiled.

    folder        subfolder of profile/ for the files of this phase, ending with a slash; "" if there is one phase
    ranks         number of ranks; rank 0 is profiled
    is_task_file  returns whether a file belongs to the task
    settle        waits until no message to other ranks is pending
    """

    phase: str
    folder: str
    model: nn.Module
    device: torch.device
    ranks: int
    is_task_file: IsTaskFile
    settle: Callable[[], None]


@dataclass(frozen=True)
class TraceOptions:
    """The keys of `profiler=trace`."""

    skip: int
    updates: int
    depth: int
    sort_by: str
    with_stack: bool
    record_shapes: bool
    only: bool

    @property
    def num_updates(self) -> int:
        """Number of updates of a complete profile."""
        return self.skip + 3 * self.updates + EXTRA_UPDATES

    def fit_to(self, total: int) -> TraceOptions:
        """Return options for a phase of `total` updates, with fewer updates per instrument if necessary."""
        if self.num_updates <= total:
            return self
        skip = min(self.skip, total // 4)
        return TraceOptions(**{**vars(self), "skip": skip, "updates": max(1, (total - skip - EXTRA_UPDATES) // 3)})


class ProfiledUpdates:
    """A number of updates recorded with one instrument; the base class records nothing.

    name         label in the report and in summary.json
    num          recorded updates
    num_warm_up  warm-up updates before them
    seconds      per recorded update; None until the first one has finished
    """

    def __init__(self, name: str, num: int, num_warm_up: int = 0) -> None:
        self.name, self.num, self.num_warm_up = name, num, num_warm_up
        self.seconds: float | None = None

    def start(self) -> None:
        """Start the instrument before its first update."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch."""
        return next(batches)

    def update(self) -> None:
        """End an update."""

    def exclude(self) -> AbstractContextManager[object]:
        """Return a context that is excluded from the recording; the device is idle when it is entered and left."""
        return nullcontext()

    def stop(self) -> None:
        """Stop the instrument."""

    def add_to_findings(self, findings: Findings) -> None:
        """Add the results to the findings."""


class Operators(ProfiledUpdates):
    """torch's profiler: operators, kernels, the trace and the time breakdown."""

    def __init__(self, subject: Subject, options: TraceOptions) -> None:
        super().__init__("operators recorded", options.updates, num_warm_up=1)
        self.subject, self.options = subject, options
        self.profile = _make_profiler(
            subject.device, self.num, with_stack=options.with_stack, record_shapes=options.record_shapes
        )
        self._is_task_file: dict[str, bool] = {}  # file -> whether it belongs to the task

    def start(self) -> None:
        self.profile.start()

    def fetch(self, batches: Iterator[Any]) -> Any:
        with record_function(DATA):
            return next(batches)

    def update(self) -> None:
        self.profile.step()

    def exclude(self) -> AbstractContextManager[object]:
        return record_function(EXCLUDED)

    def stop(self) -> None:
        self.profile.stop()

    def add_to_findings(self, findings: Findings) -> None:
        if not self.seconds:
            return
        operators = findings.operators
        operators.sort_by = self.options.sort_by
        operators.trace = gzip.compress(_export_trace(self.profile), compresslevel=5, mtime=0)
        averages = filter_events(self.profile.events()).key_averages(
            group_by_input_shapes=self.options.record_shapes,
            group_by_stack_n=MAX_STACK_LINES if self.options.with_stack else 0,
        )
        self.add_rows(operators, averages, self.num)

    def add_rows(self, operators: OperatorFindings, averages: Iterable[Any], num: int) -> None:
        """Add the operators and kernels of `num` updates; a kernel's time is in its own row and in its operator's."""
        named = [row for row in averages if _is_named_by_torch(row)]
        operators.kernels = _sum_kernels([row for row in named if row.device_type != DeviceType.CPU], num)
        rows = _merge_rows(self._operator(row, num) for row in named if row.device_type == DeviceType.CPU)
        key = partial(_sort_key, self.options.sort_by, bool(operators.kernels))
        operators.rows = sorted(rows, key=key, reverse=True)

    def _operator(self, row: Any, num: int) -> Operator:
        place = next(filter(self._is_task_line, row.stack or ()), "")
        return Operator(
            name=row.key,
            calls=row.count / num,
            self_cpu_ms=row.self_cpu_time_total / 1e3 / num,
            cpu_ms=row.cpu_time_total / 1e3 / num,
            self_device_ms=row.self_device_time_total / 1e3 / num,
            device_ms=row.device_time_total / 1e3 / num,
            shapes=str(row.input_shapes) if self.options.record_shapes and row.input_shapes else "",
            place=place,
        )

    def _is_task_line(self, line: str) -> bool:
        """Return whether a stack line belongs to the task; its path may be relative to a folder of sys.path."""
        file = line.partition("(")[0]
        if file not in self._is_task_file:
            paths = [Path(folder, file) for folder in ("", *sys.path)]
            self._is_task_file[file] = any(self.subject.is_task_file(str(path)) and path.is_file() for path in paths)
        return self._is_task_file[file]


class Modules(ProfiledUpdates):
    """Time per module."""

    def __init__(self, subject: Subject, options: TraceOptions) -> None:
        super().__init__("modules timed", options.updates)
        self.times = ModuleTimes(subject.model, subject.device, depth=options.depth, ranks=subject.ranks)
        self.start, self.update, self.stop = self.times.start, self.times.update, self.times.stop  # type: ignore[method-assign]
        self.fetch, self.exclude = self.times.fetch, self.times.exclude  # type: ignore[method-assign]

    def add_to_findings(self, findings: Findings) -> None:
        findings.modules = self.times.table()


class HiddenWaits(ProfiledUpdates):
    """Lines that make the host wait for the device."""

    def __init__(self, subject: Subject) -> None:
        super().__init__("waits searched", 2)
        self.waits = DeviceWaits(subject.model, subject.is_task_file)
        self._num_updates = 0

    def start(self) -> None:
        self.waits.start()

    def update(self) -> None:
        self._num_updates += 1
        self.waits.update()

    def exclude(self) -> AbstractContextManager[object]:
        return self.waits.exclude()

    def stop(self) -> None:
        self.waits.stop()

    def add_to_findings(self, findings: Findings) -> None:
        if self._num_updates:
            findings.waits = self.waits.table()


def _make_profiler(device: torch.device, updates: int, **options: Any) -> Any:
    """Return torch's profiler for this number of updates; it starts slowly, so a warm-up update precedes them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs to standard error
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    if options.get("with_stack"):  # private, but without it no operator has a stack
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(verbose=True)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=updates, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True, **options)


def _export_trace(profile: Any) -> bytes:
    # torch can only write a trace to a path, and follows links there, so the path is in a private folder.
    with TemporaryDirectory(prefix="profile-", dir=shared_folder()) as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return path.read_bytes()


def filter_events(events: Any) -> Any:
    """Return the profiler's events without Python functions and CUDA calls, whose time is counted for their caller.

    Events in excluded spans are removed; the device is idle when such a span starts and ends.
    """
    spans = [event.time_range for event in events if event.name == EXCLUDED]

    def counts(event: Any) -> bool:
        is_excluded = any(span.start <= event.time_range.start < span.end for span in spans)
        return not (is_excluded or getattr(event, "is_python_function", False) or _belongs_to_cuda(event))

    filtered: Any = EventList(list(filter(counts, events)), use_device=events._use_device)  # type: ignore[no-untyped-call]
    for event in filtered:
        event.cpu_children, event.cpu_parent = [], None
    filtered._build_tree()
    return filtered


def _belongs_to_cuda(event: Any) -> bool:
    """Return whether an event is a call of the CUDA runtime or driver, or overhead such as loading a kernel."""
    if hasattr(event, "activity_type"):
        return event.activity_type in CUDA_ACTIVITIES
    return event.device_type == DeviceType.CPU and CUDA_NAME.match(event.name) is not None  # torch 2.11 and 2.12


def _sum_kernels(rows: Iterable[Any], num: int) -> list[Kernel]:
    """Return the kernels and copies, longest first; rows of the same kernel are added."""
    kernels: dict[str, Kernel] = {}
    for row in rows:
        before = kernels.get(row.key, Kernel(row.key, 0.0, 0.0))
        ms = row.self_device_time_total / 1e3 / num
        kernels[row.key] = Kernel(row.key, before.calls + row.count / num, before.ms + ms)
    return sorted(kernels.values(), key=lambda kernel: -kernel.ms)


def _is_named_by_torch(row: Any) -> bool:
    """Return whether a row belongs to an operator or kernel, and not to a user annotation."""
    return not row.is_user_annotation and not row.key.startswith(("ProfilerStep", "[memory]", "accel-run: "))


def _merge_rows(rows: Iterable[Operator]) -> list[Operator]:
    """Add up the rows of the same operator, shape and task line, which torch separates if their stacks differ."""
    operators: dict[tuple[str, str, str], Operator] = {}
    for row in rows:
        key = (row.name, row.shapes, row.place)
        before = vars(operators[key]) if key in operators else {}
        sums = {name: value + vars(row)[name] for name, value in before.items() if name not in TEXT_FIELDS}
        operators[key] = replace(row, **sums)
    return list(operators.values())


def _sort_key(sort_by: str, is_of_device: bool, row: Operator) -> float:
    if sort_by == "calls":
        return row.calls
    if sort_by == "total":
        return row.device_ms if is_of_device else row.cpu_ms
    return row.self_device_ms if is_of_device else row.self_cpu_ms


# Annotations in the trace.
DATA = "accel-run: data"  # the wait for a batch
PROFILER_WAIT = "accel-run: wait of the profiler"  # a synchronization that does not happen without the profiler
EXCLUDED = "accel-run: aside"  # an evaluation or a save, which is not part of an update
EXTRA_UPDATES = 3  # besides the requested ones: a warm-up update of torch's profiler, and two for waits
CUDA_ACTIVITIES = ("cuda_runtime", "cuda_driver", "overhead")
# cudaLaunchKernel, cuLaunchKernelEx, and the kinds of overhead in Kineto's CuptiActivity.h
CUDA_NAME = re.compile(
    r"cu(da)?[A-Z]|(Lazy Function Loading|Runtime Triggered Module Loading|Activity Buffer Request|Command Buffer Full"
    r"|Buffer Flush|Driver Compiler|Instrumentation|Resource|UVM Activity Init)$"
)
TEXT_FIELDS = ("name", "shapes", "place")  # fields of Operator
MAX_STACK_LINES = 32  # Python lines that are kept per operator
