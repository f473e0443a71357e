"""The instruments of a profile: each records a few updates and adds its findings."""

from __future__ import annotations

import gzip
import os
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
from runner.profiling import trace_file
from runner.profiling.device_waits import DeviceWaits, IsOfTask
from runner.profiling.module_times import ModuleTimes
from runner.profiling.profile_report import Findings, Kernel, Operator, OperatorFindings
from runner.profiling.trace_file import TraceFile


@dataclass(frozen=True)
class Subject:
    """The training that is profiled.

    folder        of its files in profile/, ending with a slash; "" for the only phase
    ranks         number of ranks; the profile is of rank 0
    is_task_file  return whether a file belongs to the task
    settle        wait until no message to other ranks is pending
    """

    phase: str
    folder: str
    model: nn.Module
    device: torch.device
    ranks: int
    is_task_file: IsOfTask
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
        """Updates that all of it takes."""
        return self.skip + 3 * self.updates + _FEW

    def fitted(self, total: int) -> TraceOptions:
        """Return options that `total` updates are enough for, where there is any way."""
        if self.num_updates <= total:
            return self
        skip = min(self.skip, total // 4)
        return TraceOptions(**{**vars(self), "skip": skip, "updates": max(1, (total - skip - _FEW) // 3)})


class ProfiledUpdates:
    """Some updates with one instrument, or with none.

    name   what is done in them
    lead   updates at the beginning that do not count
    num    updates that count
    seconds  of one of those, None before the first is over
    """

    def __init__(self, name: str, num: int, lead: int = 0) -> None:
        self.name, self.num, self.lead = name, num, lead
        self.seconds: float | None = None

    def start(self) -> None:
        """The next update is the first."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch."""
        return next(batches)

    def update(self) -> None:
        """An update is over."""

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which nothing counts; the device has nothing to do at both ends."""
        return nullcontext()

    def stop(self) -> None:
        """Nothing is measured any more."""

    def tell(self, findings: Findings) -> None:
        """Add what was found."""


class Operators(ProfiledUpdates):
    """torch's profiler, for operators, the trace and the shares of the time."""

    def __init__(self, subject: Subject, options: TraceOptions) -> None:
        super().__init__("operators recorded", options.updates, lead=1)
        self.subject, self.options = subject, options
        self.profile = _recorder(
            subject.device, self.num, with_stack=options.with_stack, record_shapes=options.record_shapes
        )
        self._known: dict[str, bool] = {}  # file -> whether it is the task's

    def start(self) -> None:
        self.profile.start()

    def fetch(self, batches: Iterator[Any]) -> Any:
        with record_function(trace_file.DATA):
            return next(batches)

    def update(self) -> None:
        self.profile.step()

    def aside(self) -> AbstractContextManager[object]:
        return record_function(trace_file.ASIDE)

    def stop(self) -> None:
        self.profile.stop()

    def tell(self, findings: Findings) -> None:
        if not self.seconds:
            return
        content = _exported(self.profile)
        trace = TraceFile(content)
        found = findings.operators
        found.sort_by, found.trace = self.options.sort_by, gzip.compress(content, compresslevel=5, mtime=0)
        num = len(trace.updates)
        if not num:
            return
        found.shares, found.data_share = trace.shares(), trace.data_share()
        found.device_calls = trace.device_waits()
        averages = recorded(self.profile.events()).key_averages(
            group_by_input_shapes=self.options.record_shapes,
            group_by_stack_n=_STACK if self.options.with_stack else 0,
        )
        self.add_rows(found, averages, num)
        by = "self_device_time_total" if found.kernels else "self_cpu_time_total"
        found.table = averages.table(sort_by=by, row_limit=100)

    def add_rows(self, found: OperatorFindings, averages: Iterable[Any], num: int) -> None:
        """Add the operators and the kernels of `num` updates: torch has the time of a kernel in both rows."""
        named = [row for row in averages if _is_named_by_torch(row)]
        found.kernels = _kernels([row for row in named if row.device_type != DeviceType.CPU], num)
        rows = _added(self._operator(row, num) for row in named if row.device_type == DeviceType.CPU)
        key = partial(_key, self.options.sort_by, bool(found.kernels))
        found.rows = sorted(rows, key=key, reverse=True)

    def _operator(self, row: Any, num: int) -> Operator:
        place = next(filter(self._is_of_task, row.stack or ()), "")
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

    def _is_of_task(self, line: str) -> bool:
        """Return whether a line of a stack belongs to the task; torch omits folders from which Python imports."""
        file = line.partition("(")[0]
        if file not in self._known:
            paths = [Path(folder, file) for folder in ("", *sys.path)]
            self._known[file] = any(self.subject.is_task_file(str(path)) and path.is_file() for path in paths)
        return self._known[file]


class Modules(ProfiledUpdates):
    """Marks at the borders of modules."""

    def __init__(self, subject: Subject, options: TraceOptions) -> None:
        super().__init__("modules timed", options.updates)
        self.times = ModuleTimes(subject.model, subject.device, depth=options.depth, ranks=subject.ranks)
        self.start, self.update, self.stop = self.times.start, self.times.update, self.times.stop  # type: ignore[method-assign]
        self.fetch, self.aside = self.times.fetch, self.times.aside  # type: ignore[method-assign]

    def tell(self, findings: Findings) -> None:
        findings.modules = self.times.table()


class HiddenWaits(ProfiledUpdates):
    """Lines that make the host wait for the device."""

    def __init__(self, subject: Subject) -> None:
        super().__init__("waits searched", 2)
        self.waits = DeviceWaits(subject.model, subject.is_task_file)
        self._made = 0

    def start(self) -> None:
        self.waits.start()

    def update(self) -> None:
        self._made += 1
        self.waits.update()

    def aside(self) -> AbstractContextManager[object]:
        return self.waits.aside()

    def stop(self) -> None:
        self.waits.stop()

    def tell(self, findings: Findings) -> None:
        if self._made:
            findings.waits = self.waits.table()


def _recorder(device: torch.device, updates: int, **what: Any) -> Any:
    """Return torch's profiler for so many updates after one that does not count, for it starts slowly."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write its stages to standard error
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    if what.get("with_stack"):  # without it no operator has its stack
        what["experimental_config"] = torch._C._profiler._ExperimentalConfig(verbose=True)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=updates, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True, **what)


def _exported(profile: Any) -> bytes:
    # torch writes to a path and follows links, so it writes to a private folder.
    with TemporaryDirectory(prefix="profile-", dir=shared_folder()) as made:
        draft = Path(made) / "trace.json"
        profile.export_chrome_trace(str(draft))
        return draft.read_bytes()


def recorded(events: Any) -> Any:
    """Return the events of torch's profiler less Python functions and calls of CUDA, whose time is their caller's.

    What was set aside is left out: the device has nothing to do at both ends of that.
    """
    spans = [event.time_range for event in events if event.name == trace_file.ASIDE]

    def counts(event: Any) -> bool:
        is_aside = any(span.start <= event.time_range.start < span.end for span in spans)
        return not (is_aside or event.is_python_function or event.activity_type in _CALLS_OF_CUDA)

    kept: Any = EventList(list(filter(counts, events)), use_device=events._use_device)  # type: ignore[no-untyped-call]
    for event in kept:
        event.cpu_children, event.cpu_parent = [], None
    kept._build_tree()
    return kept


def _kernels(rows: Iterable[Any], num: int) -> list[Kernel]:
    """Return what the device did, the longest first; rows of one kernel are added up."""
    found: dict[str, Kernel] = {}
    for row in rows:
        before = found.get(row.key, Kernel(row.key, 0.0, 0.0))
        more = row.self_device_time_total / 1e3 / num
        found[row.key] = Kernel(row.key, before.calls + row.count / num, before.ms + more)
    return sorted(found.values(), key=lambda kernel: -kernel.ms)


def _is_named_by_torch(row: Any) -> bool:
    """Return whether a row belongs to an operator or kernel, and not to a user annotation."""
    return not row.is_user_annotation and not row.key.startswith(("ProfilerStep", "[memory]", "accel-run: "))


def _added(rows: Iterable[Operator]) -> list[Operator]:
    """Return the rows with those of one operator, shape and line added up: stacks differ above the line of the task."""
    found: dict[tuple[str, str, str], Operator] = {}
    for row in rows:
        key = (row.name, row.shapes, row.place)
        before = vars(found[key]) if key in found else {}
        sums = {name: value + vars(row)[name] for name, value in before.items() if name not in _WORDS}
        found[key] = replace(row, **sums)
    return list(found.values())


def _key(sort_by: str, is_of_device: bool, row: Operator) -> float:
    if sort_by == "calls":
        return row.calls
    if sort_by == "total":
        return row.device_ms if is_of_device else row.cpu_ms
    return row.self_device_ms if is_of_device else row.self_cpu_ms


_FEW = 3  # updates besides those that are asked for: one to settle, two for waits


_CALLS_OF_CUDA = ("cuda_runtime", "cuda_driver")


_WORDS = ("name", "shapes", "place")


_STACK = 32  # lines of Python above an operator that are kept
